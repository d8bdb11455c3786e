"""Fused kernels for the passes over the logits, compared with torch's operations on the device at start."""

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

_VOCABULARY = 5003  # more than one block of columns, and not a multiple of one


class FusedLogprobsFeature(Feature):
    """Runs `chunked_logprobs` with Triton kernels if they are correct on every rank's device."""

    def __init__(self, passes: LogitPasses | None, line: str) -> None:
        self._passes = passes
        self._line = line

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "FusedLogprobsFeature":
        del checkpoint
        asked = config.section(FusedLogprobsConfig).logprob_kernel == "triton"
        passes, problem = None, ""
        try:
            passes = load_passes()
            compare(passes, platform.local_device(), getattr(torch, config.compute_dtype_name))
        except Exception as error:  # noqa: BLE001  Triton raises many kinds of errors; the line names it
            problem = one_line(error)
        problem = next(filter(None, gather(problem)), "")
        if problem and (asked or config.model.strict):
            raise ConfigError(f"--logprob-kernel triton cannot be used: {problem}; use --logprob-kernel eager")
        if problem:
            return cls(None, f"logprob kernel: eager, because triton cannot be used: {problem}")
        return cls(passes, "logprob kernel: triton")

    @property
    def lines(self) -> list[str]:
        return [self._line]

    def logprobs_function(self, stock: LogProbsFunction) -> LogProbsFunction:
        return stock if self._passes is None else partial(stock, passes=self._passes)


def load_passes() -> LogitPasses:
    """Import the kernels. Raises ConfigError without a GPU or without Triton."""
    if find_spec("triton") is None:
        raise ConfigError("the package triton is not installed")
    from triton import knobs

    if platform.device_type() != "cuda" and not knobs.runtime.interpret:
        raise ConfigError(f"Triton does not run on {platform.device_type()}")
    from fsdptrain.features.fused_logprobs.kernels import TritonPasses

    return TritonPasses()


def compare(passes: LogitPasses, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if values or gradients of a small head differ from those of torch's operations.

    Compiles and runs all variants of the kernels that a run in `dtype` uses: capped or not, truncated or not.
    """
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((9, 16), (_VOCABULARY, 16)))
    hidden, weight = (tensor.requires_grad_() for tensor in made)
    labels = torch.randint(_VOCABULARY, (9,), generator=generator).to(device)
    bound = max(1e-5, 4 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0)  # gradients are rounded to `dtype`

    def results(with_entropy: bool, **options: Any) -> list[torch.Tensor]:
        with torch.enable_grad():
            values = chunked_logprobs(
                hidden, weight, labels, temperature=0.7, chunk_size=4, with_entropy=with_entropy, **options
            )
            found = [value for value in values if value is not None]
            total = sum(value.square().sum() for value in found)
            return [*found, *torch.autograd.grad(total, (hidden, weight))]  # type: ignore[arg-type]

    for softcap, truncation, with_entropy in product(
        (None, 5.0), (UNTRUNCATED, Truncation(top_p=0.9, top_k=100)), (False, True)
    ):
        options = {"softcap": softcap, "truncation": truncation}
        for found, wanted in zip(
            results(with_entropy, **options, passes=passes), results(with_entropy, **options), strict=True
        ):
            error = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)).item()
            if not error <= bound:
                raise ConfigError(f"its results differ from torch's by {error:.1e} on {device} in {dtype}")
