"""A reward that hangs costs its sample, and one that always hangs ends the run: never does anyone wait for it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsdptrain.errors import RewardError, RolloutError
from fsdptrain.rewards.scoring import score_completions
from fsdptrain.trainer.deadline import WithDeadline
from fsdptrain.types import Prompt

PROMPT = Prompt("a", [1], "label")


def reward(prompt: Prompt, response: str) -> float:
    if response == "hang":
        threading.Event().wait()
    if response == "raise":
        raise ValueError("no")
    return float(threading.current_thread() is threading.main_thread())


def test_a_call_that_hangs_leaves_its_sample_unscored_and_the_others_alone():
    timed = WithDeadline(reward, 0.2)
    scores = score_completions(timed, [PROMPT] * 5, ["good", "hang", "hang", "raise", "hang"])
    assert [score.reward for score in scores.scores] == [0.0, None, None, None, None]
    assert scores.first_error == "--reward: no answer within --reward-timeout 0.2 s"


def test_one_that_always_hangs_ends_the_rollout_in_one_line_after_a_few():
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"^--reward did not answer 3 times in a row .* prompt 'a': .*--reward-time"):
        score_completions(WithDeadline(reward, 0.2), [PROMPT] * 100, ["hang"] * 100)
    assert time.monotonic() - start < 10


def test_without_a_timeout_the_main_thread_calls_by_itself_and_others_have_a_deadline():
    timed = WithDeadline(reward, None)
    assert timed(PROMPT, "good") == 1.0  # as `math` wants it, whose time limit is a signal
    with ThreadPoolExecutor(1) as thread:
        timed._threads.timeout = 0.2
        with pytest.raises(RewardError):
            thread.submit(timed, PROMPT, "hang").result()
