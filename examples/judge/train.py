"""Teach a model of 0.1 M parameters to be polite, with the scores of a judge behind an OpenAI-compatible API.

    python examples/judge/train.py [--seed 0] [--output-dir runs/judge]

A task is `Ask Anna for the salt.` The warm-up imitates people who use each of three courtesies half of the time. GRPO
learns from `--reward judge` alone to use all of them. The judge (judge.py) is a rule that stands in for a language
model. To use a real one, replace `serve()` in `main` by `nullcontext(("https://host/v1", "its name", "its key"))`.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of a script, only its folder is on the path

from examples.judge.judge import serve
from examples.stages import NUM_DEMONSTRATIONS, build_parser, reinforce, warm_up, write_tasks

PEOPLE = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Klara", "Leo"]
THINGS = ["bread", "butter", "jam", "knife", "milk", "pepper", "plate", "salt", "spoon", "sugar", "tea", "water"]
VERBS = (", give me the ", ", could you give me the ")
PLEASE = ("", ", please")
ENDS = (".", ". Thank you.")
WORDS = ["Ask ", " for the ", *PEOPLE, *THINGS, *VERBS, PLEASE[1], ENDS[1]]
RUBRIC = Path(__file__).with_name("rubric.txt")
NUM_HELD_OUT = 44  # of 144 tasks


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser(str(__doc__), "runs/judge", warm_up_steps=150, rollouts=20).parse_args(argv)
    tasks = list(product(PEOPLE, THINGS))
    Random(args.seed).shuffle(tasks)
    held_out, tasks = tasks[:NUM_HELD_OUT], tasks[NUM_HELD_OUT:]
    warm_up(args, demonstrations(tasks, args.seed), WORDS)
    data = write_tasks(args.output_dir, map(row_of, tasks), map(row_of, held_out))
    with serve() as (url, model, key):
        os.environ["JUDGE_API_KEY"] = key
        judge = ["--reward", "judge", "--judge-url", url, "--judge-model", model, "--judge-rubric", str(RUBRIC)]
        reinforce(args, [*judge, *data, "--label-key", ""], ["eval/heldout/reward_mean"])


def row_of(task: tuple[str, str]) -> dict[str, str]:
    person, thing = task
    return {"prompt": f"Ask {person} for the {thing}."}


def demonstrations(tasks: Sequence[tuple[str, str]], seed: int) -> Iterator[dict[str, str]]:
    """Yield tasks and requests, which use each courtesy half of the time."""
    rng = Random(seed)
    for _ in range(NUM_DEMONSTRATIONS):
        person, thing = task = rng.choice(tasks)
        request = person + rng.choice(VERBS) + thing + rng.choice(PLEASE) + rng.choice(ENDS)
        yield {**row_of(task), "response": request}


if __name__ == "__main__":
    main()
