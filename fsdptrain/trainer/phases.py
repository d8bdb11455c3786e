"""The phases of a rollout: each is timed, and finds the trainer's tensors where it needs them."""

import faulthandler
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.profiler import record_function

from fsdptrain import stages
from fsdptrain.config import Config
from fsdptrain.config.run import profiled

if TYPE_CHECKING:
    from fsdptrain.protocols import RolloutEngine, TrainBackend

_GENERATING = ("collect", "eval")  # phases in which the engine may need the whole device
_WAITING = (*_GENERATING, "sync")  # phases in which a rank waits for the engine
_TRAINING = ("logprobs", "train", "save")
_NAMES = {  # in the log
    "collect": "rollout",
    "eval": "evaluation",
    "generate": "generating",
    "reward": "rewarding",
    "logprobs": "computing logprobs",
    "train": "training",
    "sync": "syncing weights to the engine",
    "save": "saving",
}


class Stopwatch:
    """Measure the seconds per stage of one rollout: `with watch("train"): ...`, then `watch.seconds["train"]`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time one stage. Repeated stages add up."""
        start = time.perf_counter()
        with stages.stage(_NAMES[stage]) if stage in _NAMES else nullcontext():
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Phases:
    """`with phases("train"): ...`; the seconds of the rollout so far are in `seconds`.

    With --offload-train the trainer's tensors are in host memory while the engine generates. When an engine takes
    nearly as long as --dist-timeout, each rank writes its stacks to stderr, one after the other: at the same moment,
    their lines would mix.
    """

    def __init__(self, config: Config, backend: "TrainBackend", engine: "RolloutEngine | None") -> None:
        turn = dist.get_rank() / dist.get_world_size()
        self._patience = (0.9 + 0.05 * turn) * config.launch.dist_timeout  # [s]
        self._engine = engine
        self._offloading = backend if config.sync.offload_train else None
        self._watch = Stopwatch()

    @property
    def seconds(self) -> dict[str, float]:
        return self._watch.seconds

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Time everything inside as `step` of a new rollout."""
        self._watch = Stopwatch()
        with self._watch("step"):
            yield

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._place_tensors(name)
        waits = name in _WAITING
        if waits:
            faulthandler.dump_traceback_later(self._patience, file=2)
        try:
            with self._watch(name), record_function(f"phase: {name}"):
                yield
        finally:
            if waits:
                faulthandler.cancel_dump_traceback_later()

    def _place_tensors(self, name: str) -> None:
        if self._offloading is None:
            return
        if name == "save" and self._engine is not None:
            self._engine.sleep()
        with self._watch("offload"):
            if name in _GENERATING:
                self._offloading.offload()
            elif name == "sync":
                self._offloading.offload(keep_weights=True)
            elif name in _TRAINING:
                self._offloading.onload()


def step_profiler(config: Config, run: Path) -> Callable[[int], AbstractContextManager[None]]:
    """Return what wraps each step: the profiler of --profile-steps, or nothing."""
    if config.run.profile_steps is None:
        return lambda step: nullcontext()
    from fsdptrain.trainer.profiling import StepProfiler

    return StepProfiler(profiled(config.run.profile_steps), run)
