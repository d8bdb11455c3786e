"""An engine that records its calls, and one that generates while the trainer works."""

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from fsdptrain.rollout.embedded.engine import HFEngine, build_hf_engine
from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum

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


def factory(kind: type[Recording]) -> Callable[..., Recording]:
    """What --rollout-engine names."""
    return lambda config, **kwargs: kind(build_hf_engine(config, **kwargs))


class Hanging(Recording):
    """On rank 1 it never answers."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return wait_in_vain() if dist.get_rank() == 1 else super().generate(*args, **kwargs)


def wait_in_vain() -> NoReturn:
    while True:
        threading.Event().wait(1.0)


class Corrupting(Recording):
    """From version 2 on it doubles a tensor that it gets."""

    def update_weights(self, weights: Any, policy_version: int) -> None:
        victim = "model.layers.1.mlp.down_proj.weight" if policy_version >= 2 else ""
        doubled = ((name, 2 * tensor if name == victim else tensor) for name, tensor in weights)
        super().update_weights(doubled, policy_version)

    def expect_checksums(self) -> None: ...

    def checksums(self) -> Any:
        weights = self._engine.model.state_dict()
        return {"the engine": finish_checksums({name: start_checksum(weights[name]) for name in weights})}


class InFlight(Recording):
    """The embedded engine, in threads of its own: between two updates of weights, never across one."""

    def __init__(self, engine: HFEngine) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return super().generate(*args, **kwargs)

    def generate_in_flight(self, *args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return self.generate(*args, **kwargs)

    def update_weights(self, weights: Any, policy_version: int) -> None:
        with self._lock:
            super().update_weights(weights, policy_version)

    def sleep(self) -> None:
        """It has processes of its own, as it were."""


class Late(InFlight):
    """Answers the prompt "say 0" with weights of version 0, and keeps the answer until the engine has version 3."""

    def __init__(self, engine: HFEngine) -> None:
        super().__init__(engine)
        self._version = threading.Condition()
        self._newest = 0

    def generate_in_flight(self, prompts: Any, sampling: Any) -> Any:
        made = super().generate_in_flight(prompts, sampling)
        if "say 0" in prompts[0].text:
            with self._version:
                assert self._version.wait_for(lambda: self._newest >= 3, 120)
        return made

    def update_weights(self, weights: Any, policy_version: int) -> None:
        super().update_weights(weights, policy_version)
        with self._version:
            self._newest = policy_version
            self._version.notify_all()


recording, hanging, corrupting, in_flight, late = map(factory, (Recording, Hanging, Corrupting, InFlight, Late))
