"""A hanging reward costs its sample; one that always hangs ends the run. Nothing waits for it."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsdptrain.errors import RewardError, RolloutError
from fsdptrain.rewards.results import compute_rewards
from fsdptrain.trainer.samples.deadline import WithDeadline
from fsdptrain.trainer.samples.main_thread import MainThreadLimit
from fsdptrain.types import Prompt

pytestmark = pytest.mark.slow

PROMPT = Prompt("a", [1], "label")


class Limited(WithDeadline):
    """Counts calls. Those that do not hang have a minute, however busy the machine is."""

    calls = 0

    def __call__(self, prompt: Prompt, response: str) -> float:
        self.calls += 1
        timeout = self._threads.timeout
        self._threads.timeout = timeout if response == "hang" else 60.0
        try:
            return super().__call__(prompt, response)
        finally:
            self._threads.timeout = timeout


def reward(prompt: Prompt, response: str) -> float:
    if response == "hang":
        threading.Event().wait()
    if response == "sleep":
        time.sleep(60)
    if response == "raise":
        raise ValueError("no")
    if response == "late signal":
        signal.raise_signal(signal.SIGVTALRM)
    return float(threading.current_thread() is threading.main_thread())


def test_a_hanging_call_leaves_only_its_sample_unscored():
    timed = Limited(reward, 1.0, patience=60)
    results = compute_rewards(timed, [PROMPT] * 5, ["good", "hang", "hang", "raise", "hang"])
    assert [score.reward for score in results.results] == [0.0, None, None, None, None]
    assert results.first_error == "--reward: no answer within --reward-timeout 1 s"


def test_a_reward_that_always_hangs_ends_the_rollout():
    timed = Limited(reward, 0.2, patience=60)
    with pytest.raises(RolloutError, match=r"^--reward did not answer 3 times in a row .* prompt 'a': .*--reward-time"):
        compute_rewards(timed, [PROMPT] * 100, ["hang"] * 100)
    assert timed.calls == 3


def test_a_reward_that_often_hangs_ends_the_rollout_within_the_patience():
    timed = Limited(reward, 1.0, patience=3.0)
    results = compute_rewards(timed, [PROMPT] * 4, ["hang", "good"] * 2)
    assert results.num_unscored == 2
    with pytest.raises(RolloutError, match=r"^--reward did not answer 3 times in one rollout within 1 s.*than 3 s for"):
        compute_rewards(timed, [PROMPT] * 100, ["hang", "good"] * 50)
    assert timed.calls == 4 + 5  # counted anew in each rollout


def test_the_default_deadline_allows_three_hanging_calls():
    timed = [WithDeadline(reward, None, patience=patience)._threads.timeout for patience in (30.0, 900.0, 3600.0)]
    assert timed == [10.0, 300.0, 300.0]


@pytest.mark.parametrize("text", ["hang", "sleep"])
def test_a_call_on_the_main_thread_is_interrupted_and_the_next_one_is_not(text: str) -> None:
    limited = MainThreadLimit(reward, 0.5)
    with pytest.raises(RolloutError, match=r"--reward did not answer within 0.5 s.*--reward-timeout"):
        limited(PROMPT, text)
    limited._limit_s = 600.0
    assert [limited(PROMPT, text) for text in ["good", "late signal"] * 50] == [1.0] * 100
    signal.raise_signal(signal.SIGVTALRM)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "one was not canceled"


def test_without_a_timeout_only_other_threads_have_a_deadline():
    timed = WithDeadline(reward, None, patience=60)
    assert timed(PROMPT, "good") == 1.0  # as `math` wants it, whose time limit is a signal
    with ThreadPoolExecutor(1) as thread:
        timed._threads.timeout = 0.2
        with pytest.raises(RewardError):
            thread.submit(timed, PROMPT, "hang").result()
