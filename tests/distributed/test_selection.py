"""Dynamic sampling on several ranks keeps the groups that one rank keeps, and fails on all ranks together."""

import re
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule
from fsdptrain.config import DataConfig, RolloutConfig
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.rows import Row
from fsdptrain.errors import FsdptrainError
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.selection import SelectionRules
from fsdptrain.trainer.samples.single_turn import GenerationRound, Sampler, SingleTurn
from fsdptrain.trainer.samples.source import RolloutSource
from fsdptrain.types import Prompt, Sample, SamplingParams
from tests.rewards import in_process
from tests.testing import FakeRolloutEngine, spawn, tiny_tokenizer

WANTED = 6
LETTERS = [tiny_tokenizer()(letter)["input_ids"] for letter in "ny"]
DYNAMIC = SelectionRules(dynamic=True, max_rounds=8)


def solves(prompt: Prompt, index: int) -> bool:
    """By the prompt alone: a third of the rows are never solved, a third always, of the others the odd samples are."""
    return (False, True, index % 2 == 1)[prompt.label % 3]


def answer(prompt: Prompt, index: int) -> list[int]:
    """Lengths differ, so that a sample in the wrong place shows."""
    return [*LETTERS[solves(prompt, index)], *LETTERS[0] * (1 + (prompt.label + index) % 4)]


def reward(prompt: Prompt, response: str) -> float:
    return float(response[0] == "y")


def hopeless(prompt: Prompt, response: str) -> float:
    return 0.25


def broken(prompt: Prompt, response: str) -> float:
    raise ZeroDivisionError


@dataclass
class Recording:
    """The sampler, with what it was asked written down."""

    sampler: Sampler
    rounds: list[tuple[list[str], int]] = field(default_factory=list)

    def sample(self, prompts: list[Prompt], sampling: SamplingParams, watch: Stopwatch) -> GenerationRound:
        self.rounds.append(([prompt.id for prompt in prompts], sampling.seed))
        return self.sampler.sample(prompts, sampling, watch)


def source(rules: SelectionRules, score=reward, num_rows: int = 24) -> RolloutSource:
    tokenizer = tiny_tokenizer()
    stream = PromptStream(
        [Row(f"r:{i}", f"question {i}", label=i) for i in range(num_rows)],
        tokenizer,
        data=DataConfig(prompt_data="x"),
        rollout=RolloutConfig(seed=1),
    )
    return RolloutSource(
        stream=stream,
        sampler=Recording(SingleTurn(FakeRolloutEngine(answer), in_process(score), tokenizer)),
        sampling=SamplingParams(num_samples=4, max_tokens=8, seed=9),
        num_prompts=WANTED,
        num_shown=3,
        shaping=None,
        advantages=AdvantageRule(ADVANTAGES["grpo"], "group"),
        max_unscored_fraction=0.1,
        rules=rules,
    )


def rollouts(rules: SelectionRules) -> list[dict]:
    ours = source(rules)
    found = []
    for step in range(5):
        rollout_batch = ours.collect(step)
        found.append(
            {
                "samples": rollout_batch.samples, "metrics": rollout_batch.metrics, "shown": rollout_batch.shown,
                "num_made": len(rollout_batch.results.results), "rounds": ours.sampler.rounds[:],
                "state": ours.stream.state_dict(),
            }
        )  # fmt: skip
        ours.sampler.rounds.clear()
    return found


def ends_with(rules: SelectionRules, scores: list) -> list[tuple[str, int, int]]:
    """What a rollout with each of `scores` ends with, after how many rounds, and that nobody waits for anybody."""
    ends = []
    for score in scores:
        ours = source(rules, score)
        with pytest.raises(FsdptrainError) as caught:
            ours.collect(0)
        alive = torch.ones(())
        dist.all_reduce(alive)
        ends.append((str(caught.value), len(ours.sampler.rounds), int(alive)))
    return ends


def packed_lengths(num_rows: int, num_steps: int) -> list[tuple[list[int], int]]:
    """Of each optimizer step: the lengths that this rank trains, and the denominator."""
    ours = source(SelectionRules(dynamic=True, max_rounds=1), num_rows=num_rows)
    rules = PackingRules(64, "token_mean", max_response_len=8, num_steps=num_steps, seed=0, layout="packed")
    steps = make_batches(ours.collect(0).samples, rules, rollout=0)
    return [
        ([n for p in step.packs if p.loss_weights.any() for n in p.seqlens], step.packs[0].num_loss_tokens)
        for step in steps
    ]


