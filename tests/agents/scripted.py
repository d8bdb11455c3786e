"""Episodes in memory, whose answers follow from the calls. A token is a character."""

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

from fsdptrain.agents.calls import Answer, CallError, Choice, ModelCall, ToolCall

KEY = "episode-1"


class ScriptedEpisodes:
    """Echoes the last message. Calls the first tool for each word of a user's message, and reads results aloud."""

    model = "org/tiny"

    def __init__(self) -> None:
        self.keys = {KEY}
        self.calls: list[ModelCall] = []
        self.rewards: list[tuple[str, Any]] = []
        self.num_waiting = 0
        self.cancelled, self.release = threading.Event(), threading.Event()

    def is_open(self, key: str) -> bool:
        return key in self.keys

    async def answer(self, key: str, call: ModelCall) -> Answer:
        self.calls.append(call)
        prompt = self._prompt(call)
        if prompt.endswith("wait"):
            await self._wait()
        elif prompt.endswith("refuse"):
            raise CallError(400, "the prompt is too long", param="messages", code="context_length_exceeded")
        elif prompt.endswith("fail"):
            raise ZeroDivisionError("the engine\nfailed")
        return Answer([ord(letter) for letter in prompt], [self._choice(call) for _ in range(call.num_choices)])

    async def _wait(self) -> None:
        self.num_waiting += 1
        try:
            while not self.release.is_set():
                await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_waiting -= 1

    def add_reward(self, key: str, reward: Any) -> None:
        self.rewards.append((key, reward))

    def _prompt(self, call: ModelCall) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in call.messages)

    def _choice(self, call: ModelCall) -> Choice:
        last: Mapping[str, Any] = call.messages[-1]
        text, calls, reason = last["content"], [], "stop"
        if call.tools and last["role"] == "user":
            name = call.tools[0]["function"]["name"]
            cities = [json.dumps({"city": word}) for word in text.split()]
            calls = [ToolCall(f"call_{index}", name, city) for index, city in enumerate(cities)]
            text, reason = "".join(cities), "tool_calls"
        for stop in call.stop:
            text = text.partition(stop)[0]
        if call.max_tokens is not None and len(text) > call.max_tokens:
            text, reason, calls = text[: call.max_tokens], "length", []
        logprobs = [-0.5 * index for index in range(len(text))]
        return Choice(calls, "" if calls else text, reason, [ord(letter) for letter in text], list(text), logprobs)  # type: ignore[arg-type]
