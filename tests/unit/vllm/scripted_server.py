"""An HTTP server with vLLM's routes and a script of failures. tests/vllm/servers tests what real servers do."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fsdptrain.vllm.server.client import VLLMClient

GENERATE = "/inference/v1/generate"


class ScriptedServer(ThreadingHTTPServer):
    """Completes a prompt [a, b, ...] with the prompt itself, so that an answer shows whose it is."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *, version: str = "run/1", dies_after: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version = version
        self.dies_after = dies_after  # completions
        self.refuses: dict[str, str] = {}  # path -> message, with status 500
        self.breaks_off: set[str] = set()  # paths without an answer
        self.delays: dict[str, float] = {}  # path -> seconds before its answer
        self.holds: dict[str, threading.Event] = {}  # path -> set when it may answer
        self.texts: dict[str, str] = {}  # path -> body, instead of vLLM's answer
        self.calls: list[str] = []  # paths, in order
        self.generated: list[Any] = []  # bodies of requests for completions
        self.info: Any = FITTING
        self.lock = threading.Lock()
        self.client = VLLMClient(f"http://127.0.0.1:{self.server_address[1]}")
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_: Any) -> None: ...


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        self._answer(json.loads(self.rfile.read(length)) if length else None)

    def _answer(self, body: Any) -> None:
        server, path = self.server, self.path.partition("?")[0]
        with server.lock:
            if server.dies_after == 0:
                return  # the connection breaks
            server.calls.append(path)
            if path in server.breaks_off:
                return
            if path == GENERATE:
                server.generated.append(body)
                if server.dies_after is not None:
                    server.dies_after -= 1
        time.sleep(server.delays.get(path, 0.0))
        if path in server.holds:
            server.holds[path].wait()
        if path in server.refuses:
            self._send(500, json.dumps({"error": {"message": server.refuses[path]}}))
            return
        if path == "/finish_weight_update":
            server.version = body["weight_version"]
        answer = ANSWERS.get(path, lambda server, body: {})(server, body)
        self._send(200, server.texts.get(path, json.dumps(answer)))

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def _completion(server: ScriptedServer, body: Any) -> Any:
    ids = body["token_ids"]
    spans = [{"version": server.version, "start": 0, "end": len(ids)}]
    choice = {"token_ids": ids, "finish_reason": "length", "weight_versions": spans}
    return {"choices": [choice | {"logprobs": {"content": [{"logprob": -1.0}] * len(ids)}}], "usage": {}}


FITTING = {  # in float32
    "model_config": {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_model_len": 1 << 20},
    "parallel_config": {
        "worker_extension_cls": "fsdptrain.vllm.worker.extension.WorkerExtension",
        "data_parallel_size": 1,
    },
    "scheduler_config": {"policy": "priority"},
}
ANSWERS: dict[str, Callable[[ScriptedServer, Any], Any]] = {
    "/weight_info": lambda server, body: {"weight_version": server.version},
    "/get_world_size": lambda server, body: {"world_size": 1},
    "/server_info": lambda server, body: {"vllm_config": server.info},
    "/collective_rpc": lambda server, body: {"results": [[None, {}]]},
    GENERATE: _completion,
}
