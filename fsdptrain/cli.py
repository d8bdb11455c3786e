"""Command line interface.

`fsdptrain [flags]` trains; the commands are in `COMMANDS`. Errors that a user can fix print one line to stderr and exit
with code 2. Ctrl-C exits silently with code 130.
"""

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fsdptrain import __version__
from fsdptrain.checkpoints import EXPORT as EXPORT_FOLDER
from fsdptrain.checkpoints import is_run, newest_checkpoint
from fsdptrain.config.flags import Option, asks_for_help, config_options, parse, resolve
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import ExportChoice
from fsdptrain.config.shipped import find_recipe, summaries
from fsdptrain.errors import ConfigError, FsdptrainError
from fsdptrain.launch.failures import failure_of, report_failure
from fsdptrain.quiet import silence_libraries
from fsdptrain.rank_variables import read_rank_variables
from fsdptrain.registry import suggest

_BEFORE_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # suppress C++ stack traces; errors are reported in one line

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
REPORT_USAGE = """\
usage: fsdptrain report RUN_DIR [RUN_DIR ...]

Print the first, the best and the last reward, held-out accuracy, length, share of
groups kept, pass rate and (without a reward) loss of a run, as far as it has them, and
write the page of `fsdptrain watch` with its data to RUN_DIR/report.html. The run may
still go on. The page of several runs, in the first one's folder, compares them.

  RUN_DIR      the --output-dir of the run, e.g. runs/Qwen3-4B-grpo
"""
RECIPES_USAGE = """\
usage: fsdptrain recipes [show NAME]

List the included recipes with their hardware, or print one. A recipe is a file of
options: fsdptrain --recipe NAME [more flags, which take precedence]
"""


