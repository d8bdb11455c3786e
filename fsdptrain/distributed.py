"""Errors and small values across ranks.

A rank that raises alone leaves the others waiting in their next collective until it times out. Run rank-local work that
can fail (reading a file, parsing a row) inside `raise_on_all_ranks`: every rank then raises the same error. Without an
error it costs one all-reduce of one number.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from fsdptrain.errors import FsdptrainError

LONGEST_MESSAGE = 600  # characters of a foreign exception that are shown


def gather(value: Any) -> list[Any]:
    """`value` of every rank, by rank. Small picklable things only; collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Of each of `values` the sum, in float64; every rank passes as many. Collective."""
    total = torch.tensor(values, dtype=torch.float64)  # on the CPU: gloo is always there (platform.distributed_backend)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def any_rank(condition: bool, ranks: dist.ProcessGroup | None = None) -> bool:
    """Whether it holds on some rank of all, or of `ranks`, a group for CPU tensors; collective."""
    if not dist.is_initialized():
        return condition
    flag = torch.tensor(int(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ranks)
    return bool(flag.item())


def require_same(value: Any, error: FsdptrainError) -> None:
    """`error`, with the words of rank 0, on all ranks if `value`, something small, differs between them; collective."""
    values = gather((value, str(error)))
    if any(other != values[0][0] for other, _ in values):
        raise type(error)(values[0][1])


class raise_on_all_ranks:  # noqa: N801 - reads as a verb: `with together(CheckpointError, path): ...`
    """A block of rank-local work; at its end every rank raises the same error, or none does. No collectives inside.

    An FsdptrainError keeps its class. Anything else that derives from Exception becomes `error_class` with one line,
    after `context`: what it is does not matter, that the others learn of it does. KeyboardInterrupt passes through.
    """

    def __init__(self, error_class: type[FsdptrainError], context: str) -> None:
        self.error_class = error_class
        self.context = context

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if not any_rank(error is not None):
            return
        reports = gather(None if error is None else self._report(error))
        failed = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
        rank, error_class, message = failed[0]
        where = "" if len(failed) == len(reports) else f" (rank {rank} of {len(reports)})"
        raise error_class(message + where) from error

    def _report(self, error: Exception) -> tuple[type[FsdptrainError], str]:
        if isinstance(error, FsdptrainError):
            return type(error), str(error)
        return self.error_class, f"{self.context}: {one_line(error)}"


def one_line(error: Exception) -> str:
    """The message of `error` without line breaks; with its class where it is not one of ours."""
    text = " ".join(str(error).split())
    if isinstance(error, FsdptrainError):
        return text
    text = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
