"""Compare the names and shapes of checkpoint files with a model, without reading weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import LoadStateDictConfig

from fsdptrain.model.loading.materialize import parameter_names, quiet_transformers
from fsdptrain.model.loading.shard_reader import conversions_of


@dataclass(frozen=True)
class FileDifferences:
    """Differences between the files of a checkpoint and the model, by model names. All empty if they match."""

    missing: list[str]  # in the model, not in the files
    unexpected: list[str]  # in the files, not in the model
    misfits: list[str]  # different shape: that of the files, then that of the model
    failed: list[str]  # names whose conversion fails, with the reason

    def __bool__(self) -> bool:
        return any(vars(self).values())


def compare_names(model: PreTrainedModel, path: Path, files: list[Path]) -> FileDifferences:
    """Compare names and shapes of the files, converted as in `read_shards`, with the model. Reads no weights.

    `model` is on meta and stays there. Its parameters are replaced.
    """
    headers: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                headers[key] = torch.empty(tensors.get_slice(key).get_shape(), device="meta")
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        dtype=torch.float32,
        device_map={"": torch.device("meta")},
        weight_mapping=conversions_of(model),
        ignore_mismatched_sizes=True,
    )
    names = parameter_names(model)  # collected first: loading breaks a tie if the files hold neither name
    with quiet_transformers():
        info, _ = PreTrainedModel._load_pretrained_model(model, headers, None, load_config)
        model._adjust_missing_and_unexpected_keys(info)
    here_by_its_tie = {name for group in names if not info.missing_keys.issuperset(group) for name in group}
    misfits = {name: f"{name} {list(there)} for {list(here)}" for name, there, here in info.mismatched_keys}
    failed = {name: reason.strip().splitlines()[-1] for name, reason in info.conversion_errors.items()}
    return FileDifferences(
        missing=sorted(info.missing_keys - set(misfits) - set(failed) - here_by_its_tie),
        unexpected=sorted(info.unexpected_keys),
        misfits=[misfits[name] for name in sorted(misfits)],
        failed=[f"{name}: {failed[name]}" for name in sorted(failed)],
    )
