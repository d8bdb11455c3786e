"""Train a student of the quickstart's model on the samples that a trained teacher judges, and with GRPO alone.

    python examples/distillation/train.py [--seed 0] [--output-dir runs/distillation]

The teacher is the quickstart's model after its GRPO, the student that model before it. Each run of the student has the
same prompts and the same number of samples. Prints the held-out accuracy over rollouts.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError

from fsdptrain.errors import ConfigError
from fsdptrain.tools.demo import demo

ROLLOUTS, EVERY = 20, 4
FEW = ["--rollout-batch-size", "8", "--global-batch-size", "64"]  # 64 samples and one optimizer step a rollout
DISTILL = ["--algorithm", "opd"]
STUDENTS = {
    "GRPO alone": [],
    "distillation, per token": DISTILL,
    "distillation, reverse KL of the vocabulary": [*DISTILL, "--opd-loss", "jsd", "--opd-beta", "1"],
    "GRPO and distillation": ["--opd-kl-coef", "0.3"],
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    args = parser.parse_args(argv)
    folder: Path = args.output_dir
    try:
        demo.clear(folder)
        train_teacher(folder, args.seed)
        runs = {name: train_student(folder, args.seed, args.rollouts, name) for name in STUDENTS}
    except ConfigError as error:
        sys.exit(str(error))
    except CalledProcessError as error:  # the command has printed the error
        sys.exit(error.returncode)
    show(runs)


def train_teacher(folder: Path, seed: int) -> None:
    demo.prepare(folder, seed)
    for _, recipe, flags in demo.stages(folder, seed):
        demo.run_command(["--recipe", recipe, *flags])


def train_student(folder: Path, seed: int, rollouts: int, name: str) -> Path:
    """Train one student and return the folder of its run."""
    run = folder / name.replace(",", "").replace(" ", "_")
    flags = ["--hf-checkpoint", str(folder / "sft" / "hf"), "--seed", str(seed), "--rollout-seed", str(seed)]
    flags += ["--num-rollout", str(rollouts), "--eval-interval", str(EVERY), "--save-interval", "0", "--no-export"]
    teacher = ["--opd-teacher", str(folder / "grpo" / "hf")] if STUDENTS[name] else []
    demo.run_command(
        ["--recipe", "spell_backward_demo", *flags, *teacher, *FEW, *STUDENTS[name], "--output-dir", str(run)]
    )
    return run


def show(runs: dict[str, Path]) -> None:
    """Print the held-out accuracy of each run."""
    from fsdptrain.tools.report.report import read_series

    for name, run in runs.items():
        print(f"{name}: " + " ".join(f"{value:.3f}" for value in read_series(run, "eval/heldout/accuracy")[1]))


if __name__ == "__main__":
    main()
