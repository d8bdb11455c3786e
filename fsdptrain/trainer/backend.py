"""Build the training backend and log how it computes."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.enabled_features import Features
from fsdptrain.errors import ConfigError
from fsdptrain.registry import Table

if TYPE_CHECKING:
    from fsdptrain.protocols import TrainBackend

log = logging.getLogger(__name__)

BACKENDS: "Table[Callable[..., TrainBackend]]" = Table(
    {"fsdp": "fsdptrain.fsdp.backend:FSDPBackend", "megatron": "fsdptrain.megatron.backend:MegatronBackend"}
)


def build_backend(
    config: Config,
    *,
    features: Features | None = None,
    before_load: Callable[[PreTrainedModel], None] | None = None,
) -> "TrainBackend":
    """Build the backend selected by --backend. Does not import the other backend. Collective.

    features, before_load: see `FSDPBackend`.
    """
    options: dict[str, Any] = {"total_steps": config.total_optimizer_steps}
    if config.model.backend == "fsdp":
        options |= {"features": features, "before_load": before_load}
    return BACKENDS[config.model.backend](config, **options)


def open_backend(
    config: Config, features: Features, *, before_load: Callable[[PreTrainedModel], None] | None
) -> "TrainBackend":
    """Load the policy and log how it is computed. Collective."""
    backend = build_backend(config, features=features, before_load=before_load)
    for line in backend.lines:
        log.info("%s", line)
    _report_fallbacks(backend, strict=config.model.strict)
    why = config.trains_zero_advantage
    if config.algorithm.algorithm != "sft" and why:
        log.info("samples with advantage 0 are not skipped: %s", why)
    if config.sync.offload_train and not platform.has_accelerator():
        log.warning("--offload-train: no GPU; this copies weights and saves no memory")
    return backend


def _report_fallbacks(backend: "TrainBackend", *, strict: bool) -> None:
    """Log one warning per fallback kernel on a device. With --strict, raise ConfigError on all ranks. Collective."""
    if not strict and not platform.has_accelerator():
        return
    from fsdptrain.model.probes.kernels import require_no_fallback

    kernels = backend.kernels()
    for kernel in kernels:
        if kernel.fell_back and not strict and dist.get_rank() == 0:
            log.warning("fallback: %s", kernel.line)
    with raise_on_all_ranks(ConfigError, "--strict"):
        if strict:
            require_no_fallback(kernels)
