"""The gradient of a step with a teacher is that of the definition, sequence by sequence, on any number of ranks.

The token form is REINFORCE with the exact reward of each token, its advantage plus the teacher's logprob minus the
policy's. All in float64.
"""

from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdptrain.algo.losses import LOSSES
from fsdptrain.config import Config
from fsdptrain.features.distillation.divergence import generalized_jsd, with_rest
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.trainer.logprobs import compute_logprobs
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.types import LossConfig, Sample
from tests.exact import Exact, backends_in_float64, in_float64
from tests.sweep import _EnoughError, _stop, _whole_gradient
from tests.testing import save_tiny_checkpoint, spawn

TEMPERATURE, COEF, TOP_K = 0.9, 0.4, 5
TOLERANCE = 1e-9  # of the norm of a parameter's gradient


@dataclass(frozen=True)
class Case:
    options: dict[str, Any]
    beta: float | None = None  # None: the token form
    advantages: bool = False


JSD = {"opd_loss": "jsd", "opd_top_k": TOP_K}
CASES = {
    "token": Case({}),
    "token and reward": Case({}, advantages=True),
    "jsd": Case({**JSD, "opd_beta": 0.3}, beta=0.3),
    "jsd and reward": Case({**JSD, "opd_beta": 1.0}, beta=1.0, advantages=True),
}


def samples_of(case: Case) -> list[Sample]:
    rng, made = Random(0), []
    for number in range(7):
        prompt, response = rng.randrange(1, 8), rng.randrange(1, 20)
        ids = [rng.randrange(5, 264) for _ in range(prompt + response)]
        mask = [False] * prompt + [rng.random() < 0.8 for _ in range(response)]  # of stale tokens the first are masked
        advantage = rng.gauss(0, 1) if case.advantages else 0.0
        made.append(Sample(str(number), ids, mask, [0.0] * len(ids), advantage=advantage))
    return made


def gradients(student: str, teacher: str, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """Of one step of the backend, whole, by case and parameter."""
    backends_in_float64()
    with Exact():
        return {name: _gradients(student, teacher, CASES[name]) for name in names}


def _gradients(student: str, teacher: str, case: Case) -> dict[str, Tensor]:
    options = {"opd_teacher": teacher, **case.options, "opd_kl_coef": COEF, "logprob_chunk_size": 16}
    limits = {"max_tokens_per_gpu": 40, "rollout_max_response_len": 20, "rollout_max_prompt_len": 8}
    values = {**options, **limits, "rollout_temperature": TEMPERATURE}
    config = Config(hf_checkpoint=student, algorithm="opd", **values)
    backend = FSDPBackend(config, total_steps=1)
    rules = PackingRules.of(config, layout=backend.layout_probe.layout, features=backend.features)
    steps = make_batches(own_share(samples_of(case)), rules, rollout=0)
    [step] = compute_logprobs(config, backend, steps)
    backend._optimizer.clip = _stop
    with suppress(_EnoughError):
        backend.train_step(step.packs, LOSSES["grpo"], LossConfig())
    return {name: _whole_gradient(parameter) for name, parameter in backend.model.named_parameters()}


def expected(student: str, teacher: str, case: Case) -> dict[str, Tensor]:
    policy = plain(student)
    judge = plain(teacher)
    samples = samples_of(case)
    total = sum(sum(sample.loss_mask[1:]) for sample in samples)
    for sample in samples:
        ids, mask = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask[1:])
        if not mask.any():
            continue
        logits = logits_of(policy, ids)[mask]
        with torch.no_grad():
            theirs = logits_of(judge, ids)[mask]
        labels = ids[1:][mask][:, None]
        ours, others = (x.log_softmax(-1).gather(1, labels)[:, 0] for x in (logits, theirs))
        reward = sample.advantage + (COEF * (others - ours.detach()) if case.beta is None else 0.0)
        loss = -(reward * ours).sum()
        if case.beta is not None:
            loss += COEF * divergence(logits, theirs, case.beta).sum()
        (loss / total).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}


def divergence(logits: Tensor, theirs: Tensor, beta: float) -> Tensor:
    ids = theirs.topk(TOP_K).indices
    return generalized_jsd(with_rest(logits, ids), with_rest(theirs, ids), beta)


def plain(path: str) -> PreTrainedModel:
    return in_float64(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"))


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A policy, and a larger teacher."""
    folder = tmp_path_factory.mktemp("models")
    larger = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3}
    return str(save_tiny_checkpoint(folder / "policy")), str(save_tiny_checkpoint(folder / "teacher", 1, **larger))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_gradient_is_that_of_the_definition(checkpoints: tuple[str, str], num_ranks: int) -> None:
    found = spawn(num_ranks, gradients, *checkpoints, list(CASES))
    for name, case in CASES.items():
        with Exact():
            wanted = expected(*checkpoints, case)
        for by_case in found:
            ours = by_case[name]
            for parameter, gradient in wanted.items():
                error = (ours[parameter] - gradient).norm() / gradient.norm()
                assert error < TOLERANCE, f"{name}, {parameter}: {error:.2g}"
