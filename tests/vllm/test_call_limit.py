"""A slow vLLM ends the run with an error, a hanging one ends the process, and the run resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdptrain.errors import RolloutError
from fsdptrain.vllm import call_limit, in_process
from fsdptrain.vllm.call_limit import CallLimit
from tests.e2e import command
from tests.testing import spawn
from tests.vllm import contract, hanging, models


def slow(options: dict[str, Any]) -> tuple[str, bool]:
    """What is said when the time of the last rank is over; and whether the engine then says what it said before."""
    call_limit._GRACE, in_process._STEPS_PER_CHECK = 1000.0, 2
    backend, engine = contract.build(options)
    engine.update_weights(backend.hf_weights("hub"), 0)
    before = engine.generate(contract.PROMPTS, contract.SAMPLING)
    usual, step, limit = engine._limit, engine._step, CallLimit(0.5, Path("not needed"), 0)

    def slow_step() -> Any:
        while not limit.is_over:
            pass
        return step()

    if dist.get_rank() == dist.get_world_size() - 1:
        engine._limit, engine._step = limit, slow_step
    with pytest.raises(RolloutError) as caught:
        engine.generate(contract.PROMPTS, contract.SAMPLING)
    engine._limit, engine._step = usual, step
    after = engine.generate(contract.PROMPTS, contract.SAMPLING)
    engine.close()
    return str(caught.value), after == before


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_slow_one_ends_between_two_steps_by_an_error_of_all_ranks_that_share_it(tmp_path, num_ranks):
    more = {"rollout_engine_args": {"tensor_parallel_size": 2}} if num_ranks == 2 else {}
    options = contract.colocated(models.save("untied", tmp_path / "model"), **more)
    found = spawn(num_ranks, slow, options, timeout=300)
    assert "generate of --rollout-engine vllm took more than --rollout-timeout, 0.5 s: raise it" in found[-1][0]
    assert all("took more than --rollout-timeout" in said and is_well for said, is_well in found)


@pytest.mark.matrix
def test_one_that_hangs_ends_its_process_and_the_run_goes_on_from_its_checkpoint(tmp_path):
    folder, run = models.save("tied", tmp_path / "model"), tmp_path / "run"
    (tmp_path / hanging.FAULTS).write_text(f"{hanging.STEP}\n{hanging.SYNC}\n")
    argv = ["--hf-checkpoint", str(folder), *command.TINY_RUN, "--output-dir", str(run), "--save-interval", "1"]
    argv += ["--rollout-engine", "tests.vllm.hanging:engine", "--rollout-kv-cache-gib", "0.05"]
    stacks, before = run / "stacks" / "rank0.txt", ""
    for name, call, seconds in (
        (hanging.STEP, "generate of --rollout-engine vllm", 1.25 * hanging.SECONDS),
        (hanging.SYNC, "a weight sync to --rollout-engine vllm", hanging.SECONDS),
    ):
        result = command.run(argv, tmp_path / name, timeout=200)
        assert result.code == 1, result.err
        said = f"fsdptrain: --rollout-timeout 2: {call} hangs for {seconds:g} s and cannot be interrupted; "
        assert result.err.splitlines()[-1] == f"{said}stacks: {stacks}"
        told = stacks.read_text()
        assert "in wait_in_vain" in told.removeprefix(before)
        before = told
    result = command.run(argv, tmp_path / "log", timeout=200)
    assert result.code == 0, result.err
    assert {row["step"] for row in command.metrics_of(run)} == {0, 1, 2}
