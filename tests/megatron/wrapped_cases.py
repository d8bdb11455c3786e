"""Models whose mixers are wrapped, however they are split, against transformers: in the ranks that a test spawns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from fsdptrain.models.inputs import Layout, select_tokens
from fsdptrain.models.policy import plain_batch
from fsdptrain.testing import tiny_tokenizer
from fsdptrain.types import PackedBatch
from tests import zoo
from tests.megatron import cases

SEQLENS = (8, 12, 4)  # multiples of 2 x 2: so that two ranks may share them
_GDN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_SHAPE: dict[str, Any] = {
    **_GDN,
    "vocab_size": cases.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "max_position_embeddings": 512,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_ANGLES: dict[str, Any] = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**_SHAPE, **_EXPERTS, rope_parameters=_ANGLES),
    "qwen3_5_text": Qwen3_5TextConfig(**_SHAPE, rope_parameters=_ANGLES | {"mrope_section": [2, 1, 1]}),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
        **_SHAPE, **_EXPERTS, rope_parameters=_ANGLES | {"mrope_section": [2, 1, 1]}
    ),
}


def save(family: str, folder: Path) -> Path:
    """A checkpoint whose every parameter is random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    zoo.randomize(model, 0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def differences(folder: Path, splits: Sequence[tuple[dict[str, Any], Layout]]) -> list[dict[str, float]]:
    """Of each split and layout: `logits`, the largest difference, and the largest relative difference of the gradient
    of one tensor of the files, under its name. On this rank: where packs are not shared, it has one of its own."""
    from fsdptrain.backends.megatron.groups import stop_groups

    found = []
    for split, layout in splits:
        found.append(_compare(cases.build(folder, **split), layout))
        stop_groups()
    return found


def _compare(built: cases.Built, layout: Layout) -> dict[str, float]:
    from fsdptrain.backends.megatron.forward import run_packs
    from megatron.core import parallel_state as ps

    from fsdptrain.backends.megatron import gradients

    batches = [_batch(seed) for seed in range(ps.get_data_parallel_world_size())]
    wanted, expected = _stock(built.stock, batches)
    mine = ps.get_data_parallel_rank()
    found: list[Tensor] = []

    def finish(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, dict]:
        tokens = select_tokens(hidden, batch, layout, torch.arange(batch.num_tokens))
        found.append(built.stock.lm_head(tokens).detach())
        return (tokens * _direction(mine)).sum(), torch.tensor(batch.num_tokens), {}

    wrapped = gradients.wrap(built.model)
    run_packs(wrapped, [batches[mine]], finish, layout=layout, train=True, same_shape=None)
    gradients.reduce_gradients(wrapped)
    parameters = dict(built.model.named_parameters())
    relative = {}
    for name, gradient in built.weights.stream(of=lambda name: _gradient(parameters, name)):
        if name in expected:
            relative[name] = float((gradient - expected[name]).norm() / expected[name].norm())
    assert relative.keys() == expected.keys()
    worst = max(relative, key=lambda name: relative[name])
    errors = [float((logits - wanted[mine]).abs().max()) for logits in found]  # none before the last stage
    return {"logits": max(errors, default=0.0), worst: relative[worst]}


def _gradient(parameters: dict[str, Tensor], name: str) -> Tensor:
    found = parameters[name].grad
    assert found is not None, name
    return found


def _batch(seed: int) -> PackedBatch:
    sequences = cases.tokens(1, sum(SEQLENS), seed=seed)[0].split(list(SEQLENS))
    return plain_batch([row.tolist() for row in sequences], device=torch.device("cpu"))


def _direction(seed: int) -> Tensor:
    """[T, D]: what the last hidden states are multiplied with to make a loss."""
    return torch.randn(sum(SEQLENS), _SHAPE["hidden_size"], generator=torch.Generator().manual_seed(100 + seed))


def _stock(model: PreTrainedModel, batches: Sequence[PackedBatch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of each batch the logits [T, V], sequence by sequence; the gradients of all together, by names in the files."""
    logits = []
    for seed, batch in enumerate(batches):
        rows = batch.input_ids.split(list(batch.seqlens))
        hidden = torch.cat([model.model(row[None]).last_hidden_state[0] for row in rows])
        (hidden * _direction(seed)).sum().backward()
        logits.append(model.lm_head(hidden).detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits, revert_weight_conversion(model, gradients)
