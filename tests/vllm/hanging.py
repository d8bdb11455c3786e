"""vLLM in the trainer's process that hangs once, where the first line of a file says; the line is then removed."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fsdptrain.vllm.call_limit import CallLimit
from fsdptrain.vllm.config import VllmConfig
from fsdptrain.vllm.in_process import VLLMEngine, build_vllm_engine

FAULTS = "faults"  # in the folder above that of the run
STEP, SYNC = "in a step", "in a weight sync"
SECONDS = 2.0  # in place of --rollout-timeout, for the call that hangs only


def engine(config: Any, **kwargs: Any) -> VLLMEngine:
    made = build_vllm_engine(config, **kwargs)
    assert made._limit.seconds == config.section(VllmConfig).timeout
    run = Path(config.run.output_dir)
    faults = run.parent / FAULTS
    fault, _, rest = faults.read_text().partition("\n")
    faults.write_text(rest)
    limit = CallLimit(SECONDS, run / "stacks", 0)
    generate, update_weights = made.generate, made.update_weights

    def generate_in_vain(*args: Any) -> Any:
        if made.policy_version == 1:
            made._limit, made._step = limit, wait_in_vain
        return generate(*args)

    def update_in_vain(weights: Any, policy_version: int) -> None:
        if policy_version == 1:
            made._limit = limit
            weights = never(weights)
        update_weights(weights, policy_version)

    if fault == STEP:
        made.generate = generate_in_vain  # pyright: ignore[reportAttributeAccessIssue]
    if fault == SYNC:
        made.update_weights = update_in_vain  # pyright: ignore[reportAttributeAccessIssue]
    return made


def never(weights: Iterator[Any]) -> Iterator[Any]:
    yield next(weights)
    wait_in_vain()


def wait_in_vain() -> NoReturn:
    while True:
        threading.Event().wait(1.0)
