"""Command line interface.

`fsdptrain [flags]` trains; the commands are in `COMMANDS`. Errors that a user can fix print one line to stderr and exit
with code 2. Ctrl-C prints one line and exits with code 130.
"""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdptrain import errors, silence_libraries
from fsdptrain.config.flags import asks_for_help, resolve
from fsdptrain.errors import ConfigError, FsdptrainError
from fsdptrain.rank_variables import read_rank_variables
from fsdptrain.registry import suggest

COMMANDS = {  # the lines of --help
    "train": "Train; `train` may be left out.",
    "demo": "Train a tiny model on a CPU: warm-up and GRPO.",
    "recipes": "List the included recipes; `recipes show NAME` prints one.",
    "inspect": "Show what would run: modules, layout, kernels, dtypes.",
    "plan": "Show the memory of a run, and which flags make it fit.",
    "export": "Write a checkpoint, or the newest of a run, for from_pretrained.",
    "report": "Summarize a run: a table, and a page with its curves and samples.",
    "eval": "Score a model, a checkpoint or a run, without training.",
    "watch": "Show runs in the browser, also while they go on.",
}


def main() -> None:
    """Run the console script. Exits with 0, with 2 after an error that the user can fix, with 130 after Ctrl-C."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stack traces: errors are reported in one line
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command in `argv` and return the exit code."""
    silence_libraries()
    errors.in_python = False
    try:
        return _command(argv)
    except FsdptrainError as error:
        from fsdptrain.launch.failures import failure_of, report_failure

        report_failure(failure_of(error, rank=0))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("fsdptrain: stopped by Ctrl-C\n")
        return 130
    except BrokenPipeError:  # `fsdptrain --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        sys.stderr.write(f"fsdptrain: {error.filename}: this name is too long for a file or folder: shorten it\n")
        return 2


def _command(argv: Sequence[str]) -> int:
    first = argv[0] if argv else ""
    if first == "train":
        return train(argv[1:])
    if first in COMMANDS:
        from fsdptrain.commands import FUNCTIONS

        return FUNCTIONS[first](argv[1:])
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
        from fsdptrain.help_text import print_version

        return print_version()
    resolved = resolve(argv)
    if resolved.config.launch.dry_run:
        from fsdptrain.dry_run import dry_run

        if is_rank_0():
            dry_run(resolved)
        return 0
    if read_rank_variables() is None:  # what starts ranks has checked before
        from fsdptrain.launch.inputs import check_inputs

        check_inputs(resolved.config)
    from fsdptrain import launch

    return launch.run(resolved.config, argv)


def _show_help(argv: Sequence[str]) -> int:
    from fsdptrain.help_text import print_run_help

    print_run_help(argv, COMMANDS)
    return 0


def is_rank_0() -> bool:
    """Return whether this is rank 0. Under torchrun, all ranks get the same command line."""
    ranks = read_rank_variables()
    return ranks is None or ranks.rank == 0
