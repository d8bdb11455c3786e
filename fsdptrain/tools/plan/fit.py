"""Memory options that a run chooses itself, because it would not fit as given."""

from collections.abc import Collection
from dataclasses import replace

from fsdptrain.config import Config
from fsdptrain.memory.remedies import Changed
from fsdptrain.tools.plan import remedies
from fsdptrain.tools.plan.plan import Planner, smaller_caches, smaller_packs


def fastest_fit(planner: Planner, config: Config, *, free: int, given: Collection[str]) -> Changed | None:
    """Return `config` with the fastest memory options that make it fit into `free` bytes of each GPU.

    given: flat keys of options that the user has set, which stay. Returns None if `config` fits as it is, or if nothing
    makes it fit: then the run tells what lacks. Raises MemoryPlanError if the activations cannot be traced.
    """
    planner = planner.on(replace(planner.machine, gpu_memory=free))
    if planner.fits(config) is not None:
        return None
    for changed in remedies.remedies(
        config, packs=smaller_packs(config), caches=smaller_caches(config, planner.machine)
    ):
        is_free = not any(changed.config.value(flat) != config.value(flat) for flat in given)
        if changed.flags and is_free and planner.allows(changed.config) and planner.fits(changed.config) is not None:
            return changed
    return None
