"""--sync-check of copies of a model that do not all show the same: what each can show is held to what was sent."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.rollout.weight_sync.checksum import checksum
from fsdptrain.rollout.weight_sync.verify import SyncCheck, make_probe
from fsdptrain.testing import tiny_tokenizer
from fsdptrain.types import ChecksumKind, Completion, LogProbs, PackedBatch, Prompt, SamplingParams

NAMES = ("a", "b", "c")


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 6, generator=generator).bfloat16() for name in NAMES}


@dataclass
class Copy:
    """Of the weights that were sent last, as far as it shows them."""

    name: str
    reads: Collection[str] | None = NAMES  # None: another rank looks
    stores: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    sent: Mapping[str, Tensor] = field(default_factory=dict)

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> dict[str, int] | None:
        if self.reads is None:
            return None
        return {
            name: checksum(self.stores.get(name, Tensor.clone)(self.sent[name]), kind)
            for name in names
            if name in self.reads
        }

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        return [Completion(prompt.id, [5, 6], [-1.0, -1.0], "length", 0) for prompt in prompts]

    def cached_tokens(self) -> int:
        return 0


@dataclass
class Fleet:
    shown: list[Copy]
    weight_naming: str = "hub"

    def copies(self) -> list[Copy]:
        return self.shown

    def update_weights(self, weights: Any, policy_version: int) -> None:
        sent = dict(weights)
        for copy in self.shown:
            copy.sent = sent

    def generate(self, prompts: Any, sampling: Any) -> Any: ...
    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...
    def close(self) -> None: ...


class Backend:
    """Says what the copies say."""

    def score(self, batches: Sequence[PackedBatch], model: str) -> list[LogProbs]:
        return [LogProbs(batch.rollout_logprobs) for batch in batches]


def hand_overs(*copies: Copy) -> Callable[[int], None]:
    """A hand-over of weights of their own version to `copies`, and the look at it."""
    engine: Any = Fleet(list(copies))
    backend: Any = Backend()
    probe = make_probe(
        Config(hf_checkpoint="any", max_tokens_per_gpu=512, rollout_max_response_len=8), tiny_tokenizer()
    )
    check = SyncCheck(engine, backend, probe, dtype=torch.bfloat16, first_only=False)

    def hand_over(version: int) -> None:
        engine.update_weights(check.watch(weights(version).items()), version)
        check.check(version)

    return hand_over


@pytest.mark.parametrize("turned", [False, True])
def test_copies_that_show_different_tensors_are_held_to_what_each_of_them_shows(turned, caplog):
    """As servers of which one has another kernel, and keeps another dtype."""
    more, less = Copy("more", stores={"c": Tensor.float}), Copy("less", reads=("a", "b"))
    hand_over = hand_overs(*((less, more) if turned else (more, less)))
    with caplog.at_level(logging.INFO):
        for version in range(3):
            hand_over(version)
    assert [record.getMessage() for record in caplog.records] == [
        "--sync-check: the engine stores 1 of 3 tensors in another order or dtype, e.g. c: their values are compared",
        "--sync-check: 1 of 3 tensors cannot be read back from the engine: only logprobs vouch for them",
    ]
    for name, holder in {"c": more, "b": less}.items():
        usual, holder.stores = holder.stores, {name: lambda tensor: tensor.flip(0)}
        with pytest.raises(RolloutError, match=f"{holder.name} does not hold {name} of version 3"):
            hand_over(3)
        holder.stores = usual


def test_one_that_shows_nothing_any_more_is_not_believed_and_one_that_another_rank_looks_at_is():
    shown, elsewhere = Copy("shown"), Copy("elsewhere", reads=None)
    hand_over = hand_overs(shown, elsewhere)
    hand_over(0)
    hand_over(1)
    shown.reads = ()
    with pytest.raises(RolloutError, match=r"shown does not hold a of version 2 .* first of 3 tensors"):
        hand_over(2)


def test_copies_that_store_a_tensor_in_two_ways_are_refused():
    with pytest.raises(RolloutError, match="one and two do not hold b alike"):
        hand_overs(Copy("one"), Copy("two", stores={"b": Tensor.float}))(0)
