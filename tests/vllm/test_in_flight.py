"""Requests of vLLM in the trainer's process that go on across weight syncs, and runs by the real command line."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.types import Completion, SamplingParams
from tests.e2e import command
from tests.matrix import only
from tests.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract, models
from tests.vllm.servers.conftest import weights_of

OF_ENGINE = ["--rollout-engine", "vllm", "--rollout-kv-cache-gib", "0.05"]
LONG = SamplingParams(num_samples=3, max_tokens=200, temperature=0.7, seed=5)


def across_syncs(folders: list[Path]) -> tuple[list[Completion], list[Completion], str, list[int]]:
    """Completions of requests in flight across two weight syncs; of a probe after each; the error after the end.

    And the unfinished requests of vLLM before and after a future is cancelled.
    """
    options = contract.colocated(folders[0], max_staleness=1, mismatch_correction="tis")
    _, engine = contract.build(options)
    weights, probes = [weights_of(folder) for folder in folders], []
    assert engine.keeps_requests
    engine.update_weights(weights[0].items(), 0)
    futures, unfinished = engine.submit(contract.PROMPTS[0], LONG), []
    for _ in range(2):
        steps = iter(range(3))
        engine.work(until=lambda steps=steps: next(steps, None) is None)
        unfinished.append(engine._llm.llm_engine.get_num_unfinished_requests())
        futures[0].cancel()
    engine.work(until=lambda: all(future.done() for future in futures))
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(engine.generate_in_flight, contract.PROMPTS[:2], LONG)
        for version in (1, 2):
            steps = iter(range(40))
            engine.work(until=lambda steps=steps: next(steps, None) is None, seconds=60)
            engine.sleep()
            engine.wake_up()
            engine.update_weights(weights[version % 2].items(), version)
            probes += engine.generate(contract.PROMPTS[:1], SamplingParams(num_samples=1, max_tokens=4))
        engine.work(until=made.done, seconds=200)
        completions = made.result()
        left = thread.submit(engine.generate_in_flight, contract.PROMPTS[:1], LONG)
        engine.close()
        with pytest.raises(RolloutError) as caught:
            left.result(30)
    return completions, probes, str(caught.value), unfinished


def test_each_token_is_of_the_weights_that_it_says_and_read_with_them_alone(tmp_path):
    folders = [models.save("tied", tmp_path / "first"), models.save("tied", tmp_path / "other", seed=1)]
    [(completions, probes, error, unfinished)] = spawn(1, across_syncs, folders, timeout=300)
    assert [completion.prompt_id for completion in completions] == ["a"] * 3 + ["b"] * 3
    assert error == "the engine is closed"
    assert unfinished == [3, 2], "a canceled request is not generated to its end"
    assert [(probe.policy_version, probe.versions) for probe in probes] == [(1, None), (2, None)]
    assert {0, 1, 2} in [set(completion.token_versions) for completion in completions]
    contract.require_logprobs_of_versions(completions, folders, temperature=LONG.temperature)


@pytest.mark.parametrize("num_ranks", only([1], [1, 2]))
def test_a_run_trains_on_finished_groups_with_the_logprobs_of_each_version(tmp_path, num_ranks):
    """With weights that hardly change, logprobs of all versions are those of the trainer."""
    folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = [*command.TINY_RUN, *OF_ENGINE, "--rollout-max-response-len", "32", "--max-staleness", "1"]
    argv += ["--mismatch-correction", "tis", "--num-rollout", "5", "--lr", "1e-9"]
    rows = command.trained(command.train(folder, tmp_path, *argv, timeout=400, num_ranks=num_ranks))
    assert len(rows) == 5
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-4
    assert max(row["staleness/max"] for row in rows) >= 1
    assert rows[-1]["progress/samples"] == 5 * 16
    assert rows[-1]["rollout/finished_groups"] == rows[-1]["rollout/unfinished_groups"] == 0


@pytest.mark.parametrize("num_ranks", only([1], [1, 2]))
def test_a_run_that_waits_for_rollouts_trains_on_logprobs_that_the_trainer_agrees_with(tmp_path, num_ranks):
    folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = [*command.TINY_RUN, *OF_ENGINE, "--rollout-engine-args", '{"max_num_seqs": 8}']
    rows = command.trained(command.train(folder, tmp_path, *argv, timeout=400, num_ranks=num_ranks))
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert len(rows) == 2
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-4
