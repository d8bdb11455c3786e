"""Log what a run is doing while it takes long: loading the model, generating, rewarding, ..."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_LEAST = 10.0  # between lines, and for stages that were faster before [s]
_active: list[str] = []  # stages of the main thread, from the outermost
_longest: dict[str, float] = {}  # seconds, by the names of the stage and those around it


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log `name` when it has taken 1 s, later when it takes twice as long as ever before, and again while it goes on.

    Only stages of the main thread, and only where INFO is logged, which is on rank 0.
    """
    if threading.current_thread() is not threading.main_thread() or not log.isEnabledFor(logging.INFO):
        yield
        return
    _active.append(name)
    names, begin, done = ", ".join(_active), time.monotonic(), threading.Event()
    threading.Thread(target=_watch, args=(names, begin, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        _longest[names] = max(time.monotonic() - begin, _longest.get(names, 0.0))
        _active.pop()


def _watch(names: str, begin: float, done: threading.Event) -> None:
    wait = max(_LEAST, 2 * _longest[names]) if names in _longest else 1.0
    while not done.wait(wait):
        seconds = time.monotonic() - begin
        if names == ", ".join(_active):  # else a stage within is logged
            log.info("%s: %.0f s", names, seconds)
        wait = max(_LEAST, seconds)
