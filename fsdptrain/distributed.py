"""Error propagation and small reductions across ranks.

If one rank raises alone, the other ranks wait in their next collective until it times out. Run rank-local work that can
fail (reading a file, parsing a row) inside `raise_on_all_ranks`: every rank then raises the same error. Without an
error, it costs one all-reduce of one number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from fsdptrain.errors import FsdptrainError, RankError

_CONNECTION_ERRORS = (
    "closed by peer",
    "reset by peer",
    "Timed out waiting",
    "timeout caused pair closure",  # what collectives after the one that timed out raise
    "Connection refused",
    "Broken pipe",
)  # gloo, in C++
LONGEST_MESSAGE = 600  # limit for messages of other packages' exceptions [characters]


def gather(value: Any) -> list[Any]:
    """Gather `value` of every rank, in rank order. For small picklable objects only. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Sum each element of `values` over all ranks, in float64. All ranks pass the same number of values. Collective."""
    total = torch.tensor(values, dtype=torch.float64)  # on the CPU: gloo is always available
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def any_rank(condition: bool, ranks: dist.ProcessGroup | None = None) -> bool:
    """Return whether `condition` holds on any rank of `ranks`. Collective.

    `ranks` must be a group for CPU tensors; None means all ranks.
    """
    if not dist.is_initialized():
        return condition
    flag = torch.tensor(int(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ranks)
    return bool(flag.item())


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended, hangs or is cut off."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CONNECTION_ERRORS)


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise RankError from the error of a collective that misses another rank."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise RankError("another rank has ended, hangs or is cut off (--dist-timeout)") from error


def require_same(value: Any, error: FsdptrainError) -> None:
    """Raise `error` on all ranks, with the message of rank 0, if `value` differs between ranks. Collective.

    `value` must be small and picklable.
    """
    values = gather((value, str(error)))
    if any(other != values[0][0] for other, _ in values):
        raise type(error)(values[0][1])


class raise_on_all_ranks:  # noqa: N801 - reads as a verb: `with raise_on_all_ranks(CheckpointError, path): ...`
    """Run rank-local code that may fail. If any rank raises, every rank raises the same error on exit.

    Do not call collectives inside. An FsdptrainError keeps its class. Any other Exception becomes `error_class` with a
    one-line message that starts with `context`, as does SystemExit of user code. KeyboardInterrupt passes through.
    """

    def __init__(self, error_class: type[FsdptrainError], context: str) -> None:
        self.error_class = error_class
        self.context = context

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception | SystemExit):
            return
        if not any_rank(error is not None):
            return
        reports = gather(None if error is None else self._report(error))
        failed = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
        rank, error_class, message = failed[0]
        where = "" if len(failed) == len(reports) else f" (rank {rank} of {len(reports)})"
        raise error_class(message + where) from error

    def _report(self, error: BaseException) -> tuple[type[FsdptrainError], str]:
        if isinstance(error, FsdptrainError):
            return type(error), str(error)
        return self.error_class, f"{self.context}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Return the message of `error` without line breaks. Prefixes the class name unless it is an FsdptrainError."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    if isinstance(error, FsdptrainError):
        return text
    text = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
