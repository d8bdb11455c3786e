"""A reward that hangs or crashes costs one sample, wherever it hangs. Results do not depend on the processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rewards.parallel import ParallelReward
from fsdptrain.rewards.results import compute_rewards
from fsdptrain.types import Prompt
from tests.unit.rewards import user_rewards
from tests.unit.rewards.user_rewards import judge, list_for_one, lists, obedient, of_trl, one_argument, sleeps

PROMPT = Prompt("a", [1], "label")
MINUTE = 60.0


@contextmanager
def pool(
    reward: Any, num_workers: int = 2, timeout: float = MINUTE, patience: float = 600.0
) -> Iterator[ParallelReward]:
    with closing(ParallelReward(reward, num_workers=num_workers, timeout=timeout, patience=patience)) as rewards:
        yield rewards


def scores(rewards: ParallelReward, texts: list[str]) -> list[float | None]:
    return [result.reward for result in compute_rewards(rewards, [PROMPT] * len(texts), texts).results]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_results_are_in_the_order_of_the_samples_for_any_number_of_processes(num_workers: int) -> None:
    texts = [str((7 * i) % 11 / 100) for i in range(40)]
    with pool(sleeps, num_workers) as rewards:
        assert scores(rewards, texts) == [float(text) for text in texts]
        assert scores(rewards, []) == []
        assert scores(rewards, texts[:3]) == [float(text) for text in texts[:3]]


CAUSES = {
    "regex": "--reward: no answer within --reward-timeout 3 s",
    "deaf": "--reward: no answer within --reward-timeout 3 s",
    "_exit": "--reward: its process ended with exit code 3",
    "segfault": "--reward: its process ended with signal SIGSEGV",
    "exit": "SystemExit: 1 (user_rewards.py:",
    "raise": "ValueError: no (user_rewards.py:",
    "nan": "ValueError: the reward returned nan (values.py:",
    "none": "the reward returned None",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_hang_or_a_crash_costs_its_sample(cause: str) -> None:
    texts = [str(i) for i in range(30)]
    texts[17] = cause
    with pool(obedient, timeout=3.0) as rewards:
        results = compute_rewards(rewards, [PROMPT] * 30, texts)
    assert [result.reward for result in results.results] == [None if i == 17 else float(i) for i in range(30)]
    assert results.num_unscored == 1
    assert (results.first_error or "").startswith(CAUSES[cause])


def test_a_process_that_died_between_rollouts_costs_no_sample() -> None:
    with pool(obedient, num_workers=1) as rewards:
        [pid] = scores(rewards, ["pid"])
        os.kill(int(pid or 0), signal.SIGKILL)
        time.sleep(0.5)
        assert scores(rewards, ["1", "2"]) == [1.0, 2.0]


def test_a_process_starts_without_torch() -> None:
    with pool(obedient) as rewards:
        assert scores(rewards, ["torch"]) == [0.0]


def test_processes_that_a_late_reward_has_started_are_killed() -> None:
    with pool(obedient, timeout=2.0) as rewards:
        assert scores(rewards, ["starts a process"]) == [None]
    found = subprocess.run(["pgrep", "-f", "^sleep 614$"], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_a_killed_trainer_leaves_no_process() -> None:
    code = (
        "import sys\nfrom tests.unit.rewards.test_pool import *\n"
        "with pool(obedient, 1) as rewards:\n"
        "    print(int(scores(rewards, ['pid'])[0]), flush=True)\n"
        "    scores(rewards, ['regex'])\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout as output:
        worker = int(output.readline())
    time.sleep(0.5)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + MINUTE
    status = Path(f"/proc/{worker}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_reward_that_always_hangs_ends_the_rollout(num_workers: int) -> None:
    with (
        pool(sleeps, num_workers, timeout=1.0) as rewards,
        pytest.raises(RolloutError, match=r"^--reward did not answer 3 times in a row .* prompt 'a': .*--reward-time"),
    ):
        scores(rewards, ["600"] * 100)


def test_a_reward_that_often_hangs_ends_the_rollout_within_the_patience() -> None:
    with pool(sleeps, 1, timeout=1.0, patience=3.0) as rewards:
        assert scores(rewards, ["600", "0"] * 2) == [None, 0.0] * 2
        with pytest.raises(RolloutError, match=r"^--reward did not answer 3 times in one rollout within 1 s.*than 3 s"):
            scores(rewards, ["600", "0"] * 50)  # counted anew in each rollout


@pytest.mark.parametrize("num_workers", [0, 2])
def test_async_calls_run_at_the_same_time_and_late_ones_cost_their_samples(num_workers: int) -> None:
    with pool(judge, num_workers, timeout=8.0) as rewards:
        assert scores(rewards, ["1"]) == [1.0]
        begin = time.monotonic()
        assert scores(rewards, ["slow"] * 60) == [1.0] * 60
        assert time.monotonic() - begin < 15.0  # one after the other: 30 s
        results = compute_rewards(rewards, [PROMPT] * 5, ["1", "late", "stubborn", "raise", "4"])
    assert [result.reward for result in results.results] == [1.0, None, None, None, 4.0]
    assert results.first_error == "--reward: no answer within --reward-timeout 8 s"


@pytest.mark.parametrize("cause", ["_exit", "regex"])
def test_an_async_call_that_blocks_or_ends_its_process_costs_one_sample(cause: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("fsdptrain.rewards.pool.GRACE_S", 0.0)
    with pool(judge, timeout=4.0) as rewards:
        assert scores(rewards, ["slow", cause, "slow", "3"]) == [1.0, None, 1.0, 3.0]


def test_a_reward_of_lists_gets_all_samples_in_one_call() -> None:
    with pool(lists) as rewards:
        assert scores(rewards, ["1", "none", "nan", "4"]) == [1.0, None, None, 4.0]
        results = compute_rewards(rewards, [PROMPT] * 2, ["short", ""])
    assert results.num_unscored == 2
    assert results.first_error == "the reward returned 1 values for 2 samples; it must return a list with one each"


@pytest.mark.parametrize(("prompt", "length"), [([{"role": "user", "content": "?"}], 1), ("text", 4)])
def test_a_reward_in_the_form_of_trl_gets_its_columns(prompt: Any, length: int) -> None:
    rows = [Prompt("a", [1], "", metadata={"prompt": prompt, "answer": 4 + i, "level": 1}) for i in range(2)]
    with pool(of_trl) as rewards:
        rewards.check(rows[0])
        results = compute_rewards(rewards, rows, ["4", "4"])
    assert [result.reward for result in results.results] == [1.0 + length, length]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            one_argument,
            r"--reward tests.unit.rewards.user_rewards:one_argument takes \(response: str\).*which does not",
        ),
        (of_trl, r"missing a required argument: 'answer'; the data has the columns question; write f\(prompt, resp"),
        (list_for_one, r"list_for_one, called with the first row and an empty response: TypeError"),
        (user_rewards, "is not a function"),
    ],
)
def test_a_wrong_signature_is_an_error_before_the_first_rollout(reward: Any, message: str) -> None:
    with pool(reward, 0) as rewards, pytest.raises(ConfigError, match=message):
        rewards.check(Prompt("a", [1], "", metadata={"question": "?"}))


def test_a_reward_that_cannot_score_an_empty_response_is_reported() -> None:
    with pool(obedient) as rewards:
        [line] = rewards.check(PROMPT)
    assert line.startswith(
        "--reward tests.unit.rewards.user_rewards:obedient cannot score an empty response to the fir"
    )


def test_a_closure_runs_in_this_process_and_its_hang_costs_its_sample(caplog: pytest.LogCaptureFixture) -> None:
    hanging, pid = threading.Event(), os.getpid()

    def closure(prompt: Prompt, response: str) -> float:
        if response == "hang":
            hanging.wait()
        return float(os.getpid() == pid)

    with pool(closure, timeout=2.0) as rewards:
        assert scores(rewards, ["1", "hang", "1", "1"]) == [1.0, None, 1.0, 1.0]
    hanging.set()
    assert (
        "closure runs in the trainer's process, one call at a time, because no worker process can load" in caplog.text
    )


def test_a_function_of_the_main_module_runs_in_this_process(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    def script(prompt: Prompt, response: str) -> float:
        return 1.0

    script.__module__, script.__qualname__ = "__main__", "script"
    monkeypatch.setattr(sys.modules["__main__"], "script", script, raising=False)
    with pool(script) as rewards:
        assert scores(rewards, ["1", "2"]) == [1.0, 1.0]
    assert "--reward __main__:script runs in the trainer's process" in caplog.text