def everything() -> dict:
    """Of one rank; processes are started once for all tests."""
    return {"rollouts": rollouts(DYNAMIC), "few": {num_steps: packed_lengths(3, num_steps) for num_steps in (1, 2)}}


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict]]:
    """What each rank found, by the number of ranks."""
    return {num_ranks: spawn(num_ranks, everything) for num_ranks in (1, 4)}


def test_kept_groups_differ_in_reward_and_nothing_is_asked_twice_or_lost(ranks) -> None:
    asked_in_all: list[str] = []
    for rollout in ranks[1][0]["rollouts"]:
        groups: dict[str, list[Sample]] = {}
        for sample in rollout["samples"]:
            groups.setdefault(sample.group_id, []).append(sample)
        assert len(groups) == WANTED
        assert all({s.reward for s in group} == {0.0, 1.0} and len(group) == 4 for group in groups.values())
        asked = [prompt for prompts, _ in rollout["rounds"] for prompt in prompts]
        useful = [prompt for prompt in asked if int(prompt.partition("@")[0].removeprefix("r:")) % 3 == 2]
        assert list(groups) == useful[:WANTED]  # in the order of the stream
        assert 1 < len(rollout["rounds"]) == rollout["metrics"]["selection/rounds"] <= DYNAMIC.max_rounds
        assert len(asked) == rollout["metrics"]["selection/generated_groups"] == rollout["num_made"] / 4
        assert len({seed for _, seed in rollout["rounds"]}) == len(rollout["rounds"])
        asked_in_all += asked
    assert len(set(asked_in_all)) == len(asked_in_all)
    assert {prompt for prompt in asked_in_all if "@" not in prompt} == {f"r:{i}" for i in range(24)}


def test_the_samples_do_not_depend_on_the_number_of_ranks(ranks) -> None:
    """Bit by bit; so do the rounds, their seeds, the metrics, and the state of the stream."""
    for step, whole in enumerate(ranks[1][0]["rollouts"]):
        parts = [rank["rollouts"][step] for rank in ranks[4]]
        made = sorted((sample for part in parts for sample in part["samples"]), key=lambda s: s.group_id)
        assert made == sorted(whole["samples"], key=lambda s: s.group_id)
        assert sum(part["num_made"] for part in parts) == whole["num_made"]
        for number, (prompts, seed) in enumerate(whole["rounds"]):
            assert [prompt for part in parts for prompt in part["rounds"][number][0]] == prompts
            assert {part["rounds"][number][1] for part in parts} == {seed}
        for part in parts:
            assert part["metrics"] == whole["metrics"]
            assert part["state"] == whole["state"]
            assert all(shown.row["reward"] in (0.0, 1.0) for shown in part["shown"])


@pytest.mark.parametrize("num_steps", [1, 2])
def test_fewer_groups_than_wanted_are_trained_on_with_their_own_denominator(ranks, num_steps: int) -> None:
    """Three rows, one of which teaches: two groups of six, on four ranks that have not all something to train."""
    for step, (lengths, denominator) in enumerate(ranks[1][0]["few"][num_steps]):
        found = [rank["few"][num_steps][step] for rank in ranks[4]]
        assert sorted(n for trained, _ in found for n in trained) == sorted(lengths)
        assert len(lengths) == 8 // num_steps
        assert {own for _, own in found} == {denominator}


def test_where_nothing_is_left_all_ranks_end_with_the_same_line() -> None:
    first, second = spawn(2, ends_with, SelectionRules(dynamic=True, max_rounds=3), [hopeless, broken])
    assert first == second
    flat, unscored = first
    assert re.search(r"--dynamic-sampling kept none of 18 groups in 3 rounds.* their mean is 0\.25;", flat[0])
    assert flat[1:] == (3, 2)
    assert re.search(r"--reward could not score 24 of 24 samples.*ZeroDivisionError", unscored[0])
    assert unscored[1:] == (1, 2)  # at once, not after all rounds
