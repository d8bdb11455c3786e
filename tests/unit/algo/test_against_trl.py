"""Losses equal those of TRL's GRPOTrainer in value and gradient on a real model.

TRL gets completions and computes old and reference logprobs, advantages, importance ratios, micro-batches and the loss
with its own code. The weights change between logprobs and loss, so no ratio is 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

from fsdptrain.algo.advantages import ADVANTAGES, STD_EPSILON, AdvantageRule, assign_advantages
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.data.packing.pack import pack
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward, policy_logprobs
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample
from tests.testing import no_checkpointing, save_tiny_checkpoint, tiny_tokenizer

trl = pytest.importorskip("trl", reason="trl comes with the dev extra")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning"),  # in trl
]

GROUPS, GROUP_SIZE, LONGEST = 2, 4, 16
TEMPERATURE = 0.9
MOVES = {"start": 0, "old": 1, "ref": 2, "now": 3}  # seeds of what is added to the checkpoint's weights
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """The same objective as options of TRL and of fsdptrain."""

    theirs: Mapping[str, Any]
    loss: str
    aggregation: str
    ours: Mapping[str, Any]
    engine: bool  # TRL treats the logprobs as those of vLLM
    accumulate: int  # micro-batches


def case(
    loss: str, aggregation: str, ours: Mapping[str, Any], *, engine: bool = False, accumulate: int = 1, **theirs: Any
) -> Case:
    return Case(theirs, loss, aggregation, ours, engine, accumulate)


def sampled(correction: str, mode: str) -> Case:
    """vLLM's logprobs differ from those of the old policy."""
    values = {**CLIP, "mismatch_low": 0.8, "mismatch_high": 1.25, "mismatch_correction": correction}
    return case("grpo", "token_mean", values, engine=True, **VLLM, vllm_importance_sampling_mode=mode)


CLIP = {"eps_clip": 0.1, "eps_clip_high": 0.1}
SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence", "epsilon": 0.02}
S_CLIP = {"eps_clip": 0.02, "eps_clip_high": 0.02}
VLLM = {"loss_type": "dapo", "vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.25}

SAME = {
    "dapo, two micro-batches": case("grpo", "token_mean", CLIP, accumulate=2, loss_type="dapo"),
    "gspo": case("gspo", "sequence_mean", S_CLIP, loss_type="grpo", **SEQUENCE),
    "unbiased kl": case(
        "grpo", "fixed_length", {**CLIP, "kl_loss_coef": 0.3, "use_unbiased_kl": True}, loss_type="dr_grpo", beta=0.3,
        use_bias_correction_kl=True,
    ),
    "tis": sampled("tis", "token_truncate"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # it would say that rollout_func may change


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("trl"))


@torch.no_grad()
def move(model: nn.Module, to: str) -> None:
    """From the checkpoint's weights to others nearby, the same for both sides."""
    generator = torch.Generator().manual_seed(MOVES[to])
    for _, parameter in sorted(model.named_parameters()):
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32))


def our_model(checkpoint: Path, moved: str) -> PreTrainedModel:
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    register_attention()
    model.set_attn_implementation(SEGMENTS)
    install_policy_forward(model, chunk_size=16)
    move(model, moved)
    return model.eval()


def logprobs_of(model: PreTrainedModel, batch: PackedBatch) -> LogProbs:
    return policy_logprobs(model, batch, layout="packed", temperature=TEMPERATURE, with_entropy=True)


