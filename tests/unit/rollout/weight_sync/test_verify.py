"""A wrong tensor in the engine is named: at the first sync, and at the next one after a suspicious rollout."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.rollout.weight_sync.sync import WeightSync, build_verifier
from fsdptrain.rollout.weight_sync.verify import WeightVerifier, rounding_tolerance
from fsdptrain.types import ChecksumKind
from tests.tensors import checksum
from tests.testing import FakeRolloutEngine

NAMES = ("a", "b", "c")


@dataclass
class Replica:
    """Holds the weights that were pushed last."""

    name: str
    readable: Collection[str] | None = NAMES  # None: another rank reads it
    storage: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    num_reads: int = 0

    def checksums(self, names: Collection[str], kind: ChecksumKind = "values") -> dict[str, int] | None:
        if self.readable is None:
            return None
        self.num_reads += 1
        stored = {
            name: self.storage.get(name, Tensor.clone)(self.weights[name]) for name in names if name in self.readable
        }
        return {name: checksum(tensor, kind) for name, tensor in stored.items()}


class Engine(FakeRolloutEngine):
    def __init__(self, *replicas: Replica) -> None:
        super().__init__(lambda prompt, index: [5])
        self._replicas = replicas

    def checksums(self, names: Collection[str], kind: ChecksumKind = "values") -> dict[str, dict[str, int]]:
        read = {replica.name: replica.checksums(names, kind) for replica in self._replicas}
        return {name: sums for name, sums in read.items() if sums is not None}

    def update_weights(self, weights: Any, policy_version: int) -> None:
        super().update_weights(weights, policy_version)
        for replica in self._replicas:
            replica.weights = self.weights


def syncs_to(*replicas: Replica, names: Sequence[str] = NAMES) -> Callable[..., None]:
    """Pushes different weights for each version, after a rollout with the mean logprob difference `mismatch`."""
    engine = Engine(*replicas)
    verifier = WeightVerifier(engine, tolerance=0.25)

    def sync(version: int, mismatch: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(version)
        weights = {name: torch.randn(4, 6, generator=generator).bfloat16() for name in names}
        verifier.observe(mismatch)
        engine.update_weights(verifier.record(weights.items()), version)
        verifier.verify(version)

    return sync


def test_the_first_sync_is_verified_and_later_ones_on_suspicion(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica("one")
    sync = syncs_to(replica)
    sync(0)
    assert replica.num_reads == 1
    sync(1, mismatch=0.2)
    assert replica.num_reads == 1
    sync(2, mismatch=0.3)
    assert replica.num_reads == 2
    assert (
        "mismatch/abs_mean was 0.3, more than 0.25, though the engine holds the weights that were sent" in caplog.text
    )
    sync(3, mismatch=0.5)  # up to twice as much is no news
    assert replica.num_reads == 2
    replica.storage = {"b": lambda tensor: tensor.flip(0)}
    with pytest.raises(
        RolloutError, match=r"one does not hold b of version 4, the first of 1 tensors of 3 .* --no-ver"
    ):
        sync(4, mismatch=float("nan"))


@pytest.mark.parametrize("swapped", [False, True])
def test_each_replica_is_compared_by_its_readable_tensors(swapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Like servers with different kernels and dtypes."""
    more, less = Replica("more", storage={"c": Tensor.float}), Replica("less", readable=("a", "b"))
    elsewhere = Replica("elsewhere", readable=None)
    sync = syncs_to(*((less, more) if swapped else (more, less)), elsewhere)
    with caplog.at_level(logging.INFO):
        sync(0)
    assert "1 of 3 tensors cannot be read from the engine: only mismatch/abs_mean shows their errors" in caplog.text
    for name, replica in {"c": more, "b": less}.items():
        usual, replica.storage = replica.storage, {name: lambda tensor: tensor.flip(0)}
        with pytest.raises(RolloutError, match=f"{replica.name} does not hold {name} of version 3"):
            sync(3, mismatch=1.0)
        replica.storage = usual


@pytest.mark.parametrize("storage", [Tensor.float, Tensor.t, lambda tensor: tensor.flip(0).float()])
def test_a_tensor_that_is_stored_in_another_way_is_compared_by_its_values(storage: Any) -> None:
    names = ("layers.0.up.weight", "layers.1.up.weight")  # the same matrix of several layers may have another layout
    replica = Replica("one", readable=names, storage=dict.fromkeys(names, storage))
    syncs_to(replica, names=names)(0)
    replica.storage = {names[0]: storage, names[1]: lambda tensor: storage(tensor) * 2}
    with pytest.raises(RolloutError, match=r"one does not hold layers\.[01]\.up\.weight of version 3"):
        syncs_to(replica, names=names)(3)
    replica.storage = {names[1]: lambda tensor: tensor.flip(0)}  # of one layer only: scrambled in transit
    with pytest.raises(RolloutError, match=r"one does not hold layers\.1\.up\.weight of version 3"):
        syncs_to(replica, names=names)(3)


class Naming(FakeRolloutEngine):
    weight_naming = "other"  # type: ignore[assignment]


def test_weights_are_pushed_under_the_names_that_the_engine_wants_and_their_bytes_are_counted() -> None:
    class Backend:
        def hf_weights(self, naming: str) -> Any:
            return [(naming, torch.ones(3)), ("b", torch.ones(4).bfloat16())]

    engine = Naming(lambda prompt, index: [5])
    sync = WeightSync(engine, Backend(), None)  # type: ignore[arg-type]
    assert sync.metrics(0) == {}
    for version in range(2):
        sync.push(version, lambda stage: nullcontext())
        assert sync.metrics(version) == {"weight_sync/bytes": 20.0}
        assert (list(engine.weights), engine.policy_version) == (["other", "b"], version)
    assert sync.metrics(2) == {}


def test_an_engine_without_checksums_is_not_verified_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeRolloutEngine(lambda prompt, index: [5])
    assert build_verifier(Config(hf_checkpoint="any"), engine) is None
    assert "weight syncs are not verified: FakeRolloutEngine has no method `checksums`" in caplog.text
    assert build_verifier(Config(hf_checkpoint="any", verify_weight_sync=False), Engine(Replica("one"))) is None


def test_the_tolerance_follows_from_the_dtype() -> None:
    assert [rounding_tolerance(dtype) for dtype in (torch.float32, torch.bfloat16)] == [1e-4, 0.25]
