"""Faults planted in hand-overs to a vLLM engine, one after the other, and what --sync-check says of each."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fsdptrain.errors import RolloutError
from fsdptrain.protocols import ReplicatedEngine
from tests.distributed.test_sync_check import Courier, train_a_little
from tests.vllm import contract

KEPT = "prefix cache kept"
FAULTS = ("stale", "permuted", "transposed", "not sent", KEPT)

Said = list[tuple[str, str, str | None]]  # fault, tensor, error


def what_the_check_said(
    options: dict[str, Any], tries: int, courier: Courier, keep_cache: Callable[[Any], AbstractContextManager[None]]
) -> tuple[Said, list[float]]:
    """Of each try, every other one at the hand-over that --sync-check first looks at; after each fault all goes well.
    Then logprobs are as far apart as the second list says.

    keep_cache: in it, the engine is not told to forget its cached prefixes, and all seems as if it were.
    """
    backend, engine, check = contract.build_checked(options)
    draw, found, apart = random.Random(0), [], []

    def hand_over(version: int, fault: str = "", victim: str = "") -> str | None:
        train_a_little(backend, version)
        with keep_cache(engine) if fault == KEPT else nullcontext():
            try:
                engine.update_weights(courier.carry(check.watch(backend.hf_weights("hub")), fault, victim), version)
                check.check(version)
            except RolloutError as error:
                return str(error)
        apart.extend(check.metrics().values())
        return None

    try:
        assert hand_over(0) is None
        held = engine.copies()[0] if isinstance(engine, ReplicatedEngine) else engine
        assert set(held.checksums(courier.before)) == set(courier.before)  # all can be read
        every = check
        for version in range(1, tries + 1):
            check = contract.check_of(options | {"sync_check": "first"}, engine, backend) if version % 2 else every
            fault = FAULTS[version % len(FAULTS)]
            victim = "" if fault == KEPT else draw.choice(courier.victims(fault))
            found.append((fault, victim, hand_over(version, fault, victim)))
            assert (said := hand_over(1000 + version)) is None, said
    finally:
        engine.close()
    return found, apart


def require_named(found: Said, apart: Sequence[float], *, bound: float, holder: str = "") -> None:
    """Each fault, with the `holder` of the copy."""
    assert max(apart) < bound, apart  # far from what the check allows
    for fault, victim, said in found:
        assert said is not None, f"{fault} {victim} was not seen"
        assert (victim or "prefix cache") in said, f"{fault} {victim}: {said}"
        assert holder in said, f"{fault} {victim}: {said}"
