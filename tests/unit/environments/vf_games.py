"""Environments of verifiers, as a package of its hub would have them: `load_environment`."""

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"Guess {n}", "answer": str(n)} for n in range(4)])


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        state["tries"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["tries"] += 1
        said = messages[-1].content
        if said == "crash":
            raise vf.ToolError("the game has crashed")
        if said == "bug":
            raise KeyError("bug")
        if said == "hang":
            await asyncio.sleep(1000)
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"try {state['tries']}: not {said}"}]


def right(completion: Any, answer: str) -> float:
    return float(any(m.role == "assistant" and m.content == answer for m in completion))


def quick(state: Any) -> float:
    return 1.0 / len(state["trajectory"])


async def times(a: int, b: int) -> int:
    """The product.

    Args:
        a: one number
        b: another
    """
    return a * b


class Rewriting(Guess):
    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        return messages if len(messages) <= 2 else messages[-1:]


def load_environment(kind: str = "guess", max_turns: int = 4) -> vf.Environment:
    rubric = vf.Rubric(funcs=[right, quick], weights=[1.0, 0.5])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric, system_prompt="Be brief.")
    if kind == "tools":
        return vf.ToolEnv(dataset=ROWS, tools=[times], rubric=vf.Rubric(funcs=[right]), max_turns=max_turns)
    cls = Rewriting if kind == "rewriting" else Guess
    return cls(dataset=ROWS, rubric=rubric, system_prompt="Be brief.", max_turns=max_turns)
