"""Rewards that worker processes import. The response says what they do."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from fsdptrain.types import Prompt


def obedient(prompt: Prompt, response: str) -> float | None:
    if response == "regex":  # holds the GIL
        re.fullmatch(r"(a*)*b", "a" * 60)
    if response == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL})
        time.sleep(600)
    if response == "starts a process":
        subprocess.run(["sleep", "614"], check=False)
    if response == "_exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "exit":
        sys.exit(1)
    if response == "raise":
        raise ValueError("no\nsecond line")
    if response == "none":
        return None
    if response == "pid":
        return float(os.getpid())
    if response == "torch":
        return float("torch" in sys.modules)
    return float(response)


def sleeps(prompt: Prompt, response: str) -> float:
    time.sleep(float(response))
    return float(response)


async def judge(prompt: Prompt, response: str) -> float | None:
    if response == "late":
        await asyncio.sleep(600)
    if response == "stubborn":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue
    if response == "slow":
        await asyncio.sleep(0.5)
        return 1.0
    return obedient(prompt, response)


def lists(prompts: list[Prompt], responses: list[str]) -> list[Any]:
    if responses[0] == "short":
        return [1.0]
    if responses[0] == "number":
        return 1.0  # type: ignore[return-value]
    return [obedient(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def of_trl(completions: list[Any], prompts: list[Any], answer: list[str], **columns: Any) -> list[float]:
    assert set(columns) == {"level"}
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(text == str(right)) + len(prompt) for text, right, prompt in zip(texts, answer, prompts, strict=True)]


def list_for_one(prompt: Prompt, response: str) -> Any:
    return [1.0]


def one_argument(response: str) -> float:
    return 1.0
