"""The backend interface that the trainer needs beyond `TrainBackend`, and the backend factory."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks, require_same
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Features
from fsdptrain.memory.report import MemoryReport
from fsdptrain.model.probes.kernels import Kernel, require_no_fallback
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.overrides import install_overrides
from fsdptrain.protocols import TrainBackend
from fsdptrain.registry import Table

log = logging.getLogger(__name__)

BACKENDS = Table[Callable[..., "PolicyBackend"]](
    {"fsdp": "fsdptrain.fsdp.backend:FSDPBackend", "megatron": "fsdptrain.megatron.backend:MegatronBackend"}
)


class PolicyBackend(TrainBackend, Protocol):
    """Interface of a backend as the trainer uses it."""

    compute_dtype: torch.dtype
    layout_probe: LayoutProbe

    @property
    def model(self) -> PreTrainedModel:
        """The transformers architecture. It may be on the meta device, with the weights elsewhere."""
        ...

    @property
    def features(self) -> Features:
        """The features attached to the policy."""
        ...

    @property
    def lines(self) -> list[str]:
        """Log lines that describe the backend."""
        ...

    def kernels(self) -> list[Kernel]:
        """Return the kernels that the model uses."""
        ...

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder. Collective."""
        ...


def build_backend(
    config: Config,
    *,
    features: Features | None = None,
    before_load: Callable[[PreTrainedModel], None] | None = None,
) -> PolicyBackend:
    """Build the backend selected by --backend. Does not import the other backend. Collective.

    `install_platform_overrides` comes before.

    features, before_load: see `FSDPBackend`.
    """
    options: dict[str, Any] = {"total_steps": config.total_optimizer_steps}
    if config.model.backend == "fsdp":
        options |= {"features": features, "before_load": before_load}
    return BACKENDS[config.model.backend](config, **options)


def open_backend(config: Config, features: Features, memory: MemoryReport) -> PolicyBackend:
    """Load the policy and log how it is computed. Collective."""
    backend = build_backend(config, features=features, before_load=memory.before_load)
    for line in backend.lines:
        log.info("%s", line)
    _report_fallbacks(backend, strict=config.model.strict)
    why = config.trains_zero_advantage
    if config.algorithm.skip_zero_advantage and config.algorithm.algorithm != "sft" and why:
        log.info("samples with advantage 0 are not skipped: %s", why)
    if config.sync.offload_train and not platform.has_accelerator():
        log.warning("--offload-train: no GPU; this copies weights and saves no memory")
    return backend


def _report_fallbacks(backend: PolicyBackend, *, strict: bool) -> None:
    """Log one warning per fallback kernel. With --strict, raise ConfigError on all ranks instead. Collective."""
    kernels = backend.kernels()
    for kernel in kernels:
        if kernel.fell_back and not strict and dist.get_rank() == 0:
            log.warning("fallback: %s", kernel.line)
    with raise_on_all_ranks(ConfigError, "--strict"):
        if strict:
            require_no_fallback(kernels)


def install_platform_overrides() -> None:
    """Install and log the function overrides for this device. Collective.

    Raises ConfigError unless all ranks have the same device type and the same overrides.
    """
    kind = platform.device_type()
    require_same(kind, ConfigError(f"machines of one run must be alike: rank 0 computes on {kind}, another does not"))
    with raise_on_all_ranks(ConfigError, "fsdptrain.overrides"):
        found = install_overrides(kind)
    lines = [override.line for override in found]
    require_same(lines, ConfigError(f"machines of one run must be alike: not all have the plug-ins {lines}"))
    for line in lines:
        log.info("override: %s", line)
