"""A reward that hangs or crashes costs one sample, wherever it hangs. Results do not depend on the processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rewards import local, parallel
from fsdptrain.rewards import pool as processes
from fsdptrain.rewards.build import Component, WeightedSum, build_reward
from fsdptrain.rewards.calls import RewardCalls
from fsdptrain.rewards.parallel import ParallelReward, build_parallel, compute_rewards
from fsdptrain.rewards.pool import worker_environment
from fsdptrain.types import Prompt
from tests.rewards import only
from tests.testing import wait_until
from tests.unit.rewards import user_rewards
from tests.unit.rewards.user_rewards import judge, obedient, of_trl, sleeps

pytestmark = pytest.mark.slow

PROMPT = Prompt("a", [1], "label")
MINUTE = 60.0
SHORT = 1.0
OBEDIENT = "--reward tests.unit.rewards.user_rewards:obedient"


@contextmanager
def pool(
    reward: Any, num_workers: int = 2, timeout: float = MINUTE, patience: float = 600.0
) -> Iterator[ParallelReward]:
    with closing(ParallelReward(only(reward), num_workers=num_workers, timeout=timeout, patience=patience)) as rewards:
        yield rewards


def scores(rewards: ParallelReward, texts: list[str], prompt: Prompt = PROMPT) -> list[float | None]:
    return [result.reward for result in compute_rewards(rewards, [prompt] * len(texts), texts).results]


def with_metadata(**metadata: Any) -> Prompt:
    return replace(PROMPT, metadata=metadata)


def has_ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("num_workers", [0, 3])
def test_results_are_in_the_order_of_the_samples_for_any_number_of_processes(num_workers: int) -> None:
    texts = [str((7 * i) % 11 / 200) for i in range(30)]
    with pool(sleeps, num_workers) as rewards:
        assert scores(rewards, texts) == [float(text) for text in texts]
        assert scores(rewards, []) == []


def test_a_hang_or_a_crash_costs_its_sample_and_processes_start_without_torch() -> None:
    causes = {
        "regex": f"{OBEDIENT}: no answer within --reward-timeout 3 s",
        "_exit": f"{OBEDIENT}: its process ended with exit code 3",
        "leaves a process": f"{OBEDIENT}: its process ended with exit code 3",
        "segfault": f"{OBEDIENT}: its process ended with signal SIGSEGV",
        "exit": "SystemExit: 1 (user_rewards.py:",
        "raise": "ValueError: no (user_rewards.py:",
        "nan": "ValueError: the reward returned nan (user_rewards.py:",
        "none": "the reward returned None, which means that it cannot score this (user_rewards.py:",
    }
    texts = [text for i, cause in enumerate(causes) for text in (str(i), cause, str(i))]
    calls = [(PROMPT, text) for text in texts]
    bad = [with_metadata(x=threading.Lock()), with_metadata(x=user_rewards.Unloadable())]
    with pool(obedient, timeout=3.0) as rewards:
        outcomes = rewards.run([*calls, (bad[0], "1"), (bad[1], "1")])
        assert scores(rewards, ["torch"]) == [0.0]
    for text, outcome in zip(texts, outcomes, strict=False):
        if text in causes:
            assert str(outcome).startswith(causes[text])
        else:
            assert getattr(outcome, "reward", None) == float(text)
    assert str(outcomes[-2]).startswith("the sample cannot be sent to a process: TypeError: cannot pickle")
    assert "a process cannot load the reward or the sample: ValueError" in str(outcomes[-1])


def test_a_process_that_died_between_rollouts_costs_no_sample() -> None:
    with pool(obedient, num_workers=1) as rewards:
        [pid] = scores(rewards, ["pid"])
        os.kill(int(pid or 0), signal.SIGKILL)
        wait_until(lambda: has_ended(int(pid or 0)))
        assert scores(rewards, ["1", "2"]) == [1.0, 2.0]


def test_a_killed_trainer_leaves_no_process() -> None:
    code = (
        "from tests.rewards import only\n"
        "from fsdptrain.rewards.parallel import ParallelReward\n"
        "from fsdptrain.types import Prompt\n"
        "from tests.unit.rewards.user_rewards import obedient\n"
        "prompt = Prompt('a', [1], '')\n"
        "rewards = ParallelReward(only(obedient), num_workers=1, timeout=60.0, patience=600.0)\n"
        "print(int(rewards.run([(prompt, 'pid')])[0].reward), flush=True)\n"
        "rewards.run([(prompt, 'regex')])\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout as output:
        worker = int(output.readline())
        assert output.readline() == "hangs\n"
        trainer.kill()
    trainer.wait()
    wait_until(lambda: has_ended(worker))


def test_a_reward_that_always_hangs_ends_the_rollout(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with (
        pool(sleeps, 4, timeout=SHORT, patience=2 * SHORT) as rewards,
        pytest.raises(RolloutError, match=r"no longer than 2 s for that; last: .* 1 s \(prompt 'a'\); .*--reward-time"),
    ):
        scores(rewards, ["600"] * 100, with_metadata(path=str(calls)))
    assert len(calls.read_text().split()) <= 16


def test_all_rewards_of_a_run_have_one_patience() -> None:
    parts = tuple(Component(name, 1.0, reward) for name, reward in (("a", sleeps), ("b", user_rewards.hangs_at_zero)))
    with (
        pool(WeightedSum(parts), 1, timeout=SHORT, patience=2 * SHORT) as rewards,
        pytest.raises(RolloutError, match="2 timed-out calls in one rollout"),
    ):
        scores(rewards, ["600", "0"])


def test_closing_ends_a_rollout_of_another_thread_and_its_processes(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    with pool(sleeps, timeout=600.0) as rewards, ThreadPoolExecutor(1) as thread:
        rollout = thread.submit(scores, rewards, ["600"] * 5, with_metadata(path=str(calls)))
        wait_until(lambda: len(calls.read_text().split()) == 2)
        start = time.monotonic()
        rewards.close()
        assert time.monotonic() - start < 5.0
        with pytest.raises(RolloutError, match="the run has ended"):
            rollout.result(MINUTE)
        wait_until(lambda: all(has_ended(int(pid)) for pid in calls.read_text().split()))
        with pytest.raises(RolloutError, match="the run has ended"):
            scores(rewards, ["1"])


def test_async_calls_run_at_the_same_time_and_late_ones_cost_their_samples() -> None:
    with pool(judge) as rewards:
        assert scores(rewards, ["together"] * 60) == [1.0] * 60
    with pool(judge, timeout=SHORT) as rewards:
        results = compute_rewards(rewards, [PROMPT] * 5, ["1", "late", "raise", "canceled", "5"])
    assert [result.reward for result in results.results] == [1.0, None, None, None, 5.0]
    assert results.first_error == f"{OBEDIENT[:-8]}judge: no answer within --reward-timeout 1 s"
    for reward in (user_rewards.Judge(), partial(user_rewards.Judge())):
        with pool(reward) as rewards:
            assert scores(rewards, ["1", "none", "3"]) == [1.0, None, 3.0]
            assert rewards._runners[0].reward.where == f"{OBEDIENT[:-8]}Judge"


def test_an_async_call_that_blocks_its_loop_ends_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", SHORT)
    with pool(judge, timeout=SHORT) as rewards, pytest.raises(RolloutError, match="they block their event loop"):
        scores(rewards, ["block"])


def test_a_reward_that_loads_too_long_ends_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_S", 0.01 - SHORT)
    with pool(obedient, timeout=SHORT) as rewards, pytest.raises(RolloutError, match="did not load it within 0"):
        scores(rewards, ["1"])


def test_a_reward_of_lists_gets_all_samples_in_one_call() -> None:
    with pool(user_rewards.lists) as rewards:
        assert scores(rewards, ["1", "none", "nan", "4"]) == [1.0, None, None, 4.0]
        results = compute_rewards(rewards, [PROMPT] * 2, ["short", ""])
        assert scores(rewards, ["1", "_exit"]) == [None, None]
        assert scores(rewards, ["1", "2"]) == [1.0, 2.0]
    assert results.num_unscored == 2
    for kind in (np.array, torch.tensor, iter, lambda values: np.array([values]).T):
        calls = RewardCalls(lambda prompts, responses, kind=kind: kind([1.0, 2.0]))
        assert [one.reward for one in calls.run([(PROMPT, ""), (PROMPT, "")])] == [1.0, 2.0]  # type: ignore[union-attr]
    line = "the reward returned 1 values, which is not a list with one value for each of 2 samples (user_rewards.py:"
    assert str(results.first_error).startswith(line)


@pytest.mark.parametrize(("prompt", "length"), [([{"role": "user", "content": "?"}], 1), ("text", 4)])
def test_a_reward_in_the_form_of_trl_gets_the_columns_of_all_samples(prompt: Any, length: int) -> None:
    metadata = [{"prompt": "a column", "answer": 4 + i, **({"level": 1} if i else {})} for i in range(2)]
    rows = [replace(PROMPT, source=prompt, metadata=each) for each in metadata]
    with pool(of_trl, 0) as rewards:
        results = compute_rewards(rewards, rows, ["4", "4"])
        assert rewards.check([rows[1]], call=True) == []
    assert [result.reward for result in results.results] == [1.0 + length, length]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            user_rewards.one_argument,
            r"--reward tests.unit.rewards.user_rewards:one_argument has the signature \(response: str\).*does not",
        ),
        (of_trl, r"missing a required argument: 'answer'; the data has the columns question; write f\(prompt, resp"),
        (user_rewards.list_for_one, r"list_for_one, called with labels as responses: TypeError"),
        (lambda prompt, response: torch.ones(2), r"called with labels as responses: TypeError: .* tensor"),
        (user_rewards, "is not a function"),
    ],
)
def test_a_wrong_signature_is_an_error_before_the_first_rollout(reward: Any, message: str) -> None:
    with pool(reward, 0) as rewards, pytest.raises(ConfigError, match=message):
        rewards.check([with_metadata(question="?")], call=True)


def test_a_reward_that_can_score_no_label_is_reported_by_one_rank() -> None:
    with pool(obedient, 0) as rewards:
        assert rewards.check([PROMPT], call=False) == []
        [line] = rewards.check([PROMPT], call=True)
    with pool(user_rewards.says_what_it_is_not, 0) as rewards:
        assert len(rewards.check([PROMPT], call=True)) == 1
    assert line.startswith(f"{OBEDIENT} scored none of 1 labels, passed as responses: ValueErr")


@pytest.mark.parametrize("module", ["tests", "__main__"])
def test_a_closure_runs_in_this_process(
    module: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()

    def closure(prompt: Prompt, response: str) -> float:
        return float(os.getpid() == pid)

    closure.__module__ = module
    if module == "__main__":  # a function of the script, which can be pickled
        closure.__qualname__ = "closure"
        monkeypatch.setattr(sys.modules[module], "closure", closure, raising=False)
    for reward in (closure, partial(closure)):
        caplog.clear()
        with pool(reward) as rewards:
            assert scores(rewards, ["1", "2"]) == [1.0, 1.0]
        line = "closure runs in the trainer, without --reward-timeout, because other processes cannot load it"
        assert line in caplog.text


def test_the_default_deadline_allows_three_hanging_calls_before_other_ranks_miss_this_one() -> None:
    for dist_timeout, timeout in [(60, 10.0), (1800, 300.0), (7200, 300.0)]:
        config = Config(hf_checkpoint="x", dist_timeout=dist_timeout, reward_workers=0)
        rewards = build_parallel(config, only(obedient))
        assert (rewards._timeout, rewards._patience) == (timeout, dist_timeout / 2)


@pytest.mark.parametrize(
    ("data", "evaluated", "in_process"),
    [("gsm_symbolic", None, True), ("spell_backward?size=9", "countdown", False), ("countdown", None, False)],
)
def test_tasks_that_compare_texts_are_scored_without_processes(data: str, evaluated: Any, in_process: bool) -> None:
    gym = "reasoning_gym:"
    config = Config(hf_checkpoint="x", prompt_data=gym + data, eval_prompt_data=evaluated and gym + evaluated)
    with closing(build_parallel(config, build_reward(config.reward, prompt_data=gym + data))) as rewards:
        assert isinstance(rewards._runners[0], parallel.Direct) == in_process


def test_ranks_share_cores_threads_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, workers in [(192, 8, 8), (4, 2, 2), (3, 2, 1), (1, 4, 1)]:
        monkeypatch.setattr(processes, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert processes.default_workers() == workers
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert [worker_environment(workers)["OMP_NUM_THREADS"] for workers in (1, 8, 24)] == ["12", "1", "1"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    for name in ("RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OF_USER"):
        monkeypatch.setenv(name, "2")
    left = {name for name in worker_environment(1) if re.search("RANK|WORLD|MASTER|ELASTIC|OF_USER", name)}
    assert left == {"OF_USER"}  # a library that joins the other ranks would hang
    for visible, device in [(None, "2"), ("4,5,6,7", "6"), ("", "")]:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert worker_environment(1)["CUDA_VISIBLE_DEVICES"] == device