def make_samples(checkpoint: Path) -> list[Sample]:
    """Two groups of four, of unequal lengths; the engine differs slightly from the old policy."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(GROUPS * GROUP_SIZE):
        prompt = [20 + number // GROUP_SIZE] * (3 + number // GROUP_SIZE)
        length = int(torch.randint(2, LONGEST, (), generator=generator))
        tokens = prompt + torch.randint(30, 264, (length,), generator=generator).tolist()
        mask = [False] * len(prompt) + [True] * length
        reward = float(torch.randint(0, 5, (), generator=generator)) / 4
        made.append(Sample(str(number // GROUP_SIZE), tokens, mask, [0.0] * len(mask), reward=reward))
    with torch.no_grad():
        old = logprobs_of(our_model(checkpoint, "old"), packed(made, "token_mean")).values
    samples = []
    for sample, logprobs in zip(made, old.split([len(s.token_ids) for s in made]), strict=True):
        engine = [0.0, *(logprobs + 0.2 * torch.randn(len(logprobs), generator=generator))[:-1].tolist()]
        near = [x if m else 0.0 for x, m in zip(engine, sample.loss_mask, strict=True)]
        samples.append(replace(sample, rollout_logprobs=near))
    return samples


def packed(samples: list[Sample], aggregation: str) -> PackedBatch:
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    return pack(samples, aggregation=aggregation, totals=totals, max_response_len=LONGEST)


def ours(case: Case, samples: list[Sample], checkpoint: Path) -> tuple[float, Gradients]:
    batch = packed(samples, case.aggregation)
    with torch.no_grad():
        if case.theirs.get("num_iterations") != 1:
            batch = replace(batch, old_logprobs=logprobs_of(our_model(checkpoint, "old"), batch).values)
        if case.ours.get("kl_loss_coef"):
            batch = replace(batch, ref_logprobs=logprobs_of(our_model(checkpoint, "ref"), batch).values)
    model = our_model(checkpoint, "now")
    output = LOSSES[case.loss](batch, logprobs_of(model, batch), LossConfig(**case.ours))
    output.loss.backward()
    return output.loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Result:
    value: float
    gradients: Gradients
    advantages: list[float]


def theirs(case: Case, samples: list[Sample], checkpoint: Path, folder: Path) -> Result:
    """TRL's loss and gradients, computed as in its training loop, and its advantages."""
    trainer = make_trainer(case, samples, checkpoint, folder)
    move(trainer.model, "old")
    if trainer.ref_model is not None:
        move(trainer.ref_model, "ref")
    trainer.model.train()  # TRL looks at it; the model has no dropout
    value = 0.0
    for trainer._step in range(case.accumulate):  # the first call scores, shuffles and splits
        inputs = trainer._prepare_inputs([{"prompt": "", "number": number} for number in range(len(samples))])
        trainer.model.load_state_dict(our_model(checkpoint, "now").state_dict())
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        value += loss.item()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return Result(value, gradients, list(trainer._logs["advantages"]))


def make_trainer(case: Case, samples: list[Sample], checkpoint: Path, folder: Path) -> Any:
    def split(sample: Sample) -> int:
        return sample.loss_mask.index(True)

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(samples)
        return {
            "prompt_ids": [s.token_ids[: split(s)] for s in samples],
            "completion_ids": [s.token_ids[split(s) :] for s in samples],
            "logprobs": [s.rollout_logprobs[split(s) :] for s in samples] if case.engine else None,
        }

    options = {
        "num_iterations": 2,
        "epsilon": CLIP["eps_clip"],
        "temperature": TEMPERATURE,
        "max_completion_length": LONGEST,
        "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": len(samples) // case.accumulate,
        "gradient_accumulation_steps": case.accumulate,
    }
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", **no_checkpointing()}
    trainer = trl.GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64),
        reward_funcs=lambda number, **_: [samples[i].reward for i in number],
        args=trl.GRPOConfig(output_dir=str(folder), **{**options, **quiet, **case.theirs}),
        train_dataset=Dataset.from_dict({"prompt": [""] * len(samples)}),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
    )
    trainer.use_vllm = case.engine  # after the start, which would look for vLLM; all else is as with it
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = case.accumulate  # transformers' loop sets it
    return trainer


@pytest.mark.parametrize("name", SAME)
def test_value_and_gradient_are_those_of_trl(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """With TRL's advantages, which are float32. Compares gradients of each parameter in the 2-norm."""
    samples = make_samples(checkpoint)
    wanted = theirs(SAME[name], samples, checkpoint, tmp_path)
    same = [replace(sample, advantage=a) for sample, a in zip(samples, wanted.advantages, strict=True)]
    value, gradients = ours(SAME[name], same, checkpoint)
    assert value == pytest.approx(wanted.value, rel=1e-6, abs=1e-6)
    assert gradients.keys() == wanted.gradients.keys()
    for parameter, gradient in wanted.gradients.items():
        assert (gradients[parameter] - gradient).norm() < 3e-6 * gradient.norm()


@pytest.mark.parametrize(("scale", "estimator"), [("group", "grpo"), ("none", "dr_grpo")])
def test_advantages_are_those_of_trl(scale: str, estimator: str, checkpoint: Path, tmp_path: Path) -> None:
    """Apart from the epsilon of the standard deviation. An unscored sample gets 0 in both."""
    samples = make_samples(checkpoint)
    samples[1] = replace(samples[1], reward=None)
    trl_case = case("grpo", "token_mean", {}, loss_type="dapo", scale_rewards=scale)
    found = [sample.advantage for sample in assign_advantages(samples, AdvantageRule(ADVANTAGES[estimator], scale))]
    wanted = theirs(trl_case, samples, checkpoint, tmp_path).advantages
    for start in range(0, len(samples), GROUP_SIZE):
        rows = slice(start, start + GROUP_SIZE)
        rewards = [sample.reward for sample in samples[rows] if sample.reward is not None]
        std = torch.tensor(rewards, dtype=torch.float64).std().item()
        factor = (std + 1e-4) / (std + STD_EPSILON) if scale == "group" else 1.0
        assert found[rows] == pytest.approx([factor * advantage for advantage in wanted[rows]], rel=1e-5, abs=1e-6)
    assert found[1] == 0.0
