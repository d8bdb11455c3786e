"""Proof, after weights were handed over, that the engine computes with them. docs/rollouts.md says how.

Weights are compared by checksums, tensor by tensor; what lies behind them (packed copies, kernels, cached prefixes) by
the logprobs of a few tokens that the engine samples and the trainer scores.
"""

import logging
import random
import string
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fsdptrain.algo.weights import count_totals
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
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
from fsdptrain.rewards.scoring import Score
from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS, Sent, explain
from fsdptrain.trainer.samples.single_turn import make_sample
from fsdptrain.types import ChecksumKind, Completion, Metrics, PackedBatch, Prompt, SamplingParams
from fsdptrain.vllm.options import OTHER_NUMBERS

log = logging.getLogger(__name__)

_FLAG = "--sync-check"
_LENGTHS = (160, 16, 16, 16)  # of the prompts: one is longer than a block of vLLM's prefix cache. [tokens]
_RESPONSE = 4  # tokens
_WAY_OUT = f"the engine, or what is between, is at fault; {_FLAG} off goes on all the same"


@dataclass(frozen=True)
class Probe:
    """The same prompts after every hand-over: a cache that outlived one would answer them."""

    prompts: list[Prompt]
    sampling: SamplingParams


@dataclass(frozen=True)
class _Engine:
    """One that holds a single copy of the model."""

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
    """At one copy of the model."""

    copy: EngineReplica
    held: Mapping[str, int] | None = None  # checksums of what can be read; None: it is gone, or another rank looks
    is_gone: bool = False
    otherwise: Mapping[str, ChecksumKind] = field(default_factory=dict)  # tensors stored in another way: `explain`
    completions: Sequence[Completion] = ()


