"""The phases of a rollout: each is timed, is on the timeline, and finds the trainer's tensors where it needs them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch.profiler import record_function

from fsdptrain.protocols import OffloadingBackend, RolloutEngine, TrainBackend
from fsdptrain.trainer.profiling import RANGE
from fsdptrain.trainer.timeline import Stopwatch, Timeline
from fsdptrain.trainer.waits import Waits

_GENERATING = ("collect", "eval")  # phases in which the engine may need the whole device
_WAITING = (*_GENERATING, "sync", "check")  # phases in which a rank waits for the engine
_TRAINING = ("logprobs", "train", "save")


class Phases:
    """`with phases("train"): ...`; the seconds of the rollout so far are in `seconds`.

    With --offload-train the trainer's tensors are in host memory while the engine generates. `waits` bounds phases in
    which a rank waits for an engine.
    """

    def __init__(
        self, timeline: Timeline, waits: Waits, backend: TrainBackend, engine: RolloutEngine | None, *, offload: bool
    ) -> None:
        self.timeline = timeline
        self._waits = waits
        self._engine = engine
        self._offloading: OffloadingBackend | None = None
        if offload:
            assert isinstance(backend, OffloadingBackend), "the configuration refuses other backends"
            self._offloading = backend
        self._watch = Stopwatch(timeline)

    @property
    def seconds(self) -> dict[str, float]:
        return self._watch.seconds

    @contextmanager
    def rollout(self, number: int) -> Iterator[None]:
        """Time everything inside as `step` of rollout `number`, counted from 1."""
        self._watch = Stopwatch(self.timeline, number)
        with self._watch("step"):
            yield

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._place_tensors(name)
        waits = self._waits() if name in _WAITING else nullcontext()
        with self._watch(name), waits, record_function(f"{RANGE}{name}"):
            yield

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
