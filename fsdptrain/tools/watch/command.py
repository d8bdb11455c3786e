"""`fsdptrain watch RUN ...` and `fsdptrain report RUN ... --html [FILE]`."""

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from fsdptrain.config.flags import Option, parse
from fsdptrain.errors import ConfigError

WATCH = {"port": Option("--port", int, "Port on this machine. 0: a free one.", 0)}
WATCH_USAGE = """\
usage: fsdptrain watch RUN_DIR [RUN_DIR ...] [--port PORT]

Show runs in the browser, while they go on: curves, the stages of rank 0, and samples
with the advantage or the logprobs of each token. Prints an address of this machine with
a key in it. Ctrl-C ends it; the runs go on.

  RUN_DIR   the --output-dir of a run, e.g. runs/Qwen3-4B-grpo; several are compared
  --port    of the address; default: a free one
"""


def watch(argv: Sequence[str]) -> int:
    """Run `fsdptrain watch RUN_DIR [RUN_DIR ...] [--port PORT]` until Ctrl-C."""
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(WATCH_USAGE)
        return 0
    folders, rest = _split(argv)
    if not folders:
        raise ConfigError("watch needs the folder of a run, e.g. fsdptrain watch runs/Qwen3-4B-grpo")
    port = parse(rest, WATCH).get("port", 0)
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be 0 to 65535, got {port}")
    from fsdptrain.tools.watch.run_data import RunData
    from fsdptrain.tools.watch.server import WatchServer

    runs = [RunData(folder, name) for folder, name in _named(folders)]
    with WatchServer(runs, port) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


def write_html(argv: Sequence[str]) -> int:
    """Run `fsdptrain report RUN_DIR [RUN_DIR ...] --html [FILE]`."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--html=") else [word])]
    at = words.index("--html")
    values = list(takewhile(lambda word: not word.startswith("-"), words[at + 1 :]))
    folders, rest = _split([*words[:at], *words[at + 1 + len(values) :]])
    if not folders:
        raise ConfigError("report needs the folder of a run, e.g. fsdptrain report runs/Qwen3-4B-grpo --html")
    if len(values) > 1:
        raise ConfigError(f"--html takes one file, got {' '.join(values)}: put the folders of runs before it")
    if rest:
        raise ConfigError(f"{rest[0]} has no effect with --html, which writes only the page: remove it")
    import time

    from fsdptrain.tools.watch.page import render
    from fsdptrain.tools.watch.run_data import RunData

    target = Path(values[0]) if values else folders[0] / "report.html"
    runs = [RunData(folder, name) for folder, name in _named(folders)]
    for run in runs:
        run.poll()
    payloads = [run.payload() for run in runs]
    for folder, payload in zip(folders, payloads, strict=True):
        if payload["step"] is None:
            raise ConfigError(f"{folder} has no metrics.jsonl with a step in it: pass the --output-dir of a run")
    try:
        target.write_text(render({"runs": payloads, "saved": time.time()}).html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {target} cannot be written: {error.strerror}") from error
    sys.stdout.write(f"written to {target}\n")
    return 0


def _split(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the folders before the first flag, and the rest. Raises ConfigError for a folder that is none."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    folders = [Path(word) for word in words]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: pass the --output-dir of a run")
    return folders, list(argv[len(words) :])


def _named(folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """Name each folder by its last component, or by the whole path if two have the same."""
    names = [folder.resolve().name for folder in folders]
    return [
        (folder, name if names.count(name) == 1 else str(folder)) for folder, name in zip(folders, names, strict=True)
    ]
