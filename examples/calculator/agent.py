"""The calculator as the tool of an agent, written with the OpenAI Agents SDK as for any other model.

    fsdptrain --hf-checkpoint Qwen/Qwen3-0.6B --environment examples.calculator.agent:run_episode \\
              --prompt-data reasoning_gym:products --reward reasoning_gym --rollout-max-prompt-len 512

The episode gives no reward: `--reward` scores the last response.
"""

from contextlib import suppress

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError

from examples.calculator.calculator import answer
from fsdptrain.types import Prompt

set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression of numbers, + - * / // % ** and brackets.

    Args:
        expression: for example 12 * (3 + 4)
    """
    return answer(expression)


async def run_episode(client: AsyncOpenAI, prompt: Prompt) -> None:
    model = OpenAIChatCompletionsModel("policy", openai_client=client)
    with suppress(MaxTurnsExceeded, BadRequestError):  # too many calls, or the context is full
        await Runner.run(Agent("calculator", model=model, tools=[calculator]), str(prompt.source), max_turns=3)
