"""vLLM servers that a run starts: on this machine, on the loopback interface, and never longer than the run."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsdptrain
from fsdptrain.errors import RolloutError
from fsdptrain.vllm.options import ENVIRONMENT
from fsdptrain.vllm.server import supervisor
from fsdptrain.vllm.server.client import VLLMClient, last_words

HOST = "127.0.0.1"
_END_S = 30.0  # for the supervisor to kill its server
_HEALTH_S = 5.0
_POLL_S = 0.3
PLUGIN: Mapping[str, Any] = {"worker_extension_cls": "fsdptrain.vllm.worker.extension.WorkerExtension"}
MIDDLEWARE: Mapping[str, Any] = {"middleware": "fsdptrain.vllm.worker.auth.ApiKeyMiddleware"}
_ENVIRONMENT = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}  # the routes of weight transfer
# On a CPU vLLM would bind the workers of all servers to the same first cores. [vLLM 0.32]
_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_REMOVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}


class ServerProcess:
    """A server that is being started."""

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
        with socket.create_server((HOST, 0)) as probe:
            port = probe.getsockname()[1]
        self.client = VLLMClient(f"http://{HOST}:{port}", api_key, log=log)
        self._log = log
        self._imports = Path(tempfile.mkdtemp(prefix="fsdptrain-import-"))  # this package, and nothing else of ours
        package = Path(fsdptrain.__file__).resolve().parent
        (self._imports / "fsdptrain").symlink_to(package, target_is_directory=True)
        server = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port), *arguments]
        temporary = os.pathsep.join(str(folder) for folder in (weights, self._imports) if folder)
        guard = [sys.executable, str(supervisor.__file__), str(os.getpid()), temporary]
        environment = _DEFAULTS | {name: value for name, value in os.environ.items() if name not in _REMOVED}
        environment |= _ENVIRONMENT | {"VLLM_API_KEY": api_key, "PYTHONPATH": str(self._imports)}
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*guard, *server],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C goes to the trainer, which then ends its servers
            )

    async def wait_until_up(self, seconds: float) -> None:
        """RolloutError with the last errors of the log if the server ends, or is not healthy in time."""
        end = time.monotonic() + seconds
        while (is_alive := self._process.poll() is None) and time.monotonic() < end:
            with contextlib.suppress(RolloutError):
                return await self.client.get("/health", timeout=_HEALTH_S)
            await asyncio.sleep(_POLL_S)
        what = f"was not up in {seconds:.0f} s" if is_alive else "ended during its start"
        raise RolloutError(f"{self.client.url} {what} ({self._log}: {last_words(self._log)})")

    def close(self) -> None:
        """Kill the server, its engine and its workers, and wait until they are gone."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # a stopped process handles nothing else
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        shutil.rmtree(self._imports, ignore_errors=True)


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
