"""The liger feature: liger-kernel replaces norms and gated MLPs of the loaded model, compared with the stock ones.

The losses of liger-kernel are not used: the losses here are functions of logprobs. Its rotary embedding is not used
either: it can only be replaced for all models.
"""

import logging
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import one_line, raise_on_all_ranks, sum_over_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.loading.meta import model_config
from fsdptrain.model.policy import TOLERANCES, evaluating, over_ranks, plain_batch, policy_logprobs
from fsdptrain.model.probes.layout import LayoutProbe, probe_segments
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import reshard, stock_class

log = logging.getLogger(__name__)

_ROUNDINGS = 16  # of half precision: kernels that round once differ by up to 6 from torch's operations (36 layers)


class LigerFeature(Feature):
    def __init__(self, *, compute_dtype: torch.dtype) -> None:
        self._dtype = compute_dtype

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "LigerFeature":
        with raise_on_all_ranks(ConfigError, "--liger"):
            model_type = model_config(checkpoint, trust_remote_code=config.model.trust_remote_code).model_type
            if problem := obstacle(model_type):
                raise ConfigError(f"--liger {problem}")
        return cls(compute_dtype=getattr(torch, config.compute_dtype_name))

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        """Replace the modules. Raises ConfigError if that changes logprobs or gradients beyond rounding. Collective."""
        name = stock_class(model).__name__
        wanted, wanted_gradients = _results(model, probe.layout, vocab_size)
        try:
            replace_modules(model)
            found, gradients = _results(model, probe.layout, vocab_size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton raises many kinds; the same on every rank
            raise ConfigError(f"--liger does not work with {name}: {one_line(error)}; leave it out") from error
        rounding, tolerance = torch.finfo(self._dtype).eps, TOLERANCES[self._dtype]
        bound = max(1e-4, _ROUNDINGS * rounding)
        of_logprobs = over_ranks((found - wanted).abs().mean().item())
        of_gradients = _largest_difference(gradients, wanted_gradients, rounding)
        if not (of_logprobs <= tolerance and of_gradients <= bound):  # also rejects nan
            raise ConfigError(
                f"--liger changes the logprobs of {name} by {of_logprobs:.2g} (tolerance {tolerance:g}) and a gradient "
                f"by {of_gradients:.2g} of its norm (tolerance {bound:.2g}): leave it out"
            )
        log.info("liger kernels in norms and MLPs (probe: logprobs %.2g, gradients %.2g)", of_logprobs, of_gradients)


def obstacle(model_type: str) -> str:
    """Return why the kernels cannot run here, or not for models of `model_type`, as the end of a message, or ""."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from triton import knobs

    if not platform.has_accelerator() and not knobs.runtime.interpret:
        return "needs a GPU and none is available: leave it out"
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"has no kernels for models of type {model_type}: leave it out"
    return ""


def replace_modules(model: PreTrainedModel) -> None:
    """Let liger-kernel replace the forwards of modules of `model`, and no class of other models."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    family = vars(sys.modules[stock_class(model).__module__])
    stock = family.copy()
    _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    family.update(stock)


def _results(model: PreTrainedModel, layout: Layout, vocab_size: int) -> tuple[Tensor, list[Tensor]]:
    """Return the logprobs [T] of the segments of the layout probe and this rank's shards of the gradients."""
    batch = plain_batch(probe_segments(model, vocab_size), device=platform.local_device())
    with evaluating(model), torch.enable_grad():
        values = policy_logprobs(model, batch, layout=layout).values
        (values * (batch.position_ids + 1).sin()).sum().backward()
    reshard(model)
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return values.detach(), gradients


def _largest_difference(found: list[Tensor], wanted: list[Tensor], rounding: float) -> float:
    """Return the largest difference of a parameter's gradient, relative to its norm. Collective.

    The norm counts as at least `rounding` times that of all gradients: the gradient of some biases is only rounding.
    """
    differences = sum_over_ranks([(a - b.double()).square().sum().item() for a, b in zip(found, wanted, strict=True)])
    squares = sum_over_ranks([x.double().square().sum().item() for x in wanted])
    least = max(rounding**2 * sum(squares), torch.finfo(torch.float32).tiny)
    ratios = torch.tensor(differences, dtype=torch.float64) / torch.tensor(squares, dtype=torch.float64).clamp(least)
    return ratios.max().sqrt().item()  # nan if one is
