"""Continuous rollouts: long groups hold nobody back, and every prompt is trained once, on any number of ranks."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from fsdptrain.algo.advantages import ADVANTAGES, AdvantageRule
from fsdptrain.config import Config, DataConfig, RolloutConfig
from fsdptrain.data.prompts import PromptStream
from fsdptrain.data.rows import Row
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.trainer.samples.continuous import ContinuousSource, assign, open_threads
from fsdptrain.trainer.samples.selection import SelectionRules
from fsdptrain.trainer.samples.single_turn import SingleTurn
from fsdptrain.types import Completion, Prompt, Sample, SamplingParams
from tests.rewards import in_process
from tests.testing import FakeRolloutEngine, spawn, tiny_tokenizer

WANTED, STEPS = 4, 6
LETTERS = [tiny_tokenizer()(letter)["input_ids"] for letter in "ny"]


class Gated(FakeRolloutEngine):
    """Answers each prompt when its gate is open, with the weights of that moment."""

    def __init__(self, closed: Sequence[int]) -> None:
        super().__init__(lambda prompt, index: LETTERS[(prompt.label % 3 > 0) * (index % 2)])
        self.closed = set(closed)
        self.changed = threading.Condition()

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        with self.changed:
            self.changed.wait_for(lambda: prompts[0].label not in self.closed, 60)
        time.sleep(0.002 * (prompts[0].label * 7 % 5))  # groups finish in another order than they start
        if prompts[0].label == -1:
            raise RolloutError("a server is gone")
        return self.generate(prompts, sampling)

    def open(self, label: int) -> None:
        with self.changed:
            self.closed.discard(label)
            self.changed.notify_all()


@contextmanager
def source(
    engine: Gated, *, first: int = 0, state: dict[str, Any] | None = None, **more: Any
) -> Iterator[ContinuousSource]:
    tokenizer = tiny_tokenizer()
    rows = [Row(f"r:{i}", f"question {i}", label=first + i) for i in range(60)]
    stream = PromptStream(
        rows, tokenizer, data=DataConfig(prompt_data="x"), rollout=RolloutConfig(seed=1, shuffle=False)
    )
    if state is not None:
        stream.load_state_dict(state)
    threads = ThreadPoolExecutor(64)
    values = {"max_staleness": 1, "num_rollouts": STEPS, **more}
    try:
        yield ContinuousSource(
            stream=stream,
            sampler=SingleTurn(engine, in_process(lambda _, response: float(response == "y")), tokenizer),
            sampling=SamplingParams(num_samples=4, max_tokens=8, seed=9),
            num_prompts=WANTED,
            num_shown=0,
            shaping=None,
            advantages=AdvantageRule(ADVANTAGES["grpo"], "group"),
            max_unscored_fraction=0.1,
            threads=threads,
            **values,
        )
    finally:
        for label in list(engine.closed):
            engine.open(label)
        threads.shutdown()


def labels(samples: Sequence[Sample]) -> list[int]:
    """The labels of the groups of all ranks, in the order in which they were started."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [sample.group_id for sample in samples])
    names = [name for part in found for name in part]
    assert all(names.count(name) == 4 for name in names), "a group is whole"
    return sorted({int(name.removeprefix("r:")) for name in names})


def run(made: ContinuousSource, engine: Gated, steps: range = range(STEPS)) -> list[list[int]]:
    """The groups of each step."""
    found = []
    for step in steps:
        engine.policy_version = step
        made.run_ahead(step)
        found.append(labels(made.collect(step).samples))
    return found


def long_group() -> tuple[list[list[int]], float]:
    """Prompt 1 is answered before step 3."""
    engine = Gated([1])
    with source(engine) as made:
        first = run(made, engine, range(3))
        unfinished = made._slot_metrics()["rollout/unfinished_groups"]
        engine.open(1)
        made._open[0].work and made._open[0].work.result(60)
        while made._open[0].result is None:
            made._exchange()
        return [*first, *run(made, engine, range(3, STEPS))], unfinished


def test_a_long_group_goes_on_into_a_later_step_and_every_prompt_is_trained_once() -> None:
    for steps, unfinished in spawn(2, long_group):
        assert [len(groups) for groups in steps] == [WANTED] * STEPS
        assert sorted(label for groups in steps for label in groups) == list(range(WANTED * STEPS))
        assert 1 in steps[3], "the oldest finished group comes first"
        assert unfinished >= 1


