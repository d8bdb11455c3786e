"""Requests of vLLM in the trainer's process that go on across weight syncs, and continuous rollouts with them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fsdptrain.errors import RolloutError
from fsdptrain.types import Completion, SamplingParams
from tests.e2e import command
from tests.testing import save_tiny_checkpoint, spawn
from tests.vllm import contract, models
from tests.vllm.servers.conftest import weights_of

LONG = SamplingParams(num_samples=3, max_tokens=200, temperature=0.7, seed=5)


def across_syncs(folders: list[Path]) -> tuple[list[Completion], list[Completion], str]:
    """Completions of requests in flight across two weight syncs; of a probe after each; the error after the end."""
    options = contract.colocated(folders[0], max_staleness=1, mismatch_correction="tis")
    _, engine = contract.build(options)
    weights, probes = [weights_of(folder) for folder in folders], []
    assert engine.keeps_requests
    engine.update_weights(weights[0].items(), 0)
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
    return completions, probes, str(caught.value)


def test_each_token_is_of_the_weights_that_it_says_and_read_with_them_alone(tmp_path):
    """Also for tokens read before the sync: a cache of the old weights would change the logprobs after it."""
    folders = [models.save("tied", tmp_path / "first"), models.save("tied", tmp_path / "other", seed=1)]
    [(completions, probes, error)] = spawn(1, across_syncs, folders, timeout=300)
    assert [completion.prompt_id for completion in completions] == ["a"] * 3 + ["b"] * 3
    assert error == "the engine is closed"
    assert [(probe.policy_version, probe.versions) for probe in probes] == [(1, None), (2, None)]
    assert {0, 1, 2} in [set(completion.token_versions) for completion in completions]
    for completion in completions:
        assert completion.token_versions == sorted(completion.token_versions)
        expected = contract.logprobs_by_version(completion, folders, temperature=LONG.temperature)
        assert (expected - torch.tensor(completion.logprobs)).abs().max() < 1e-4


def cancelled(folder: Path) -> tuple[int, int]:
    """Unfinished requests of vLLM before and after a future is cancelled."""
    _, engine = contract.build(contract.colocated(folder))
    engine.update_weights(weights_of(folder).items(), 0)
    futures = engine.submit(contract.PROMPTS[0], LONG)
    steps = iter(range(5))
    engine.work(until=lambda: next(steps, None) is None)
    before = engine._llm.llm_engine.get_num_unfinished_requests()
    futures[0].cancel()
    steps = iter(range(2))
    engine.work(until=lambda: next(steps, None) is None)
    after = engine._llm.llm_engine.get_num_unfinished_requests()
    engine.work(until=lambda: all(future.done() for future in futures))
    engine.close()
    return before, after


def test_a_cancelled_request_is_not_generated_to_its_end(tmp_path):
    assert spawn(1, cancelled, models.save("tied", tmp_path), timeout=200) == [(3, 2)]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_run_trains_on_finished_groups_with_the_logprobs_of_each_version(tmp_path, num_ranks):
    """With weights that hardly change, logprobs of all versions are those of the trainer."""
    folder = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = ["--hf-checkpoint", str(folder), *command.TINY_RUN, "--rollout-engine", "vllm", "--max-staleness", "1"]
    argv += ["--rollout-kv-cache-gib", "0.05", "--rollout-max-response-len", "32", "--mismatch-correction", "tis"]
    argv += ["--num-rollout", "5", "--output-dir", str(tmp_path / "run"), "--lr", "1e-9"]
    result = command.run(argv, tmp_path / "log", timeout=400, num_ranks=num_ranks)
    assert result.code == 0, result.err
    rows = command.trained(command.metrics_of(tmp_path / "run"))
    assert len(rows) == 5
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-4
    assert max(row["staleness/max"] for row in rows) >= 1
    assert rows[-1]["progress/samples"] == 5 * 16
    assert rows[-1]["rollout/finished_groups"] == rows[-1]["rollout/unfinished_groups"] == 0
