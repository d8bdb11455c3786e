"""The memory of a run, before and after the model is loaded."""

import importlib
import importlib.util
import logging
import os
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.demand import MemorySupply, Shard, check_load_memory, gib
from fsdptrain.memory.grid import Grid
from fsdptrain.model.structure import count_parameters

log = logging.getLogger(__name__)


def plan_memory(model: PreTrainedModel, config: Config) -> None:
    """Log required and available memory. Raises MemoryPlanError on all ranks if loading cannot fit. Collective."""
    supply = MemorySupply(
        device_free=platform.device_memory()[0],
        host_free=platform.host_memory()[0],
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        has_accelerator=platform.has_accelerator(),
    )
    with raise_on_all_ranks(MemoryPlanError, "--hf-checkpoint"):
        log.info("%s", check_load_memory(config, _shard(model, config), supply))


def _shard(model: PreTrainedModel, config: Config) -> Shard:
    grid, counts = Grid.of(config, dist.get_world_size()), count_parameters(model)
    if not grid.is_split:
        return Shard.of(counts, grid.shards)
    from fsdptrain.memory.pieces import Pieces

    pieces = Pieces(model, grid)
    copied = pieces.total(lambda piece: (piece.tensor_copies - 1) * piece.numel)
    return Shard.of(counts, grid.shards * grid.tensor, gathered=pieces.gathered, copied=copied)


def build_planner(config: Config, model: PreTrainedModel | None = None, *, auto_engine: str) -> Any:
    """Create a `tools.plan.Planner` for a run on GPUs; None if the tools are not installed. Collective.

    model: if built already. auto_engine: which engine --rollout-engine auto means.
    """
    if importlib.util.find_spec("fsdptrain.tools") is None:
        return None
    tools = importlib.import_module("fsdptrain.tools.plan.plan")
    if model is None:
        model, _ = importlib.import_module("fsdptrain.tools.inspect.inspection").meta_model(config, with_adapters=True)
    with raise_on_all_ranks(MemoryPlanError, "--hf-checkpoint"):
        machine = tools.Machine(dist.get_world_size(), platform.device_memory()[1])
        return tools.Planner(model, machine, auto_engine=auto_engine)


def fit_memory(planner: Any, config: Config) -> Config:
    """Add memory options that the user has not set, if the run does not fit without. Collective.

    planner: None on a CPU, where nothing changes. All ranks use the choice of rank 0 for the least free memory.
    """
    if planner is None or config.model.deterministic_mode:
        return config
    free = min(gather(platform.device_memory()[0]))
    with raise_on_all_ranks(MemoryPlanError, "--max-tokens-per-gpu"):
        own = _fitting(planner, config, free)
    values, flags = gather(own)[0]
    if flags:
        log.info("memory: %s chosen to fit into %s GiB; set other memory options to choose yourself", flags, gib(free))
    return config.with_values(**values)


def _fitting(planner: Any, config: Config, free: int) -> tuple[dict[str, Any], str]:
    """Return the options by flat key, and their flags; nothing if the run fits, or if none are found."""
    fit = importlib.import_module("fsdptrain.tools.plan.fit")
    try:
        found = fit.fastest_fit(planner, config, free=free, given=config.given_values)
    except MemoryPlanError as error:
        log.info("%s", error)
        return {}, ""
    finally:
        planner.forget_compiled()
    if found is None:
        return {}, ""
    changed = {flat: key.value(found.config) for flat, key in all_keys().items()}
    return {flat: value for flat, value in changed.items() if value != config.value(flat)}, " ".join(found.flags)


def choose_sizes(planner: Any, config: Config) -> Config:
    """Replace `auto` of --logprob-chunk-size and --fsdp-reshard-after-forward by the memory plan. Collective.

    planner: None on a CPU, where nothing changes. All ranks use the choice of rank 0 for the least free memory.
    """
    if planner is None or "auto" not in (config.model.logprob_chunk_size, config.fsdp.reshard_after_forward):
        return config
    free = min(gather(platform.device_memory()[0]))
    with raise_on_all_ranks(MemoryPlanError, "--logprob-chunk-size auto"):
        own = _choice(planner, config, free)
    choice = gather(own)[0]
    if not choice:
        return config
    config = config.with_values(**choice)
    layers = "freed" if config.fsdp.reshard_after_forward else "kept"
    log.info("logprobs of %d tokens at a time, layers %s after the forward pass", config.model.chunk_size, layers)
    return config


def _choice(planner: Any, config: Config, free: int) -> dict[str, Any]:
    """Return the sizes by flat key; nothing if the run cannot be planned."""
    try:
        chosen = planner.choose_sizes(config, free)
    except MemoryPlanError as error:
        log.info("%s", error)
        return {}
    finally:
        planner.forget_compiled()
    return {flat: chosen.value(flat) for flat in ("logprob_chunk_size", "fsdp_reshard_after_forward")}


def planned_memory(planner: Any, config: Config) -> int | None:
    """Compute the peak memory of the memory plan without its margin. None if it cannot be planned. [bytes]"""
    if planner is None:
        return None
    try:
        peaks = [planner.training(config), planner.generation(config)]
    except MemoryPlanError as error:
        log.info("%s", error)
        return None
    finally:
        planner.forget_compiled()
    return max(peak.total for peak in peaks if peak is not None)
