"""The memory of a run, before and after the model is loaded."""

import importlib
import importlib.util
import logging
import os
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.demand import MemorySupply, check_load_memory, demand_of, load_memory_line
from fsdptrain.memory.grid import Grid
from fsdptrain.model.structure import count_parameters

if TYPE_CHECKING:
    from fsdptrain.memory.pieces import Pieces

log = logging.getLogger(__name__)


def plan_memory(model: PreTrainedModel, config: Config, *, embedded_engine: bool) -> None:
    """Log required and available memory. Raises MemoryPlanError on all ranks if loading cannot fit. Collective."""
    grid = Grid.of(config, dist.get_world_size())
    pieces = split_pieces(model, grid) if grid.is_split else None
    demand = demand_of(config, grid, count_parameters(model), embedded_engine=embedded_engine, pieces=pieces)
    supply = MemorySupply(
        device_free=platform.device_memory()[0],
        host_free=platform.host_memory()[0],
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        has_accelerator=platform.has_accelerator(),
    )
    log.info("%s", load_memory_line(demand, supply))
    with raise_on_all_ranks(MemoryPlanError, "--hf-checkpoint"):
        check_load_memory(demand, supply)


def split_pieces(model: PreTrainedModel, grid: Grid) -> "Pieces":
    from fsdptrain.memory.pieces import Pieces

    return Pieces(model, grid)


def planned_memory(model: PreTrainedModel, config: Config) -> int | None:
    """Compute the peak memory of the memory plan without its margin. None if it cannot be planned. [bytes]"""
    if importlib.util.find_spec("fsdptrain.tools") is None:
        return None
    tools = importlib.import_module("fsdptrain.tools.plan.plan")
    planner = tools.Planner(model, tools.Machine(dist.get_world_size(), platform.device_memory()[1]))
    try:
        peaks = [planner.training(config), planner.generation(config)]
    except MemoryPlanError as error:
        log.info("%s", error)
        return None
    return max(peak.total for peak in peaks if peak is not None)
