"""Rewards, and two estimators of advantages, for the tests of the command line."""

import os
import re
import signal
import sys
import time
from pathlib import Path

from fsdptrain.types import Prompt


def exits(prompt: Prompt, response: str) -> float:
    sys.exit(0)


def crashes_and_hangs(prompt: Prompt, response: str) -> float:
    """Ends its process for some answers, and hangs in C code for others."""
    kind = len(set(response)) % 4
    if response and kind == 0:
        os._exit(1)
    if kind == 1:
        re.fullmatch(r"(a*)*b", "a" * 60)
    return variety(prompt, response)


def variety(prompt: Prompt, response: str) -> float:
    """Differs between the answers of a random model, so that there is a gradient."""
    return len(set(response)) / 8


def by_label(prompt: Prompt, response: str) -> float:
    """The label where it is a number; where it is "luck", 1 for every other length."""
    return float(len(response) % 2) if prompt.label == "luck" else float(prompt.label)


def names_color(prompt: Prompt, response: str) -> float:
    """A letter of the first half of the alphabet for a red picture, of the second half for a blue one."""
    half = "abcdefghijklm" if prompt.label == "red" else "nopqrstuvwxyz"
    return float(response[:1].lower() in tuple(half))


def killed_once(prompt: Prompt, response: str) -> float:
    """Kills rank 1 in its third rollout, unless the file that KILLED names says that it has done so."""
    _calls.append(response)
    marker = Path(os.environ["KILLED"])
    if os.environ["RANK"] == "1" and len(_calls) == 20 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return variety(prompt, response)


_calls: list[str] = []


def half_a_second(prompt: Prompt, response: str) -> float:
    """In all samples of a rank together."""
    time.sleep(float(os.environ.get("SECONDS", "0.5")) / 16)
    return variety(prompt, response)


def zeros(rewards: list[float], lengths: list[int]) -> list[float]:
    """An advantage estimator."""
    return [0.0] * len(rewards)


def below_64_tokens(rewards: list[float], lengths: list[int]) -> list[float]:
    return [float(length < 64) for length in lengths]
