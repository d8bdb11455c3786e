"""The liger feature: liger-kernel replaces norms and gated MLPs of the loaded model, compared with the stock ones.

The losses of liger-kernel are not used: the losses here are functions of logprobs. Its rotary embedding is not used
either: it writes over its inputs, which selective checkpointing keeps, and can only be replaced for all models.
"""

import logging
import math
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import one_line, raise_on_all_ranks, sum_over_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.policy import TOLERANCES, evaluating, over_ranks, plain_batch, policy_logprobs
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import reshard, stock_class

log = logging.getLogger(__name__)

_LENGTHS = (40, 23)  # of the segments of the probe
_BLOCK_TOKENS = 4096  # liger-kernel computes norms of 8 heads or more with another kernel from here on
_ROUNDINGS = 16  # of half precision: kernels that round once differ by up to 6 from torch's operations (36 layers)
_Gradients = Sequence[tuple[nn.Parameter, Tensor]]


class LigerFeature(Feature):
    def __init__(self, *, max_tokens: int, compute_dtype: torch.dtype) -> None:
        """max_tokens: the most tokens of a pack."""
        self._max_tokens = max_tokens
        self._dtype = compute_dtype

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "LigerFeature":
        del checkpoint
        _require()
        return cls(max_tokens=config.max_tokens_per_pack, compute_dtype=getattr(torch, config.compute_dtype_name))

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        """Refuse a model that liger-kernel does not know; `verify` replaces the modules."""
        del meshes
        _require(model.config.model_type)

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        """Replace the modules. Raises ConfigError if that changes logprobs or gradients beyond rounding. Collective."""
        name = stock_class(model).__name__
        lengths: list[int] = list(_LENGTHS)
        if platform.has_accelerator():
            lengths.append(max(1, min(_BLOCK_TOKENS, self._max_tokens) - sum(_LENGTHS)))
        wanted, gradients = _results(model, lengths, probe.layout, vocab_size)
        try:
            replace_modules(model)
            found, others = _results(model, lengths, probe.layout, vocab_size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton raises many kinds; the same on every rank
            raise ConfigError(f"--liger does not work with {name}: {one_line(error)}; leave it out") from error
        of_logprobs, least = over_ranks((found - wanted).abs().mean().item()), TOLERANCES[self._dtype]
        rounding = torch.finfo(self._dtype).eps
        of_gradients, where = largest_difference(model, others, gradients, floor=rounding)
        bound = max(1e-4, _ROUNDINGS * rounding)
        if not (of_logprobs <= least and of_gradients <= bound):  # also rejects nan
            raise ConfigError(
                f"--liger changes the logprobs of {name} by {of_logprobs:.2g} (tolerance {least:g}) and the gradients "
                f"of {where} by {of_gradients:.2g} of their norm (tolerance {bound:.2g}): leave it out"
            )
        measured = f"logprobs {of_logprobs:.2g} <= {least:g}, gradients {of_gradients:.2g} <= {bound:.2g}"
        log.info("liger kernels in norms and MLPs (probe: %s)", measured)


def _require(model_type: str | None = None) -> None:
    with raise_on_all_ranks(ConfigError, "--liger"):
        if problem := obstacle(model_type):
            raise ConfigError(f"--liger {problem}")


def obstacle(model_type: str | None = None) -> str:
    """Return why the kernels cannot run here, or not for models of `model_type`, as the end of a message, or ""."""
    if find_spec("liger_kernel") is None:
        return "needs the package liger-kernel, not installed here: pip install 'fsdptrain[liger]', or leave it out"
    if find_spec("triton") is None:
        return "needs the package triton, not installed here: install it, or leave it out"
    from triton import knobs

    if not platform.has_accelerator() and not knobs.runtime.interpret:
        return "needs a GPU and none is available: leave it out"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type is not None and model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"has no kernels for models of type {model_type}: leave it out"
    return ""


def replace_modules(model: PreTrainedModel) -> None:
    """Let liger-kernel replace the forwards of modules of `model`, and no class of other models."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    family = vars(sys.modules[stock_class(model).__module__])
    stock = family.copy()
    _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    family.update(stock)


def _results(
    model: PreTrainedModel, lengths: Sequence[int], layout: Layout, vocab_size: int
) -> tuple[Tensor, _Gradients]:
    """Return the logprobs [T] of random tokens and this rank's shards of the gradients."""
    generator = torch.Generator().manual_seed(0)
    segments = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    batch = plain_batch(segments, device=platform.local_device())
    with evaluating(model), torch.enable_grad():
        values = policy_logprobs(model, batch, layout=layout).values
        (values * (batch.position_ids + 1).sin()).sum().backward()
    reshard(model)
    gradients = [(p, local_shard(p.grad)) for p in model.parameters() if p.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    return values.detach(), gradients


def largest_difference(model: nn.Module, found: _Gradients, wanted: _Gradients, *, floor: float) -> tuple[float, str]:
    """Return the largest relative difference of the gradients of a kind over all ranks, and the name of the kind.

    A kind is a parameter of all layers. The difference is relative to the norm of the kind, or to `floor` times the
    norm of all gradients if that is larger: the gradient of some biases is only rounding.
    """
    kinds = {p: re.sub(r"\.\d+(?=\.)", ".*", name) for name, p in model.named_parameters()}
    differences, squares = (dict.fromkeys(kinds.values(), 0.0) for _ in range(2))
    others = dict(found)
    for p, gradient in wanted:
        differences[kinds[p]] += (others.get(p, 0.0) - gradient.double()).square().sum().item()
        squares[kinds[p]] += gradient.double().square().sum().item()
    sums = sum_over_ranks([*differences.values(), *squares.values()])
    norms = [square**0.5 for square in sums[len(squares) :]]
    least = max(floor * math.hypot(*norms), torch.finfo(torch.float32).tiny)
    ratios = [difference**0.5 / max(norm, least) for difference, norm in zip(sums, norms, strict=False)]
    ratios = [math.inf if math.isnan(ratio) else ratio for ratio in ratios]  # max() passes over nan
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    return ratios[worst], list(differences)[worst]
