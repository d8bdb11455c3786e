"""Inspect a megatron-core run from config.json alone.

Builds a small random model of the same kind, and the whole model on meta if its layers are plain.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.cpu_shims import prepare_megatron
from fsdptrain.megatron.forward import layout_of
from fsdptrain.megatron.groups import start_groups, stop_groups
from fsdptrain.megatron.model import WRAPPED, build_model, build_options
from fsdptrain.megatron.parity import check_parity, small_models
from fsdptrain.megatron.report import Fact, build_report
from fsdptrain.megatron.transformer_config import transformer_config
from fsdptrain.megatron.weights import WeightMap
from fsdptrain.model.loading.hub import resolve_config
from fsdptrain.model.loading.meta import build_meta_model
from fsdptrain.model.probes.kernels import Kernel
from fsdptrain.overrides import Override, install_overrides


@dataclass(frozen=True)
class BuildInspection:
    lines: list[str]  # parameter count of the whole model, modules of the small copy, and its parity
    kernels: list[Kernel]
    overrides: list[Override]  # plug-ins for this device

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fallbacks": [kernel.line for kernel in self.kernels if kernel.fell_back]}


def inspect_build(config: Config) -> BuildInspection:
    """Inspect the model of `config`. Raises the errors of a run, except for fallbacks under --strict.

    The small copy has the heads, norms, rotary frequencies and router of the whole model, but fewer layers and experts.
    """
    prepare_megatron()
    overrides = install_overrides(platform.device_type())  # before the copy, which uses them
    path = resolve_config(config.model.hf_checkpoint)
    stock = build_meta_model(path, trust_remote_code=config.model.trust_remote_code, attn_implementation="eager")
    options = build_options(config)
    split = config.section(MegatronConfig)
    transformer_config(stock.config, split, **options)  # raises ConfigError for unsupported parallel sizes
    wrapped = WRAPPED if split.context_parallel > 1 else None  # as in the run; the copy is not sharded
    one = MegatronConfig(spec=split.spec or wrapped)
    layout = layout_of(stock.config, split, has_engine=options["has_engine"], dtype=options["dtype"])
    with platform.process_group(config.launch.dist_timeout):
        start_groups(one, timeout_s=config.launch.dist_timeout)
        try:
            whole = _whole_model(stock, one, options)
            small, model = small_models(stock.config, one, options, device=platform.local_device())
            report = build_report(model, small, layout=layout)
            difference, tolerance = check_parity(small, model, one, options)
        finally:
            stop_groups()
    lines = [
        whole,
        "a small random copy of it, on one process:",
        *(f"  {line}" for line in report.lines),
        f"  it computes the logprobs of transformers: {difference:.2g} <= {tolerance:g}",
        *(f"fallback: {kernel.line}" for kernel in report.kernels if kernel.fell_back),
        *(f"override: {override.line}" for override in overrides),
    ]
    return BuildInspection(lines, report.kernels, overrides)


def check_sizes(config: Config) -> None:
    """Raise ConfigError if megatron-core cannot build the model of `config`, or not in its parallel sizes.

    Assumes GPUs with Transformer Engine, which allow the most: the run may be planned on another machine.
    """
    prepare_megatron()
    model = build_meta_model(
        resolve_config(config.model.hf_checkpoint),
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation="eager",
    )
    options: dict[str, Any] = build_options(config) | {"has_engine": True, "on_cpu": False}
    transformer_config(model.config, config.section(MegatronConfig), **options)


def _whole_model(stock: PreTrainedModel, one: MegatronConfig, options: dict[str, Any]) -> str:
    """Count the parameters in transformers and in megatron-core, and check that each maps to the files.

    The megatron-core model is built on meta. Transformer Engine layers always allocate device memory, so with them only
    the transformers count is reported.
    """
    config, wanted = stock.config, sum(p.numel() for p in stock.parameters())
    said = f"{config.model_type}: {wanted:,} parameters by config.json"
    if options["has_engine"]:
        return f"{said}; those of megatron-core are counted when a run builds it"
    with torch.device("meta"):
        model = build_model(transformer_config(config, one, **options), config, spec=one.spec)
    WeightMap(model, stock)
    counted = Fact("parameters", sum(p.numel() for p in model.parameters()), wanted)
    if not counted.agrees:
        raise ConfigError(f"--backend megatron: {counted.problem}: use --backend fsdp")
    return f"{said}, and as many in megatron-core's model, each with its place in the files"
