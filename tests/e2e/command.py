"""The real command line, in a process of its own that has imported torch already: starts in 0.1 s instead of 6."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from fsdptrain import cli
from fsdptrain.config.keys import all_keys, all_sections
from tests.testing import preloaded_context, rank_variables, reserved_port

TINY_RUN = [
    *("--prompt-data", "reasoning_gym:spell_backward?max_word_len=4&size=64"),
    *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
    *("--rollout-max-response-len", "8", "--max-tokens-per-gpu", "512", "--eval-size", "4"),
    *("--reward", "reasoning_gym", "tests.e2e.rewards:variety", "--reward-workers", "0"),
    *("--lr", "1e-3", "--no-bf16", "--system-prompt", "", "--log-to"),
]
UNEVALUATED = [*TINY_RUN[: TINY_RUN.index("--eval-size")], *TINY_RUN[TINY_RUN.index("--eval-size") + 2 :]]
UNEVALUATED += ["--eval-interval", "0"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Return all metrics that the run in this folder has logged."""
    return rows_of(run / "metrics.jsonl")


def trained(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the rows of training steps."""
    return [row for row in rows if "loss/total" in row]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def start(argv: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> ForkServerProcess:
    """Begin `fsdptrain *argv` with more environment variables; its output goes to files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    process = preloaded_context().Process(target=main, args=(list(argv), folder, variables or {}))
    process.start()
    return process


@contextmanager
def start_ranks(
    argv: Sequence[str], folder: Path, num_ranks: int, variables: Mapping[str, str] | None = None
) -> Iterator[list[ForkServerProcess]]:
    """Begin `fsdptrain *argv` on ranks as torchrun does; --nproc-per-node, which starts new ones, takes 10 s more."""
    with reserved_port() as port:
        yield [
            start(
                argv,
                folder / f"rank{rank}" if rank else folder,
                {**(variables or {}), **(rank_variables(rank, num_ranks, port) if num_ranks > 1 else {})},
            )
            for rank in range(num_ranks)
        ]


def run(
    argv: Sequence[str],
    folder: Path,
    timeout: float = 300.0,
    *,
    num_ranks: int = 1,
    variables: Mapping[str, str] | None = None,
) -> Result:
    """Run `fsdptrain *argv` to its end and return the output of the first rank. `variables`: PYTHONPATH too."""
    with start_ranks(argv, folder, num_ranks, variables) as processes:
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert len(set(codes)) == 1, f"ranks ended with {codes}\n{_last_errors(folder, num_ranks)}"
    assert codes[0] is not None
    return Result(codes[0], (folder / "out").read_text(), (folder / "err").read_text())


def _last_errors(folder: Path, num_ranks: int) -> str:
    folders = [folder, *(folder / f"rank{rank}" for rank in range(1, num_ranks))]
    return "\n".join(f"rank {rank}: {(one / 'err').read_text()[-4000:]}" for rank, one in enumerate(folders))


def train(checkpoint: Path, folder: Path, *flags: str, num_ranks: int = 1, timeout: float = 300.0) -> list[dict]:
    """Run into `folder`/run, to the end without an error, and return all metrics. Standard error is in `folder`/err."""
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder / "run"), *flags]
    result = run(argv, folder, timeout, num_ranks=num_ranks)
    assert result.code == 0, result.err
    return metrics_of(folder / "run")


def main(argv: list[str], folder: Path, variables: Mapping[str, str]) -> None:
    """Become the command: what a process of `start` does."""
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    os.environ.update(variables, OMP_NUM_THREADS="1")
    if "PYTHONPATH" in variables:
        sys.path.insert(0, variables["PYTHONPATH"])  # the process has started already
        all_sections.cache_clear()
        all_keys.cache_clear()
    sys.exit(cli.run(argv))
