"""Models whose mixers are wrapped, however they are split, against transformers: in the ranks that a test spawns."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
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

from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.errors import FsdptrainError
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
        **{key: value for key, value in _SHAPE.items() if key != "intermediate_size"},
        **_EXPERTS,
        rope_parameters=_ANGLES | {"mrope_section": [2, 1, 1]},
    ),
}
OF_EXPERTS = ("qwen3_next", "qwen3_5_moe_text")
PLAIN = ("llama", "qwen2", "qwen3_moe", "deepseek_v3")  # attention is megatron-core's own, where no tokens are dealt


def save(family: str, folder: Path) -> Path:
    """A checkpoint whose every parameter is random."""
    if family in PLAIN:
        return cases.save(family, folder, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    zoo.randomize(model, 0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class Found(NamedTuple):
    """On one rank: where packs are not shared, it has one of its own."""

    logits: float  # the largest difference
    gradient: float  # the largest relative difference of one tensor of the files
    tensor: str  # its name
    norm: float  # relative difference of that of all gradients
    changed: list[str]  # what came out otherwise than it was loaded, bit by bit


def differences(models: Sequence[tuple[Path, dict[str, Any], Layout]]) -> list[Found]:
    """Of each model, split and layout."""
    from fsdptrain.backends.megatron.groups import stop_groups

    found = []
    for folder, split, layout in models:
        files = load_file(folder / "model.safetensors")
        built = cases.build(folder, **split)
        streamed = dict(built.weights.stream())
        changed = [name for name in files if not torch.equal(streamed[name], files[name])]
        found.append(_compare(built, layout)._replace(changed=[*changed, *(streamed.keys() - files.keys())]))
        stop_groups()
    return found


def _compare(built: cases.Built, layout: Layout) -> Found:
    from megatron.core import parallel_state as ps

    from fsdptrain.backends.megatron import gradients
    from fsdptrain.backends.megatron.dealing import deal
    from fsdptrain.backends.megatron.forward import run_packs
    from fsdptrain.backends.megatron.masters import Masters
    from fsdptrain.backends.megatron.zigzag import gather_own

    batches = [_batch(seed) for seed in range(ps.get_data_parallel_world_size())]
    wanted, expected = _stock(built.stock, batches)
    mine = ps.get_data_parallel_rank()
    found: list[Tensor] = []

    def finish(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, dict]:
        dealt = deal(batch, built.model.config)
        if dealt is None:
            tokens = select_tokens(hidden, batch, layout, torch.arange(batch.num_tokens))
        else:  # the loss of the whole pack on each rank, as the backend computes it
            tokens = gather_own(hidden[0], dealt.seqlens, dealt.group)[dealt.places]
        found.append(built.stock.lm_head(tokens).detach())
        return (tokens * _direction(mine, tokens.shape[1])).sum(), torch.tensor(batch.num_tokens), {}

    wrapped = gradients.wrap(built.model)
    masters = Masters(wrapped)
    run_packs(wrapped, [batches[mine]], finish, layout=layout, train=True, same_shape=None)
    gradients.reduce_gradients(wrapped, masters)
    relative = {}
    for name, gradient in built.weights.stream(of=masters.whole_gradient, only_parameters=True):
        if name in expected:
            relative[name] = float((gradient - expected[name]).norm() / (expected[name].norm() or 1.0))
    assert relative.keys() == expected.keys()
    worst = max(relative, key=lambda name: (math.isnan(relative[name]), relative[name]))
    errors = [float((logits - wanted[mine]).abs().max()) for logits in found]  # none before the last stage
    norm = masters.total_norm() / torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    largest = max(errors, default=0.0, key=lambda x: (math.isnan(x), x))
    return Found(largest, relative[worst], worst, abs(norm.item() - 1), [])


def _batch(seed: int) -> PackedBatch:
    sequences = cases.tokens(1, sum(SEQLENS), seed=seed)[0].split(list(SEQLENS))
    return plain_batch([row.tolist() for row in sequences], device=torch.device("cpu"))


def _direction(seed: int, width: int) -> Tensor:
    """[T, D]: what the last hidden states are multiplied with to make a loss."""
    return torch.randn(sum(SEQLENS), width, generator=torch.Generator().manual_seed(100 + seed))


def _stock(model: PreTrainedModel, batches: Sequence[PackedBatch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of each batch the logits [T, V], sequence by sequence; the gradients of all together, by names in the files."""
    logits = []
    for seed, batch in enumerate(batches):
        rows = batch.input_ids.split(list(batch.seqlens))
        hidden = torch.cat([model.model(row[None]).last_hidden_state[0] for row in rows])
        (hidden * _direction(seed, hidden.shape[1])).sum().backward()
        logits.append(model.lm_head(hidden).detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits, revert_weight_conversion(model, gradients)


def refusals(folder: Path) -> dict[str, str]:
    """On one of two context-parallel ranks: what a mixer says to rows that it cannot deal, and to a mask of another."""
    built = cases.build(folder, context_parallel=2)
    mixer = built.model.decoder.layers[1].self_attention
    hidden = torch.zeros(4, 2, _SHAPE["hidden_size"])
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    return {"rows": _refusal(mixer, hidden, None), "mask": _refusal(mixer, hidden, mask)}


def _refusal(mixer: Any, hidden: Tensor, mask: Tensor | None) -> str:
    try:
        mixer(hidden, mask)
    except FsdptrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def norms(folder: Path) -> list[dict[str, str]]:
    """Of each layer the norms around its mixer, which has some of its own: name and class."""
    layers: Any = cases.build(folder).model.decoder.layers
    return [
        {
            name: type(module).__name__
            for name, module in layer.named_modules()
            if "Norm" in type(module).__name__ and not name.startswith("self_attention.hf.")
        }
        for layer in layers
    ]


def with_own_spec(folder: Path) -> list[str]:
    """Classes of the mixers, where --megatron-spec names the function below."""
    from fsdptrain.backends.megatron.model import build_model
    from fsdptrain.backends.megatron.transformer_config import transformer_config

    config = cases.build(folder).stock.config
    options: dict[str, Any] = {"dtype": torch.float32, "has_engine": False, "on_cpu": True}
    built = transformer_config(config, MegatronConfig(), **options)
    model = build_model(built, config, spec="tests.megatron.wrapped_cases:only_attention")
    layers: Any = model.decoder.layers
    return [type(layer.self_attention.hf).__name__ for layer in layers]


def with_own_spec_and_sequence_parallel() -> float:
    """How far logprobs are from those of transformers, in padded rows whose length the ranks do not divide."""
    from fsdptrain.backends.megatron.cpu_shims import install_cpu_shims
    from fsdptrain.backends.megatron.groups import start_groups
    from fsdptrain.backends.megatron.parity import check_parity

    install_cpu_shims()
    config = copy.deepcopy(CONFIGS["qwen3_next"])
    vars(config)["layer_types"] = ["full_attention"] * config.num_hidden_layers
    split = MegatronConfig(tensor_parallel=2, sequence_parallel=True, spec=f"{__name__}:only_attention")
    start_groups(split, timeout_s=60)
    options: dict[str, Any] = {"dtype": torch.float32, "has_engine": False, "on_cpu": True}
    return check_parity(config, split, options, spec=split.spec, device=torch.device("cpu"))[0]


def only_attention(transformer_config: Any, hf_config: PreTrainedConfig, *, vp_stage: int | None = None) -> Any:
    """A user's layers: as those of the backend, of a config of their own."""
    from fsdptrain.backends.megatron.hf_spec import layer_spec

    changed = copy.deepcopy(hf_config)
    vars(changed)["layer_types"] = ["full_attention"] * changed.num_hidden_layers
    return layer_spec(transformer_config, changed, vp_stage=vp_stage)


def other_norms(transformer_config: Any, hf_config: PreTrainedConfig, *, vp_stage: int | None = None) -> Any:
    """Layers as a user may get them wrong: norms with another eps."""
    from fsdptrain.backends.megatron.model import layer_spec

    transformer_config.layernorm_epsilon = 1e-3
    return layer_spec(transformer_config, hf_config, vp_stage=vp_stage)


def other_activation(transformer_config: Any, hf_config: PreTrainedConfig, *, vp_stage: int | None = None) -> Any:
    """Another activation, of which no fact is reported for dense layers."""
    from fsdptrain.backends.megatron.model import layer_spec

    transformer_config.activation_func = torch.nn.functional.gelu
    return layer_spec(transformer_config, hf_config, vp_stage=vp_stage)
