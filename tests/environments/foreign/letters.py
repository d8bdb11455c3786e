"""A taskset of verifiers whose user asks for more until the agent has no turns left. Some words make it fail."""
# pyright: reportMissingImports=false

import os
import time
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LettersEnv", "LettersTaskset"]


class LettersConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("one", "two", "three", "four")


class LettersData(vf.TaskData):
    word: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def letters(self, trace: vf.Trace) -> float:
        return float(sum(len(message.content or "") for message in trace.assistant_messages))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.metric
    async def tokens(self, trace: vf.Trace) -> float:
        return float(trace.usage.completion_tokens if trace.usage else 0)


class LettersEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class LettersEnv(vf.Env[LettersEnvConfig]):
    async def run(self, task: LettersTask, agents: vf.Agents) -> None:
        match task.data.word:
            case "dies":
                os._exit(3)
            case "blocks":
                time.sleep(600)
            case "raises":
                raise ValueError("no such\nword")
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                segment = await interaction.turn("more")


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> Iterator[LettersTask]:
        for word in self.config.words:
            yield LettersTask(LettersData(prompt=f"say {word}", system_prompt="speak", word=word), self.config.task)
