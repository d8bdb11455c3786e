"""Options of weight staleness, weight transfer to servers and server timeouts."""

from typing import Literal

from pydantic import Field

from fsdptrain.config.section import Section


class SyncConfig(Section):
    """Engines and weight sync."""

    max_staleness: int = Field(default=0, ge=0)
    """Generate ahead of training, with weights at most this many rollouts older than those that are trained. With
    vllm-server, generation and training overlap. 0: always use the newest weights. [rollouts]"""
    offload_train: bool = False
    """Move the trainer's weights and optimizer state to host memory during generation, so that the engine can use all
    of the device. They cross the bus twice per rollout."""
    weight_transfer: Literal["file", "gloo", "nccl"] = "file"
    """How weights reach servers. `file`: through a folder that they can read. `gloo`: over the network. `nccl`: between
    GPUs, not yet run."""
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
