"""The weights of a version go to the engine, and are proven to have come."""

from fsdptrain.protocols import AdapterBackend, AdapterEngine, RolloutEngine, TrainBackend
from fsdptrain.rollout.weight_sync.verify import SyncCheck
from fsdptrain.trainer.timeline import Stopwatch
from fsdptrain.trainer.waits import Waits
from fsdptrain.types import Metrics


class WeightSync:
    """To one engine, version after version."""

    def __init__(
        self,
        engine: RolloutEngine,
        backend: TrainBackend,
        check: SyncCheck | None,
        waits: Waits,
        *,
        adapter_only: bool,
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._check = check
        self._waits = waits
        self._adapter_only = adapter_only
        self._newest: int | None = None  # version that the engine was given

    def give(self, version: int, watch: Stopwatch) -> None:
        """Collective. RolloutError where the engine does not hold what it was given."""
        with watch("sync"), self._waits():
            self._engine.wake_up()
            self._update(version)
            self._newest = version
        if self._check:
            with watch("check"), self._waits():
                watch.seconds["sync_check"] = self._check.check(version)
            watch.seconds["sync"] += watch.seconds["check"]

    def metrics(self, version: int) -> Metrics:
        """Of this rank; nothing of a version that the engine was not given, such as the last of a run without
        evaluation."""
        if self._newest != version:
            return {}
        return self._check.metrics() if self._check else {}

    def _update(self, version: int) -> None:
        engine, backend, check = self._engine, self._backend, self._check
        if self._adapter_only:
            assert isinstance(engine, AdapterEngine), "checks.py refuses other engines"
            assert isinstance(backend, AdapterBackend), "and other backends"
            engine.update_adapter(backend.adapter_weights(), backend.write_adapter_config, version)
            return
        weights = backend.hf_weights(engine.weight_naming)
        engine.update_weights(check.watch(weights) if check else weights, version)
