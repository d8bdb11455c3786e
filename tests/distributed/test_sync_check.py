"""--sync-check names the very tensor that did not arrive, each time, and is silent when all did.

Faults are planted behind the trainer's back: between what it sends and what the engine is given.
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.structure import reshard
from fsdptrain.rollout.embedded.engine import build_hf_engine
from fsdptrain.rollout.weight_sync.verify import build_sync_check
from fsdptrain.testing import spawn, tiny_tokenizer
from tests import zoo
from tests.matrix import only

FAULTS = ("stale", "permuted", "transposed", "not sent")
TRIES = 50  # of each dtype and model
MODELS = {
    "qwen3 in bf16": ("qwen3", True),
    "qwen3 in float32": ("qwen3", False),
    "qwen3_moe in bf16": ("qwen3_moe", True),
    "qwen3_moe in float32": ("qwen3_moe", False),
}


class Courier:
    """Carries weights to the engine, and does something to one of them on the way."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}

    def carry(self, weights: Iterable[tuple[str, Tensor]], fault: str, victim: str) -> Iterator[tuple[str, Tensor]]:
        now = {}
        for name, tensor in weights:
            now[name] = tensor.clone()
            sent = tensor if name != victim else self.broken(name, tensor, fault)
            if sent is not None:
                yield name, sent
        self.before = now

    def broken(self, name: str, tensor: Tensor, fault: str) -> Tensor | None:
        if fault == "stale":
            return self.before[name]
        if fault == "transposed":
            return tensor.mT
        return None if fault == "not sent" else tensor.flip(0)

    def victims(self, fault: str) -> list[str]:
        """The tensors that can be wrong in this way without having another shape."""
        return sorted(name for name, tensor in self.before.items() if fault != "transposed" or is_square(tensor))


def is_square(tensor: Tensor) -> bool:
    """Of a matrix, or of a row of them."""
    return tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]


def train_a_little(backend: FSDPBackend, seed: int) -> None:
    """As an optimizer step would: in bf16 it leaves most values of a tensor as they are."""
    torch.manual_seed(seed)
    reshard(backend.model)
    with torch.no_grad():
        for parameter in map(local_shard, backend.model.parameters()):
            parameter.add_(1e-3 * parameter.abs().mean() * torch.randn_like(parameter))


def what_the_check_said(folder: Path, bf16: bool) -> list[tuple[str, str, str | None]]:
    """(fault, tensor, error) of each try, every other one at the hand-over that --sync-check first looks at; first and
    now and then all goes well."""
    options = {"hf_checkpoint": str(folder), "bf16": bf16, "max_tokens_per_gpu": 512, "rollout_max_response_len": 64}
    config = Config(**options)
    backend = FSDPBackend(config, total_steps=1)
    engine = build_hf_engine(config, checkpoint=backend.checkpoint_path, device=backend.device)
    check = every = build_sync_check(config, engine, backend, tiny_tokenizer())
    courier, draw, found = Courier(), random.Random(0), []

    def hand_over(version: int, fault: str = "", victim: str = "") -> str | None:
        train_a_little(backend, version)
        assert check is not None
        try:
            engine.update_weights(courier.carry(check.watch(backend.hf_weights("module")), fault, victim), version)
            check.check(version)
        except RolloutError as error:
            return str(error)
        return None

    assert hand_over(0) is None
    for version in range(1, TRIES + 1):
        first = Config(**options, sync_check="first")
        check = build_sync_check(first, engine, backend, tiny_tokenizer()) if version % 2 else every
        fault = draw.choice(FAULTS)
        victim = draw.choice(courier.victims(fault))
        found.append((fault, victim, hand_over(version, fault, victim)))
        if version % 5 == 0:
            assert hand_over(1000 + version) is None
    return found


@pytest.mark.parametrize("model", only(["qwen3 in bf16"], MODELS))
def test_a_fault_is_named_in_each_of_fifty_tries(tmp_path: Path, model: str) -> None:
    name, bf16 = MODELS[model]
    folder = tmp_path / "model"
    zoo.build(name).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    [found] = spawn(1, what_the_check_said, folder, bf16, timeout=300)
    assert len(found) == TRIES
    for fault, victim, said in found:
        sign = "missing: " if fault == "not sent" else "the engine does not hold "  # what is missing, the engine sees
        assert said is not None, f"{fault} {victim} was not seen"
        assert f"{sign}{victim}" in said, said
