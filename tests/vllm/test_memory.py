"""What vLLM in the trainer's process holds on a device, and when it frees it."""

from pathlib import Path
from typing import Any

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.platform import GIB
from tests.testing import spawn
from tests.vllm import contract, models

_OF_INTEREST = {"sleep", "wake_up", "collective_rpc", "reset_prefix_cache", "enqueue"}


class Recorder:
    """A real vLLM, and what is asked of it. On a CPU it does not give back anything when it sleeps."""

    def __init__(self, llm: Any, calls: list[tuple[str, Any]]) -> None:
        self._llm, self._calls = llm, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._llm, name)

        def called(*args: Any, **given: Any) -> Any:
            self._calls.append((name, given.get("tags", given.get("level"))))
            return method(*args, **given)

        return called if name in _OF_INTEREST else method


def life(folder: Path, gib: float) -> tuple[list[tuple[str, Any]], int, list[str]]:
    """What is asked of vLLM in two rollouts; the memory of its cache; what it says while it sleeps."""
    backend, engine = contract.build(contract.colocated(folder, rollout_kv_cache_gib=gib))
    calls: list[tuple[str, Any]] = []
    said = []
    engine._llm, engine._sleeps = Recorder(engine._llm, calls), True  # as on a GPU
    for version in range(2):
        engine.wake_up()
        engine.update_weights(backend.hf_weights("hub"), version)
        engine.generate(contract.PROMPTS, contract.SAMPLING)
        engine.sleep()
        with pytest.raises(RolloutError) as caught:
            engine.generate(contract.PROMPTS, contract.SAMPLING)
        said.append(str(caught.value))
    return calls, engine._llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes, said


def test_it_sleeps_around_training_and_its_cache_has_the_memory_that_was_given(tmp_path):
    [(calls, cache, said)] = spawn(1, life, models.save("tied", tmp_path), 0.03, timeout=200)
    woken = [("wake_up", ["weights"]), ("collective_rpc", None), ("wake_up", ["kv_cache"])]
    assert calls == [*woken, ("reset_prefix_cache", None), ("enqueue", None), ("sleep", 2)] * 2
    assert cache == int(0.03 * GIB)
    assert all("vLLM has no weights: call update_weights first, also after sleep()" in text for text in said)
