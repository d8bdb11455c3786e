"""Options of vLLM, in the trainer's process and as servers. Imports no vLLM."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from fsdptrain.config.rules import NEUTRAL, IdleWith, Problem, Requires
from fsdptrain.config.section import Names, Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

SERVER_ENGINE = "vllm-server"

_SERVERS = Requires(f"rollout_engine={SERVER_ENGINE}")
_STARTED = IdleWith("rollout_urls", fix="these servers run already, remove it")
_NOT_HF = IdleWith("rollout_engine=hf", fix="remove it, or use --rollout-engine vllm")


class VllmConfig(Section):
    """vLLM engines."""

    NAME = "vllm"
    PREFIX = "rollout_"
    ON_RESUME = NEUTRAL

    engine_args: Annotated[dict[str, Any], _NOT_HF, _STARTED] = Field(default={})
    """vLLM engine options, as key=value or as one JSON object, e.g. max_num_seqs=512."""
    kv_cache_gib: Annotated[float | None, _NOT_HF, _STARTED] = Field(default=None, gt=0.0)
    """Memory of vLLM's key-value cache. Default: vLLM's choice on a GPU, 1 on a CPU. [GiB]"""
    timeout: Annotated[float, _NOT_HF] = Field(default=7200.0, gt=0.0)
    """Time limit of a request (vllm-server), or of an engine step and a weight sync (vllm). A longer one ends the run.
    [s]"""
    urls: Annotated[Names, _SERVERS] = Field(default=[])
    """vllm-server: running servers, e.g. http://127.0.0.1:8000. See docs/rollouts.md."""
    num_servers: Annotated[int | None, _SERVERS] = Field(default=None, ge=1)
    """vllm-server: servers to start on this machine, instead of --rollout-urls; they stop with the run."""
    server_python: Annotated[str | None, _SERVERS, _STARTED] = None
    """vllm-server: Python interpreter with vLLM that starts the servers. Default: the trainer's."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if config.rollout.engine == SERVER_ENGINE and bool(self.urls) == (self.num_servers is not None):
            yield (
                f"--rollout-engine {SERVER_ENGINE} needs --rollout-urls, of servers that run, or "
                "--rollout-num-servers, to start some: give one of the two"
            )
        for url in self.urls:
            if not _is_address(url):
                shown = repr(url.rpartition("@")[2])  # without a password
                yield f"--rollout-urls {shown} is no address of a server: write e.g. http://127.0.0.1:8000"
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            yield f"--rollout-urls names a server twice: {', '.join(self.urls)}"

    def launch_problems(self, world_size: int, local_world_size: int) -> Iterator[str]:
        if world_size > local_world_size and self.num_servers is not None:
            yield (
                f"--rollout-num-servers {self.num_servers} starts servers on one machine, and this run has more: "
                "start servers yourself and name them by --rollout-urls"
            )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:  # a port, bracket or host name that cannot be
        return False
    known = parts.scheme in ("http", "https") and host and port != 0 and url.isprintable() and " " not in url
    return bool(known) and not (parts.query or parts.fragment or "@" in parts.netloc)


class ServerConfig(Section):
    """vLLM servers: weight transfer and deadlines."""

    NAME = "servers"
    ON_RESUME = NEUTRAL
    RULES = (_SERVERS,)

    weight_transfer: Literal["file", "nccl"] = "file"
    """How weights reach servers. `file`: in a file that they can read. `nccl`: from GPU to GPU."""
    weight_sync_dir: str | None = None
    """Folder for the weights that servers read. Default: shared memory if there is room and all servers are on this
    machine, else --output-dir, which the servers must be able to read."""
    weight_sync_timeout: float = Field(default=300.0, gt=0.0)
    """Longest wait for a server to load new weights, or to answer a health check while it generates. [s]"""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if config.rollout.engine == SERVER_ENGINE and 2 * self.weight_sync_timeout >= config.launch.dist_timeout:
            yield (
                f"--dist-timeout {config.launch.dist_timeout} is no longer than ranks may wait for a server, "
                f"2 x --weight-sync-timeout {self.weight_sync_timeout:g}: raise it"
            )


SECTIONS = (VllmConfig, ServerConfig)
