"""Requests in flight during a weight sync: each token has the version that sampled it, and none is lost."""

import itertools
import threading
import time
from dataclasses import replace

import torch

from fsdptrain.types import Completion, SamplingParams
from tests.vllm import contract
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import weights_of
from tests.vllm.servers.test_push import build
from tests.vllm.servers.watched import GENERATE, Watched

LONG = SamplingParams(num_samples=3, max_tokens=800, temperature=0.7, seed=5)


def test_each_token_is_of_the_weights_that_it_says_and_read_with_them_alone(models, urls, alone, tmp_path):
    """Also for tokens read before the sync: a cache of the old weights would change the logprobs after it."""
    model = models["tied"]
    options = cases.attached(model.first, urls["tied"], output_dir=str(tmp_path), max_staleness=1)
    options |= {"mismatch_correction": "tis"}
    engine = build(options)
    weights = [weights_of(model.first), weights_of(model.other)]
    versions, made = itertools.count(1), []
    try:
        engine.update_weights(weights[0].items(), 0)
        engine.generate(contract.PROMPTS, cases.GREEDY)  # slow only once
        for seed in range(5):  # the requests of a round may end before the first sync on a busy machine
            made += _made_during_syncs(engine, replace(LONG, seed=seed), weights, versions)
            if any(completion.versions is not None for completion in made):
                break
    finally:
        engine.close()
    assert any(completion.versions is not None for completion in made), "no request was in flight during an update"
    for completion in made:
        assert completion.token_versions == sorted(completion.token_versions)
        assert completion.policy_version == completion.token_versions[0]
        folders = [model.first, model.other]
        expected = contract.logprobs_by_version(completion, folders, temperature=LONG.temperature)
        assert (expected - torch.tensor(completion.logprobs)).abs().max() < 1e-4


def _made_during_syncs(engine, sampling, weights, versions) -> list[Completion]:
    """Return completions that were made while the weights of the engine were replaced again and again."""
    made: list[Completion] = []
    thread = threading.Thread(target=lambda: made.extend(engine.generate_in_flight(contract.PROMPTS[:2], sampling)))
    thread.start()
    while thread.is_alive():
        version = next(versions)
        engine.update_weights(weights[version % 2].items(), version)
        probe = engine.generate(contract.PROMPTS[:1], cases.GREEDY)  # requests in flight continue meanwhile
        assert [completion.policy_version for completion in probe] == [version]
        assert probe[0].versions is None
    assert [completion.prompt_id for completion in made] == ["a"] * 3 + ["b"] * 3
    return made


def test_what_the_trainer_waits_for_is_not_queued_behind_what_is_in_flight(models, urls, alone, tmp_path, monkeypatch):
    """For example an evaluation, which would otherwise wait for nearly a whole rollout."""
    options = cases.attached(models["tied"].first, urls["tied"], output_dir=str(tmp_path), max_staleness=1)
    engine = build({**options, "mismatch_correction": "tis"})
    try:
        engine.update_weights(weights_of(models["tied"].first).items(), 0)
        # in the order of arrival it waits for nearly all in each round; on a busy machine in some round
        assert any(_waited_for(engine, urls["tied"], monkeypatch) < 0.5 for _ in range(3))
    finally:
        engine.close()


def _waited_for(engine, url, monkeypatch) -> float:
    """Return the share of many requests in flight that were answered before a later one that the trainer waits for."""
    many = SamplingParams(num_samples=2 * cases.AT_ONCE, max_tokens=800, temperature=0.7, seed=5)
    total = 2 * many.num_samples
    with monkeypatch.context() as patches:
        watched = Watched(patches, url, GENERATE)
        thread = threading.Thread(target=lambda: engine.generate_in_flight(contract.PROMPTS[:2], many))
        thread.start()
        while len(watched.asked_bodies) < total:
            assert thread.is_alive()
            time.sleep(0.01)
        engine.generate(contract.PROMPTS[:1], cases.GREEDY)
        thread.join(timeout=200)
    assert len(watched.answered_bodies) == total + 1
    [before] = [count for body, count in watched.asked_bodies if "priority" in body]
    answered = ["priority" in body for body in watched.answered_bodies].index(True) - before
    return answered / (total - before)
