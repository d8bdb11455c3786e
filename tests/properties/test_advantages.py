"""Advantages equal their formulas in float64, in any order of samples and on any ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule, assign_advantages, scale_over_batch
from fsdptrain.algo.shaping import ShapingRule
from fsdptrain.types import Sample

SHAPING = ShapingRule(max_response_len=30, overlong_buffer=6, overlong_penalty=0.5)
RULES = [
    AdvantageRule(estimate, scale) for estimate in ADVANTAGES.values() for scale in ("group", "batch", "whiten", "none")
]


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Groups of any size, with few different rewards, so that some have no spread, and some samples without any."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    level = draw(st.sampled_from([0.0, 1000.0]))
    values = draw(st.lists(st.floats(0, 2), min_size=1, max_size=4))
    numbers = Random(draw(st.integers(0, 10_000)))
    samples = []
    for group, size in enumerate(sizes):
        for _ in range(size):
            length = numbers.randrange(0, 31)
            samples.append(
                Sample(
                    group_id=f"g{group}",
                    token_ids=[1] * (length + 1),
                    loss_mask=[False] + [True] * length,
                    rollout_logprobs=[0.0] * (length + 1),
                    reward=None if numbers.random() < 0.15 else level + numbers.choice(values),
                )
            )
    return samples


def made_on_ranks(shares: Sequence[list[Sample]], rule: AdvantageRule) -> list[list[Sample]]:
    """The samples of each rank. Replays all ranks up to the first collective with unknown sums."""
    known: list[dict[str, float]] = []
    while True:
        asked: list[Mapping[str, float]] = []
        made = []
        for share in shares:
            answers = iter(known)
            try:
                assigned = assign_advantages(SHAPING.apply(share), rule)
                made.append(scale_over_batch(assigned, rule, lambda values, a=answers: _next(a, values)))
            except _Collective as collective:
                asked.append(collective.values)
        if not asked:
            return made
        assert len(asked) == len(shares)  # every rank takes part in it
        known.append({name: sum(values[name] for values in asked) for name in asked[0]})


class _Collective(Exception):  # noqa: N818 - not an error: a rank waits
    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = values


def _next(answers, values: Mapping[str, float]) -> Mapping[str, float]:
    for answer in answers:
        return answer
    raise _Collective(values)


def values(samples: Sequence[Sample]) -> np.ndarray:
    return np.array([sample.advantage for sample in samples])


@settings(max_examples=400)
@given(rule=st.sampled_from(RULES), batch=batches(), seed=st.integers(0, 1000), num_ranks=st.integers(1, 4))
def test_advantages_do_not_depend_on_ranks_or_on_the_order_of_samples(rule, batch, seed, num_ranks) -> None:
    whole = values(made_on_ranks([batch], rule)[0])
    groups = [list(members) for _, members in groupby(enumerate(batch), lambda pair: pair[1].group_id)]
    numbers = Random(seed)
    shares: list[list[tuple[int, Sample]]] = [[] for _ in range(num_ranks)]
    for group in groups:
        shares[numbers.randrange(num_ranks)] += group
    for share in shares:
        numbers.shuffle(share)
    made = made_on_ranks([[sample for _, sample in share] for share in shares], rule)
    for share, samples in zip(shares, made, strict=True):
        np.testing.assert_allclose(values(samples), [whole[i] for i, _ in share], rtol=1e-9, atol=1e-9)


@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(ADVANTAGES)),
    scale=st.sampled_from(["group", "batch", "whiten", "none"]),
    batch=batches(),
)
def test_advantages_equal_a_reference_in_float64(name, scale, batch) -> None:
    rule = AdvantageRule(ADVANTAGES[name], scale)
    shaped, counts = shaped_rewards(batch), np.array([sum(s.loss_mask) for s in batch])
    scored = np.array([s.reward is not None for s in batch])
    expected = np.zeros(len(batch))
    for members in groups_of(batch, scored):
        rewards = shaped[members]
        if np.ptp(rewards) == 0:
            continue
        baseline = rewards.mean()
        if name == "rloo":
            baseline = np.array([np.delete(rewards, i).mean() for i in range(len(rewards))])
        expected[members] = 0.0 if name == "none" else rewards - baseline
        if scale == "group":
            expected[members] /= rewards.std(ddof=1) + 1e-6
    if scale == "batch" and scored.sum() > 1:
        expected /= shaped[scored].std(ddof=1) + 1e-6
    if scale == "whiten" and counts[scored].sum() > 1:
        tokens = np.repeat(expected[scored], counts[scored])
        expected[scored] = (expected[scored] - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    if scale == "whiten" and counts[scored].sum() < 2:
        return  # one token has no variance, and so no reference
    np.testing.assert_allclose(values(made_on_ranks([batch], rule)[0]), expected, rtol=1e-7, atol=1e-7)


@given(rule=st.sampled_from(RULES), batch=batches(), reward=st.sampled_from([1.5, 0.1, 1e9 + 0.3]))
def test_equal_rewards_give_advantages_of_exactly_0(rule, batch, reward) -> None:
    """Rounding of the mean must not be divided by a tiny standard deviation."""
    same = [replace(s, reward=None if s.reward is None else reward) for s in batch]
    made = scale_over_batch(assign_advantages(same, rule), rule, dict)
    assert not np.any(values(made))


def shaped_rewards(batch: Sequence[Sample]) -> np.ndarray:
    """Reward - 0.5 max(0, T - 24) / 6, 0 where there is none."""
    lengths = np.array([sum(s.loss_mask) for s in batch])
    rewards = np.array([s.reward or 0.0 for s in batch])
    return rewards - 0.5 * np.clip((lengths - 24) / 6, 0, 1)


def groups_of(batch: Sequence[Sample], scored: np.ndarray) -> list[np.ndarray]:
    ids = np.array([s.group_id for s in batch])
    found = [np.flatnonzero((ids == name) & scored) for name in dict.fromkeys(ids)]
    return [members for members in found if len(members)]
