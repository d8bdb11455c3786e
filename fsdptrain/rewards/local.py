"""Async rewards, in an event loop of the trainer's process."""

import asyncio
import math
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError

from fsdptrain import platform
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.calls import Call, LostTime, Outcome, RewardCalls, reason

MAX_CONCURRENT = 64  # async calls of a rank
GRACE_S = 5.0  # for the event loop to end late calls


class EventLoop:
    """Calls one async reward in an event loop of its own thread, up to `MAX_CONCURRENT` calls at a time.

    The loop lives until `close`, because an HTTP client of the user belongs to one loop. A call must not block it.
    """

    def __init__(self, reward: RewardCalls) -> None:
        self.reward = reward
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._free = asyncio.Semaphore(MAX_CONCURRENT)
        threading.Thread(target=self._run_loop, daemon=True, name="async reward").start()

    def run(self, calls: Sequence[Call], lost: LostTime) -> list[Outcome]:
        """Score the samples, in order. Raises RolloutError if too much time is lost, or after `close`."""
        if not self._closed:
            rounds = math.ceil(len(calls) / MAX_CONCURRENT)
            scored = asyncio.run_coroutine_threadsafe(self._score_all(calls, lost), self._loop)
            try:
                return scored.result(rounds * self.reward.timeout + GRACE_S)
            except CancelledError:
                pass
            except TimeoutError:
                raise RolloutError(
                    f"{self.reward.where}: async calls did not end at --reward-timeout: they block their event loop, "
                    "or catch its cancellation; await what takes long, or make it a plain function"
                ) from None
        raise RolloutError(f"{self.reward.where}: the run has ended")

    def close(self) -> None:
        """Cancel all calls and end the event loop."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(_end(), self._loop)

    def _run_loop(self) -> None:
        platform.use_local_device()
        self._loop.run_forever()
        self._loop.close()

    async def _score_all(self, calls: Sequence[Call], lost: LostTime) -> list[Outcome]:
        scored = await asyncio.gather(*(self._score(job, lost) for job in self.reward.jobs(calls)))
        return [outcome for outcomes in scored for outcome in outcomes]

    async def _score(self, calls: Sequence[Call], lost: LostTime) -> list[Outcome]:
        async with self._free:
            deadline = asyncio.timeout(self.reward.timeout)
            try:
                async with deadline:
                    return self.reward.outcomes(await self.reward.call(calls), len(calls))
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # user code may raise anything
                if self._closed:
                    raise
                why = self.reward.late if deadline.expired() else reason(error)
            lost.add(self.reward, why, calls[0], num_calls=MAX_CONCURRENT)
            return [why] * len(calls)


async def _end() -> None:
    """Cancel the calls of the current event loop and stop it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
