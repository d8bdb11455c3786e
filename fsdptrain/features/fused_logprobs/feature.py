"""Fused kernels for the passes over the logits, compared with torch's operations on the device at start."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import gather, one_line
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, LogProbsFunction
from fsdptrain.features.fused_logprobs.config import FusedLogprobsConfig
from fsdptrain.model.logprobs import LogitPasses, chunked_logprobs

_TOLERANCE = 1e-5  # of float32, for logits of magnitude 5


class FusedLogprobsFeature(Feature):
    """Runs `chunked_logprobs` with Triton's kernels, where they are right on every rank's device."""

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
            compare(passes, platform.local_device())
        except Exception as error:  # noqa: BLE001  Triton raises errors of many kinds; the line says which
            problem = one_line(error)
        problem = next(filter(None, gather(problem)), "")
        if problem and asked:
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


def compare(passes: LogitPasses, device: torch.device) -> None:
    """Raise ConfigError if values and gradients of a small head differ from those of torch's operations."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator).to(device) for shape in ((9, 16), (5003, 16)))
    hidden, weight = (tensor.requires_grad_() for tensor in made)
    labels = torch.randint(5003, (9,), generator=generator).to(device)

    def results(score: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        with torch.enable_grad():
            logprobs, entropy = score(hidden, weight, labels, softcap=5.0, temperature=0.7, with_entropy=True)
            assert entropy is not None
            total = logprobs.sum() + entropy.square().sum()
            return [logprobs, entropy, *torch.autograd.grad(total, (hidden, weight))]

    for found, wanted in zip(results(partial(chunked_logprobs, passes=passes)), results(chunked_logprobs), strict=True):
        error = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)).item()
        if not error <= _TOLERANCE:
            raise ConfigError(f"its results differ from torch's by {error:.1e} on {device}")