def main() -> None:
    """Run the console script. Exits with 0, with 2 after an error that the user can fix, with 130 after Ctrl-C."""
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command in `argv` and return the exit code."""
    silence_libraries()
    try:
        return _command(argv)
    except FsdptrainError as error:
        report_failure(failure_of(error, rank=0))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `fsdptrain --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        report_failure(
            failure_of(ConfigError(f"a name is too long for this file system: {str(error.filename)[:80]} ..."), rank=0)
        )
        return 2


def _command(argv: Sequence[str]) -> int:
    first = argv[0] if argv else ""
    if first in COMMANDS:
        return COMMANDS[first](argv[1:])
    if first == "help":
        return _show_help(argv)
    if first.isalpha() and not Path(first).exists():  # paths and hub ids get a more specific error
        raise ConfigError(
            f"{first!r} is not a command; the commands are {', '.join(COMMANDS)}, and flags alone train, e.g. "
            f"fsdptrain --hf-checkpoint Qwen/Qwen3-4B{suggest(first, list(COMMANDS))}"
        )
    return train(argv)


def train(argv: Sequence[str]) -> int:
    """Train; `train` may be left out."""
    if asks_for_help(argv) or "--help-all" in argv:
        return _show_help(argv)
    if "--version" in argv:
        return _print_version()
    resolved = resolve(argv)
    if resolved.config.launch.dry_run:
        from fsdptrain.dry_run import dry_run

        if _is_rank_0():
            dry_run(resolved)
        return 0
    if read_rank_variables() is None:  # what starts ranks has checked before
        from fsdptrain.launch.inputs import check_inputs

        check_inputs(resolved.config)
    from fsdptrain import launch

    return launch.run(resolved.config, argv)


def demo(argv: Sequence[str]) -> int:
    """Train a tiny model on a CPU: warm-up and GRPO."""
    from fsdptrain.tools.demo import demo as quickstart

    if asks_for_help(argv):
        return _print_options("fsdptrain demo", quickstart.USAGE, quickstart.OPTIONS)
    return quickstart.demo(argv)


def recipes(argv: Sequence[str]) -> int:
    """List the included recipes; `recipes show NAME` prints one."""
    if asks_for_help(argv):
        sys.stdout.write(RECIPES_USAGE)
    elif not argv:
        rows = [(found.name, found.hardware, found.about) for found in summaries()]
        first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        sys.stdout.writelines(f"{name:<{first}}  {hardware:<{second}}  {about}\n" for name, hardware, about in rows)
    elif argv[0] == "show" and len(argv) == 2:
        sys.stdout.write(find_recipe(argv[1], what="recipes show").read_text())
    else:
        raise ConfigError(f"recipes {' '.join(argv)}: it is fsdptrain recipes, or fsdptrain recipes show NAME")
    return 0


def inspect(argv: Sequence[str]) -> int:
    """Show what would run: modules, layout, kernels, dtypes."""
    from fsdptrain.tools.inspect import command

    return command.inspect(argv)


def plan(argv: Sequence[str]) -> int:
    """Show the memory of a run, and which flags make it fit."""
    from fsdptrain.tools.plan import command

    return command.plan(argv)


def export(argv: Sequence[str]) -> int:
    """Write a checkpoint, or the newest of a run, for from_pretrained."""
    options = EXPORT | {
        flat: option for flat, option in config_options().items() if all_keys()[flat].is_marked(ExportChoice)
    }
    if asks_for_help(argv):
        return _print_options("fsdptrain export [RUN | CHECKPOINT]", EXPORT_USAGE, options)
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
    from fsdptrain.trainer import export_checkpoint  # lazy: imports torch

    export_checkpoint(checkpoint, Path(output), **values)
    if _is_rank_0():
        sys.stdout.write(f"the model of {checkpoint} is written to {output}\n")
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """Score a model, a checkpoint or a run, without training."""
    from fsdptrain.tools.evaluate import CHECKPOINT, USAGE, run_arguments, table

    if asks_for_help(argv):
        return _print_options("fsdptrain eval [RUN | MODEL]", USAGE, {"checkpoint": CHECKPOINT})
    arguments, output = run_arguments(argv)
    code = train(arguments)
    if code == 0 and _is_rank_0() and "--dry-run" not in arguments:
        sys.stdout.write(f"{table(output)}each sample: {output / 'samples.jsonl'}\n")
    return code


def report(argv: Sequence[str]) -> int:
    """Summarize a run: a table, and a page with its curves and samples."""
    if asks_for_help(argv):
        sys.stdout.write(REPORT_USAGE)
        return 0
    from fsdptrain.tools.watch.command import report as report_runs  # lazy: imports rich

    return report_runs(argv)


def watch(argv: Sequence[str]) -> int:
    """Show runs in the browser, also while they go on."""
    from fsdptrain.tools.watch import command

    return command.watch(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "demo": demo,
    "recipes": recipes,
    "inspect": inspect,
    "plan": plan,
    "export": export,
    "report": report,
    "eval": evaluate,
    "watch": watch,
}  # the first line of the docstring is the line in --help


def _print_options(prog: str, description: str, options: Mapping[str, Option]) -> int:
    from fsdptrain.help_text import print_options

    return print_options(prog, description, options)


def _show_help(argv: Sequence[str]) -> int:
    from fsdptrain.help_text import print_run_help

    print_run_help(argv, {name: str(command.__doc__).partition("\n")[0] for name, command in COMMANDS.items()})
    return 0


def _print_version() -> int:
    """Print the versions of fsdptrain and of the packages that results depend on, without importing them."""
    found = {}
    for name in ("torch", "transformers", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    others = ", ".join(f"{name} {number}" for name, number in found.items())
    sys.stdout.write(f"fsdptrain {__version__} ({others}, Python {sys.version.split()[0]})\n")
    return 0


def _is_rank_0() -> bool:
    """Return whether this is rank 0. Under torchrun, all ranks get the same command line."""
    ranks = read_rank_variables()
    return ranks is None or ranks.rank == 0
