"""vLLM servers that a run starts: on this machine, on the loopback interface, and never longer than the run."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsdptrain
from fsdptrain.vllm.options import ENVIRONMENT
from fsdptrain.vllm.server import supervisor

HOST = "127.0.0.1"
_END_S = 30.0  # for the supervisor to kill its server
_LOG_LINES = 5  # of a failed server, in an error
_LINE_LENGTH = 300
PLUGIN: Mapping[str, Any] = {"worker_extension_cls": "fsdptrain.vllm.worker.extension.WorkerExtension"}
MIDDLEWARE: Mapping[str, Any] = {"middleware": "fsdptrain.vllm.worker.auth.ApiKeyMiddleware"}
_ENVIRONMENT = {
    **ENVIRONMENT,
    "VLLM_SERVER_DEV_MODE": "1",  # the routes of weight transfer
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # the routes of adapters, with --enable-lora
}
# On a CPU vLLM would bind the workers of all servers to the same first cores. [vLLM 0.32]
_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_REMOVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}


class ServerProcess:
    """A server on a port that it keeps when it is restarted."""

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        log: Path,
        *,
        api_key: str,
        weights: Path | None = None,
        devices: str | None = None,
    ) -> None:
        """
        arguments: of vLLM's server, without host and port.
        weights: folder to delete if the run is killed.
        devices: CUDA_VISIBLE_DEVICES; None: no GPU.
        """
        self._port = _reserve_port()
        self.port: int = self._port.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.log = log
        self._imports = _import_folder()
        self._devices = devices
        self._api_key = api_key
        self._server = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(self.port)]
        self._server += arguments
        self._temporary = os.pathsep.join(str(folder) for folder in (weights, self._imports) if folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        guard = [sys.executable, str(supervisor.__file__), str(os.getpid()), self._temporary]
        environment = _DEFAULTS | {name: value for name, value in os.environ.items() if name not in _REMOVED}
        environment |= _ENVIRONMENT | {"VLLM_API_KEY": self._api_key, "PYTHONPATH": str(self._imports)}
        if self._devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *self._server],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes to the trainer, which then ends its servers
            )

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """Tell the supervisor to kill the server, its engine and its workers. Does not wait."""
        if self._process is not None and not self.has_ended:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)  # a stopped process handles nothing else

    def end(self) -> None:
        """Kill the server and wait until it is gone."""
        self.kill()
        if self._process is None:
            return
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def close(self) -> None:
        """End the server and give up its port."""
        self.end()
        self._port.close()
        shutil.rmtree(self._imports, ignore_errors=True)

    def last_words(self) -> str:
        """The last errors of its log, or else its last lines, on one line."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        lines = [line.strip()[:_LINE_LENGTH] for line in lines]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return " | ".join((errors or lines)[-_LOG_LINES:])


def command_line(options: Mapping[str, Any]) -> list[str]:
    """vLLM's options as flags: `max_num_seqs: 8` becomes `--max-num-seqs 8`; also booleans, lists and mappings."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def _reserve_port() -> socket.socket:
    """A socket that is bound to a free port and does not listen.

    Linux gives the port to nobody else while the socket exists, except to a server that binds it with SO_REUSEADDR, as
    vLLM does.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, 0))
    return reserved


def _import_folder() -> Path:
    """A private folder in which vLLM's environment finds this package and nothing else of the trainer's environment."""
    folder = Path(tempfile.mkdtemp(prefix="fsdptrain-import-"))
    (folder / "fsdptrain").symlink_to(Path(fsdptrain.__file__).resolve().parent, target_is_directory=True)
    return folder
