"""Fused kernels for the passes over the logits, compared with torch's operations on the device at start."""

import logging
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import gather, one_line
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, LogProbsFunction
from fsdptrain.features.fused_logprobs.config import FusedLogprobsConfig
from fsdptrain.model.logit_passes import LogitPasses
from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.model.truncation import UNTRUNCATED, Truncation

log = logging.getLogger(__name__)

_VOCABULARY = 5008  # more than one block of columns, not a multiple of one, and of 16, as Triton distinguishes
_BOUND = 1e-5  # of values in float32


class FusedLogprobsFeature(Feature):
    """Runs `chunked_logprobs` with Triton kernels if they are correct on every rank's device."""

    def __init__(self, passes: LogitPasses | None) -> None:
        self._passes = passes

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "FusedLogprobsFeature":
        del checkpoint
        passes, problem = usable_passes(config)
        if problem:
            log.info("logprob kernel: eager, because triton cannot be used: %s", problem)
            return cls(None)
        log.info("logprob kernel: triton")
        return cls(passes)

    def logprobs_function(self, stock: LogProbsFunction) -> LogProbsFunction:
        return stock if self._passes is None else partial(stock, passes=self._passes)


def usable_passes(config: Config) -> tuple[LogitPasses | None, str]:
    """Return the kernels, or None and the reason if some rank cannot use them.

    Raises ConfigError for that reason with --logprob-kernel triton or --strict.
    """
    passes, problem = None, ""
    try:
        passes = load_passes()
        compare(passes, platform.local_device(), getattr(torch, config.compute_dtype_name))
    except Exception as error:  # noqa: BLE001  Triton raises many kinds of errors; the line names it
        problem = one_line(error)
    problem = next(filter(None, gather(problem)), "")
    if problem and (config.section(FusedLogprobsConfig).logprob_kernel == "triton" or config.model.strict):
        raise ConfigError(f"--logprob-kernel triton cannot be used: {problem}; use --logprob-kernel eager")
    return None if problem else passes, problem


def load_passes() -> LogitPasses:
    """Import the kernels. Raises ConfigError without a GPU or Triton."""
    if find_spec("triton") is None:
        raise ConfigError("the package triton is not installed")
    from triton import knobs

    if platform.device_type() != "cuda" and not knobs.runtime.interpret:
        raise ConfigError(f"Triton does not run on {platform.device_type()}")
    from fsdptrain.features.fused_logprobs.kernels import TritonPasses

    return TritonPasses()


def compare(passes: LogitPasses, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if values or gradients of a small head differ from those of torch's operations.

    Compiles and runs one variant of each kind: capped or not, truncated or not, with entropy or without.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, 16), (_VOCABULARY, 16), (_VOCABULARY,))
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    hidden, weight, bias = inputs
    labels = torch.randint(_VOCABULARY, (9,), generator=generator).to(device)
    rounding = 4 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0  # of gradients

    def results(**options: Any) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        with torch.enable_grad():
            both = chunked_logprobs(
                hidden, weight, labels, bias=bias, logit_scale=1.1, temperature=0.7, chunk_size=4, **options
            )
            values = [value for value in both if value is not None]
            total = torch.stack([value.square().sum() for value in values]).sum()
            return values, torch.autograd.grad(total, inputs)

    for softcap, truncation, with_entropy in product(
        (None, 5.0), (UNTRUNCATED, Truncation(top_p=0.9, top_k=100)), (False, True)
    ):
        options = {"softcap": softcap, "truncation": truncation, "with_entropy": with_entropy}
        for bound, found, wanted in zip(
            (_BOUND, max(_BOUND, rounding)), results(**options, passes=passes), results(**options), strict=True
        ):
            error = max(map(_relative_error, found, wanted))
            if not error <= bound:
                raise ConfigError(f"its results differ from torch's by {error:.1e} on {device} in {dtype}")


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value. NaN if there is one."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()