class SyncCheck:
    """Looks at every hand-over, or at the first one of a run."""

    def __init__(
        self,
        engine: CheckedEngine | ReplicatedEngine,
        backend: TrainBackend,
        probe: Probe,
        *,
        dtype: torch.dtype,
        first_only: bool,
    ) -> None:
        self._seconds = 0.0  # that checksums took while weights were handed over
        self._engine = engine
        self._backend = backend
        self._probe = probe
        self._dtype = dtype
        self._first_only = first_only
        self._sent: dict[str, Sent] = {}  # in the order of the trainer
        self._otherwise: dict[str, ChecksumKind] | None = None  # tensors; None: nothing was checked yet
        self._readable: frozenset[str] = frozenset()
        self._difference: float | None = None

    @property
    def is_due(self) -> bool:
        return not self._first_only or self._otherwise is None

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same, and their checksums are kept until `check`."""
        self._sent, self._seconds = {}, 0.0
        for name, tensor in weights:
            if self.is_due:
                start = time.perf_counter()
                self._sent[name] = Sent.of(tensor, self._kinds_of(name))
                self._seconds += time.perf_counter() - start
            yield name, tensor

    def check(self, version: int) -> float:
        """After `update_weights`: RolloutError on all ranks, or what the proof took, checksums included. [s]

        Collective.
        """
        if not self.is_due:
            return 0.0
        start = time.perf_counter()
        engine = self._engine
        copies = engine.copies() if isinstance(engine, ReplicatedEngine) else [_Engine(engine)]
        looks = [ReplicaCheck(copy) for copy in copies]
        # One after the other: several ranks may hold parts of one copy, and what one of them finds ends none alone.
        with raise_on_all_ranks(RolloutError, _FLAG):
            side_by_side(self._read, looks)
        if self._otherwise is None and self._engine.weight_naming == "hub":
            self._explain(looks)
        with raise_on_all_ranks(RolloutError, _FLAG):
            for look in looks:
                self._require_held(look, version)
        with raise_on_all_ranks(RolloutError, _FLAG):
            side_by_side(partial(self._ask, version=version), looks)
        batches = [self._batch(look.completions) for look in looks]
        scored = self._backend.score(batches, "policy")
        with raise_on_all_ranks(RolloutError, _FLAG):
            apart = [
                (logprobs.values - batch.rollout_logprobs)[batch.loss_mask].abs().mean().item()
                for logprobs, batch in zip(scored, batches, strict=True)
            ]
            for look, difference in zip(looks, apart, strict=True):
                self._require_agreement(look, difference, version)
        self._difference = max(apart)
        if self._otherwise is None:
            self._learn(looks)
        return self._seconds + time.perf_counter() - start

    def metrics(self) -> Metrics:
        """Of this rank, of a check since the last call."""
        found, self._difference = self._difference, None
        return {} if found is None else {"sync/probe_abs_mean": found}

    def _read(self, look: ReplicaCheck) -> None:
        names: dict[ChecksumKind, list[str]] = {}
        for name in self._sent:
            names.setdefault(self._kind_of(name), []).append(name)
        found = self._checksums(look, names)
        look.held = None if found is None else {name: held for sums in found.values() for name, held in sums.items()}

    def _checksums(
        self, look: ReplicaCheck, names: Mapping[ChecksumKind, Sequence[str]]
    ) -> dict[ChecksumKind, Mapping[str, int]] | None:
        """Of each kind those of `names`; None where the copy is gone, or another rank looks at it."""
        found = {}
        try:
            for kind, asked in names.items():
                sums = look.copy.checksums(asked, kind)
                if sums is None:
                    return None
                found[kind] = sums
        except ReplicaGoneError as error:
            log.warning("%s; its weights are not looked at", error)
            look.is_gone = True
            return None
        return found

    def _explain(self, looks: Sequence[ReplicaCheck]) -> None:
        """At a first hand-over: which tensors are stored otherwise, and not wrong. Collective.

        All ranks ask of the same tensors, for those that hold parts of one copy read them together.
        """
        asked = sorted({name for names in gather([n for look in looks for n in self._wrong(look)]) for name in names})
        if not asked:
            return

        def explained(look: ReplicaCheck) -> None:
            if look.held is None:
                return
            found = self._checksums(look, {kind: asked for kind in CHECKSUM_KINDS if kind != "bits"})
            if found is None:
                look.held = None
                return
            look.otherwise = explain(self._wrong(look), look.held, self._sent, lambda _, kind: found[kind])

        with raise_on_all_ranks(RolloutError, _FLAG):
            side_by_side(explained, looks)

    def _wrong(self, look: ReplicaCheck) -> list[str]:
        held = look.held or {}
        return [name for name in held if held[name] != self._sent[name].sums[self._kind_of(name)]]

    def _require_held(self, look: ReplicaCheck, version: int) -> None:
        """RolloutError where it holds something else, or lacks what was there at the first hand-over."""
        unread = frozenset() if look.held is None else self._readable - look.held.keys()
        bad = unread | (set(self._wrong(look)) - look.otherwise.keys())
        if bad:
            raise RolloutError(self._blame(look.copy.name, [name for name in self._sent if name in bad], version))

    def _ask(self, look: ReplicaCheck, version: int) -> None:
        look.completions = look.copy.generate(self._probe.prompts, self._probe.sampling)
        if cached := look.copy.cached_tokens():
            raise RolloutError(
                f"{_FLAG}: {look.copy.name} answered with {cached} tokens of its prefix cache that are older than "
                f"version {version} of the weights; {_WAY_OUT}"
            )

    def _kind_of(self, name: str) -> ChecksumKind:
        """By which what is held of a tensor is compared with what was sent."""
        return (self._otherwise or {}).get(name, "bits")

    def _kinds_of(self, name: str) -> Sequence[ChecksumKind]:
        return CHECKSUM_KINDS if self._otherwise is None else (self._kind_of(name),)

    def _learn(self, looks: Sequence[ReplicaCheck]) -> None:
        """From the first hand-over: what all copies can read, and what is stored in other ways, on all ranks and by all
        copies that can read it alike. Collective.

        Nothing where all that could have shown it are gone: the next hand-over is the first one then.
        """
        seen = [(look.copy.name, frozenset(look.held), look.otherwise) for look in looks if look.held is not None]
        found = gather((seen, any(look.is_gone for look in looks)))  # ranks may share a copy
        everywhere = [row for rows, _ in found for row in rows]
        if not everywhere and any(gone for _, gone in found):
            return
        learned: dict[str, tuple[ChecksumKind, str]] = {}  # by tensor: how it is stored, and which copy said so first
        for holder, read, otherwise in everywhere:
            for name in sorted(read):
                kind = otherwise.get(name, "bits")
                first, other = learned.setdefault(name, (kind, holder))
                if kind != first:
                    raise RolloutError(f"{_FLAG}: {other} and {holder} do not hold {name} alike; {_WAY_OUT}")
        self._readable = frozenset(learned).intersection(*(read for _, read, _ in everywhere))
        self._otherwise = {name: kind for name, (kind, _) in learned.items() if kind != "bits"}
        self._report(list(self._otherwise), num_read=len(self._readable))

    def _blame(self, holder: str, wrong: Sequence[str], version: int) -> str:
        return (
            f"{_FLAG}: {holder} does not hold {wrong[0]} of version {version} as the trainer does, the first of "
            f"{len(wrong)} tensors that differ, of {len(self._sent)}; {_WAY_OUT}"
        )

    def _require_agreement(self, look: ReplicaCheck, apart: float, version: int) -> None:
        bound = tolerance(self._dtype)
        if apart <= bound:
            return
        if look.otherwise:
            raise RolloutError(self._blame(look.copy.name, list(look.otherwise), version))
        raise RolloutError(
            f"{_FLAG}: logprobs of {look.copy.name} and trainer are {apart:.2g} apart under version {version}, more "
            f"than the {bound:.2g} that {self._dtype} explains, though the {len(look.held or ())} tensors that can be "
            f"read, of {len(self._sent)}, are the trainer's; {_WAY_OUT}"
        )

    def _report(self, otherwise: list[str], *, num_read: int) -> None:
        if otherwise:
            line = (
                "%s: the engine stores %d of %d tensors in another order or dtype, e.g. %s: their values are compared"
            )
            log.info(line, _FLAG, len(otherwise), len(self._sent), some_of(otherwise))
        if unread := len(self._sent) - num_read:
            line = "%s: %d of %d tensors cannot be read back from the engine: only logprobs vouch for them"
            log.warning(line, _FLAG, unread, len(self._sent))

    def _batch(self, completions: Sequence[Completion]) -> PackedBatch:
        pairs = zip(self._probe.prompts, completions, strict=True)
        samples = [make_sample(prompt, made, Score(None)) for prompt, made in pairs]
        totals = count_totals([len(made.token_ids) for made in completions])
        return pack(samples, aggregation="token_mean", totals=totals, max_response_len=_RESPONSE)


def side_by_side(do: Callable[[ReplicaCheck], None], looks: Sequence[ReplicaCheck]) -> None:
    """At several copies at one time, so that neither work nor waits of one come on top of those of another."""
    if len(looks) == 1:  # it may be in this very process, where no other thread is wanted
        do(looks[0])
        return
    with ThreadPoolExecutor(len(looks), thread_name_prefix="sync-check") as threads:
        list(threads.map(do, looks))


def tolerance(dtype: torch.dtype) -> float:
    """Largest mean difference of logprobs that rounding explains: 32 units of `dtype`, and never less than 1e-4."""
    return max(1e-4, 32 * torch.finfo(dtype).eps)


def make_probe(config: Config, tokenizer: PreTrainedTokenizerBase, *, max_positions: int | None = None) -> Probe:
    """Ordinary tokens: those of a text of random words. max_positions: of the model; None: it knows no limit."""
    limits = [config.batch.max_tokens_per_gpu // len(_LENGTHS), *([max_positions] if max_positions else [])]
    longest = min(config.prompt_budget, *(limit - _RESPONSE for limit in limits))
    draw = random.Random(config.run.seed)
    prompts = []
    for i, length in enumerate(_LENGTHS):
        words = ("".join(draw.choices(string.ascii_lowercase, k=4)) for _ in range(length))
        ids = tokenizer(" ".join(words), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]  # too many: some are cut off
        prompts.append(Prompt(f"{_FLAG}/{i}", list(ids[: max(1, min(length, longest))]), ""))
    rollout = config.rollout
    sampling = SamplingParams(
        num_samples=1,
        max_tokens=min(_RESPONSE, rollout.max_response_len),
        temperature=config.scoring_temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or -1,
        min_p=rollout.min_p,
        seed=rollout.seed,
    )
    return Probe(prompts, sampling)


def build_sync_check(
    config: Config,
    engine: RolloutEngine,
    backend: TrainBackend,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int | None = None,
) -> SyncCheck | None:
    """None where there is nothing to check with; ConfigError if the check was asked for."""
    wanted = config.run.sync_check
    if wanted == "off":
        return None
    reason = _not_checkable(config, engine)
    if reason and wanted is not None:
        raise ConfigError(f"{_FLAG} {wanted}: {reason}; leave it out")
    if reason or not isinstance(engine, CheckedEngine | ReplicatedEngine):
        log.warning("%s: nothing is checked: %s", _FLAG, reason)
        return None
    dtype: torch.dtype = getattr(torch, config.compute_dtype_name)
    probe = make_probe(config, tokenizer, max_positions=max_positions)
    return SyncCheck(engine, backend, probe, dtype=dtype, first_only=wanted == "first")


def _not_checkable(config: Config, engine: RolloutEngine) -> str:
    if not isinstance(engine, CheckedEngine | ReplicatedEngine):
        return f"--rollout-engine {config.rollout.engine} has no methods `checksums` and `cached_tokens`"
    if other := sorted(OTHER_NUMBERS.intersection(config.rollout.engine_args)):
        return f"with --rollout-engine-args {other[0]} engine and trainer differ on purpose"
    return ""
