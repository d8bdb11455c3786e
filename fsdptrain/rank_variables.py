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


def read_rank_variables(environment: Mapping[str, str] = os.environ) -> RankVariables | None:
    """Read what torchrun, or `accelerate launch`, has set. None where RANK is not set: this process is alone.

    Raises ConfigError with the variable and its value.
    """
    if "RANK" not in environment:
        return None
    found = RankVariables(
        rank=_integer(environment, "RANK"),
        world_size=_integer(environment, "WORLD_SIZE", low=1),
        local_rank=_integer(environment, "LOCAL_RANK", default="0"),
        local_world_size=_integer(environment, "LOCAL_WORLD_SIZE", low=1, default="1"),
        master_addr=_text(environment, "MASTER_ADDR"),
        master_port=_integer(environment, "MASTER_PORT", low=1, high=65535),
        store_of_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    problem = None
    if found.rank >= found.world_size:
        problem = f"RANK={found.rank} in the environment must be below WORLD_SIZE={found.world_size}"
    elif found.local_world_size > found.world_size:
        problem = f"LOCAL_WORLD_SIZE={found.local_world_size} in the environment is above WORLD_SIZE={found.world_size}"
    elif "LOCAL_WORLD_SIZE" in environment and found.local_rank >= found.local_world_size:
        bound = f"LOCAL_WORLD_SIZE={found.local_world_size}"
        problem = f"LOCAL_RANK={found.local_rank} in the environment must be below {bound}"
    if problem is not None:
        raise ConfigError(f"{problem}: {_REMEDY}")
    return found


def has_fsdptrain_launcher() -> bool:
    return LAUNCHER_PID in os.environ


def restart_count() -> int:
    """Count the restarts so far. torchrun counts them for each machine, not for the run."""
    return _integer(os.environ, RESTART_COUNT, default="0")


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
        bounds = f"from {low} to {high}" if high < sys.maxsize else f"of at least {low}"
        raise ConfigError(f"{name}={text} in the environment must be an integer {bounds}: {_REMEDY}")
    return int(text)
