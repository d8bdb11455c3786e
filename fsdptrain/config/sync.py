"""Options of weight staleness, weight transfer to servers and server timeouts."""

from typing import Literal

from pydantic import Field

from fsdptrain.config.section import Section


class SyncConfig(Section):
    """Engines and weight sync."""

    max_staleness: int = Field(default=0, ge=0)
    """Generate ahead of training: with weights at most so many rollouts older than those that are trained. With
    vllm-server both go on at the same time. 0: always with the newest. [rollouts]"""
    offload_train: bool = False
    """Weights and optimizer of the trainer are in host memory while completions are made, so that the engine has the
    device to itself. They cross the bus there and back in each rollout."""
    weight_transfer: Literal["file", "gloo", "nccl"] = "file"
    """How weights reach servers. `file`: in a folder that they can read. `gloo`: over the network. `nccl`: from GPU to
    GPU, not yet run."""
    weight_sync_dir: str | None = None
    """Folder for the newest weights. Default: in shared memory if all servers are on this machine and there is room,
    else in --output-dir, which the servers must be able to read."""
    update_weight_buffer_size: int = Field(default=512 * 2**20, ge=1)
    """Weights sent at once, or stored in one file. [bytes]"""
    weight_sync_timeout: float = Field(default=300.0, gt=0.0)
    """Deadline of every wait for a server: to take new weights, or to answer a health check while it generates. [s]"""
    server_start_timeout: float = Field(default=600.0, gt=0.0)
    """Deadline for the start of a server. [s]"""
    min_servers: int = Field(default=1, ge=1)
    """Continue while at least this many servers are up. Servers that the run started are restarted."""
