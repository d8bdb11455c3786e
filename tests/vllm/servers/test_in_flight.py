"""Requests in flight during a weight sync: each token has the version that sampled it, and none is lost."""

import itertools
import threading
from dataclasses import replace

from fsdptrain.types import Completion, SamplingParams
from tests.vllm import contract
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import weights_of
from tests.vllm.servers.test_push import build

LONG = SamplingParams(num_samples=3, max_tokens=400, temperature=0.7, seed=5)


def test_each_token_is_of_the_weights_that_it_says_and_read_with_them_alone(models, urls, alone, tmp_path):
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
    assert all(completion.policy_version == completion.token_versions[0] for completion in made)
    contract.require_logprobs_of_versions(made, [model.first, model.other], temperature=LONG.temperature)


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
