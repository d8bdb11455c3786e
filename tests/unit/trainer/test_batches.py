"""Samples are assigned to optimizer steps at random and evenly, on any ranks."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.data.packing.pack import fill_packs, pack
from fsdptrain.data.packing.sample_index import gather_index, sample_keys
from fsdptrain.trainer.batches import assign_to_steps, in_epochs
from fsdptrain.types import Sample

KEYS = st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=40)
STEPS = st.integers(1, 9)


def named(steps: list[list[int]], keys: list[int]) -> list[set[int]]:
    return [{keys[i] for i in step} for step in steps]


@given(keys=KEYS, num_steps=STEPS)
def test_every_sample_is_in_one_step_and_steps_have_equal_sizes(keys: list[int], num_steps: int) -> None:
    steps = assign_to_steps(keys, num_steps, seed="0/0/0")
    assert sorted(i for step in steps for i in step) == list(range(len(keys)))
    sizes = [len(step) for step in steps]
    assert len(sizes) == num_steps, "however few the samples are: the learning rate follows the steps"
    assert max(sizes) - min(sizes) <= 1


@given(data=st.data(), keys=KEYS, num_steps=STEPS, seed=st.text(max_size=3))
def test_steps_do_not_depend_on_the_order_of_samples(data, keys, num_steps, seed):
    other = data.draw(st.permutations(keys))
    assert named(assign_to_steps(other, num_steps, seed=seed), other) == named(
        assign_to_steps(keys, num_steps, seed=seed), keys
    )


def test_each_rollout_has_other_steps() -> None:
    keys = list(range(64))
    assignments = [assign_to_steps(keys, 4, seed=seed) for seed in ("0/0/0", "0/1/0", "1/0/0")]
    assert all(a != b for i, a in enumerate(assignments) for b in assignments[:i])
    assert assign_to_steps(keys, 4, seed="0/0/0") == assignments[0]


def test_every_epoch_has_each_step_once() -> None:
    steps: list[Any] = [*range(8)]
    found = in_epochs(steps, 3, seed="0/1")
    first, second, third = found[:8], found[8:16], found[16:]
    assert first == sorted(second) == sorted(third) == steps
    assert second != third


def test_one_step_keeps_the_order() -> None:
    assert assign_to_steps([9, 3, 5], 1, seed="0/0/0") == [[0, 1, 2]]


@given(st.lists(st.sampled_from(["a:0", "a:1", "b:0@1", "ü"]), max_size=12))
def test_the_key_of_a_sample_is_its_group_and_position(groups: list[str]) -> None:
    keys = sample_keys([Sample(group, [0], [False], [0.0]) for group in groups])
    assert len(set(keys)) == len(groups)
    alone = {group: sample_keys([Sample(group, [0], [False], [0.0])] * groups.count(group)) for group in set(groups)}
    assert {group: [k for g, k in zip(groups, keys, strict=True) if g == group] for group in alone} == alone


def test_the_index_has_the_keys_and_advantages_and_its_totals_count_what_is_skipped() -> None:
    samples = [
        Sample(group, [1, 2, 3], [False, trained, True], [0.0, 0.1, 0.2], advantage=advantage)
        for group, trained, advantage in (("a", True, 0.0), ("a", False, 1.0), ("b", True, -1.0))
    ]
    index = gather_index(samples)
    assert index.keys == tuple(sample_keys(samples))
    assert index.has_advantage == (False, True, True)
    totals = index.totals(range(3), [1, 2])
    assert (totals.num_tokens, totals.num_skipped) == (5, 2)
    assert pack(samples, aggregation="token_mean", totals=totals, max_response_len=2).cu_seqlens.dtype == torch.int32


def test_samples_of_equal_length_are_packed_in_their_order() -> None:
    sizes = [9 - i % 2 for i in range(200)]
    found = fill_packs(sizes, [1.0] * 200, num_ranks=1, max_tokens=9)
    assert found == [[i] for i in [*range(0, 200, 2), *range(1, 200, 2)]]
