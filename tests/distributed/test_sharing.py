"""The prompt of a group computed once, on real ranks: every gradient and metric is that of each sample on its own.

Plan, exchange, pack, score and train as the trainer does it, with --prefix-sharing on against off. Old logprobs and
reference ones are scored with shared prompts too.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptrain.algo.losses import LOSSES
from fsdptrain.features.prefix_sharing.feature import PrefixSharingFeature
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.trainer.batches import PackingRules, StepBatches, make_batches
from fsdptrain.trainer.metrics import packing_metrics
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.types import Metrics, Sample
from tests import zoo
from tests.exact import Exact, backends_in_float64
from tests.matrix import only
from tests.testing import save_tiny_checkpoint, spawn

from .test_fsdp_backend import GRPO, MAX_RESPONSE, config, keep_gradients, scored

GROUPS, GROUP_SIZE, SHORTEST_PROMPT = 4, 4, 32
MAX_TOKENS = 256
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "two steps": ("qwen3", {"steps_per_rollout": 2}),
    "adapter": ("qwen3", {"lora_rank": 4, "steps_per_rollout": 2}),  # until its first step one half has no gradient
    "cpu offload": ("qwen3", {"fsdp_cpu_offload": True}),
    "experts": ("qwen3_moe", {"router_aux_loss_coef": 0.01}),
}
# In float64. Of the difference of a parameter's gradient, in the 2-norm, to that gradient: only the order of summation
# differs. Gradients of adapters are rounded to float32 at the end of each step.
EXACT, ROUNDED = 1e-12, 4 * torch.finfo(torch.float32).eps

Run = tuple[list[dict[str, Tensor]], list[Metrics], float]  # gradients and metrics of each step, tokens shared


def shares_prefixes(backend: FSDPBackend) -> bool:
    feature = backend.features.find(PrefixSharingFeature)
    return feature is not None and feature.probe is not None and feature.probe.shares


def grouped_samples() -> list[Sample]:
    """Groups of one prompt each, of other lengths; responses of unequal ones, advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for group in range(GROUPS):
        prompt = torch.randint(5, zoo.VOCAB_SIZE, (SHORTEST_PROMPT + 9 * group,), generator=generator).tolist()
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(1, MAX_RESPONSE, (), generator=generator))
            response = torch.randint(5, zoo.VOCAB_SIZE, (length,), generator=generator).tolist()
            mask = [False] * len(prompt) + [True] * length
            logprobs = [-5.0 if m else 0.0 for m in mask]
            advantage = float(torch.randn((), generator=generator))
            made.append(Sample(str(group), [*prompt, *response], mask, logprobs, advantage=advantage))
    return made


def rollout(backend: FSDPBackend, sharing: Any, num_steps: int) -> list[StepBatches]:
    assert sharing == "off" or shares_prefixes(backend)
    layout = backend.layout_probe.layout
    rules = PackingRules(MAX_TOKENS, "sequence_mean", MAX_RESPONSE, num_steps, 0, layout, features=backend.features)
    return make_batches(own_share(grouped_samples()), rules, rollout=0)


def train(checkpoint: str, sharing: str, values: dict[str, Any]) -> Run:
    # with a large epsilon Adam does not blow the rounding of tiny gradients up to whole steps
    options = {"kl_loss_coef": 0.1, "adam_eps": 0.01, "prefix_sharing": sharing, **values}
    settings = config(checkpoint, **options)
    backend = FSDPBackend(settings, total_steps=10)
    steps = rollout(backend, sharing, settings.steps_per_rollout)
    assert any(batch.shared is not None for step in steps for batch in step.packs) == (sharing == "on")
    found = keep_gradients(backend._optimizer)
    gradients, history = [], []
    with Exact():
        packs = [scored(backend, step.packs, reference=True) for step in steps]
        for batches in packs:
            history.append(backend.train_step(batches, LOSSES["grpo"], GRPO))
            gradients.append(dict(found))
    return gradients, history, packing_metrics(steps)["perf/shared_tokens"]


def every_setting(checkpoints: dict[str, str]) -> dict[str, tuple[Run, Run]]:
    """On, and off."""
    backends_in_float64()
    return {
        setting: (train(checkpoints[model], "on", values), train(checkpoints[model], "off", values))
        for setting, (model, values) in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    zoo.build("qwen3_moe", num_experts=6).save_pretrained(folder / "qwen3_moe")
    save_tiny_checkpoint(folder / "qwen3")
    return {name: str(folder / name) for name in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module", params=only([2], [1, 2]), ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, checkpoints: dict[str, str]) -> list[dict[str, tuple[Run, Run]]]:
    return spawn(request.param, every_setting, checkpoints)


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of the parameter that differs most."""
    assert found.keys() == wanted.keys()
    norms = {name: (float((found[name] - wanted[name]).norm()), float(wanted[name].norm())) for name in wanted}
    assert any(norm for _, norm in norms.values())
    return max(difference / norm if norm else difference for difference, norm in norms.values())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_prompt_computed_once_gives_the_gradients_and_metrics_of_one_computed_for_each_sample(
    ranks: list[dict[str, tuple[Run, Run]]], setting: str
) -> None:
    bound = ROUNDED if setting == "adapter" else EXACT
    for rank in ranks:
        (gradients, history, shared), (wanted, expected, none) = rank[setting]
        assert shared > 0.2
        assert none == 0
        assert len(gradients) == len(wanted) == SETTINGS[setting][1].get("steps_per_rollout", 1)
        for mine, theirs in zip(gradients, wanted, strict=True):
            assert relative(mine, theirs) < bound
        for metrics, other in zip(history, expected, strict=True):
            assert metrics == pytest.approx(other, rel=10 * bound, abs=bound)
