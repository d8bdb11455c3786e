"""A smoke test: each loss that TRL's GRPOTrainer has too has its value and gradient, on a small model.

The formulas in float64: tests/properties/test_loss_formulas.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals
from fsdptrain.data.packing.pack import pack
from fsdptrain.types import LogProbs, LossConfig, Sample
from tests.testing import no_checkpointing, tiny_tokenizer

trl = pytest.importorskip("trl", reason="trl comes with the dev extra")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning"),  # in trl
]

LENGTHS, LONGEST = (2, 9, 5, 16), 16  # of responses; each prompt is one token
CLIP, SEQUENCES = {"eps_clip": 0.1, "eps_clip_high": 0.1}, {"importance_sampling_level": "sequence"}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {  # our loss, weights and options; TRL's options
    "dapo": ("grpo", "token_mean", CLIP, {"epsilon": 0.1}),
    "grpo": ("grpo", "sequence_mean", CLIP, {"epsilon": 0.1}),
    "dr_grpo": ("grpo", "fixed_length", CLIP, {"epsilon": 0.1}),
    "gspo": ("gspo", "sequence_mean", CLIP, {"loss_type": "grpo", "epsilon": 0.1, **SEQUENCES}),
    "cispo": ("cispo", "token_mean", {"is_cap_high": 1.1}, {"epsilon_high": 1.1}),
    "sapo": ("sapo", "sequence_mean", {}, {}),
}


def trainer_of(checkpoint: Path, folder: Path, **options: Any) -> Any:
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", **no_checkpointing()}
    sizes = {"max_completion_length": LONGEST, "num_generations": 4, "per_device_train_batch_size": 4}
    trainer = trl.GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64),
        reward_funcs=lambda **_: [],
        args=trl.GRPOConfig(output_dir=str(folder), **quiet, **sizes, **options),
        train_dataset=Dataset.from_dict({"prompt": [""] * 4}),
        processing_class=tiny_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1  # transformers' loop sets it
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_trl(case: str, checkpoint: Path, tmp_path: Path) -> None:
    name, aggregation, values, options = CASES[case]
    trainer = trainer_of(checkpoint, tmp_path, **{"loss_type": case, **options})
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 264, (1 + length,), generator=generator) for length in LENGTHS]
    advantages = [1.5, -0.5, 0.25, -1.25]
    found = [trainer.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0] for ids in rows]
    old = [x.detach() + 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in found]

    theirs = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.stack([ids[:1] for ids in rows]),
            "prompt_mask": torch.ones(4, 1, dtype=torch.long),
            "completion_ids": pad_sequence([ids[1:] for ids in rows], batch_first=True),
            "completion_mask": pad_sequence([torch.ones(n, dtype=torch.long) for n in LENGTHS], batch_first=True),
            "old_per_token_logps": pad_sequence(old, batch_first=True),
            "advantages": torch.tensor(advantages),
            "num_items_in_batch": torch.tensor(sum(LENGTHS)),
        },
    )
    samples = [
        Sample("g", ids.tolist(), [False] + [True] * n, [0.0] * (n + 1), advantage=advantage)
        for ids, n, advantage in zip(rows, LENGTHS, advantages, strict=True)
    ]
    batch = pack(samples, aggregation=aggregation, totals=count_totals(LENGTHS), max_response_len=LONGEST)
    packed, old_packed = (torch.cat([torch.cat([x, x.new_zeros(1)]) for x in each]) for each in (found, old))
    config = LossConfig(**values)
    ours = LOSSES[name](replace(batch, old_logprobs=old_packed), LogProbs(packed), config).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    for mine, wanted in zip(*(torch.autograd.grad(loss, parameters) for loss in (ours, theirs)), strict=True):
        assert (mine - wanted).norm() < 3e-6 * wanted.norm()
