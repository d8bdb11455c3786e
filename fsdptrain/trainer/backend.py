"""What the trainer asks of a backend besides `TrainBackend`, and the choice between the two."""

import importlib
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
from fsdptrain.feature import Features
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
    def features(self) -> Features:
        """What attaches to the policy."""
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
    features: Features | None = None,
    before_load: Callable[[PreTrainedModel], None] | None = None,
) -> PolicyBackend:
    """The backend that --backend names; the other is not imported. Collective.

    features, before_load: see `FSDPBackend`.
    """
    install_platform_overrides()
    options: dict[str, Any] = {"total_steps": config.total_optimizer_steps}
    if config.parallel.backend == "megatron":
        return importlib.import_module("fsdptrain.megatron.backend").MegatronBackend(config, **options)
    from fsdptrain.fsdp.backend import FSDPBackend

    return FSDPBackend(config, **options, features=features, before_load=before_load)


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
