"""`fsdptrain watch RUN ...` and `fsdptrain report RUN ...`."""

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from fsdptrain.checkpoints import CONFIG_FILE
from fsdptrain.config.flags import Option, asks_for_help, parse
from fsdptrain.errors import ConfigError

WATCH = {"port": Option("--port", int, "Port on this machine. 0: a free one.", 0)}
WATCH_USAGE = """\
usage: fsdptrain watch RUN_DIR [RUN_DIR ...] [--port PORT]

Show runs in the browser, also during training: curves, and samples with the advantage or
the logprobs of each token. Prints an address of this machine with a key in it. Ctrl-C ends it; the runs continue.

  RUN_DIR   the --output-dir of a run, e.g. runs/Qwen3-4B-grpo; more than one: compared
  --port    of the address; default: a free one
"""
REPORT_USAGE = """\
usage: fsdptrain report RUN_DIR [RUN_DIR ...]

Print the first, the best and the last reward, held-out accuracy, length, share of
groups kept, pass rate and (without a reward) loss of a run, as far as it has them, and
write the page of `fsdptrain watch` with its data to RUN_DIR/report.html. The run may
still be training. With more than one run, the page compares them, in the first one's folder.

  RUN_DIR      the --output-dir of the run, e.g. runs/Qwen3-4B-grpo
"""


def watch(argv: Sequence[str]) -> int:
    """Run `fsdptrain watch RUN_DIR [RUN_DIR ...] [--port PORT]` until Ctrl-C."""
    if asks_for_help(argv):
        sys.stdout.write(WATCH_USAGE)
        return 0
    folders, rest = _split(argv, "watch")
    port = parse(rest, WATCH).get("port", 0)
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be 0 to 65535, got {port}")
    from fsdptrain.tools.watch.run_data import RunData
    from fsdptrain.tools.watch.server import WatchServer

    with WatchServer([RunData(folder, name) for folder, name in _named(folders)], port) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


def report(argv: Sequence[str]) -> int:
    """Run `fsdptrain report RUN_DIR [RUN_DIR ...]`: print the tables, and write the page as one file."""
    if asks_for_help(argv):
        sys.stdout.write(REPORT_USAGE)
        return 0
    folders, rest = _split(argv, "report")
    parse(rest, {})
    import time

    from fsdptrain.tools.report.report import print_report
    from fsdptrain.tools.watch.page import render
    from fsdptrain.tools.watch.run_data import RunData

    target = folders[0] / "report.html"
    named = _named(folders)
    runs = [RunData(folder, name) for folder, name in named]
    for run, (folder, name) in zip(runs, named, strict=True):
        run.poll()
        print_report(run, folder, name if len(runs) > 1 else "")
    payloads = [run.payload() for run in runs]
    try:
        target.write_text(render({"runs": payloads, "saved": time.time()}).html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    sys.stdout.write(f"written to {target}\n")
    return 0


def _split(argv: Sequence[str], command: str) -> tuple[list[Path], list[str]]:
    """Return the folders before the first flag, and the rest. Raises ConfigError for a folder that is none."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    folders = [Path(word) for word in words]
    if not folders:
        raise ConfigError(f"{command} needs the folder of a run, e.g. fsdptrain {command} runs/Qwen3-4B-grpo")
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: pass the --output-dir of a run")
        runs = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG_FILE}"))
        if runs and not (folder / CONFIG_FILE).exists():
            raise ConfigError(f"{folder} is not a run, it holds {len(runs)}: pass one or more of {', '.join(runs)}")
        files = [path.name for path in folder.iterdir()]
        if files and CONFIG_FILE not in files and "metrics.jsonl" not in files:  # an empty one: of a run that starts
            raise ConfigError(f"{folder} holds no run: pass the --output-dir of a run")
    return folders, list(argv[len(words) :])


def _named(folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """Name each folder by its last component, or by the whole path if two have the same."""
    names = [folder.resolve().name for folder in folders]
    return [
        (folder, name if names.count(name) == 1 else str(folder)) for folder, name in zip(folders, names, strict=True)
    ]
