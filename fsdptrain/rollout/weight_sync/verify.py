"""Verify after a weight sync that the engine computes with the weights that were sent: docs/weight_sync.md.

Checksums compare the weights tensor by tensor. What they cannot see (packed copies, kernels, cached prefixes) shows in
the logprobs of a few tokens that the engine samples and the trainer scores.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.model.loading.files import some_of
from fsdptrain.protocols import (
    CheckedEngine,
    EngineReplica,
    ReplicaGoneError,
    ReplicatedEngine,
    RolloutEngine,
    TrainBackend,
)
from fsdptrain.rollout.weight_sync.probe import Probe, make_probe, tolerance
from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS, SentTensor, SentTensors, classify
from fsdptrain.types import ChecksumKind, Completion, Metrics, Prompt, SamplingParams

log = logging.getLogger(__name__)

FLAG = "--verify-weight-sync"
_HINT = f"the engine or the transfer is broken; {FLAG} off continues without verification"
_MAX_LOSS = 0.5  # largest mean logprob difference of a lossy engine
_MIN_LOSS = 0.05  # that is always accepted of one, because it is measured on a few tokens
_LOSS_MARGIN = 4.0  # its largest difference after the first sync, as a multiple of that at the first sync


@dataclass(frozen=True)
class _OnlyReplica:
    """An engine that holds a single copy of the model."""

    engine: CheckedEngine
    name: str = "the engine"

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> Mapping[str, int]:
        return self.engine.checksums(names, kind)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        return self.engine.generate(prompts, sampling)

    def cached_tokens(self) -> int:
        return self.engine.cached_tokens()


@dataclass
class ReplicaCheck:
    """What the verification of one sync has learned about one replica."""

    replica: EngineReplica
    checksums: Mapping[str, int] | None = None  # of all readable tensors; None: gone, or read by another rank
    is_gone: bool = False
    mismatches: Mapping[str, ChecksumKind] = field(default_factory=dict)  # stored in another way: see `classify`
    completions: Sequence[Completion] = ()


class WeightVerifier:
    """Verifies every weight sync, or only the first one that it sees."""

    def __init__(
        self,
        engine: CheckedEngine | ReplicatedEngine,
        backend: TrainBackend,
        probe: Probe,
        *,
        dtype: torch.dtype,
        first_only: bool,
        lossy: str = "",
    ) -> None:
        """lossy: the option that makes the engine compute other logprobs on purpose"""
        self._engine = engine
        self._backend = backend
        self._probe = probe
        self._dtype = dtype
        self._first_only = first_only
        self._lossy = lossy
        self._bound = _MAX_LOSS if lossy else tolerance(dtype)  # of the mean logprob difference
        self._recorded = SentTensors()
        self._sent: dict[str, SentTensor] = {}  # in the trainer's order
        self._record_seconds = 0.0
        self._kinds: dict[str, ChecksumKind] | None = None  # of tensors stored in another way; None: not verified yet
        self._readable: frozenset[str] = frozenset()
        self._metrics: Metrics = {}

    @property
    def is_due(self) -> bool:
        return not self._first_only or self._kinds is None

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` unchanged and keep their checksums for `verify`."""
        self._recorded, self._record_seconds = SentTensors(), 0.0
        for name, tensor in weights:
            if self.is_due:
                start = time.perf_counter()
                kinds = CHECKSUM_KINDS if self._kinds is None else (self._kind_of(name),)
                self._recorded.add(name, tensor, kinds)
                self._record_seconds += time.perf_counter() - start
            yield name, tensor

    def verify(self, version: int) -> None:
        """Call after the engine took the recorded weights. Collective. RolloutError on all ranks if they differ."""
        if not self.is_due:
            return
        start, is_first = time.perf_counter(), self._kinds is None
        self._sent = self._recorded.finish()
        engine = self._engine
        replicas = engine.replicas() if isinstance(engine, ReplicatedEngine) else [_OnlyReplica(engine)]
        checks = [ReplicaCheck(replica) for replica in replicas]
        # Several ranks may read parts of one replica together, so all ranks finish a step before any of them raises.
        with raise_on_all_ranks(RolloutError, FLAG):
            for_each_replica(self._read_checksums, checks)
        if is_first and engine.weight_naming == "hub":
            self._classify_mismatches(checks)
        with raise_on_all_ranks(RolloutError, FLAG):
            for check in checks:
                self._require_sent_weights(check, version)
        with raise_on_all_ranks(RolloutError, FLAG):
            for_each_replica(partial(self._answer_probe, version=version), checks)
        difference = self._compare_logprobs(checks, version)
        if is_first:
            self._learn_storage(checks)
            self._learn_bound(difference)
        seconds = self._record_seconds + time.perf_counter() - start
        self._metrics = {"weight_sync/logprob_abs_diff": difference, "perf/verify_weight_sync_s": seconds}

    def metrics(self) -> Metrics:
        """Metrics of the last sync on this rank; empty if it was not verified or was reported already."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _read_checksums(self, check: ReplicaCheck) -> None:
        names: dict[ChecksumKind, list[str]] = {}
        for name in self._sent:
            names.setdefault(self._kind_of(name), []).append(name)
        found = _checksums_of(check, names)
        check.checksums = (
            None if found is None else {name: sum_ for sums in found.values() for name, sum_ in sums.items()}
        )

    def _classify_mismatches(self, checks: Sequence[ReplicaCheck]) -> None:
        """At the first sync: find the tensors that are stored in another way, not wrong. Collective.

        All ranks ask for the same tensors, because ranks that hold parts of one replica read them together.
        """
        wrong = gather([name for check in checks for name in self._differing(check)])
        names = sorted({name for names in wrong for name in names})
        if not names:
            return

        def classify_one(check: ReplicaCheck) -> None:
            if check.checksums is None:
                return
            found = _checksums_of(check, {kind: names for kind in CHECKSUM_KINDS if kind != "bits"})
            if found is None:
                check.checksums = None
                return
            check.mismatches = classify(
                self._differing(check), list(check.checksums), self._sent, lambda _, kind: found[kind]
            )

        with raise_on_all_ranks(RolloutError, FLAG):
            for_each_replica(classify_one, checks)

    def _differing(self, check: ReplicaCheck) -> list[str]:
        held = check.checksums or {}
        return [name for name in held if held[name] != self._sent[name].checksums[self._kind_of(name)]]

    def _require_sent_weights(self, check: ReplicaCheck, version: int) -> None:
        """RolloutError if a tensor differs, or can no longer be read though it could at the first sync."""
        unread = frozenset() if check.checksums is None else self._readable - check.checksums.keys()
        bad = unread | (set(self._differing(check)) - check.mismatches.keys())
        if bad:
            raise RolloutError(self._mismatch_error(check.replica.name, [n for n in self._sent if n in bad], version))

    def _answer_probe(self, check: ReplicaCheck, version: int) -> None:
        check.completions = check.replica.generate(self._probe.prompts, self._probe.sampling)
        if cached := check.replica.cached_tokens():
            raise RolloutError(
                f"{FLAG}: {check.replica.name} took {cached} tokens from a prefix cache that is older than version "
                f"{version} of the weights; {_HINT}"
            )

    def _compare_logprobs(self, checks: Sequence[ReplicaCheck], version: int) -> float:
        """The largest mean difference of logprobs over the replicas of this rank. Collective."""
        batches = [self._probe.pack(check.completions) for check in checks]
        scored = self._backend.compute_logprobs(batches, "policy")
        with raise_on_all_ranks(RolloutError, FLAG):
            differences = [
                (logprobs.values - batch.rollout_logprobs)[batch.loss_mask].abs().mean().item()
                for logprobs, batch in zip(scored, batches, strict=True)
            ]
            for check, difference in zip(checks, differences, strict=True):
                self._require_agreement(check, difference, version)
        return max(differences)

    def _require_agreement(self, check: ReplicaCheck, difference: float, version: int) -> None:
        bound = self._bound
        if difference <= bound:
            return
        reason = f"{self._lossy} explains" if self._lossy else f"rounding in {self._dtype} explains"
        if check.mismatches:
            raise RolloutError(self._mismatch_error(check.replica.name, list(check.mismatches), version))
        raise RolloutError(
            f"{FLAG}: logprobs of {check.replica.name} and of the trainer differ by {difference:.2g} under version "
            f"{version}, more than the {bound:.2g} that {reason}, though the "
            f"{len(check.checksums or ())} readable tensors of {len(self._sent)} match; {_HINT}"
        )

    def _learn_storage(self, checks: Sequence[ReplicaCheck]) -> None:
        """From the first sync: which tensors can be read and which are stored in another way, the same on all ranks.

        Collective. Learns nothing if every replica that could tell is gone: the next sync counts as the first one.
        """
        mine = [(c.replica.name, frozenset(c.checksums), c.mismatches) for c in checks if c.checksums is not None]
        found = gather((mine, any(check.is_gone for check in checks)))  # ranks may share a replica
        rows = [row for rows, _ in found for row in rows]
        if not rows and any(is_gone for _, is_gone in found):
            return
        learned: dict[str, tuple[ChecksumKind, str]] = {}  # kind, and the first replica that showed it
        for replica, readable, mismatches in rows:
            for name in sorted(readable):
                kind = mismatches.get(name, "bits")
                first_kind, first_replica = learned.setdefault(name, (kind, replica))
                if kind != first_kind:
                    raise RolloutError(f"{FLAG}: {first_replica} and {replica} store {name} differently; {_HINT}")
        self._readable = frozenset(learned).intersection(*(readable for _, readable, _ in rows))
        self._kinds = {name: kind for name, (kind, _) in learned.items() if kind != "bits"}
        self._log_storage()

    def _learn_bound(self, difference: float) -> None:
        """From the first sync: by how much a lossy engine may differ, the same on all ranks. Collective."""
        if self._lossy and self._kinds is not None:
            largest = max(gather(difference))
            self._bound = min(_MAX_LOSS, max(tolerance(self._dtype), _MIN_LOSS, _LOSS_MARGIN * largest))
            line = "%s: with %s logprobs differ by %.2g at the first sync, and may differ by %.2g later"
            log.info(line, FLAG, self._lossy, largest, self._bound)

    def _log_storage(self) -> None:
        if self._kinds:
            log.info(
                "%s: the engine stores %d of %d tensors in another layout or dtype, e.g. %s: their values are compared",
                *(FLAG, len(self._kinds), len(self._sent), some_of(list(self._kinds))),
            )
        if unread := len(self._sent) - len(self._readable):
            log.warning(
                "%s: %d of %d tensors cannot be read from the engine: only logprobs verify them",
                *(FLAG, unread, len(self._sent)),
            )

    def _kind_of(self, name: str) -> ChecksumKind:
        """The kind of checksum by which the engine's tensor is compared with the trainer's."""
        return (self._kinds or {}).get(name, "bits")

    def _mismatch_error(self, replica: str, names: Sequence[str], version: int) -> str:
        return (
            f"{FLAG}: {replica} does not hold {names[0]} of version {version}, the first of {len(names)} tensors of "
            f"{len(self._sent)} that differ from the trainer's; {_HINT}"
        )


def _checksums_of(
    check: ReplicaCheck, names: Mapping[ChecksumKind, Sequence[str]]
) -> dict[ChecksumKind, Mapping[str, int]] | None:
    """Checksums by kind; None if the replica is gone or another rank reads it."""
    found = {}
    try:
        for kind, names_of_kind in names.items():
            sums = check.replica.checksums(names_of_kind, kind)
            if sums is None:
                return None
            found[kind] = sums
    except ReplicaGoneError as error:
        log.warning("%s; its weights are not verified", error)
        check.is_gone = True
        return None
    return found


def for_each_replica(do: Callable[[ReplicaCheck], None], checks: Sequence[ReplicaCheck]) -> None:
    """Run `do` for all replicas at the same time, so that their work and waits do not add up."""
    if len(checks) == 1:  # perhaps in this process, where another thread is not wanted
        do(checks[0])
        return
    with ThreadPoolExecutor(len(checks), thread_name_prefix="verify") as threads:
        list(threads.map(do, checks))


def build_verifier(
    config: Config,
    engine: RolloutEngine,
    backend: TrainBackend,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int | None = None,
) -> WeightVerifier | None:
    """None if the engine cannot be verified; ConfigError if --verify-weight-sync was given nevertheless."""
    requested = config.run.verify_weight_sync
    if requested == "off":
        return None
    reason = _reason_against(config, engine)
    if reason and requested is not None:
        raise ConfigError(f"{FLAG} {requested}: {reason}; remove the flag")
    if reason or not isinstance(engine, CheckedEngine | ReplicatedEngine):
        log.warning("%s: weight syncs are not verified: %s", FLAG, reason)
        return None
    dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
    probe = make_probe(config, tokenizer, max_positions=max_positions)
    first_only = requested == "first"
    return WeightVerifier(engine, backend, probe, dtype=dtype, first_only=first_only, lossy=config.inexact_engine)


def _reason_against(config: Config, engine: RolloutEngine) -> str:
    if not isinstance(engine, CheckedEngine | ReplicatedEngine):
        return f"--rollout-engine {config.rollout.engine} has no methods `checksums` and `cached_tokens`"
    return ""
