"""The two stages of the examples: warm up the quickstart's model on demonstrations, then train it with GRPO.

Both run the `fsdptrain` command, as for a large model.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from fsdptrain.tools.demo.demo import run_command
from fsdptrain.tools.demo.model import save_start

Row = Mapping[str, Any]  # `prompt`, and `response` or `label`
NUM_DEMONSTRATIONS = 20_000
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}  # two heads learn later to copy results
BOTH = ["--no-bf16", "--max-tokens-per-gpu", "4096", "--adam-beta2", "0.99"]
WARM_UP = [
    *("--algorithm", "sft", "--label-key", "response", "--lr", "4e-3", "--min-lr", "4e-4", "--lr-warmup-iters", "20"),
    *("--lr-decay-style", "cosine", "--rollout-batch-size", "64", "--eval-interval", "0", "--keep-last", "0"),
]
GRPO = [
    *("--system-prompt", "", "--rollout-max-response-len", "40", "--eval-size", "128"),
    *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--lr", "3e-4", "--lr-warmup-iters", "5"),
    *("--global-batch-size", "64"),
]


def build_parser(doc: str, folder: str, *, warm_up_steps: int, rollouts: int) -> ArgumentParser:
    """Return the options of an example, with its defaults. The first line of `doc` describes it."""
    parser = ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path(folder))
    parser.add_argument("--warm-up-steps", type=int, default=warm_up_steps)
    parser.add_argument("--rollouts", type=int, default=rollouts)
    return parser


def warm_up(args: Namespace, demonstrations: Iterable[Row], words: Sequence[str]) -> None:
    """Train an untrained model on rows of `prompt` and `response`. Each of the `words` is one token."""
    folder: Path = args.output_dir
    save_start(folder / "start", seed=args.seed, words=words, **HEADS)
    data = write_rows(folder / "demonstrations.jsonl", demonstrations)
    flags = ["--hf-checkpoint", str(folder / "start"), "--prompt-data", str(data), *WARM_UP]
    _run(args, "sft", [*flags, "--num-rollout", str(args.warm_up_steps)])


def reinforce(args: Namespace, flags: Sequence[str], shown: Sequence[str]) -> None:
    """Train the warm model with GRPO and print the metrics `shown`, before and after. `flags` override GRPO."""
    folder: Path = args.output_dir
    count = str(args.rollouts)
    flags = ["--hf-checkpoint", str(folder / "sft" / "hf"), *GRPO, *flags]
    _run(args, "grpo", [*flags, "--num-rollout", count, "--eval-interval", count])
    rows = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    for name in shown:
        values = [row[name] for row in rows if name in row]
        print(f"{name}: {values[0]:.3f} -> {values[-1]:.3f}")


def write_tasks(folder: Path, rows: Iterable[Row], held_out: Iterable[Row]) -> list[str]:
    """Write rows to train and to evaluate on, and return the flags that name them."""
    names = {"--prompt-data": write_rows(folder / "tasks.jsonl", rows)}
    names["--eval-prompt-data"] = write_rows(folder / "held_out.jsonl", held_out)
    return [str(part) for pair in names.items() for part in pair]


def write_rows(target: Path, rows: Iterable[Row]) -> Path:
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def say(content: str) -> dict[str, str]:
    """Return a message of the model."""
    return {"role": "assistant", "content": content}


def _run(args: Namespace, stage: str, flags: Sequence[str]) -> None:
    seeds = ["--seed", str(args.seed), "--rollout-seed", str(args.seed)]
    try:
        run_command([*flags, *BOTH, *seeds, "--output-dir", str(args.output_dir / stage)])
    except CalledProcessError as error:  # the command has printed the error
        sys.exit(error.returncode)
