"""The commands beside training: `fsdptrain COMMAND ...`. Each takes its arguments and returns the exit code."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdptrain.checkpoints import CONFIG_FILE, PROGRESS_FILE, list_checkpoints
from fsdptrain.checkpoints import EXPORT as EXPORT_FOLDER
from fsdptrain.cli import is_rank_0
from fsdptrain.config.flags import Option, asks_for_help, config_options, parse
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import EXPORT_CHOICE
from fsdptrain.config.shipped import FOLDER, find_recipe, read_summary
from fsdptrain.errors import ConfigError
from fsdptrain.registry import Table

EXPORT_EXAMPLE = "fsdptrain export runs/Qwen3-4B-grpo, or one of its checkpoints with --output my-model"
EXPORT = {
    "checkpoint": Option("--checkpoint", str | None, "Run, or one of its checkpoints: the first argument.", None),
    "output": Option(
        "--output", str | None, "Folder to write, which from_pretrained reads. Default: RUN/hf, of a run.", None
    ),
}
EXPORT_USAGE = """\
Write a training checkpoint as a Hugging Face folder.

  fsdptrain export runs/Qwen3-4B-grpo             its newest checkpoint, to its hf/
  fsdptrain export runs/x/checkpoints/step_00000050 --output my-model"""
RECIPES_USAGE = """\
usage: fsdptrain recipes [show NAME]

List the included recipes with their hardware, or print one. A recipe is a file of
options: fsdptrain --recipe NAME [more flags, which take precedence]
"""


def recipes(argv: Sequence[str]) -> int:
    if asks_for_help(argv):
        sys.stdout.write(RECIPES_USAGE)
    elif not argv:
        rows = [read_summary(path) for path in sorted(FOLDER.glob("*.yaml"))]
        first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        sys.stdout.writelines(f"{name:<{first}}  {hardware:<{second}}  {about}\n" for name, hardware, about in rows)
    elif argv[0] == "show" and len(argv) == 2:
        sys.stdout.write(find_recipe(argv[1], what="recipes show").read_text())
    else:
        raise ConfigError(f"recipes {' '.join(argv)}: it is fsdptrain recipes, or fsdptrain recipes show NAME")
    return 0


def export(argv: Sequence[str]) -> int:
    options = EXPORT | {
        flat: option for flat, option in config_options().items() if EXPORT_CHOICE in all_keys()[flat].field.metadata
    }
    if asks_for_help(argv):
        from fsdptrain.help_text import print_options

        return print_options("fsdptrain export [RUN | CHECKPOINT]", EXPORT_USAGE, options)
    if argv and not argv[0].startswith("-"):  # fsdptrain export runs/x
        argv = [EXPORT["checkpoint"].flag, *argv]
    values = parse(argv, options)
    if not values.get("checkpoint"):
        raise ConfigError(f"--checkpoint is missing, e.g. {EXPORT_EXAMPLE}")
    checkpoint, output = Path(values.pop("checkpoint")), values.pop("output", None)
    if not checkpoint.exists():
        raise ConfigError(f"--checkpoint {checkpoint} does not exist: it is a run, or one of its checkpoints")
    if is_run(checkpoint):
        output = output or str(checkpoint / EXPORT_FOLDER)
        checkpoint = newest_checkpoint(checkpoint)
    if not output:
        raise ConfigError(f"--output is missing, e.g. {EXPORT_EXAMPLE}")
    from fsdptrain.trainer.export import export_checkpoint  # lazy: imports torch

    export_checkpoint(checkpoint, Path(output), **values)
    if is_rank_0():
        sys.stdout.write(f"the model of {checkpoint} is written to {output}\n")
    return 0


def is_run(path: Path) -> bool:
    """Return whether `path` is the folder of a run."""
    return (path / CONFIG_FILE).is_file() and not (path / PROGRESS_FILE).is_file()


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of the run. Raises ConfigError if it has none."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        model = run / EXPORT_FOLDER
        exported = f"; its exported model is {model}" if model.is_dir() else ""
        raise ConfigError(f"{run} has no checkpoint in {run / 'checkpoints'}{exported}")
    return checkpoints[-1]


FUNCTIONS = Table[Callable[[Sequence[str]], int]](
    {
        "demo": "fsdptrain.tools.demo.demo:demo",
        "recipes": "fsdptrain.commands:recipes",
        "inspect": "fsdptrain.tools.inspect.command:inspect",
        "plan": "fsdptrain.tools.plan.command:plan",
        "export": "fsdptrain.commands:export",
        "report": "fsdptrain.tools.watch.command:report",
        "eval": "fsdptrain.tools.evaluate:evaluate",
        "watch": "fsdptrain.tools.watch.command:watch",
    }
)
