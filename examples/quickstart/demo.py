"""`make demo`: a tokenizer, a model, a warm-up, GRPO, and a picture of what happened. All by the real command line.

    python examples/quickstart/demo.py [--seed 0] [--output-dir runs/quickstart]

It shows that GRPO selects and sharpens a behaviour that the warm-up taught (think first, then answer); the hasty half
of the warm-up is wrong on purpose. It does not show a new skill learnt from nothing. Everything else is as in a run of
a model of 4 B parameters: the same command, the same code.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # so small a model is faster on one thread


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Warm up a small model, train it with GRPO, plot what happened.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/quickstart"))
    args = parser.parse_args(argv)
    folder: Path = args.output_dir
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seconds: dict[str, float] = {}
    begin = time.monotonic()
    prepare(folder, args.seed)
    seconds["prepare"] = time.monotonic() - begin
    for stage, recipe, flags in stages(folder, args.seed):
        begin = time.monotonic()
        run_command(["--recipe", str(ROOT / "recipes" / recipe), *flags])
        seconds[stage] = time.monotonic() - begin
    finish(folder, seconds)


def stages(folder: Path, seed: int) -> list[tuple[str, str, list[str]]]:
    """(name, recipe, flags) of both commands."""
    both = ["--seed", str(seed), "--rollout-seed", str(seed)]
    warm_up = ["--hf-checkpoint", str(folder / "start"), "--prompt-data", str(folder / "demonstrations.jsonl")]
    grpo = ["--hf-checkpoint", str(folder / "sft" / "hf")]
    return [
        ("sft", "quickstart_sft.yaml", [*warm_up, *both, "--output-dir", str(folder / "sft")]),
        ("grpo", "quickstart.yaml", [*grpo, *both, "--output-dir", str(folder / "grpo")]),
    ]


def prepare(folder: Path, seed: int) -> None:
    """The untrained model and the demonstrations; words that GRPO will be evaluated on are left out of them."""
    from corpus import write_demonstrations
    from model import save_start
    from transformers.utils import logging

    from fsdptrain.config import load_recipe

    logging.disable_progress_bar()

    print("Building a tokenizer and a Qwen3 of 0.1 M parameters, and writing 20,000 demonstrations ...", flush=True)
    save_start(folder / "start", seed=seed)
    config = load_recipe(ROOT / "recipes" / "quickstart.yaml", seed=seed, rollout_seed=seed)
    write_demonstrations(folder / "demonstrations.jsonl", config, count=20_000)


def run_command(flags: list[str]) -> None:
    print("\n$ fsdptrain " + " ".join(flags), flush=True)
    subprocess.run([sys.executable, "-m", "fsdptrain", *flags], check=True, env={**ENVIRONMENT, **os.environ})


def finish(folder: Path, seconds: dict[str, float]) -> None:
    """summary.json, curves.png, samples.md, and a table."""
    from fsdptrain.planning.curves import draw_curves, read_series

    _, sampled = read_series(folder / "grpo", "eval/heldout/accuracy")
    _, greedy = read_series(folder / "grpo", "eval/heldout_greedy/accuracy")
    summary = {
        "accuracy_before": sampled[0],
        "accuracy_after": sampled[-1],
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "seconds": {stage: round(value, 1) for stage, value in seconds.items()},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    draw_curves(folder / "grpo", folder / "curves.png")
    write_samples(folder)
    show(folder, summary)


def write_samples(folder: Path) -> None:
    """The same held-out questions before and after."""
    rows = [json.loads(line) for line in (folder / "grpo" / "samples.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if row["set"] == "heldout"]
    steps = sorted({row["step"] for row in held_out})
    lines = ["| question | before | | after | |", "|---|---|---|---|---|"]
    for first, last in zip(
        *([row for row in held_out if row["step"] == s] for s in (steps[0], steps[-1])), strict=True
    ):
        question = first["prompt"].removeprefix("<|user|>").removesuffix("<|assistant|>")
        cells = [question, first["response"], mark(first), last["response"], mark(last)]
        lines.append("| " + " | ".join(f"`{cell}`" if len(cell) > 1 else cell for cell in cells) + " |")
    (folder / "samples.md").write_text("\n".join(lines) + "\n")


def mark(row: dict[str, float]) -> str:
    return "✓" if row["reward"] == 1.0 else "✗"


def show(folder: Path, summary: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="spell_backward, 256 words that were never trained on", title_justify="left")
    for column in ("accuracy", "before GRPO", "after GRPO"):
        table.add_column(column, justify="left" if column == "accuracy" else "right")
    for row, name in (("sampled, temperature 1", "accuracy"), ("greedy", "greedy")):
        table.add_row(row, f"{summary[f'{name}_before']:.3f}", f"{summary[f'{name}_after']:.3f}")
    console = Console()
    console.print(table)
    total = sum(summary["seconds"].values())
    console.print(f"{total:.0f} s. Look at {folder}/curves.png and {folder}/samples.md; model: {folder}/grpo/hf")


if __name__ == "__main__":
    main()
