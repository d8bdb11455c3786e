"""Options of weight staleness, weight transfer to servers and server timeouts."""

from typing import Literal

from pydantic import Field

from fsdptrain.config.section import Section


class SyncConfig(Section):
    """Engines and weight sync."""

    max_staleness: int = Field(default=0, ge=0)
    """Generate ahead of training, with weights at most this many rollouts older than the trained ones. With
    vllm-server, both run concurrently. 0: always use the newest weights. [rollouts]"""
    offload_train: bool = False
    """Keep the trainer's weights and optimizer in host memory during generation, so that the engine has the device to
    itself. They are transferred to the host and back in each rollout."""
    weight_push: Literal["file", "gloo", "nccl"] = "file"
    """Weight transfer to servers. `file`: through a directory that they can read. `gloo`: over the network. `nccl`: GPU
    to GPU, not tested yet."""
    weight_folder: str | None = None
    """Directory for the newest weights. Default: in shared memory if all servers are on this machine and it has room,
    else in --output-dir, which the servers must be able to read."""
    update_weight_buffer_size: int = Field(default=512 * 2**20, ge=1)
    """Size of the weights that are sent, or stored in one file, at a time. [bytes]"""
    sync_timeout: float = Field(default=300.0, gt=0.0)
    """Timeout of every wait for a server: to load new weights, or to respond while it generates. [s]"""
    server_start_timeout: float = Field(default=600.0, gt=0.0)
    """Timeout for a server to start. [s]"""
    min_servers: int = Field(default=1, ge=1)
    """Minimum number of servers; the run continues without the others. Servers that the run started are restarted."""
