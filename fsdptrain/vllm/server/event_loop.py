"""An asyncio event loop in a background thread: the rollout engine is synchronous, its HTTP client is not."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from fsdptrain.errors import RolloutError

T = TypeVar("T")
_CLOSE_S = 0.05  # for transports of cancelled requests to close


class EventLoop:
    """Runs coroutines for synchronous callers in any number of threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises RolloutError if the loop is or gets closed."""
        if self._loop.is_closed():
            work.close()
            raise RolloutError("the engine is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RolloutError("the engine is closed") from None
        except BaseException:
            future.cancel()  # nobody waits any more, as after Ctrl-C
            raise

    def cancel_all(self) -> None:
        """Cancel everything that runs, and wait until it has ended. Its callers get a RolloutError."""
        asyncio.run_coroutine_threadsafe(_cancel_all_others(), self._loop).result()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.cancel_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(_CLOSE_S)


async def race(work: Coroutine[Any, Any, T], interrupt: asyncio.Event, error: Exception) -> T:
    """Return the result of `work`; cancel it and raise `error` as soon as `interrupt` is set."""
    task, interrupted = asyncio.create_task(work), asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait((task, interrupted), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error
        return task.result()
    finally:
        for each in (task, interrupted):
            if not each.cancelling():  # a second cancellation would interrupt the closing of a connection
                each.cancel()
        await asyncio.wait((task, interrupted))
