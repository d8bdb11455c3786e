"""The loss of DAPO equals that of TRL's GRPOTrainer in value and gradient on a real model.

Other losses: their formulas in float64, tests/properties/test_loss_formulas.py.

TRL gets completions and computes old and reference logprobs, advantages, importance ratios, micro-batches and the loss
with its own code. The weights change between logprobs and loss, so no ratio is 1.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

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
MOVES = {"old": 1, "now": 3}  # seeds of what is added to the checkpoint's weights
Gradients = dict[str, Tensor]


CLIP = {"eps_clip": 0.1, "eps_clip_high": 0.1}
MICRO_BATCHES = 2


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


def make_samples() -> list[Sample]:
    """Two groups of four, of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(GROUPS * GROUP_SIZE):
        prompt = [20 + number // GROUP_SIZE] * (3 + number // GROUP_SIZE)
        length = int(torch.randint(2, LONGEST, (), generator=generator))
        tokens = prompt + torch.randint(30, 264, (length,), generator=generator).tolist()
        mask = [False] * len(prompt) + [True] * length
        reward = float(torch.randint(0, 5, (), generator=generator)) / 4
        made.append(Sample(str(number // GROUP_SIZE), tokens, mask, [0.0] * len(mask), reward=reward))
    return made


def packed(samples: list[Sample]) -> PackedBatch:
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    return pack(samples, aggregation="token_mean", totals=totals, max_response_len=LONGEST)


def ours(samples: list[Sample], checkpoint: Path) -> tuple[float, Gradients]:
    batch = packed(samples)
    with torch.no_grad():
        batch = replace(batch, old_logprobs=logprobs_of(our_model(checkpoint, "old"), batch).values)
    model = our_model(checkpoint, "now")
    output = LOSSES["grpo"](batch, logprobs_of(model, batch), LossConfig(**CLIP))
    output.loss.backward()
    return output.loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Result:
    value: float
    gradients: Gradients
    advantages: list[float]


def theirs(samples: list[Sample], checkpoint: Path, folder: Path) -> Result:
    """TRL's loss and gradients, computed as in its training loop, and its advantages."""
    trainer = make_trainer(samples, checkpoint, folder)
    move(trainer.model, "old")
    trainer.model.train()  # TRL looks at it; the model has no dropout
    value = 0.0
    for trainer._step in range(MICRO_BATCHES):  # the first call scores, shuffles and splits
        inputs = trainer._prepare_inputs([{"prompt": "", "number": number} for number in range(len(samples))])
        trainer.model.load_state_dict(our_model(checkpoint, "now").state_dict())
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        value += loss.item()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return Result(value, gradients, list(trainer._logs["advantages"]))


def make_trainer(samples: list[Sample], checkpoint: Path, folder: Path) -> Any:
    def split(sample: Sample) -> int:
        return sample.loss_mask.index(True)

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(samples)
        return {
            "prompt_ids": [s.token_ids[: split(s)] for s in samples],
            "completion_ids": [s.token_ids[split(s) :] for s in samples],
            "logprobs": None,
        }

    options = {
        "loss_type": "dapo",
        "num_iterations": 2,
        "epsilon": CLIP["eps_clip"],
        "temperature": TEMPERATURE,
        "max_completion_length": LONGEST,
        "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": len(samples) // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
    }
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", **no_checkpointing()}
    trainer = trl.GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64),
        reward_funcs=lambda number, **_: [samples[i].reward for i in number],
        args=trl.GRPOConfig(output_dir=str(folder), **options, **quiet),
        train_dataset=Dataset.from_dict({"prompt": [""] * len(samples)}),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
    )
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = MICRO_BATCHES  # transformers' loop sets it
    return trainer


def test_value_and_gradient_of_dapo_are_those_of_trl(checkpoint: Path, tmp_path: Path) -> None:
    """With TRL's advantages, which are float32. Compares gradients of each parameter in the 2-norm."""
    samples = make_samples()
    wanted = theirs(samples, checkpoint, tmp_path)
    same = [replace(sample, advantage=a) for sample, a in zip(samples, wanted.advantages, strict=True)]
    value, gradients = ours(same, checkpoint)
    assert value == pytest.approx(wanted.value, rel=1e-6, abs=1e-6)
    assert gradients.keys() == wanted.gradients.keys()
    for parameter, gradient in wanted.gradients.items():
        assert (gradients[parameter] - gradient).norm() < 3e-6 * gradient.norm()
