"""The folder of a peft adapter that --lora-init names: its options. Imports no torch."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from fsdptrain.errors import CheckpointError

CONFIG_FILE, WEIGHTS_FILE, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_KNOWN = (  # keys of peft that are read, or have no effect on a loaded adapter, or show in its tensors
    " r lora_alpha use_rslora target_modules target_parameters modules_to_save peft_type task_type auto_mapping "
    "peft_version base_model_name_or_path revision inference_mode lora_dropout fan_in_fan_out bias exclude_modules "
    "layers_to_transform layers_pattern megatron_core qalora_group_size ensure_weight_tying init_lora_weights "
)
_KEEP_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # other values of init_lora_weights change it


def with_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, of the section `lora`, with the options of the adapter in the folder `init`.

    A run that is read elsewhere has them. Raises CheckpointError, because pydantic would wrap a ConfigError.
    """
    folder, flag = Path(values["init"]), f"--lora-init {values['init']}"
    if "rank" in values and not folder.exists():
        return values
    found = _read_config(folder, flag)
    fixed = {"rank": found.get("r"), "alpha": found.get("lora_alpha"), "rslora": bool(found.get("use_rslora"))}
    for name, value in fixed.items():
        if values.get(name, value) != value:
            raise CheckpointError(f"--lora-{name} {values[name]} contradicts {flag}, which has {value}: remove it")
    modules = found.get("target_modules") or []
    targets = [modules] if isinstance(modules, str) else [*modules]
    targets += [name.removesuffix(".weight") for name in found.get("target_parameters") or []]
    return {"targets": targets, "modules_to_save": found.get("modules_to_save") or []} | values | fixed


def _read_config(folder: Path, flag: str) -> dict[str, Any]:
    """Read the options of an adapter. Raises CheckpointError if it cannot be trained here."""
    try:
        found = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{flag}: {CONFIG_FILE} cannot be read ({reason}): give a folder of peft") from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        raise CheckpointError(f"{flag}: {CONFIG_FILE} is not of a LoRA adapter: give the folder of one")
    unknown = [key for key, value in found.items() if value and f" {key} " not in _KNOWN]
    unknown += ["init_lora_weights"] * (found.get("init_lora_weights") not in _KEEP_THE_BASE)
    for key in unknown:
        raise CheckpointError(f"{flag} has {key} {found[key]!r}, which is not supported: merge it by peft")
    if found.get("lora_dropout"):
        _warn_of_dropout(flag, found["lora_dropout"])
    if not (folder / WEIGHTS_FILE).is_file():
        is_pickle = (folder / _PICKLE).is_file()
        why = f"{_PICKLE} is a pickle, which may run code: load and save it by peft" if is_pickle else "it is missing"
        raise CheckpointError(f"{flag} needs {WEIGHTS_FILE}: {why}")
    return found


@cache
def _warn_of_dropout(flag: str, dropout: float) -> None:
    logging.getLogger(__name__).warning("%s: trained on without its lora_dropout of %g", flag, dropout)