def ages(staleness: int) -> list[int]:
    """Of each sample: its step minus the version that sampled it."""
    engine = Gated([])
    with source(engine, max_staleness=staleness) as made:
        found = []
        for step in range(STEPS):
            engine.policy_version = step
            made.run_ahead(step)
            for group in made._open:
                assert group.work is None or group.work.result(60)
            batch = made.collect(step)
            assert len(made._open) <= staleness * WANTED
            found += [step - sample.policy_version for sample in batch.samples]
    return found


def test_groups_that_finish_in_time_are_as_old_as_is_allowed_at_most() -> None:
    for found in spawn(2, ages, 2):
        assert 0 == min(found) < max(found) == 2


def dynamic() -> tuple[list[list[int]], dict[str, float], dict[str, Any]]:
    engine = Gated([])
    rules = SelectionRules(dynamic=True, max_rounds=4)
    with source(engine, rules=rules) as made:
        groups, batch = [], None
        for step in range(STEPS):
            made.run_ahead(step)
            batch = made.collect(step)
            groups.append(labels(batch.samples))
        assert batch is not None
        return groups, dict(batch.metrics), made.stream.state_dict()


def test_groups_without_spread_are_replaced_and_no_prompt_is_lost() -> None:
    for groups, metrics, state in spawn(2, dynamic):
        kept = [label for step in groups for label in step]
        assert len(kept) == len(set(kept)) == WANTED * STEPS
        assert all(label % 3 for label in kept), "each third row teaches nothing"
        assert metrics["selection/missing_groups"] == 0
        assert not state.get("pending"), "each prompt was trained or dropped"
        assert set(kept) == {label for label in range(state["position"]) if label % 3}


def hopeless() -> tuple[int, int, int]:
    """Groups that were judged in the first step, and rounds, where none has spread; prompts that were drawn."""
    engine = Gated([])
    engine.respond = lambda prompt, index: LETTERS[0]
    with source(engine, rules=SelectionRules(dynamic=True, max_rounds=2)) as made:
        made.run_ahead(0)
        for group in made._open:
            assert group.work
            group.work.result(60)
        with pytest.raises(RolloutError) as caught:
            made.collect(0)
    match = re.search(r"kept none of (\d+) groups in (\d+) rounds", str(caught.value))
    assert match
    return int(match[1]), int(match[2]), made.stream.position


def test_a_step_judges_no_more_groups_than_its_rounds_allow() -> None:
    assert spawn(1, hopeless) == [(2 * WANTED, 2, 2 * WANTED)]


def test_an_engine_that_cannot_keep_requests_is_refused() -> None:
    config = Config(hf_checkpoint="x", max_staleness=1, mismatch_correction="tis")
    with ExitStack() as stack, pytest.raises(ConfigError, match="--max-staleness 1 needs an engine that keeps"):
        open_threads(config, FakeRolloutEngine(lambda prompt, index: [5]), stack)


def resumed() -> list[list[int]]:
    """Stop after step 2 with a group in flight, and continue from the state of the stream."""
    engine = Gated([2])
    with source(engine) as made:
        first = run(made, engine, range(2))
        state = made.stream.state_dict()
    engine = Gated([])
    with source(engine, state=state) as made:
        return [*first, *run(made, engine, range(2, STEPS))]


def test_a_resumed_run_trains_every_prompt_once() -> None:
    for found in spawn(2, resumed):
        assert 2 not in found[0] + found[1]
        assert sorted(label for groups in found for label in groups) == list(range(WANTED * STEPS))


def broken() -> str:
    """Row 5, which one rank owns, has the label -1."""
    engine = Gated([])
    with source(engine, first=-6) as made, pytest.raises(RolloutError) as caught:
        run(made, engine)
    return str(caught.value)


def test_an_error_of_one_group_ends_all_ranks() -> None:
    for message in spawn(2, broken):
        assert message.startswith("a server is gone")


def test_new_groups_go_to_the_ranks_with_the_fewest() -> None:
    assert assign(4, [0, 0]) == [0, 0, 1, 1]
    assert assign(4, [5, 2, 2]) == [1, 1, 2, 2]
    assert assign(0, [1]) == []
