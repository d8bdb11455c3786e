"""Verify after a weight sync that the engine loaded the weights that were sent: docs/weight_sync.md.

The first sync is verified, and each one after a rollout whose logprobs differ between engine and trainer by more than
rounding explains. All others cost nothing.
"""

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.protocols import CheckedEngine, RolloutEngine
from fsdptrain.rollout.weight_sync.checksum import StartedChecksum, finish_checksums, start_checksum

log = logging.getLogger(__name__)

FLAG = "--verify-weight-sync"


def verifier_of(engine: RolloutEngine, dtype: torch.dtype) -> "WeightVerifier | None":
    """Return a verifier of the syncs of weights in `dtype` to `engine`; None, with a warning, without checksums."""
    if not isinstance(engine, CheckedEngine):
        log.warning("weight syncs are not verified: %s has no method `checksums`", type(engine).__name__)
        return None
    return WeightVerifier(engine, tolerance=rounding_tolerance(dtype))


class WeightVerifier:
    """Verifies the first weight sync, and the next one after each suspicion."""

    def __init__(self, engine: CheckedEngine, *, tolerance: float) -> None:
        """tolerance: mean logprob difference of engine and trainer that is no suspicion"""
        self._engine = engine
        self._tolerance = tolerance
        self._suspicion: float | None = None  # the difference that caused it
        self._is_first = True
        self._started: dict[str, StartedChecksum] = {}  # of the weights that were sent

    @property
    def is_due(self) -> bool:
        return self._is_first or self._suspicion is not None

    def observe(self, difference: float) -> None:
        """Take the mean logprob difference of a rollout, the same on all ranks."""
        if not difference <= self._tolerance:  # nan too
            self._suspicion = difference

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return `weights` for the next update, unchanged, and keep their checksums for `verify`."""
        if not self.is_due:
            return weights
        self._engine.expect_checksums()
        return self._recorded(weights)

    def _recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self._started = {}
        for name, tensor in weights:
            self._started[name] = start_checksum(tensor)
            yield name, tensor

    def verify(self, version: int) -> None:
        """Call after the engine took the recorded weights. Collective. RolloutError on all ranks if they differ."""
        if not self.is_due:
            return
        sent = finish_checksums(self._started)
        with raise_on_all_ranks(RolloutError, FLAG):
            for replica, loaded in self._engine.checksums().items():
                if wrong := [name for name, checksum in sent.items() if loaded.get(name) != checksum]:
                    raise RolloutError(
                        f"{FLAG}: {replica} does not hold {wrong[0]} of version {version}, the first of {len(wrong)} "
                        f"tensors of {len(sent)} that differ from the trainer's; the engine or the transfer is "
                        "broken; --no-verify-weight-sync continues without verification"
                    )
        if self._suspicion is not None:
            log.warning(
                "%s: mismatch/abs_mean was %.2g, more than %.2g, though the engine loaded the weights that were sent; "
                "a difference above %.2g is checked again",
                *(FLAG, self._suspicion, self._tolerance, 2 * self._suspicion),
            )
            self._tolerance = max(self._tolerance, 2 * self._suspicion)
        self._is_first, self._suspicion = False, None


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Largest mean logprob difference that rounding explains: 32 epsilons of `dtype`, at least 1e-4."""
    return max(1e-4, 32 * torch.finfo(dtype).eps)
