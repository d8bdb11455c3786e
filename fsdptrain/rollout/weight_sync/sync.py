"""Push the trainer's weights to the engine and verify that they arrived."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.types import Metrics

if TYPE_CHECKING:
    from fsdptrain.protocols import RolloutEngine, TrainBackend
    from fsdptrain.rollout.weight_sync.verify import WeightVerifier

Span = Callable[[str], AbstractContextManager[None]]  # times a stage, "sync"


class WeightSync:
    """Weight syncs from one trainer to one engine."""

    def __init__(self, engine: "RolloutEngine", backend: "TrainBackend", verifier: "WeightVerifier | None") -> None:
        self.engine = engine
        self._backend = backend
        self._verifier = verifier
        self._pushed: int | None = None  # newest version
        self._nbytes = 0  # of its weights

    def push(self, version: int, span: Span) -> None:
        """Push the policy's weights as `version` and verify them. Collective.

        Raises RolloutError on every rank if the engine does not hold these weights afterwards.
        """
        with span("sync"):
            self.engine.wake_up()
            self._pushed, self._nbytes = version, 0
            weights = self._counted(self._backend.hf_weights(self.engine.weight_naming))
            self.engine.update_weights(self._verifier.record(weights) if self._verifier else weights, version)
            if self._verifier:
                self._verifier.verify(version)

    def observe(self, trained: Metrics) -> None:
        """Take the metrics of a rollout's optimizer steps, which are the same on all ranks."""
        if self._verifier:
            self._verifier.observe(trained.get("mismatch/abs_mean", 0.0))

    def metrics(self, version: int) -> Metrics:
        """Metrics of the sync of `version` on this rank; empty if `version` was not pushed."""
        return {"weight_sync/bytes": float(self._nbytes)} if self._pushed == version and self._nbytes else {}

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._nbytes += tensor.nbytes
            yield name, tensor


def build_verifier(config: Config, engine: "RolloutEngine") -> "WeightVerifier | None":
    """None if the engine cannot be verified, or must not be. The embedded engine copies the weights in this process."""
    if not config.run.verify_weight_sync or config.rollout.engine == "hf":
        return None
    from fsdptrain.rollout.weight_sync.verify import verifier_of

    return verifier_of(engine, getattr(torch, config.compute_dtype_name))
