"""An asyncio event loop in a background thread: the rollout engine is synchronous, its HTTP client is not."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from fsdptrain.errors import RolloutError

T = TypeVar("T")


class EventLoop:
    """Runs coroutines for synchronous callers in any number of threads."""

    def __init__(self) -> None:
        self._loop, self._is_closed = asyncio.new_event_loop(), False
        self._thread = threading.Thread(target=self._run_forever, name="servers", daemon=True)
        self._thread.start()

    def _run_forever(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def start(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Raises RolloutError if the loop is closed."""
        if self._is_closed:
            work.close()
            raise RolloutError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises RolloutError if the loop is or gets closed."""
        future = self.start(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RolloutError("the engine is closed") from None
        except BaseException:
            future.cancel()  # nobody waits any more, as after Ctrl-C
            raise

    def close(self) -> None:
        """Cancel all tasks and wait until they have ended. Calls of `run` raise a RolloutError."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*works)
