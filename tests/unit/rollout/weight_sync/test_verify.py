"""Which engines are verified, what is logged, and how replicas with different readable tensors are compared."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.protocols import ReplicaGoneError
from fsdptrain.rollout.weight_sync.probe import make_probe, tolerance
from fsdptrain.rollout.weight_sync.sync import WeightSync
from fsdptrain.rollout.weight_sync.verify import ReplicaCheck, WeightVerifier, build_verifier, for_each_replica
from fsdptrain.types import ChecksumKind, Completion, LogProbs, PackedBatch, Prompt, SamplingParams
from tests.tensors import checksum
from tests.testing import FakeRolloutEngine, tiny_tokenizer

NAMES = ("a", "b", "c")


def config(**values: Any) -> Config:
    return Config(hf_checkpoint="any", **values)


@dataclass
class Replica:
    """Holds the weights that were pushed last."""

    name: str
    readable: Collection[str] | None = NAMES  # None: another rank reads it
    storage: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    all_called: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> dict[str, int] | None:
        self.all_called.wait(60)
        if self.readable is None:
            return None
        stored = {
            name: self.storage.get(name, Tensor.clone)(self.weights[name]) for name in names if name in self.readable
        }
        return {name: checksum(tensor, kind) for name, tensor in stored.items()}

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        self.all_called.wait(60)
        return [Completion(prompt.id, [5, 6], [-1.0, -1.0], "length", 0) for prompt in prompts]

    def cached_tokens(self) -> int:
        return 0


class Engine(FakeRolloutEngine):
    def __init__(self, *replicas: Replica) -> None:
        super().__init__(lambda prompt, index: [5])
        self._replicas = replicas

    def replicas(self) -> Sequence[Replica]:
        return self._replicas

    def update_weights(self, weights: Any, policy_version: int) -> None:
        super().update_weights(weights, policy_version)
        for replica in self._replicas:
            replica.weights = self.weights


class Agreeing:
    """A backend that computes the engine's own logprobs."""

    def compute_logprobs(self, batches: Sequence[PackedBatch], model: str) -> list[LogProbs]:
        return [LogProbs(batch.rollout_logprobs) for batch in batches]


def verifier_of(engine: Engine, backend: Any = None) -> WeightVerifier:
    probe = make_probe(config(max_tokens_per_gpu=512, rollout_max_response_len=8), tiny_tokenizer())
    backend = backend or Agreeing()
    return WeightVerifier(engine, backend, probe, dtype=torch.bfloat16, first_only=False)


def syncs_to(*replicas: Replica, names: Sequence[str] = NAMES) -> Callable[[int], None]:
    """Pushes different weights for each version, and verifies them."""
    engine = Engine(*replicas)
    verifier = verifier_of(engine)

    def sync(version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        weights = {name: torch.randn(4, 6, generator=generator).bfloat16() for name in names}
        engine.update_weights(verifier.record(weights.items()), version)
        verifier.verify(version)

    return sync


@pytest.mark.parametrize("swapped", [False, True])
def test_each_replica_is_compared_by_its_readable_tensors(swapped, caplog):
    """Like servers with different kernels and dtypes."""
    more, less = Replica("more", storage={"c": Tensor.float}), Replica("less", readable=("a", "b"))
    sync = syncs_to(*((less, more) if swapped else (more, less)))
    with caplog.at_level(logging.INFO):
        for version in range(3):
            sync(version)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "the engine stores 1 of 3 tensors in another layout or dtype, e.g. c: their values are compared",
        "1 of 3 tensors cannot be read from the engine: only logprobs verify them",
    ]
    for name, replica in {"c": more, "b": less}.items():
        usual, replica.storage = replica.storage, {name: lambda tensor: tensor.flip(0)}
        with pytest.raises(RolloutError, match=f"{replica.name} does not hold {name} of version 3"):
            sync(3)
        replica.storage = usual


@pytest.mark.parametrize("storage", [Tensor.float, lambda tensor: tensor.t(), lambda tensor: tensor.t().float()])
def test_a_tensor_that_is_stored_in_another_way_is_compared_that_way_at_each_sync(storage):
    names = ("layers.0.up.weight", "layers.1.up.weight")  # the same matrix of several layers may have another layout
    replica = Replica("one", readable=names, storage=dict.fromkeys(names, storage))
    sync = syncs_to(replica, names=names)
    for version in range(3):
        sync(version)
    replica.storage = {names[0]: storage, names[1]: lambda tensor: storage(tensor) * 2}
    with pytest.raises(RolloutError, match=r"one does not hold layers\.1\.up\.weight of version 3"):
        sync(3)


def test_many_replicas_are_called_at_the_same_time() -> None:
    """More replicas than the default number of threads in a pool: none waits for another."""
    together = threading.Barrier(64)
    checks = [ReplicaCheck(Replica(str(i))) for i in range(64)]
    for_each_replica(lambda check: together.wait(60) and None, checks)


class Naming(FakeRolloutEngine):
    weight_naming = "other"  # type: ignore[assignment]


def test_weights_are_pushed_under_the_names_that_the_engine_wants() -> None:
    class Backend:
        def push_weights(self, engine: Any, version: int) -> bool:
            return False

        def hf_weights(self, naming: str) -> Any:
            return [(naming, torch.ones(1))]

    engine, backend = Naming(lambda prompt, index: [5]), Backend()
    WeightSync(engine, backend, None).push(3, lambda stage: nullcontext())  # type: ignore[arg-type]
    assert list(engine.weights) == ["other"]
    assert engine.policy_version == 3


