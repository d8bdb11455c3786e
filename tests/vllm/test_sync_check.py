"""With vLLM too, --sync-check names the tensor that did not arrive, and sees a prefix cache that was kept."""

import random
from pathlib import Path

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.testing import spawn
from tests.distributed.test_sync_check import Courier, train_a_little
from tests.vllm import contract, models

FAULTS = ("stale", "permuted", "transposed", "not sent", "prefix cache kept")
TRIES = {"tied": 25, "untied": 25, "moe": 50}  # in each of two dtypes: a hundred of dense models, and of mixtures


class KeptCache:
    """Stands for a vLLM that is not told to forget, and says that it was."""

    def __init__(self, llm: object) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> object:
        return (lambda: True) if name == "reset_prefix_cache" else getattr(self._llm, name)


def what_the_check_said(folder: Path, bf16: bool, tries: int) -> tuple[list[tuple[str, str, str | None]], list[float]]:
    """(fault, tensor, error) of each try, every other one at the hand-over that --sync-check first looks at; after each
    fault all goes well."""
    options = contract.colocated(folder, bf16=bf16)
    backend, engine, check = contract.build_checked(options)
    courier, draw, found, apart = Courier(), random.Random(0), [], []

    def hand_over(version: int, fault: str = "", victim: str = "") -> str | None:
        train_a_little(backend, version)
        llm = engine._llm
        try:
            if fault == "prefix cache kept":
                engine._llm = KeptCache(llm)
            engine.update_weights(courier.carry(check.watch(backend.hf_weights("hub")), fault, victim), version)
            check.check(version)
        except RolloutError as error:
            return str(error)
        finally:
            engine._llm = llm
        apart.extend(check.metrics().values())
        return None

    assert hand_over(0) is None
    assert engine.checksums(courier.before).keys() == courier.before.keys()  # all can be read
    every = check
    for version in range(1, tries + 1):
        check = contract.check_of(options | {"sync_check": "first"}, engine, backend) if version % 2 else every
        fault = FAULTS[version % len(FAULTS)]
        victim = "" if fault == "prefix cache kept" else draw.choice(courier.victims(fault))
        found.append((fault, victim, hand_over(version, fault, victim)))
        assert (said := hand_over(1000 + version)) is None, said
    return found, apart


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_each_fault_is_named(tmp_path, bf16, name):
    folder = models.save(name, tmp_path / "model")
    [(found, apart)] = spawn(1, what_the_check_said, folder, bf16, TRIES[name], timeout=500)
    assert len(found) == TRIES[name]
    assert max(apart) < (0.05 if bf16 else 1e-5), apart  # far from what the check allows
    for fault, victim, said in found:
        assert said is not None, f"{fault} {victim} was not seen"
        assert (victim or "prefix cache") in said, f"{fault} {victim}: {said}"
