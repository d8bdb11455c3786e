"""Teach a model of 0.1 M parameters to write programs that pass their tests, in a sandbox.

    python examples/code/train.py [--seed 0] [--output-dir runs/code]

A task is `Read x. Add 12, then multiply by 3. Print the result.` The warm-up imitates two programmers: one sets
brackets, one forgets them, so that Python multiplies first. GRPO learns from `--reward code` alone to set them: each
program runs on two inputs, and the reward is 1 if it prints both outputs.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of a script, only its folder is on the path

from examples.stages import NUM_DEMONSTRATIONS, build_parser, reinforce, warm_up, write_tasks

VERBS = {"+": "Add", "-": "Subtract"}
ENDS = ("```python\nprint(", ")\n```")
WORDS = ["Read x. ", *VERBS.values(), ", then multiply by ", ". Print the result.", *ENDS, "int(input())"]
NUM_HELD_OUT = 64
# 128 tests in a rollout: each starts Python in a sandbox, which takes 0.07 s of a core.
SMALLER = ["--rollout-batch-size", "8", "--global-batch-size", "32", "--lr", "5e-4"]
Task = tuple[str, int, int]  # sign, first number, factor


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser(str(__doc__), "runs/code", warm_up_steps=150, rollouts=10).parse_args(argv)
    tasks = list(product(VERBS, range(1, 100), range(2, 10)))
    Random(args.seed).shuffle(tasks)
    held_out, tasks = tasks[:NUM_HELD_OUT], tasks[NUM_HELD_OUT:]
    warm_up(args, demonstrations(tasks, args.seed), WORDS)
    data = write_tasks(args.output_dir, map(row_of, tasks), map(row_of, held_out))
    reinforce(args, ["--reward", "code", *SMALLER, *data], ["eval/heldout/accuracy"])


def row_of(task: Task) -> dict[str, Any]:
    """Return the task in words, and its tests."""
    sign, number, factor = task
    results = {x: (x + number if sign == "+" else x - number) * factor for x in (5, 60)}
    return {
        "prompt": f"Read x. {VERBS[sign]} {number}, then multiply by {factor}. Print the result.",
        "label": [{"input": f"{x}\n", "output": f"{result}\n"} for x, result in results.items()],
    }


def demonstrations(tasks: Sequence[Task], seed: int) -> Iterator[dict[str, str]]:
    """Yield tasks and programs, half of which are right."""
    rng = Random(seed)
    for _ in range(NUM_DEMONSTRATIONS):
        task = rng.choice(tasks)
        yield {"prompt": row_of(task)["prompt"], "response": program(task, brackets=rng.random() < 0.5)}


def program(task: Task, *, brackets: bool) -> str:
    sign, number, factor = task
    first = f"int(input()) {sign} {number}"
    return (f"({first}) * {factor}" if brackets else f"{first} * {factor}").join(ENDS)


if __name__ == "__main__":
    main()
