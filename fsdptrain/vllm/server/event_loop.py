"""An asyncio event loop in a background thread: the rollout engine is synchronous, its HTTP client is not."""

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from fsdptrain.errors import RolloutError

T = TypeVar("T")
_CLOSE_S = 0.05  # for transports to close


class _TrackingLoop(asyncio.SelectorEventLoop):
    """Knows its connections. anyio forgets one if a request is cancelled at the moment in which it is connected."""

    def __init__(self) -> None:
        super().__init__()
        self._open: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    async def create_connection(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        transport, protocol = await super().create_connection(*args, **options)
        self._open.add(transport)
        return transport, protocol

    async def close_connections(self) -> None:
        for transport in list(self._open):
            transport.close()
        await asyncio.sleep(_CLOSE_S)


class EventLoop:
    """Runs coroutines for synchronous callers in any number of threads."""

    def __init__(self) -> None:
        self._loop = _TrackingLoop()
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
        """Cancel all tasks and wait until they have ended. Calls of `run` raise a RolloutError."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.cancel_all()
        asyncio.run_coroutine_threadsafe(self._loop.close_connections(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
