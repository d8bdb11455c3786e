"""The variables that torchrun sets for each rank, checked without importing torch."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from fsdptrain.errors import ConfigError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where a rank leaves its error for the process that started it
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
RUN_ID = "TORCHELASTIC_RUN_ID"  # --rdzv-id; the same after a restart
LAUNCHER_PID = "FSDPTRAIN_LAUNCHER_PID"  # set for ranks started by the fsdptrain command
_REMEDY = "start with torchrun, which sets it, or unset RANK to train in one process"


@dataclass(frozen=True)
class RankVariables:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # ranks on this machine
    master_addr: str
    master_port: int
    store_of_agent: bool  # torchrun's agent listens at master_addr:master_port, not rank 0
    max_restarts: int = 0  # of torchrun
    restart: int = 0  # which of them this is; torchrun counts them for each machine, not for the run

    @property
    def keeps_store_over_restarts(self) -> bool:
        return self.store_of_agent and self.max_restarts > 0 and self.local_world_size < self.world_size


def read_rank_variables(environment: Mapping[str, str] = os.environ) -> RankVariables | None:
    """Read what torchrun, or `accelerate launch`, has set. None where RANK is not set: this process is alone.

    Raises ConfigError with the variable and its value.
    """
    if "RANK" not in environment:
        return None
    world_size = _integer(environment, "WORLD_SIZE", low=1)
    local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", low=1, high=world_size, default="1")
    local_ranks = local_world_size if "LOCAL_WORLD_SIZE" in environment else sys.maxsize
    return RankVariables(
        rank=_integer(environment, "RANK", high=world_size - 1),
        world_size=world_size,
        local_rank=_integer(environment, "LOCAL_RANK", high=local_ranks - 1, default="0"),
        local_world_size=local_world_size,
        master_addr=_text(environment, "MASTER_ADDR"),
        master_port=_integer(environment, "MASTER_PORT", low=1, high=65535),
        store_of_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        max_restarts=_integer(environment, "TORCHELASTIC_MAX_RESTARTS", default="0"),
        restart=_integer(environment, RESTART_COUNT, default="0"),
    )


def has_fsdptrain_launcher() -> bool:
    return LAUNCHER_PID in os.environ


def _text(environment: Mapping[str, str], name: str, default: str = "") -> str:
    text = environment.get(name) or default
    if not text:
        raise ConfigError(f"RANK is set in the environment and {name} is not: {_REMEDY}")
    return text


def _integer(
    environment: Mapping[str, str], name: str, *, low: int = 0, high: int = sys.maxsize, default: str = ""
) -> int:
    text = _text(environment, name, default)
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        bounds = f"from {low} to {high}" if high < sys.maxsize - 1 else f"of at least {low}"
        raise ConfigError(f"{name}={text} in the environment must be an integer {bounds}: {_REMEDY}")
    return int(text)
