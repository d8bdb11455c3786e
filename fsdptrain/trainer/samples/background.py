"""The threads in which groups are generated, for an engine that keeps requests across weight syncs."""

import logging
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.protocols import InFlightEngine, RolloutEngine, SteppedEngine

log = logging.getLogger(__name__)

MAX_SLOTS = 512  # threads of one rank, by default


@dataclass(frozen=True)
class Background:
    """Where groups are generated while the trainer does other work."""

    threads: Executor
    stepped: SteppedEngine | None  # the engine, if it generates on the training thread


def open_background(
    config: Config, engine: RolloutEngine, stack: ExitStack, *, has_deadlines: bool = False
) -> Background | None:
    """Create the threads, ended after the engine. None: whole rollouts are generated on the training thread.

    has_deadlines: episodes must end while the engine generates
    """
    if not config.sync.max_staleness:
        return None
    if reason := _reason_against(engine, has_deadlines=has_deadlines):
        for key in ("rollout_slots", "partial_rollout", "mask_offpolicy_in_partial_rollout"):
            if config.is_set(key):
                raise ConfigError(f"--{key.replace('_', '-')} has no effect, because {reason}: remove it")
        log.info("--max-staleness: whole rollouts are generated ahead, because %s", reason)
        return None
    stepped = engine if isinstance(engine, SteppedEngine) else None
    threads = ThreadPoolExecutor(rollout_slots(config), thread_name_prefix="rollout")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)  # do not wait: other ranks wait for an error
    return Background(threads, stepped)


def _reason_against(engine: RolloutEngine, *, has_deadlines: bool) -> str:
    """Return why groups cannot be generated across weight syncs, or "" if they can."""
    if not isinstance(engine, InFlightEngine):
        return "this engine generates only while the trainer waits"
    if not isinstance(engine, SteppedEngine):
        return ""
    if has_deadlines:
        return "this engine pauses while the trainer works, and the episodes of agents have deadlines"
    return "" if engine.keeps_requests else "this engine cannot continue requests after a weight sync"


def rollout_slots(config: Config) -> int:
    """Return the number of groups that this rank generates at the same time."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if config.rollout.slots is not None:
        return max(1, len(range(rank, config.rollout.slots, num_ranks)))
    rollouts = 1 + config.sync.max_staleness
    groups = -(-config.rollout.batch_size // num_ranks)
    if config.environment.has_episodes:
        groups = min(groups, config.environment.environment_workers // config.algorithm.n_samples_per_prompt)
    return max(1, min(rollouts * groups, MAX_SLOTS))
