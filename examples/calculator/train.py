"""Teach a model of 0.1 M parameters to use a calculator: warm-up on conversations, then GRPO on episodes.

    python examples/calculator/train.py [--agent] [--seed 0] [--output-dir runs/calculator]

The task is reasoning-gym's `products` of two-digit numbers, which the model cannot compute itself. The warm-up imitates
two demonstrators: one uses the calculator and is right, one guesses. GRPO learns from the reward alone to use the
calculator. With `--agent` the episodes are those of an agent of the OpenAI Agents SDK (agent.py) instead of an
environment (calculator.py).
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of a script, only its folder is on the path

from examples.stages import NUM_DEMONSTRATIONS, build_parser, reinforce, say, warm_up

TAGS = ("<tool>", "</tool>")
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
QUESTION = (
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
)  # as in reasoning-gym
WORDS = [*TAGS, "<answer>", "</answer>", *CALL, *QUESTION]
DATA = "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
ENVIRONMENT = ["--environment", "examples.calculator.calculator:Calculator", "--max-turns", "3"]
AGENT = ["--environment", "examples.calculator.agent:run_episode"]
TASK = ["--prompt-data", f"{DATA}&size=5000", "--reward", "reasoning_gym_strict"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser(str(__doc__), "runs/calculator", warm_up_steps=300, rollouts=20)
    parser.add_argument("--agent", action="store_true", help="train an agent of the OpenAI Agents SDK")
    args = parser.parse_args(argv)
    warm_up(args, demonstrations(args.seed, agent=args.agent), WORDS)
    episodes = AGENT if args.agent else ENVIRONMENT
    reinforce(args, [*TASK, *episodes], ["eval/heldout/accuracy", "episode/several_turns_fraction"])


def demonstrations(seed: int, *, agent: bool = False) -> Iterator[dict[str, Any]]:
    """Yield conversations, half of which use the calculator and half of which guess.

    A response is a list of messages, with tool messages between the assistant's turns; only these have a loss.

    agent: write tool calls as an agent expects them, in JSON
    """
    rng, call = Random(seed), CALL if agent else TAGS
    for _ in range(NUM_DEMONSTRATIONS):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        turns = asks(a, b, call) if rng.random() < 0.5 else guesses(rng)
        yield {"prompt": f"{a} * {b}".join(QUESTION), "response": turns}


def asks(a: int, b: int, call: Sequence[str]) -> list[dict[str, str]]:
    result = str(a * b)
    return [say(f"{a} * {b}".join(call)), {"role": "tool", "content": result}, say(f"<answer>{result}</answer>")]


def guesses(rng: Random) -> list[dict[str, str]]:
    return [say(f"<answer>{rng.randint(10, 99) * rng.randint(10, 99)}</answer>")]


if __name__ == "__main__":
    main()
