"""Faults planted in weight syncs: the verification must name each of them, with every engine."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdptrain.errors import RolloutError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.structure import reshard
from tests.vllm import contract

FAULTS = ("stale", "permuted", "transposed", "not sent")


@dataclass(frozen=True)
class Outcome:
    """What the verification reported for one planted fault."""

    fault: str
    tensor: str
    error: str | None


class FaultyTransfer:
    """Passes weights on to the engine and corrupts one of them behind the trainer's back."""

    def __init__(self, *, droppable: Callable[[str], bool] | None = None) -> None:
        """`droppable`: tensors that can go missing without an error of the engine's own; None: all."""
        self.previous: dict[str, Tensor] = {}
        self._droppable = droppable

    def carry(self, weights: Iterable[tuple[str, Tensor]], fault: str, victim: str) -> Iterator[tuple[str, Tensor]]:
        current = {}
        for name, tensor in weights:
            current[name] = tensor.clone()
            sent = tensor if name != victim else self._corrupted(name, tensor, fault)
            if sent is not None:
                yield name, sent
        self.previous = current

    def _corrupted(self, name: str, tensor: Tensor, fault: str) -> Tensor | None:
        if fault == "stale":
            return self.previous[name]
        if fault == "transposed":
            return tensor.mT
        return None if fault == "not sent" else tensor.flip(0)

    def victims(self, fault: str) -> list[str]:
        """The tensors that keep their shape under `fault`."""
        names = sorted(name for name, tensor in self.previous.items() if fault != "transposed" or _is_square(tensor))
        if fault == "not sent" and self._droppable is not None:
            names = list(filter(self._droppable, names))
        return names


def _is_square(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]


def train_a_little(backend: FSDPBackend, seed: int) -> None:
    """Like an optimizer step: in bf16 most values of a tensor stay the same."""
    torch.manual_seed(seed)
    reshard(backend.model)
    with torch.no_grad():
        for parameter in map(local_shard, backend.model.parameters()):
            parameter.add_(1e-3 * parameter.abs().mean() * torch.randn_like(parameter))


def train_adapter(backend: FSDPBackend, version: int) -> None:
    torch.manual_seed(version)
    reshard(backend.model)
    for _, parameter in sorted(backend.model.named_parameters()):
        if parameter.requires_grad:
            shard = local_shard(parameter)
            shard.add_(0.2 * torch.randn(shard.shape))


def sync(backend: Any, engine: Any, verifier: Any, version: int, transfer: FaultyTransfer, *fault: str) -> None:
    """Train a little, push with a fault (kind, tensor), verify as after a suspicious rollout."""
    verifier.observe(math.nan)
    train_a_little(backend, version)
    weights = verifier.record(backend.hf_weights(engine.weight_naming))
    engine.update_weights(transfer.carry(weights, *(fault or ("", ""))), version)
    verifier.verify(version)


def plant_faults(options: dict[str, Any], tries: int, transfer: FaultyTransfer) -> list[Outcome]:
    """One fault in each of `tries` syncs; every other one in the first sync of a verifier. A good one follows."""
    backend, engine, later = contract.build_verified(options)
    draw, outcomes = random.Random(0), []
    try:
        sync(backend, engine, later, 0, transfer)
        for version in range(1, tries + 1):
            verifier = contract.verifier_of(options, engine) if version % 2 else later
            fault = FAULTS[version % len(FAULTS)]
            victim, error = draw.choice(transfer.victims(fault)), None
            try:
                sync(backend, engine, verifier, version, transfer, fault, victim)
            except RolloutError as caught:
                error = str(caught)
            outcomes.append(Outcome(fault, victim, error))
            sync(backend, engine, verifier, 1000 + version, transfer)
    finally:
        engine.close()
    return outcomes


def require_named(outcomes: Sequence[Outcome], *, replica: str = "") -> None:
    """Each error names the tensor and the replica."""
    for outcome in outcomes:
        assert outcome.error is not None, f"{outcome} was not noticed"
        assert outcome.tensor in outcome.error, outcome
        assert replica in outcome.error, outcome
