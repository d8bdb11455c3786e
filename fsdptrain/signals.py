"""SIGINT and SIGTERM as requests: the first one asks for an orderly end, a later one for an immediate end."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

SAME_REQUEST_S = 1.0  # [s] within which signals count as one: terminals and `timeout` signal several processes


@contextmanager
def stop_signals(numbers: Iterable[int], *, first: Callable[[int], None], again: Callable[[], None]) -> Iterator[None]:
    """Within the context, the first of these signals calls `first`, and one more than SAME_REQUEST_S later `again`.

    Python runs handlers in the main thread, between bytecodes: not while a call in C waits.
    """
    since: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal since
        del frame
        if since is None:
            since = time.monotonic()
            first(number)
        elif time.monotonic() - since > SAME_REQUEST_S:
            again()

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heeded() -> list[int]:
    """Return SIGINT and SIGTERM, without those that this process ignores."""
    return [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
