"""`fsdptrain demo`: create a tokenizer and a model, warm it up, and train it with GRPO.

GRPO selects and sharpens a behavior from the warm-up (think first, then answer). Half of the demonstrations of the
warm-up answer at once and are mostly wrong. Both stages run the `fsdptrain` command, as for a large model.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdptrain.config.flags import Option, parse
from fsdptrain.errors import ConfigError

HEADINGS = {
    "sft": "[2/3] Warm-up: imitate a careful and a hasty demonstrator",
    "grpo": "[3/3] GRPO: learn from the reward alone which of them is right",
}
MARK = ".fsdptrain-demo"  # marks a folder that the next demo may replace
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # one thread is faster for a small model
OPTIONS = {
    "seed": Option("--seed", int, "Seed of the weights, the demonstrations and both stages.", 0),
    "output_dir": Option("--output-dir", str, "Folder to write, new or of an earlier demo.", "runs/quickstart"),
    "warm_up_steps": Option("--warm-up-steps", int, "Steps of the warm-up. [optimizer steps]", 700),
    "rollouts": Option("--rollouts", int, "Rollouts of GRPO. [rollouts]", 30),
}
LEAST = {"warm_up_steps": 21, "rollouts": 1}  # the recipe warms the learning rate up for 20 steps
USAGE = """\
Warm up a model of 0.1 M parameters and train it with GRPO.

About a minute on two cores; needs no GPU and no network."""


def demo(argv: Sequence[str]) -> int:
    """Run the demo in --output-dir. Returns the exit code of the command that failed, or 0."""
    values = {key: option.default for key, option in OPTIONS.items()} | parse(argv, OPTIONS)
    for key, least in LEAST.items():
        if values[key] < least:
            raise ConfigError(f"{OPTIONS[key].flag} must be at least {least}, got {values[key]}")
    counts = {"sft": values["warm_up_steps"], "grpo": values["rollouts"]}
    try:
        play(Path(values["output_dir"]), values["seed"], counts)
    except subprocess.CalledProcessError as error:  # the command has printed the error
        return error.returncode
    return 0


def play(folder: Path, seed: int, counts: Mapping[str, int]) -> None:
    """Run all stages in an empty `folder`. counts: rollouts by stage."""
    clear(folder)
    seconds: dict[str, float] = {}
    begin = time.monotonic()
    prepare(folder, seed)
    seconds["prepare"] = time.monotonic() - begin
    for stage, recipe, flags in stages(folder, seed):
        begin = time.monotonic()
        print(f"\n{HEADINGS[stage]}", end="", flush=True)
        run_command(["--recipe", recipe, *flags, "--num-rollout", str(counts[stage])])
        seconds[stage] = time.monotonic() - begin
    finish(folder, seconds)


def clear(folder: Path) -> None:
    """Create an empty folder. Replaces that of an earlier demo; raises ConfigError if the folder has other contents."""
    used = folder.is_dir() and any(folder.iterdir())
    if (folder.exists() and not folder.is_dir()) or (used and not (folder / MARK).is_file()):
        raise ConfigError(f"--output-dir {folder} is not a demo folder: choose a new folder, or delete it")
    if used:
        print(f"Replacing the demo in {folder}; --output-dir NEW_FOLDER keeps it.", flush=True)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def stages(folder: Path, seed: int) -> list[tuple[str, str, list[str]]]:
    """Return (name, recipe, flags) of both commands."""
    both = ["--seed", str(seed), "--rollout-seed", str(seed)]
    warm_up = ["--hf-checkpoint", str(folder / "start"), "--prompt-data", str(folder / "demonstrations.jsonl")]
    grpo = ["--hf-checkpoint", str(folder / "sft" / "hf")]
    return [
        ("sft", "spell_backward_sft_demo", [*warm_up, *both, "--output-dir", str(folder / "sft")]),
        ("grpo", "spell_backward_demo", [*grpo, *both, "--output-dir", str(folder / "grpo")]),
    ]


def prepare(folder: Path, seed: int) -> None:
    """Write the untrained model and the demonstrations, without the words that GRPO is evaluated on."""
    from transformers.utils import logging

    from fsdptrain.config.recipe import load_recipe
    from fsdptrain.tools.demo.corpus import write_demonstrations
    from fsdptrain.tools.demo.model import save_start

    logging.disable_progress_bar()
    heading = "[1/3] Building a tokenizer and a Qwen3 of 0.1 M parameters, and writing 20,000 demonstrations ..."
    print(heading, flush=True)
    save_start(folder / "start", seed=seed)
    config = load_recipe("spell_backward_demo", seed=seed, rollout_seed=seed)
    write_demonstrations(folder / "demonstrations.jsonl", config, count=20_000)


def run_command(flags: list[str]) -> None:
    print("\n$ fsdptrain " + shlex.join(flags), flush=True)
    subprocess.run([sys.executable, "-m", "fsdptrain", *flags], check=True, env={**ENVIRONMENT, **os.environ})


def finish(folder: Path, seconds: dict[str, float]) -> None:
    """Write summary.json and the report of the GRPO run, and print their paths."""
    from fsdptrain.tools.watch.run_data import RunData

    run = RunData(folder / "grpo", "grpo")
    run.poll()
    (_, sampled), (_, greedy) = (run.curves[f"eval/{name}/accuracy"] for name in ("heldout", "heldout_greedy"))
    summary = {
        "accuracy_before": sampled[0],
        "accuracy_after": sampled[-1],
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "seconds": {stage: round(value, 1) for stage, value in seconds.items()},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    print(flush=True)
    run_command(["report", str(folder / "grpo")])
    show(folder, summary, sampled)


def show(folder: Path, summary: dict, accuracies: Sequence[float]) -> None:
    print(
        f"\nHeld-out accuracy, sampled: {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}, ", end=""
    )
    print(f"greedy: {summary['greedy_before']:.3f} -> {summary['greedy_after']:.3f}; ", end="")
    print(f"{sum(summary['seconds'].values()):.0f} s")
    print(
        "  "
        + "".join("▁▂▃▄▅▆▇█"[round(7 * value)] for value in accuracies)
        + "  accuracy from 0 to 1, over the rollouts"
    )
    for name, what in (
        ("grpo/report.html", "curves and samples"),
        ("summary.json", "these numbers"),
        ("grpo/hf", "the model, for from_pretrained"),
    ):
        print(f"  {folder / name}  {what}")
