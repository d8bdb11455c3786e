"""`fsdptrain demo`: create a tokenizer and a model, warm it up, and train it with GRPO; or train a real one.

GRPO selects and sharpens a behavior from the warm-up (think first, then answer). Half of the demonstrations of the
warm-up answer at once and are mostly wrong. With --model, GRPO teaches an instruct model sums of two digits. All stages
run the `fsdptrain` command, as for a large model.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from fsdptrain.config.flags import Option, asks_for_help, parse
from fsdptrain.errors import ConfigError
from fsdptrain.tools.demo.sums import write_sums

BUILDING = "[1/3] Building a tokenizer and a Qwen3 of 0.1 M parameters, and writing 20,000 demonstrations ..."
WARM_UP = "[2/3] Warm-up: imitate a careful and a hasty demonstrator"
GRPO = "[3/3] GRPO: learn from the reward alone which of them is right"
SUMS = "GRPO: learn sums of two digits from the reward alone"
MARK = ".fsdptrain-demo"  # marks a folder that the next demo may replace
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # is faster for a small model
OPTIONS = {
    "model": Option("--model", str, "Instruct model, a folder or a Hub name: skips the warm-up; learns sums.", None),
    "seed": Option("--seed", int, "Seed of the weights, the demonstrations and both stages.", 0),
    "output_dir": Option("--output-dir", str, "Folder to write, new or of an earlier demo.", "runs/quickstart"),
    "warm_up_steps": Option("--warm-up-steps", int, "Steps of the warm-up. [optimizer steps]", 700),
    "rollouts": Option("--rollouts", int, "Rollouts of GRPO. [rollouts]", 30),
}
LEAST = {"warm_up_steps": 21, "rollouts": 1}  # the recipe warms the learning rate up for 20 steps
USAGE = """\
Warm up a model of 0.1 M parameters and train it with GRPO.

One to two minutes on two cores; needs no GPU and no network. With --model, train that model on sums of two digits."""


def demo(argv: Sequence[str]) -> int:
    """Run the demo in --output-dir. Returns the exit code of the command that failed, or 0."""
    if asks_for_help(argv):
        from fsdptrain.help_text import print_options

        return print_options("fsdptrain demo", USAGE, OPTIONS)
    given = parse(argv, OPTIONS)
    values = {key: option.default for key, option in OPTIONS.items()} | given
    for key, least in LEAST.items():
        if values[key] < least:
            raise ConfigError(f"{OPTIONS[key].flag} must be at least {least}, got {values[key]}")
    if values["model"] is not None and "warm_up_steps" in given:
        raise ConfigError("--warm-up-steps: --model is trained without a warm-up; remove one of the two")
    try:
        play(Path(values["output_dir"]), **{key: value for key, value in values.items() if key != "output_dir"})
    except subprocess.CalledProcessError as error:  # the command has printed the error
        return error.returncode
    return 0


def play(folder: Path, *, model: str | None, seed: int, warm_up_steps: int, rollouts: int) -> None:
    """Run all stages in an empty `folder`."""
    clear(folder)
    seconds: dict[str, float] = {}
    both = ["--seed", str(seed), "--rollout-seed", str(seed)]
    if model is None:
        with timed(seconds, "prepare"):
            prepare(folder, seed)
        with timed(seconds, "sft"):
            files = ["--hf-checkpoint", str(folder / "start"), "--prompt-data", str(folder / "demonstrations.jsonl")]
            output = ["--output-dir", str(folder / "sft"), "--num-rollout", str(warm_up_steps)]
            run_command(["--recipe", "spell_backward_sft_demo", *files, *both, *output], WARM_UP, ONE_THREAD)
        grpo = ["--recipe", "spell_backward_demo", "--hf-checkpoint", str(folder / "sft" / "hf")]
    else:
        write_sums(folder / "sums.jsonl")
        grpo = ["--recipe", "sums_smollm2_135m", "--hf-checkpoint", model, "--prompt-data", str(folder / "sums.jsonl")]
    with timed(seconds, "grpo"):
        output = ["--output-dir", str(folder / "grpo"), "--num-rollout", str(rollouts)]
        run_command([*grpo, *both, *output], *((GRPO, ONE_THREAD) if model is None else (SUMS, {})))
    finish(folder, seconds)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - begin


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


def prepare(folder: Path, seed: int) -> None:
    """Write the untrained model and the demonstrations, without the words that GRPO is evaluated on."""
    from transformers.utils import logging

    from fsdptrain.config.recipe import load_recipe
    from fsdptrain.tools.demo.corpus import write_demonstrations
    from fsdptrain.tools.demo.model import save_start

    logging.disable_progress_bar()
    print(BUILDING, flush=True)
    save_start(folder / "start", seed=seed)
    config = load_recipe("spell_backward_demo", seed=seed, rollout_seed=seed)
    write_demonstrations(folder / "demonstrations.jsonl", config, count=20_000)


def run_command(flags: list[str], heading: str = "", environment: Mapping[str, str] | None = None) -> None:
    print("\n" + "\n".join(filter(None, [heading, f"$ fsdptrain {shlex.join(flags)}"])), flush=True)
    subprocess.run([sys.executable, "-m", "fsdptrain", *flags], check=True, env={**(environment or {}), **os.environ})


def finish(folder: Path, seconds: dict[str, float]) -> None:
    """Write summary.json and the report of the GRPO run, and print the result and their paths."""
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
    run_command(["report", str(folder / "grpo")])
    of_sampled, of_greedy = (f"{values[0]:.3f} -> {values[-1]:.3f}" for values in (sampled, greedy))
    print(f"\nHeld-out accuracy, sampled: {of_sampled}, greedy: {of_greedy}; {sum(seconds.values()):.0f} s")
    bars = "".join("▁▂▃▄▅▆▇█"[round(7 * value)] for value in sampled)
    print(f"  {bars}  accuracy from 0 to 1, over the rollouts")
    show_answers(folder / "grpo" / "samples.jsonl")
    print(f"  {folder / 'grpo/report.html'}  curves and samples")
    print(f"  {folder / 'summary.json'}  these numbers")
    print(f"  {folder / 'grpo/hf'}  the model, for from_pretrained")


def show_answers(samples: Path) -> None:
    """Print sampled answers to three held-out prompts before and after training, of those that changed."""
    rows = [row for row in map(json.loads, samples.read_text().splitlines()) if row["set"] == "heldout"]
    before, after = ({row["prompt"]: row for row in rows if row["step"] == step} for step in (0, rows[-1]["step"]))
    changed = [prompt for prompt in before if before[prompt]["response"] != after[prompt]["response"]]
    for prompt in changed[:3]:
        answers = [shorten(found[prompt]["response"], 60) for found in (before, after)]
        print(f"  {before[prompt]['label']}: {answers[0]!r}, then {answers[1]!r}")
