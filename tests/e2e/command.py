"""The real command line, in a process of its own that has imported torch already: starts in 0.1 s instead of 6."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from fsdptrain import cli

TINY_RUN = [
    *("--prompt-data", "reasoning_gym:spell_backward?max_word_len=4&size=64"),
    *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
    *("--rollout-max-response-len", "8", "--max-tokens-per-gpu", "512", "--eval-size", "4"),
    *("--reward", "reasoning_gym", "tests.e2e.rewards:variety"),
    *("--lr", "1e-3", "--no-bf16", "--system-prompt", "", "--log-to"),
]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def start(argv: Sequence[str], folder: Path) -> ForkServerProcess:
    """Begin `fsdptrain *argv`; its output goes to files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fsdptrain.testing", "fsdptrain.trainer"])
    process = context.Process(target=_main, args=(list(argv), folder))
    process.start()
    return process


def run(argv: Sequence[str], folder: Path, timeout: float = 120.0) -> Result:
    """Do `fsdptrain *argv` to its end."""
    process = start(argv, folder)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return Result(process.exitcode, (folder / "out").read_text(), (folder / "err").read_text())


def _main(argv: list[str], folder: Path) -> None:
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(cli.run(argv))
