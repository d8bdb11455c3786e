"""Teach a model of 0.1 M parameters to win a game of several turns: guess a number from 1 to 31 in 5 turns.

    python examples/guess_number/train.py [--seed 0] [--output-dir runs/guess_number]

The warm-up imitates two players: one halves the range that is left and always wins, one ignores the hints and mostly
loses. GRPO learns from the reward of the game (game.py) alone which of them to follow.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of a script, only its folder is on the path

from examples.guess_number.game import GuessNumber
from examples.stages import NUM_DEMONSTRATIONS, build_parser, reinforce, say, warm_up

HIGHEST = 31
TURNS = 5  # enough for one who halves the range
GAME = GuessNumber(HIGHEST)
WORDS = ["Game ", GAME.rules, "higher", "lower"]
ENVIRONMENT = ["--environment", "examples.guess_number.game:GuessNumber", "--environment-kwargs", f"highest={HIGHEST}"]
TASK = [*ENVIRONMENT, "--prompt-data", "environment", "--max-turns", str(TURNS)]


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser(str(__doc__), "runs/guess_number", warm_up_steps=300, rollouts=20).parse_args(argv)
    warm_up(args, demonstrations(args.seed), WORDS)
    reinforce(args, TASK, ["eval/heldout/accuracy", "episode/turns_mean"])


def demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """Yield whole games, half of which follow the hints."""
    rng, prompts = Random(seed), GAME.dataset()
    for _ in range(NUM_DEMONSTRATIONS):
        messages = play(rng.randint(1, HIGHEST), rng, follow_hints=rng.random() < 0.5)
        yield {"prompt": rng.choice(prompts)["prompt"], "response": messages}


def play(number: int, rng: Random, *, follow_hints: bool) -> list[dict[str, str]]:
    """Return the messages of a game. It ends with a guess, the right one or that of the last turn."""
    low, high, messages = 1, HIGHEST, []
    for _ in range(TURNS):
        guess = (low + high) // 2 if follow_hints else rng.randint(1, HIGHEST)
        turn = GAME.step(number, str(guess))
        messages += [say(str(guess)), {"role": "user", "content": str(turn.observation)}]
        if turn.done:
            break
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return messages[:-1]


if __name__ == "__main__":
    main()
