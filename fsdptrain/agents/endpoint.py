"""A server of the OpenAI API on loopback. The key of a request names its episode."""

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable

from pydantic_core import from_json

from fsdptrain.agents.calls import CallError, Episodes
from fsdptrain.agents.chat import ChatRequest
from fsdptrain.agents.wire import parse
from fsdptrain.errors import ConfigError, describe

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    remedy = "in the clone, pip install '.[agents]'"
    raise ConfigError(f"the endpoint of agents needs the packages starlette and uvicorn: {remedy}") from error

log = logging.getLogger(__name__)
Handler = Callable[[Request, str], Awaitable[Response]]

_IDLE_S = 75  # for connections without a request; longer than clients keep theirs
_CLOSE_S = 1  # for connections whose client does not read its response


class Endpoint:
    """Serves `episodes` on a free port, in a daemon thread, until `close`."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes
        self._loop = asyncio.new_event_loop()
        self._closing: asyncio.Future[None] = self._loop.create_future()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
        # Connections inherit it. Without, each response waits 40 ms for an acknowledgement of its headers.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._application(),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=4096,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )
        self._thread = threading.Thread(target=self._run, name="agent-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server. Open calls are cancelled and get status 503."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join()

    def _stop(self) -> None:
        self._server.should_exit = True
        if not self._closing.done():
            self._closing.set_result(None)

    def _run(self) -> None:
        with self._socket, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def _application(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._checked(self._chat), methods=["POST"]),
            Route("/v1/reward", self._checked(self._reward), methods=["POST"]),
            Route("/v1/models", self._checked(self._models), methods=["GET"]),
        ]
        application = Starlette(routes=routes)
        application.router.redirect_slashes = False
        return application

    def _checked(self, handle: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Call `handle` with the key of the request, until the endpoint is closed. Errors become responses."""

        async def respond(request: Request) -> Response:
            work = asyncio.ensure_future(self._handled(handle, request))
            try:
                await asyncio.wait({work, self._closing}, return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else _refuse(CallError(503, "the endpoint is closed"))
            finally:
                work.cancel()

        return respond

    async def _handled(self, handle: Handler, request: Request) -> Response:
        try:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._episodes.is_open(key):
                raise CallError(401, "the API key belongs to no open episode", code="invalid_api_key")
            return await handle(request, key)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except CallError as error:
            return _refuse(error)
        except Exception as error:
            log.exception("%s failed", request.url.path)
            return _refuse(CallError(500, describe(error)))

    async def _chat(self, request: Request, key: str) -> Response:
        """Answer a chat completion; a streamed one when it is complete. Cancels the call if the client disconnects."""
        body = parse(ChatRequest, await request.body())
        answer = asyncio.ensure_future(self._episodes.answer(key, body.to_call()))
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            if answer.cancelled():
                raise CallError(503, "the call was cancelled")
            found = body.to_body(answer.result(), self._episodes.model)
        finally:
            answer.cancel()
            gone.cancel()
        if body.stream:
            return Response("".join(body.to_events(found)), media_type="text/event-stream")
        return JSONResponse(found)

    async def _reward(self, request: Request, key: str) -> Response:
        try:
            reward = from_json(await request.body(), allow_inf_nan=False)
        except ValueError as error:
            raise CallError(400, f"Invalid JSON: {error}") from None
        if isinstance(reward, bool) or not isinstance(reward, (int, float, dict)):
            raise CallError(400, "the body must be a number or an object with a reward", param="reward")
        if isinstance(reward, dict) and "reward" not in reward:
            raise CallError(400, "the object has no reward", param="reward")
        self._episodes.add_reward(key, reward)
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request, key: str) -> Response:
        description = {"id": self._episodes.model, "object": "model", "created": 0, "owned_by": "fsdptrain"}
        return JSONResponse({"object": "list", "data": [description]})


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse(error: CallError) -> Response:
    """Return the response to a refused call, as OpenAI formats it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"message": str(error)[:1000], "type": kind, "param": error.param, "code": error.code}
    return JSONResponse({"error": body}, error.status)
