"""Requests to vLLM in this process: submitted by any thread, answered while one thread steps the engine."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.errors import RolloutError
from fsdptrain.types import Completion

WAIT_S = 0.01  # for a request, before the condition of the caller is checked again


@dataclass(eq=False)
class Request:
    """One completion of one prompt."""

    token_ids: list[int]
    params: Any  # vLLM's sampling parameters
    read: Callable[[Any], Completion]  # makes the completion of vLLM's output
    priority: int = 0  # the lowest is generated first; 0 unless the engine schedules by priority
    future: Future[Completion] = field(default_factory=Future)

    def answer(self, output: Any) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.read(output.outputs[0]))
            except Exception as error:  # noqa: BLE001  # the thread that waits raises it
                self.future.set_exception(error)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Requests:
    """The requests of one engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards `_new` and `_is_closed`
        self._new: list[Request] = []
        self._running: dict[str, Request] = {}  # by vLLM's id of the request
        self._is_closed = False

    def add(self, request: Request) -> None:
        with self._changed:
            if self._is_closed:
                raise RolloutError("the engine is closed")
            self._new.append(request)
            self._changed.notify()

    def wait(self) -> None:
        """Wait shortly for a new request."""
        with self._changed:
            self._changed.wait_for(lambda: self._new, WAIT_S)

    def start_new(self, llm: Any) -> None:
        """Pass new requests to vLLM, and end those whose future was cancelled."""
        cancelled = [id_ for id_, request in self._running.items() if request.future.cancelled()]
        if cancelled:
            llm.llm_engine.abort_request(cancelled)
            for id_ in cancelled:
                del self._running[id_]
        new = self._take_new()
        if not new:
            return
        prompts = [{"prompt_token_ids": request.token_ids} for request in new]
        options = {"priority": [request.priority for request in new]} if any(r.priority for r in new) else {}
        try:
            ids = llm.enqueue(prompts, [request.params for request in new], use_tqdm=False, **options)
        except BaseException as error:
            for request in new:
                request.fail(error)
            raise
        # vLLM adds a random suffix to the ids of requests, and answers with the id alone
        self._running |= {id_.partition("-")[0]: request for id_, request in zip(ids, new, strict=True)}

    def finish(self, output: Any) -> None:
        request = self._running.pop(output.request_id, None) if output.finished else None
        if request is not None:  # otherwise it was cancelled
            request.answer(output)

    def _take_new(self) -> list[Request]:
        with self._changed:
            new, self._new = self._new, []
        return [request for request in new if not request.future.cancelled()]

    def close(self, engine: Any) -> None:
        """End all requests with an error."""
        with self._changed:
            self._is_closed = True
        for request in [*self._running.values(), *self._take_new()]:
            request.fail(RolloutError("the engine is closed"))
        engine.abort_request(list(self._running))
