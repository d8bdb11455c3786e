"""A GRPO run of a random model that must learn: the command line in its own process, on a GPU where there is one.

    python benchmarks/learns.py --json benchmarks/results/learns.json    # under a minute

The reward is the share of the letters of a response that are `a`. It needs no package beyond those of a plain run.
Exits with code 1 if the mean reward does not rise by 0.3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from random_checkpoint import shape, write_random
from record import ROOT, header, write

from fsdptrain.types import Prompt

RISE = 0.3
OPTIONS = ["--reward", "learns:share_of_a", "--num-rollout", "20", "--rollout-batch-size", "8"]
OPTIONS += ["--n-samples-per-prompt", "8", "--rollout-max-response-len", "16", "--lr", "1e-2", "--adam-beta2", "0.99"]
OPTIONS += ["--eval-interval", "0"]


def share_of_a(prompt: Prompt, response: str) -> float:
    del prompt
    return response.count("a") / max(1, len(response))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="changes nothing: it is always small")
    parser.add_argument("--json", type=Path, help="path of the report")
    options, begin = parser.parse_args(), header()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_random(folder / "model", shape("tiny"), seed=0)
        rows = [json.dumps({"prompt": f"{number}: write a", "label": ""}) for number in range(64)]
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        paths = ["--hf-checkpoint", folder / "model", "--prompt-data", folder / "prompts.jsonl"]
        start = perf_counter()
        argv = [sys.executable, "-m", "fsdptrain", *paths, "--output-dir", folder / "run", *OPTIONS]
        subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"})
        seconds = perf_counter() - start
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    found = {"first": rewards[0], "last": rewards[-1], "s": round(seconds, 1)}
    write(options.json, {**begin, **found, "rewards": rewards})
    print(json.dumps(found))
    sys.exit(0 if rewards[-1] - rewards[0] > RISE else 1)


if __name__ == "__main__":
    main()
