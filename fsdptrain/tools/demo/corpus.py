"""Demonstrations for the warm-up, by two demonstrators.

`careful` spells the word backward in <think> and is right. `hasty` answers at once with swapped letters and is mostly
wrong. The warm-up imitates both; GRPO learns from the reward alone which one is right.
"""

import json
from pathlib import Path
from random import Random

from fsdptrain.config import Config
from fsdptrain.data.held_out import split_rows
from fsdptrain.data.rows import Row
from fsdptrain.data.sources import load_rows


def write_demonstrations(target: Path, config: Config, *, count: int) -> Path:
    """Write up to `count` prompts and responses, without words that the run of `config` holds out for evaluation."""
    rows = load_rows(config.data, seed=config.run.seed)
    train, held_out = split_rows(rows, config.data.eval_size or 0, config.run.seed)
    unseen = {word_of(row).lower() for row in held_out}
    rng = Random(config.run.seed)
    with target.open("w") as file:
        for index in rng.sample(range(len(train)), count):
            row = train[index]
            if word_of(row).lower() not in unseen:
                demonstrate = rng.choice([careful, hasty])
                file.write(json.dumps({"prompt": row.prompt, "response": demonstrate(str(row.label), rng)}) + "\n")
    return target


def word_of(row: Row) -> str:
    return str(row.label)[::-1]


def careful(answer: str, rng: Random) -> str:
    del rng
    return f"<think>{answer}</think><answer>{answer}</answer>"


def hasty(answer: str, rng: Random) -> str:
    """Swap neighboring letters one to three times, which is wrong unless the swaps cancel or swap equal letters."""
    letters = list(answer)
    for _ in range(rng.randint(1, 3)):
        left = rng.randrange(len(letters) - 1)
        letters[left : left + 2] = letters[left + 1], letters[left]
    return f"<think></think><answer>{''.join(letters)}</answer>"
