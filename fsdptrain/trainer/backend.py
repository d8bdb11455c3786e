"""What the trainer asks of a backend besides `TrainBackend`, and the choice between the two."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks, require_same
from fsdptrain.errors import ConfigError
from fsdptrain.features.vision.processor import ImageProcessor
from fsdptrain.model.probes.kernels import Kernel
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.overrides import install_overrides
from fsdptrain.protocols import TrainBackend

log = logging.getLogger(__name__)


class PolicyBackend(TrainBackend, Protocol):
    """A backend as the trainer uses it."""

    compute_dtype: torch.dtype
    layout_probe: LayoutProbe

    @property
    def model(self) -> PreTrainedModel:
        """The architecture as transformers has it; the weights may be elsewhere, and this on meta."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """Packs may hold samples that share a prompt."""
        ...

    @property
    def lines(self) -> list[str]:
        """What was built, for the log."""
        ...

    def kernels(self) -> list[Kernel]:
        """What computes the parts of the model."""
        ...

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder. Collective."""
        ...


def build_backend(
    config: Config,
    *,
    before_load: Callable[[PreTrainedModel], None] | None = None,
    processor: ImageProcessor | None = None,
) -> PolicyBackend:
    """The one that --backend names; the other is not imported. Collective.

    before_load: sees the model while it has no memory yet (FSDP). processor: see `FSDPBackend`.
    """
    install_platform_overrides()
    options: dict[str, Any] = {"total_steps": config.total_optimizer_steps}
    if config.parallel.backend == "megatron":
        from fsdptrain.megatron.backend import MegatronBackend

        return MegatronBackend(config, **options)
    from fsdptrain.fsdp.backend import FSDPBackend

    return FSDPBackend(config, **options, before_load=before_load, processor=processor)


def install_platform_overrides() -> None:
    """Say what replaces functions of ours on this device; ConfigError unless all ranks have the same. Collective."""
    kind = platform.device_type()
    require_same(kind, ConfigError(f"machines of one run must be alike: rank 0 computes on {kind}, another does not"))
    with raise_on_all_ranks(ConfigError, "fsdptrain.overrides"):
        found = install_overrides(kind)
    lines = [override.line for override in found]
    require_same(lines, ConfigError(f"machines of one run must be alike: not all have the plug-ins {lines}"))
    for line in lines:
        log.info("override: %s", line)
