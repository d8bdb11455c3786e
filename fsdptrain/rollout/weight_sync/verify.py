"""Verify after a weight sync that the engine holds the weights that were sent: docs/weight_sync.md.

The first sync is verified, and each one after a rollout whose logprobs differ between engine and trainer by more than
rounding explains. All others cost nothing.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.model.loading.files import some_of
from fsdptrain.protocols import CheckedEngine, RolloutEngine
from fsdptrain.rollout.weight_sync.checksum import StartedChecksum, finish_checksums, start_checksum
from fsdptrain.types import ChecksumKind

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
        self._started: dict[tuple[str, ChecksumKind], StartedChecksum] = {}  # of the weights that were sent

    @property
    def is_due(self) -> bool:
        return self._is_first or self._suspicion is not None

    def observe(self, difference: float) -> None:
        """Take the mean logprob difference of a rollout, the same on all ranks."""
        if not difference <= self._tolerance:  # nan too
            self._suspicion = difference

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` unchanged and keep their checksums for `verify`."""
        self._started = {}
        for name, tensor in weights:
            if self.is_due:
                self._started |= {(name, kind): start_checksum(tensor, kind) for kind in ("values", "multiset")}
            yield name, tensor

    def verify(self, version: int) -> None:
        """Call after the engine took the recorded weights. Collective. RolloutError on all ranks if they differ."""
        if not self.is_due:
            return
        sent, engine = finish_checksums(self._started), self._engine
        names = list(dict.fromkeys(name for name, _ in sent))
        # Several ranks may read parts of one replica together, so all ranks finish a step before any of them raises.
        with raise_on_all_ranks(RolloutError, FLAG):
            held = engine.checksums(names, "values")
        wrong = {
            replica: [name for name in names if name in sums and sums[name] != sent[name, "values"]]
            for replica, sums in held.items()
        }
        of_all_ranks = gather([name for differing in wrong.values() for name in differing])
        suspects = sorted({name for of_rank in of_all_ranks for name in of_rank})
        unordered = {}
        if suspects and engine.weight_naming == "hub":  # vLLM stores some matrices in another layout
            with raise_on_all_ranks(RolloutError, FLAG):
                unordered = engine.checksums(suspects, "multiset")
        rearranged: set[str] = set()
        with raise_on_all_ranks(RolloutError, FLAG):
            for replica, differing in wrong.items():
                sums = unordered.get(replica, {})
                same = {name for name in differing if sums.get(name) == sent[name, "multiset"]}
                accepted = _in_every_layer(same, held[replica])
                if bad := [name for name in differing if name not in accepted]:
                    raise RolloutError(
                        f"{FLAG}: {replica} does not hold {bad[0]} of version {version}, the first of {len(bad)} "
                        f"tensors of {len(names)} that differ from the trainer's; the engine or the transfer is "
                        "broken; --no-verify-weight-sync continues without verification"
                    )
                rearranged |= accepted
        unread = len(names) - min(map(len, held.values()), default=len(names))
        self._report(sorted(rearranged), unread, len(names))
        self._is_first, self._suspicion = False, None

    def _report(self, rearranged: list[str], unread: int, num_sent: int) -> None:
        if self._is_first and rearranged:
            log.info(
                "%s: the engine stores %d of %d tensors in another layout, e.g. %s: their values are compared",
                *(FLAG, len(rearranged), num_sent, some_of(rearranged)),
            )
        if self._is_first and unread:
            log.warning(
                "%s: %d of %d tensors cannot be read from the engine: only mismatch/abs_mean shows their errors",
                *(FLAG, unread, num_sent),
            )
        if self._suspicion is not None:
            log.warning(
                "%s: mismatch/abs_mean was %.2g, more than %.2g, though the engine holds the weights that were sent; a "
                "difference above %.2g is checked again",
                *(FLAG, self._suspicion, self._tolerance, 2 * self._suspicion),
            )
            self._tolerance = max(self._tolerance, 2 * self._suspicion)


def _in_every_layer(permuted: Collection[str], readable: Iterable[str]) -> set[str]:
    """Return the tensors of `permuted` that are permuted in every layer: a single one was scrambled in transit."""
    by_layer: dict[str, list[str]] = {}
    for name in readable:
        by_layer.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)  # of all layers and all experts
    return {name for names in by_layer.values() if len(names) > 1 and set(permuted).issuperset(names) for name in names}


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Largest mean logprob difference that rounding explains: 32 epsilons of `dtype`, at least 1e-4."""
    return max(1e-4, 32 * torch.finfo(dtype).eps)
