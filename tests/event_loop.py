"""Run a coroutine in a loop that leaves no connection open, as `asyncio.run` may after a cancelled request."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from fsdptrain.vllm.server.event_loop import EventLoop

T = TypeVar("T")


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    loop = EventLoop()
    try:
        return loop.run(work)
    finally:
        loop.close()
