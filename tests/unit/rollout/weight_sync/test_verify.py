"""A wrong tensor in the engine is named: at the first sync, and at the next one after a suspicious rollout."""

from collections.abc import Callable, Mapping
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
from tests.tensors import checksum
from tests.testing import FakeRolloutEngine

NAMES = ("a", "b", "c")


@dataclass
class Replica:
    """Loads the weights that were pushed last."""

    name: str
    changes: Mapping[str, Callable[[Tensor], Tensor | None]] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    num_reads: int = 0

    def checksums(self) -> dict[str, int]:
        self.num_reads += 1
        loaded = {name: self.changes.get(name, Tensor.clone)(tensor) for name, tensor in self.weights.items()}
        return {name: checksum(tensor) for name, tensor in loaded.items() if tensor is not None}


class Engine(FakeRolloutEngine):
    def __init__(self, *replicas: Replica) -> None:
        super().__init__(lambda prompt, index: [5])
        self._replicas = replicas
        self._is_expecting = False

    def expect_checksums(self) -> None:
        self._is_expecting = True

    def checksums(self) -> dict[str, dict[str, int]]:
        assert self._is_expecting
        self._is_expecting = False
        return {replica.name: replica.checksums() for replica in self._replicas}

    def update_weights(self, weights: Any, policy_version: int) -> None:
        super().update_weights(weights, policy_version)
        for replica in self._replicas:
            replica.weights = self.weights


def syncs_to(*replicas: Replica) -> Callable[..., None]:
    """Pushes different weights for each version, after a rollout with the mean logprob difference `mismatch`."""
    engine = Engine(*replicas)
    verifier = WeightVerifier(engine, tolerance=0.25)

    def sync(version: int, mismatch: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(version)
        weights = {name: torch.randn(4, 6, generator=generator).bfloat16() for name in NAMES}
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
        "mismatch/abs_mean was 0.3, more than 0.25, though the engine loaded the weights that were sent" in caplog.text
    )
    sync(3, mismatch=0.5)  # up to twice as much is no news
    assert replica.num_reads == 2
    replica.changes = {"b": lambda tensor: tensor.flip(0)}
    with pytest.raises(
        RolloutError, match=r"one does not hold b of version 4, the first of 1 tensors of 3 .* --no-ver"
    ):
        sync(4, mismatch=float("nan"))


@pytest.mark.parametrize("change", [lambda tensor: tensor.flip(0), lambda tensor: 2 * tensor, lambda tensor: None])
def test_each_replica_is_compared(change: Any) -> None:
    """Also those that load in another dtype. A tensor that does not arrive is a difference."""
    good, bad = Replica("good", {"c": Tensor.float}), Replica("bad", {"a": Tensor.float, "c": change})
    syncs_to(good)(0)
    with pytest.raises(RolloutError, match=r"bad does not hold c of version 0, the first of 1"):
        syncs_to(good, bad)(0)


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
