"""Serve episodes to the trainer, as lines of JSON on standard input and output.

The trainer sends the options, then requests `{"id", "prompt", "label", "metadata", "url", "key", "model"}` and
`{"cancel": id}`. The program answers with `{"rows": [...]}` or `{"error"}`, then with `{"id", "reward"}` or
`{"id", "error"}` for each request. A cancelled request is answered at once: that shows that the program still responds.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TextIO

Rows = list[dict[str, Any]]
RunEpisode = Callable[[dict[str, Any]], Awaitable[dict[str, float]]]
Open = Callable[[dict[str, Any]], AbstractAsyncContextManager[tuple[Rows, RunEpisode]]]

_END_S = 10.0  # to end by itself
_MAX_LINE = 64 * 2**20  # bytes of a request


def main(open_environment: Open) -> None:
    """Serve until standard input ends. `open_environment` takes the options and gives rows and a function."""
    sys.path.insert(0, os.getcwd())  # environments of the user
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an environment prints is no answer
    threading.Thread(target=_end_after_parent, args=[os.getppid()], daemon=True).start()
    asyncio.run(_serve(open_environment, channel))


def _end_after_parent(parent: int) -> None:
    """End this process group some time after the trainer has died, also if an environment hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_END_S)
    os.killpg(0, signal.SIGKILL)


async def _serve(open_environment: Open, channel: TextIO) -> None:
    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    requests = asyncio.StreamReader(limit=_MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    options = json.loads(await requests.readline())
    async with AsyncExitStack() as stack:
        try:
            rows, run = await stack.enter_async_context(open_environment(options))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the code of an environment may raise anything
            send({"error": describe(error)})
            return
        send({"rows": rows})
        running: dict[int, asyncio.Task[None]] = {}
        while line := await requests.readline():
            request = json.loads(line)
            if "cancel" not in request:
                running[request["id"]] = asyncio.create_task(_answer(run, request, running, send))
            elif (task := running.pop(request["cancel"], None)) is not None:
                task.cancel()
                send({"id": request["cancel"], "error": "cancelled"})
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _answer(
    run: RunEpisode,
    request: dict[str, Any],
    running: dict[int, asyncio.Task[None]],
    send: Callable[[dict[str, Any]], None],
) -> None:
    try:
        answer = {"reward": await run(request)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the code of an environment may raise anything
        answer = {"error": describe(error)}
    if running.pop(request["id"], None) is not None:  # else it was cancelled
        send({"id": request["id"], **answer})


def describe(error: BaseException) -> str:
    """Return the type and the message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]
