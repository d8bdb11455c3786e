"""The threads in which groups are generated, for an engine that keeps requests across weight syncs."""

import logging
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.protocols import InFlightEngine, RolloutEngine, SteppedEngine

log = logging.getLogger(__name__)

MAX_SLOTS = 512  # threads of one rank, by default


@dataclass(frozen=True)
class Background:
    """Where groups are generated while the trainer does other work."""

    threads: Executor
    num_slots: int  # groups at the same time on this rank
    stepped: SteppedEngine | None  # the engine, if it generates on the training thread


def open_background(config: Config, engine: RolloutEngine, stack: ExitStack) -> Background | None:
    """Create the threads, ended after the engine. None: whole rollouts are generated on the training thread."""
    if not config.sync.max_staleness or not isinstance(engine, InFlightEngine):
        return None
    stepped = engine if isinstance(engine, SteppedEngine) else None
    if stepped is not None and not stepped.keeps_requests:
        log.info("whole rollouts are generated ahead: this engine cannot continue requests after a weight sync")
        return None
    num_slots = rollout_slots(config)
    threads = ThreadPoolExecutor(num_slots, thread_name_prefix="rollout")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)  # do not wait: other ranks wait for an error
    return Background(threads, num_slots, stepped)


def rollout_slots(config: Config) -> int:
    """Return the number of groups that a rank generates at the same time."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if config.rollout.slots is not None:
        return max(1, config.rollout.slots // num_ranks)
    rollouts = 1 + config.sync.max_staleness
    groups = -(-config.rollout.batch_size // num_ranks)
    if config.environment.has_episodes:
        groups = min(groups, config.environment.environment_workers // config.algorithm.n_samples_per_prompt)
    return max(1, min(rollouts * groups, MAX_SLOTS))
