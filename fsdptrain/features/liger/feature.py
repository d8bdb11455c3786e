"""The liger feature: kernels of liger-kernel for norms, rotary embeddings and gated MLPs, compared at start.

The losses of liger-kernel are not used: the losses here are functions of logprobs.
"""

import importlib
import math
import re
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
from fsdptrain.features.liger.modules import Replacement, describe, find_replacements
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.policy import TOLERANCES, evaluating, over_ranks, plain_batch, policy_logprobs
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import reshard, stock_class

_LENGTHS = (40, 23)  # of the segments of the probe
_BLOCK_ROWS = 4096 * 8  # liger-kernel computes norms of heads with another kernel from here on
_SEGMENT = 512
_ROUNDINGS = 16  # of half precision: kernels that round once differ by up to 6 from torch's operations (36 layers)


class LigerFeature(Feature):
    def __init__(self, *, max_tokens: int, compute_dtype: torch.dtype) -> None:
        """max_tokens: the most tokens of a pack."""
        self._max_tokens = max_tokens
        self._dtype = compute_dtype
        self._of_logprobs = TOLERANCES[compute_dtype]
        self._of_gradients = max(1e-4, _ROUNDINGS * torch.finfo(compute_dtype).eps)  # of a kind
        self._replacements: list[Replacement] = []
        self._line = ""

    @classmethod
    def check(cls, config: Config) -> None:
        del config
        with raise_on_all_ranks(ConfigError, "--liger"):
            problem = obstacle()
            if problem:
                raise ConfigError(f"--liger {problem}")

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "LigerFeature":
        del checkpoint
        cls.check(config)
        return cls(max_tokens=config.max_tokens_per_pack, compute_dtype=getattr(torch, config.compute_dtype_name))

    @property
    def lines(self) -> list[str]:
        return [self._line]

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        """Find the modules; `after_probe` replaces them."""
        del meshes
        self._replacements = find_replacements(model)
        if not self._replacements:
            raise ConfigError(
                f"--liger has no kernel for norms, rotary embeddings or MLPs of {type(model).__name__}: leave it out"
            )

    def after_probe(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        """Replace the modules. Raises ConfigError if that changes logprobs or gradients beyond rounding. Collective."""
        lengths = self._lengths(model)
        wanted, gradients = _results(model, lengths, probe.layout, vocab_size)
        with raise_on_all_ranks(ConfigError, "--liger"):
            kernels = importlib.import_module("liger_kernel.ops")
        for replacement in self._replacements:
            replacement.install(kernels)
        try:
            found, others = _results(model, lengths, probe.layout, vocab_size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton raises many kinds; the same on every rank
            raise ConfigError(f"--liger does not work with {_name(model)}: {one_line(error)}") from error
        of_logprobs = over_ranks((found - wanted).abs().mean().item())
        of_gradients, where = _largest_difference(model, others, gradients, floor=torch.finfo(self._dtype).eps)
        if not (of_logprobs <= self._of_logprobs and of_gradients <= self._of_gradients):  # also rejects nan
            raise ConfigError(
                f"--liger changes the logprobs of {_name(model)} by {of_logprobs:.2g} (tolerance "
                f"{self._of_logprobs:g}) and the gradients of {where} by {of_gradients:.2g} of their norm (tolerance "
                f"{self._of_gradients:.2g}): leave it out"
            )
        measured = (
            f"probe: logprobs {of_logprobs:.2g} <= {self._of_logprobs:g}, "
            f"gradients {of_gradients:.2g} <= {self._of_gradients:.2g}"
        )
        self._line = f"liger kernels in {describe(self._replacements)} ({measured})"

    def _lengths(self, model: PreTrainedModel) -> list[int]:
        """Return the segments of the probe. On an accelerator they reach the kernel for many rows, if packs do."""
        lengths: list[int] = list(_LENGTHS)
        if platform.has_accelerator():
            values = model.config.get_text_config().to_dict()
            heads = values.get("num_key_value_heads") or values["num_attention_heads"]
            longest = min(_SEGMENT, values.get("max_position_embeddings") or _SEGMENT)
            tokens = min(-(-_BLOCK_ROWS // heads), self._max_tokens)
            lengths += [longest] * max(0, -(-(tokens - sum(lengths)) // longest))
        return lengths


def obstacle() -> str:
    """Return why the kernels cannot run here, as the end of a message, or ""."""
    if find_spec("liger_kernel") is None:
        return "needs the package liger-kernel, not installed here: pip install 'fsdptrain[liger]', or leave it out"
    if find_spec("triton") is None:
        return "needs the package triton, not installed here: install it, or leave it out"
    from triton import knobs

    if not platform.has_accelerator() and not knobs.runtime.interpret:
        return "needs a GPU and none is available: leave it out"
    return ""


def _results(
    model: PreTrainedModel, lengths: list[int], layout: Layout, vocab_size: int
) -> tuple[Tensor, list[tuple[nn.Parameter, Tensor]]]:
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


def _largest_difference(
    model: nn.Module,
    found: list[tuple[nn.Parameter, Tensor]],
    wanted: list[tuple[nn.Parameter, Tensor]],
    *,
    floor: float,
) -> tuple[float, str]:
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


def _name(model: PreTrainedModel) -> str:
    return stock_class(model).__name__
