"""The embedded engine reports the experts of each token. Their replay reduces the mismatch."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fsdptrain.data.routes import sample_routes
from fsdptrain.enabled_features import Features
from fsdptrain.errors import RolloutError
from fsdptrain.features.moe.feature import MoEFeature
from fsdptrain.model.policy import plain_batch
from fsdptrain.rollout.embedded.engine import HFEngine
from fsdptrain.types import NO_ROUTE, Completion, Prompt, SamplingParams
from tests import zoo
from tests.seam import install_replay, routed_logprobs
from tests.testing import tiny_qwen3

CPU = torch.device("cpu")
SAMPLING = SamplingParams(num_samples=6, max_tokens=20, seed=5, stop_token_ids=tuple(range(5, 35)), with_routes=True)


def make_prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    return [
        Prompt(f"p{length}", torch.randint(40, zoo.VOCAB_SIZE, (length,), generator=generator).tolist(), "")
        for length in (7, 1, 18, 3)
    ]


def make_engine(model: PreTrainedModel, folder: Path) -> HFEngine:
    model.save_pretrained(folder)
    engine = HFEngine(folder, dtype=torch.float32, device=CPU)
    engine.use_features(Features([MoEFeature(replay="rollout")]))
    engine.update_weights(model.state_dict().items(), 1)
    return engine


def trainer(model: PreTrainedModel) -> tuple[MoEFeature, PreTrainedModel]:
    return install_replay(model), model


def completions(engine: HFEngine) -> list[tuple[Prompt, Completion]]:
    prompts = make_prompts()
    asked = [prompt for prompt in prompts for _ in range(SAMPLING.num_samples)]
    return list(zip(asked, engine.generate(prompts, SAMPLING), strict=True))


def as_pack(made: list[tuple[Prompt, Completion]]):
    segments = [[*prompt.token_ids, *completion.token_ids] for prompt, completion in made]
    reported = [sample_routes([completion.routes], len(s)) for (_, completion), s in zip(made, segments, strict=True)]
    return dataclasses.replace(plain_batch(segments, device=CPU), routes=torch.cat(reported))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_the_engine_reports_the_experts_of_the_trainer(name, tmp_path):
    """With padded prompts, and while finished rows leave the cache."""
    engine = make_engine(zoo.build(name), tmp_path)
    made = completions(engine)
    lengths = [len(completion.token_ids) for _, completion in made]
    assert len(set(lengths)) > 5
    for prompt, completion in made:
        assert len(completion.routes) == len(prompt.token_ids) + len(completion.token_ids) - 1
    batch = as_pack(made)
    own = routed_logprobs(
        trainer(zoo.build(name))[1], dataclasses.replace(batch, routes=None), layout="packed", with_routes=True
    ).extras["routes"]
    read = (batch.routes != NO_ROUTE).flatten(1).any(1)
    assert (~read).sum() == len(made)  # the last token of each
    assert torch.equal(batch.routes[read], own[read])


def test_routes_change_no_completion_and_are_optional(tmp_path):
    engine = make_engine(zoo.build("qwen3_moe"), tmp_path)
    with_routes = engine.generate(make_prompts(), SAMPLING)
    without = engine.generate(make_prompts(), dataclasses.replace(SAMPLING, with_routes=False))
    assert with_routes == without
    assert all(completion.routes is None for completion in without)
    dense = make_engine(tiny_qwen3(), tmp_path / "dense")
    with pytest.raises(RolloutError, match="Qwen3ForCausalLM has no experts"):
        dense.generate(make_prompts(), SAMPLING)
