"""Verify after a weight sync that the engine holds the weights that were sent: docs/weight_sync.md.

The first sync is verified, and each one after a rollout whose logprobs differ between engine and trainer by more than
rounding explains. All others cost nothing.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.model.loading.files import some_of
from fsdptrain.protocols import CheckedEngine, RolloutEngine
from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS, SentTensors, classify
from fsdptrain.types import ChecksumKind, Metrics

log = logging.getLogger(__name__)

FLAG = "--verify-weight-sync"


class WeightVerifier:
    """Verifies the first weight sync, and the next one after each suspicion."""

    def __init__(self, engine: CheckedEngine, *, tolerance: float) -> None:
        """tolerance: mean logprob difference of engine and trainer that is no suspicion"""
        self._engine = engine
        self._tolerance = tolerance
        self._suspicion: float | None = None  # the difference that caused it
        self._is_first = True
        self._recorded = SentTensors()
        self._record_seconds = 0.0
        self._metrics: Metrics = {}

    @property
    def is_due(self) -> bool:
        return self._is_first or self._suspicion is not None

    def observe(self, difference: float) -> None:
        """Take the mean logprob difference of a rollout, the same on all ranks."""
        if not difference <= self._tolerance:  # nan too
            self._suspicion = difference

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` unchanged and keep their checksums for `verify`."""
        self._recorded, self._record_seconds = SentTensors(), 0.0
        for name, tensor in weights:
            if self.is_due:
                start = time.perf_counter()
                self._recorded.add(name, tensor, CHECKSUM_KINDS)
                self._record_seconds += time.perf_counter() - start
            yield name, tensor

    def verify(self, version: int) -> None:
        """Call after the engine took the recorded weights. Collective. RolloutError on all ranks if they differ."""
        if not self.is_due:
            return
        start, sent, engine = time.perf_counter(), self._recorded.finish(), self._engine
        # Several ranks may read parts of one replica together, so all ranks finish a step before any of them raises.
        with raise_on_all_ranks(RolloutError, FLAG):
            held = engine.checksums(list(sent), "bits")
        differing = {
            replica: [name for name in sent if name in sums and sums[name] != sent[name].checksums["bits"]]
            for replica, sums in held.items()
        }
        otherwise: dict[str, dict[str, ChecksumKind]] = {}
        names = sorted({name for of_rank in gather([n for ns in differing.values() for n in ns]) for name in of_rank})
        if names and engine.weight_naming == "hub":
            with raise_on_all_ranks(RolloutError, FLAG):
                found = {kind: engine.checksums(names, kind) for kind in CHECKSUM_KINDS if kind != "bits"}
            for replica, wrong in differing.items():
                of_replica = {kind: sums.get(replica, {}) for kind, sums in found.items()}
                otherwise[replica] = classify(wrong, list(held[replica]), sent, lambda _, kind: of_replica[kind])  # noqa: B023 - called at once
        with raise_on_all_ranks(RolloutError, FLAG):
            for replica, wrong in differing.items():
                _require_none([n for n in wrong if n not in otherwise.get(replica, {})], replica, len(sent), version)
        unread = len(sent) - min(map(len, held.values()), default=len(sent))
        self._report(sorted({name for names in otherwise.values() for name in names}), unread, len(sent))
        self._metrics = {"perf/verify_weight_sync_s": self._record_seconds + time.perf_counter() - start}
        self._is_first, self._suspicion = False, None

    def metrics(self) -> Metrics:
        """Metrics of the last sync on this rank; empty if it was not verified or was reported already."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _report(self, otherwise: list[str], unread: int, num_sent: int) -> None:
        if self._is_first and otherwise:
            log.info(
                "%s: the engine stores %d of %d tensors in another layout or dtype, e.g. %s: their values are compared",
                *(FLAG, len(otherwise), num_sent, some_of(otherwise)),
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


def _require_none(wrong: Sequence[str], replica: str, num_sent: int, version: int) -> None:
    if wrong:
        raise RolloutError(
            f"{FLAG}: {replica} does not hold {wrong[0]} of version {version}, the first of {len(wrong)} tensors of "
            f"{num_sent} that differ from the trainer's; the engine or the transfer is broken; "
            "--no-verify-weight-sync continues without verification"
        )


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Largest mean logprob difference that rounding explains: 32 epsilons of `dtype`, at least 1e-4."""
    return max(1e-4, 32 * torch.finfo(dtype).eps)


def build_verifier(config: Config, engine: RolloutEngine) -> WeightVerifier | None:
    """None if the engine cannot be verified, or must not be."""
    if not config.run.verify_weight_sync:
        return None
    if not isinstance(engine, CheckedEngine):
        log.warning("weight syncs are not verified: %s has no method `checksums`", type(engine).__name__)
        return None
    return WeightVerifier(engine, tolerance=rounding_tolerance(getattr(torch, config.compute_dtype_name)))
