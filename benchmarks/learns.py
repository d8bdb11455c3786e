"""A GRPO run of a random model that must learn, on a GPU where there is one.

    python benchmarks/learns.py --json benchmarks/results/learns.json    # under a minute

The reward is the share of the letters of a response that are `a`. Needs no package for data or rewards. Exits with code
1 if the mean reward does not rise by 0.3.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from random_checkpoint import shape, write_random
from record import header, write

from fsdptrain import Config, Trainer
from fsdptrain.types import Prompt

RISE = 0.3


def share_of_a(prompt: Prompt, response: str) -> float:
    del prompt
    return response.count("a") / max(1, len(response))


def train(folder: Path) -> list[float]:
    """Return the mean reward of each step."""
    write_random(folder / "model", shape("tiny"), seed=0)
    config = Config(
        hf_checkpoint=str(folder / "model"),
        output_dir=str(folder / "run"),
        num_rollout=20,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        rollout_max_response_len=16,
        lr=1e-2,
        adam_beta2=0.99,
        kl_loss_coef=0.0,
        eval_interval=0,
    )
    rows = [{"prompt": f"{number}: write a", "label": ""} for number in range(64)]
    Trainer(config, reward=share_of_a, dataset=rows).fit()
    found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["reward/mean"] for row in found if "reward/mean" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="changes nothing: it is always small")
    parser.add_argument("--json", type=Path, help="path of the report")
    options, begin, start = parser.parse_args(), header(), perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rewards = train(Path(folder))
    found = {"first": rewards[0], "last": rewards[-1], "s": round(perf_counter() - start, 1)}
    write(options.json, {**begin, **found, "rewards": rewards})
    print(json.dumps(found))
    sys.exit(0 if rewards[-1] - rewards[0] > RISE else 1)


if __name__ == "__main__":
    main()
