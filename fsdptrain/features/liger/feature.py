"""The liger feature: liger-kernel replaces norms and gated MLPs of the loaded model, compared with the stock ones.

The losses of liger-kernel are not used: the losses here are functions of logprobs. Its rotary embedding is not used
either: it can only be replaced for all models.
"""

import logging
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import one_line
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.model.policy import TOLERANCES, evaluating, over_ranks, plain_batch, policy_logprobs
from fsdptrain.model.probes.layout import LayoutProbe, probe_segments
from fsdptrain.model.structure import reshard, stock_class

log = logging.getLogger(__name__)


class LigerFeature(Feature):
    def __init__(self, *, compute_dtype: torch.dtype) -> None:
        self._dtype = compute_dtype

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "LigerFeature":
        return cls(compute_dtype=getattr(torch, config.compute_dtype_name))

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        """Replace the modules. Raises ConfigError if that changes logprobs beyond rounding. Collective."""
        batch = plain_batch(probe_segments(model, vocab_size), device=platform.local_device())
        name, tolerance = stock_class(model).__name__, TOLERANCES[self._dtype]
        with evaluating(model), torch.no_grad():
            wanted = policy_logprobs(model, batch, layout=probe.layout).values
            reshard(model)
            try:
                replace_modules(model)
                found = policy_logprobs(model, batch, layout=probe.layout).values
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Triton raises many kinds; the same on every rank
                raise ConfigError(f"--liger does not work with {name}: {one_line(error)}; leave it out") from error
        reshard(model)
        if not any("Liger" in module._get_name() for module in model.modules()):
            raise ConfigError(f"--liger has no kernels for {name}: leave it out")
        difference = over_ranks((found - wanted).abs().mean().item())
        if not difference <= tolerance:  # also rejects nan
            line = f"--liger changes the logprobs of {name} by {difference:.2g} (tolerance {tolerance:g}): leave it out"
            raise ConfigError(line)
        log.info("liger kernels in norms and MLPs (probe: logprobs %.2g)", difference)


def replace_modules(model: PreTrainedModel) -> None:
    """Let liger-kernel replace the forwards of modules of `model`, and no class of other models."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    family = vars(sys.modules[stock_class(model).__module__])
    stock = family.copy()
    _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    family.update(stock)