def test_the_bytes_of_a_sync_are_those_of_the_weights_unless_the_engine_got_less() -> None:
    class Backend:
        def push_weights(self, engine: Any, version: int) -> bool:
            return False

        def hf_weights(self, naming: str) -> Any:
            return [("a", torch.ones(3)), ("b", torch.ones(4).bfloat16())]

    engine = FakeRolloutEngine(lambda prompt, index: [5])
    sync = WeightSync(engine, Backend(), None)  # type: ignore[arg-type]
    assert sync.metrics(0) == {}
    for version in range(2):
        sync.push(version, lambda stage: nullcontext())
        assert sync.metrics(version) == {"weight_sync/bytes": 20.0}
    engine.sent_bytes = 7  # type: ignore[attr-defined]
    assert sync.metrics(1) == {"weight_sync/bytes": 7.0}
    assert sync.metrics(2) == {}


def test_the_probe_samples_as_the_rollouts_do_and_each_prompt_has_an_id() -> None:
    probe = make_probe(config(rollout_top_p=0.7, rollout_top_k=9, rollout_min_p=0.1), tiny_tokenizer())
    assert (probe.sampling.top_p, probe.sampling.top_k, probe.sampling.min_p) == (0.7, 9, 0.1)
    assert len({prompt.id for prompt in probe.prompts}) == len(probe.prompts)


def test_logprobs_that_differ_are_an_error_that_names_the_version_and_a_tensor_stored_in_another_way() -> None:
    class Disagreeing(Agreeing):
        def compute_logprobs(self, batches: Sequence[PackedBatch], model: str) -> list[LogProbs]:
            return [LogProbs(batch.rollout_logprobs + 1) for batch in batches]

    for storage, message in (
        ({}, "logprobs of one and of the trainer differ by 1 under version 7"),
        ({"b": Tensor.float}, "one does not hold b of version 7"),
    ):
        engine = Engine(Replica("one", storage=storage))
        verifier = verifier_of(engine, Disagreeing())
        weights = {name: torch.randn(4, 6).bfloat16() for name in NAMES}
        engine.update_weights(verifier.record(weights.items()), 7)
        with pytest.raises(RolloutError, match=message):
            verifier.verify(7)


def test_a_replica_that_goes_while_tensors_are_classified_teaches_nothing() -> None:
    gone, other = Replica("gone", storage={"b": Tensor.float}), Replica("other", storage={"b": Tensor.float})

    def checksums(names: Collection[str], kind: ChecksumKind = "bits") -> dict[str, int] | None:
        if kind != "bits":
            raise ReplicaGoneError("gone has gone")
        return Replica.checksums(gone, names, kind)

    gone.checksums = checksums  # type: ignore[method-assign]
    sync = syncs_to(gone, other)
    sync(0)
    gone.checksums = lambda names, kind="bits": None  # type: ignore[method-assign, assignment]
    other.readable = ("a", "b")
    with pytest.raises(RolloutError, match="other does not hold c of version 1"):  # it was readable at the first sync
        sync(1)


def test_a_replica_must_stay_readable_unless_another_rank_reads_it():
    shown = Replica("shown")
    sync = syncs_to(shown, Replica("elsewhere", readable=None))
    sync(0)
    sync(1)
    shown.readable = ()
    with pytest.raises(RolloutError, match=r"shown does not hold a of version 2, the first of 3 tensors"):
        sync(2)


def test_replicas_that_store_a_tensor_differently_are_rejected():
    with pytest.raises(RolloutError, match="one and two store b differently"):
        syncs_to(Replica("one"), Replica("two", storage={"b": Tensor.float}))(0)


def test_replicas_are_verified_at_the_same_time():
    all_called = threading.Barrier(3)
    engine = Engine(*(Replica(f"replica {i}", all_called=all_called) for i in range(3)))
    verifier = verifier_of(engine)
    engine.update_weights(verifier.record([("a", torch.ones(2))]), 1)
    verifier.verify(1)
    metrics = verifier.metrics()
    assert metrics["weight_sync/logprob_abs_diff"] == 0.0
    assert metrics["perf/verify_weight_sync_s"] > 0
    assert verifier.metrics() == {}


def build(**values: Any) -> WeightVerifier | None:
    backend: Any = Agreeing()
    return build_verifier(config(**values), FakeRolloutEngine(lambda prompt, index: [5]), backend, tiny_tokenizer())


def test_an_engine_without_checksums_is_not_verified_with_a_warning_or_an_error_if_requested(caplog):
    with caplog.at_level(logging.WARNING):
        assert build() is None
    (record,) = caplog.records
    assert "weight syncs are not verified: --rollout-engine auto has no methods `checksums`" in record.message
    with pytest.raises(ConfigError, match=r"--verify-weight-sync every: .*`checksums`"):
        build(verify_weight_sync="every")
    assert build(verify_weight_sync="off") is None


@pytest.mark.parametrize("positions", [None, 32, 128])
@pytest.mark.parametrize("max_tokens", [64, 512, 8192])
def test_the_probe_fits_a_pack_and_the_model_and_is_always_the_same(max_tokens, positions):
    given = config(max_tokens_per_gpu=max_tokens, rollout_max_response_len=8)
    probe = make_probe(given, tiny_tokenizer(), max_positions=positions)
    assert probe == make_probe(given, tiny_tokenizer(), max_positions=positions)
    lengths, response = [len(prompt.token_ids) for prompt in probe.prompts], probe.sampling.max_tokens
    assert max(lengths) + response <= (positions or 10_000)
    assert len(lengths) * (max(lengths) + response) <= max(max_tokens, 4 * 164)
    assert sum(lengths) + len(lengths) * response <= max_tokens
    assert max(lengths) <= given.prompt_budget


def test_the_tolerance_follows_from_the_dtype():
    assert [tolerance(dtype) for dtype in (torch.float32, torch.bfloat16)] == [1e-4, 0.25]
    assert tolerance(torch.float16) == pytest.approx(0.031, abs=1e-3)
