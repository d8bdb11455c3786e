"""Build the training backend and log how it computes."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.enabled_features import Features
from fsdptrain.registry import Table

if TYPE_CHECKING:
    from fsdptrain.protocols import TrainBackend

log = logging.getLogger(__name__)

BACKENDS: "Table[Callable[..., TrainBackend]]" = Table(
    {"fsdp": "fsdptrain.fsdp.backend:FSDPBackend", "megatron": "fsdptrain.megatron.backend:MegatronBackend"}
)


def build_backend(
    config: Config, *, features: Features | None = None, before_load: Callable[[PreTrainedModel], None] | None = None
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
    if config.model.strict or platform.has_accelerator():
        from fsdptrain.model.probes.kernels import report_fallbacks

        report_fallbacks(backend.kernels(), strict=config.model.strict)
    why = config.trains_zero_advantage
    if config.run.num_rollout and config.algorithm.algorithm != "sft" and why:
        log.info("samples with advantage 0 are not skipped: %s", why)
    if config.sync.offload_train and not platform.has_accelerator():
        log.warning("--offload-train: no GPU; this copies weights and saves no memory")
    return backend
