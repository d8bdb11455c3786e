"""Inspect a model without its weights: its structure from config.json, and a layout probe on a small random copy.

report = inspect_model(config, num_gpus=8)
json.dumps(report.as_dict())
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.checks import check_packages
from fsdptrain.enabled_features import NO_FEATURES
from fsdptrain.errors import NumericsError
from fsdptrain.features.context_parallel.feature import check_model
from fsdptrain.features.liger.feature import obstacle
from fsdptrain.features.lora.adapters import add_adapters
from fsdptrain.features.model_parallel.plan import split_plan_of
from fsdptrain.features.sections import ContextParallelConfig, LigerConfig, LoraConfig
from fsdptrain.fsdp.build import meta_policy
from fsdptrain.memory.estimate import Shapes, count_parameters
from fsdptrain.model.loading.fill import parameter_names
from fsdptrain.model.loading.hub import resolve_config
from fsdptrain.model.loading.materialize import quiet_transformers
from fsdptrain.model.policy import head_transform
from fsdptrain.model.probes.copy_probe import probe_random_copy
from fsdptrain.model.probes.kernels import Kernel, kernels
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.sizes import active_sizes
from fsdptrain.model.structure import lm_head
from fsdptrain.trainer.resolve import resolve_dtype


@dataclass(frozen=True)
class Inspection:
    """The full report. `refusal` is the reason why the model cannot be trained; `probe` may be None then."""

    checkpoint: str
    model_class: str
    model_type: str
    module: str  # module that defines the class
    parameters: Mapping[str, int]
    head: str
    probe: LayoutProbe | None
    refusal: str
    kernels: list[Kernel]
    device_type: str

    @property
    def fallbacks(self) -> list[str]:
        return [kernel.line for kernel in self.kernels if kernel.fell_back]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fallbacks": self.fallbacks}


def inspect_model(config: Config, *, num_gpus: int) -> Inspection:
    """Inspect the model of `config`. Raises CheckpointError if config.json cannot be read."""
    (config, _), device_type = resolve_dtype(config), platform.device_type()
    model, _ = meta_model(config)
    compute_dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
    probe, refusal = None, ""
    try:
        with quiet_transformers():
            probe = probe_random_copy(model.config, trust_remote_code=config.model.trust_remote_code)
    except NumericsError as error:
        refusal = str(error)
    if config.section(LigerConfig).liger:
        check_packages(config, [LigerConfig.NAME])
        problem = obstacle(model.config.model_type)
        refusal = refusal or (f"--liger {problem}" if problem else "")
    split_plan_of(model, config)
    return Inspection(
        checkpoint=config.model.hf_checkpoint,
        model_class=type(model).__name__,
        model_type=model.config.model_type,
        module=type(model).__module__,
        parameters=_count(model, Shapes(model, config, num_gpus)),
        head=_head(model),
        probe=probe,
        refusal=refusal,
        kernels=kernels(model, device_type=device_type, compute_dtype=compute_dtype, probe=probe),
        device_type=device_type,
    )


def meta_model(config: Config) -> tuple[PreTrainedModel, Path]:
    """Return the model on meta, as a run builds it here, and the folder of its config.json.

    Raises ConfigError for invalid --lora-targets.
    """
    path = resolve_config(config.model.hf_checkpoint)
    model = meta_policy(config.with_values(lr_scale={}), path, NO_FEATURES)  # which may name parameters of an adapter
    if config.section(ContextParallelConfig).context_parallel_size > 1:
        check_model(model.config, config)
    lora = config.section(LoraConfig)
    if lora.rank:
        check_packages(config, [LoraConfig.NAME])
        add_adapters(model, lora)
    return model, path


def _count(model: PreTrainedModel, shapes: Shapes) -> dict[str, int]:
    total, frozen = count_parameters(model)
    return {
        "total": total,
        "active": round(sum(active_sizes(model).values())),  # used by one token, embedding and head included
        "trainable": total - frozen,
        "per_rank": sum(map(shapes.shard, model.parameters())),  # on the rank with most
        "num_shards": shapes.num_shards,
    }


def _head(model: PreTrainedModel) -> str:
    """Describe the output layer: its class, size and ties, and the transform of the logits."""
    head, transform = lm_head(model), head_transform(model.config)
    name = next(name for name, module in model.named_modules() if module is head)
    ties = next(names for names in parameter_names(model) if f"{name}.weight" in names)
    notes = [type(head).__name__, f"vocabulary {model.config.get_text_config().vocab_size}"]
    notes.append(next((f"tied to {other}" for other in ties if other != f"{name}.weight"), "not tied"))
    notes += ["with bias"] * any(name == "bias" for name, _ in head.named_parameters())
    notes += [f"logits x {transform.logit_scale:g}"] * (transform.logit_scale != 1.0)
    return ", ".join(notes if transform.softcap is None else [*notes, f"softcap {transform.softcap:g}"])
