"""The variables that torchrun sets for each rank, checked without importing torch."""

import os
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

    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name) or default
        try:
            return int(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(f"{name}={text} in the environment is not an integer: {_REMEDY}") from None

    ranks = RankVariables(
        rank=number("RANK"),
        world_size=number("WORLD_SIZE"),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        master_addr=environment.get("MASTER_ADDR", ""),
        master_port=number("MASTER_PORT"),
        store_of_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        max_restarts=number("TORCHELASTIC_MAX_RESTARTS", 0),
        restart=number(RESTART_COUNT, 0),
    )
    if not (0 <= ranks.rank < ranks.world_size and ranks.local_world_size <= ranks.world_size and ranks.master_addr):
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR do not fit together, {ranks}: {_REMEDY}")
    return ranks


def has_fsdptrain_launcher() -> bool:
    return LAUNCHER_PID in os.environ
