"""Rewards that worker processes import. The response says what they do."""

import asyncio
import ctypes
import os
import re
import sys
import time
from typing import Any

from fsdptrain.types import Prompt


def obedient(prompt: Prompt, response: str) -> float | None:
    if response == "regex":  # holds the GIL
        os.write(1, b"hangs\n")
        re.fullmatch(r"(a*)*b", "a" * 60)
    if response == "leaves a process" and not os.fork():
        time.sleep(600)
    if response in ("_exit", "leaves a process"):
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "exit":
        sys.exit(1)
    if response == "raise":
        raise ValueError("no\nsecond line")
    if response == "canceled":
        raise asyncio.CancelledError
    if response == "none":
        return None
    if response == "pid":
        return float(os.getpid())
    if response == "torch":
        return float("torch" in sys.modules)
    return float(response)


def sleeps(prompt: Prompt, response: str) -> float:
    if "path" in prompt.metadata:
        with open(prompt.metadata["path"], "a") as calls:
            calls.write(f"{os.getpid()}\n")
    time.sleep(float(response))
    return float(response)


def hangs_at_zero(prompt: Prompt, response: str) -> float:
    time.sleep(0.0 if float(response) else 600)
    return 1.0


class Unloadable:
    """Pickles, and does not load."""

    def __call__(self, prompt: Prompt, response: str) -> float:
        return obedient(prompt, response) or 0.0

    def __reduce__(self) -> Any:
        return int, ("x",)


_together: dict[asyncio.AbstractEventLoop, tuple[list[str], asyncio.Event]] = {}


async def judge(prompt: Prompt, response: str) -> float | None:
    if response == "block":
        time.sleep(20)
    if response == "late":
        await asyncio.sleep(600)
    if response == "together":  # sixty of these wait for each other
        arrived, all_here = _together.setdefault(asyncio.get_running_loop(), ([], asyncio.Event()))
        arrived.append(response)
        if len(arrived) == 60:
            all_here.set()
        await all_here.wait()
        return 1.0
    return obedient(prompt, response)


class Judge:
    async def __call__(self, prompts: list[Prompt], responses: list[str]) -> list[Any]:
        await asyncio.sleep(0)
        return lists(prompts, responses)


def lists(prompts: list[Prompt], responses: list[str]) -> list[Any]:
    if responses[0] == "short":
        return [1.0]
    return [obedient(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def of_trl(completions: list[Any], prompts: list[Any], answer: list[str], **columns: Any) -> list[float]:
    assert set(columns) == {"level"}
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(text == str(right)) + len(prompt) for text, right, prompt in zip(texts, answer, prompts, strict=True)]


def says_what_it_is_not(prompt: Prompt, response: str) -> float:
    raise ValueError(f"{response!r}, which is not a number")


def list_for_one(prompt: Prompt, response: str) -> Any:
    return [1.0]


def one_argument(response: str) -> float:
    return 1.0
