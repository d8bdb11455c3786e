"""An engine that says what it was asked for."""

from typing import Any

from fsdptrain.rollout.hf import HFEngine, build_hf_engine

CALLS: list[str] = []


class Recording:
    """The embedded engine, with its calls written down."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine
        self.weight_naming = engine.weight_naming

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append("generate")
        return self._engine.generate(*args, **kwargs)

    def update_weights(self, weights: Any, policy_version: int) -> None:
        CALLS.append(f"weights {policy_version}")
        self._engine.update_weights(weights, policy_version)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake_up(self) -> None:
        self._engine.wake_up()

    def close(self) -> None:
        self._engine.close()


def recording(config: Any, **kwargs: Any) -> Recording:
    return Recording(build_hf_engine(config, **kwargs))
