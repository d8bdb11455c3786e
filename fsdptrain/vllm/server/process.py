"""vLLM servers that a run starts itself: on this machine, on the loopback interface, and never longer than the run."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsdptrain
from fsdptrain.vllm.server import supervisor as vllm_keeper

HOST = "127.0.0.1"
_END_S = 30.0  # for a keeper to end its server
_LOG_LINES = 5  # of a server that ended, in an error
_LINE_LENGTH = 300
# Also in an environment without fsdptrain: see `_import_path`.
PLUGIN: Mapping[str, Any] = {
    "worker_extension_cls": "fsdptrain.vllm.worker.extension.WorkerExtension",
    "weight_transfer_config": {"backend": "fsdptrain"},
}
GUARD: Mapping[str, Any] = {"middleware": "fsdptrain.vllm.worker.auth.ApiKeyMiddleware"}
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that take weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # those that take adapters, with --enable-lora
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # on shared cores threads that spin while they wait cost most of the speed
}
# On a CPU vLLM would bind each worker to the first cores, those of all servers to the same ones. [vLLM 0.32]
_UNLESS_GIVEN = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_NOT_THEIRS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}


@dataclass(frozen=True)
class Launch:
    """How to start one server."""

    python: str
    arguments: Sequence[str]  # of vLLM's server, without host and port
    folder: Path  # for its log
    weights: Path  # deleted if the run is killed
    api_key: str = field(repr=False)


class ServerProcess:
    """A server on a port that stays its own when it is started again."""

    def __init__(self, launch: Launch, index: int, devices: str | None) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log = launch.folder / f"server{index}.log"
        self._launch = launch
        self._devices = devices  # CUDA_VISIBLE_DEVICES; None: there are none
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        launch = self._launch
        server = [launch.python, "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(self.port)]
        keeper = [sys.executable, str(vllm_keeper.__file__), str(os.getpid()), str(launch.weights)]
        environment = _UNLESS_GIVEN | {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS}
        environment |= _ENVIRONMENT | {"VLLM_API_KEY": launch.api_key, "PYTHONPATH": _import_path(launch.folder)}
        if self._devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*keeper, *server, *launch.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends its servers
            )

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def end(self) -> None:
        """The keeper kills the server, its engine and its workers."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # who was stopped hears nothing else
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def last_words(self) -> str:
        """The end of its log, on one line."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        said = [line.strip()[:_LINE_LENGTH] for line in lines if "Error" in line or "error:" in line] or [
            line.strip() for line in lines
        ]
        return " | ".join(said[-_LOG_LINES:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def command_line(options: Mapping[str, Any]) -> list[str]:
    """vLLM's options as flags: `max_num_seqs: 8` is `--max-num-seqs 8`; true, false, lists and mappings too."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def _import_path(folder: Path) -> str:
    """A folder in which vLLM's environment finds this package and nothing else of ours."""
    path = folder / "import"
    path.mkdir(exist_ok=True)
    link, package = path / "fsdptrain", Path(fsdptrain.__file__).parent
    if not link.is_symlink() or link.resolve() != package.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(package, target_is_directory=True)
    return str(path.resolve())
