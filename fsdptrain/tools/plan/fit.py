"""Memory options that a run chooses itself, because it would not fit as given."""

from collections.abc import Collection
from dataclasses import replace

from fsdptrain.config import Config
from fsdptrain.errors import MemoryPlanError
from fsdptrain.memory.demand import gib
from fsdptrain.memory.remedies import Changed
from fsdptrain.tools.plan import remedies
from fsdptrain.tools.plan.plan import Planner, smaller_packs


def fastest_fit(planner: Planner, config: Config, *, free: int, given: Collection[str]) -> Changed | None:
    """Return `config` with the fastest memory options that make it fit into `free` bytes of each GPU.

    given: flat keys of options that the user has set, which stay. Packs get smaller only if that leaves the data as it
    is: without --rollout-max-prompt-len, and in supervised training, their size limits the length of prompts.

    Returns None if `config` fits as it is. Raises MemoryPlanError if nothing makes it fit, or if the activations cannot
    be traced.
    """
    planner = planner.on(replace(planner.machine, gpu_memory=free))
    if planner.fits(config) is not None:
        return None
    keeps_data = config.algorithm.algorithm != "sft" and config.rollout.max_prompt_len is not None
    packs = smaller_packs(config) if keeps_data else []
    for changed in remedies.remedies(config, packs=packs, caches=planner.smaller_caches(config)):
        is_free = not any(changed.config.value(flat) != config.value(flat) for flat in given)
        if changed.flags and is_free and planner.allows(changed.config) and planner.fits(changed.config) is not None:
            return changed
    raise MemoryPlanError(
        f"memory: no memory option that is free to choose makes the run fit into {gib(free)} GiB: "
        "`fsdptrain plan` with the same flags and --rollout-engine shows what would"
    )
