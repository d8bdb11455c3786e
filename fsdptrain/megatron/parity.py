"""Parity check before the first step: a small random model in transformers and in megatron-core, with the run's split.

It uses the same code as the run (config, layers, table, schedule, head), so errors in any of them show in the logprobs:
swapped queries and keys, a wrong rotary base, misnumbered experts.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.distributed import one_line, raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError, NumericsError
from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.forward import LogprobsHead, layout_of, run_packs
from fsdptrain.megatron.hub_names import hub_state
from fsdptrain.megatron.model import build_model
from fsdptrain.megatron.transformer_config import is_whole, transformer_config
from fsdptrain.megatron.weights import WeightMap
from fsdptrain.megatron.whole import cut_layers
from fsdptrain.model.loading.meta import model_from_config
from fsdptrain.model.policy import MODEL_ERRORS, TOLERANCES, over_ranks, plain_batch
from fsdptrain.model.probes.random_copy import AT_MOST, EXPERT_KEYS, cut_widths
from fsdptrain.model.sizes import expert_choice, head_size
from fsdptrain.random_state import preserve_rng_state
from fsdptrain.types import PackedBatch

_AT_MOST = {"vocab_size": 251, "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64}
_SPLIT = ("intermediate_size", "moe_intermediate_size")  # sharded over tensor-parallel ranks, as in the full model
_SEGMENTS = (17, 23)  # tokens


@torch.no_grad()
def small_models(
    config: PreTrainedConfig, split: MegatronConfig, options: dict[str, Any], *, device: torch.device
) -> tuple[PreTrainedModel, nn.ModuleList]:
    """Build the same random float32 weights in transformers on the CPU and in megatron-core. Collective.

    options: arguments of `transformer_config`. Its dtype is that of the run and is not used here.
    """
    small = small_config(config, split)
    with preserve_rng_state(), raise_on_all_ranks(ConfigError, "--backend megatron"):
        torch.manual_seed(0)  # the same on every rank
        stock = model_from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
        scale = 0.1 * min(1.0, (_AT_MOST["hidden_size"] / small.hidden_size) ** 0.5)  # whole layers keep their width
        for parameter in stock.parameters():
            parameter.add_(scale * torch.randn(parameter.shape))
    return stock, _converted(stock, split, options | {"dtype": torch.float32}, device)


def check_parity(
    stock: PreTrainedModel, model: nn.ModuleList, split: MegatronConfig, options: dict[str, Any]
) -> tuple[float, float]:
    """Compare the logprobs of `small_models`. Returns (mean difference, largest over ranks; tolerance). Collective.

    Compares in float32 in any case, because rounding in half precision hides errors. A run in another dtype is also
    compared in that dtype, with its kernels and layout. Raises NumericsError if a difference exceeds its tolerance.
    """
    measured = _compared(stock, model, split, options | {"dtype": torch.float32})
    if options["dtype"] != torch.float32:
        device = next(model.parameters()).device
        _compared(stock, _converted(stock, split, options, device), split, options)
    return measured


@torch.no_grad()
def _converted(
    stock: PreTrainedModel, split: MegatronConfig, options: dict[str, Any], device: torch.device
) -> nn.ModuleList:
    even = split.model_copy(update={"first_stage_layers": None, "last_stage_layers": None})
    with preserve_rng_state(), raise_on_all_ranks(ConfigError, "--backend megatron"):
        built = transformer_config(stock.config, even, **options)
        model = build_model(built, stock.config, spec=split.spec).to(device)
    weights = WeightMap(model, stock, bridge=split.bridge)
    with raise_on_all_ranks(CheckpointError, "--backend megatron"):
        weights.load(hub_state(stock).__getitem__)
    return model


@torch.no_grad()
def _compared(
    stock: PreTrainedModel, model: nn.ModuleList, split: MegatronConfig, options: dict[str, Any]
) -> tuple[float, float]:
    config, dtype = stock.config, options["dtype"]
    tokens = torch.randint(config.vocab_size, (sum(_SEGMENTS),), generator=torch.Generator().manual_seed(0))
    segments = [part.tolist() for part in tokens.split(_SEGMENTS)]
    batch = plain_batch(segments, device=next(model.parameters()).device)
    layout = layout_of(config, split, has_engine=options["has_engine"], dtype=dtype)
    head = LogprobsHead(config, layout, chunk_size=16)

    def scored(hidden: Tensor, batch: PackedBatch) -> Tensor:
        return head(model, hidden, batch, with_entropy=False).values

    try:
        found = run_packs(model, [batch], scored, layout=layout, train=False)
    except MODEL_ERRORS as error:
        what = f"a small random {config.model_type} cannot be computed in these stages"
        raise NumericsError(f"--backend megatron: {what}: {one_line(error)}: use --backend fsdp") from error
    wanted = torch.cat([_stock_logprobs(stock, segment) for segment in segments])
    own = (found[0].cpu() - wanted).abs().sum().item() / batch.num_tokens if found else 0.0
    difference, tolerance = over_ranks(own), TOLERANCES[dtype]
    if not difference <= tolerance:
        raise NumericsError(
            f"--backend megatron: a small random {config.model_type} computes other logprobs in megatron-core than in "
            f"transformers, by {difference:.2g} (tolerance {tolerance:g}, {dtype}): use --backend fsdp"
        )
    return difference, tolerance


def small_config(config: PreTrainedConfig, split: MegatronConfig) -> PreTrainedConfig:
    """Return a small config with at least one layer of each kind and the original head size.

    The split of the run divides all sizes.
    """
    small, whole = copy.deepcopy(config), is_whole(config, split.spec)
    parts = split.pipeline_parallel * (split.virtual_pipeline or 1)
    cut_widths(small, AT_MOST if whole else _AT_MOST)
    if whole:
        return cut_layers(small, parts)
    said = small.to_dict()
    for key in _SPLIT:
        if isinstance(said.get(key), int):
            setattr(small, key, said[key] - said[key] % split.tensor_parallel)
    small.head_dim = head_size(config)
    groups = split.tensor_parallel * (2 if config.num_key_value_heads >= 2 * split.tensor_parallel else 1)
    small.num_attention_heads = groups * (config.num_attention_heads // config.num_key_value_heads)
    small.num_key_value_heads = groups
    choice, ranks = expert_choice(config), split.expert_parallel
    for key in EXPERT_KEYS:
        if choice is not None and isinstance(said.get(key), int):
            setattr(small, key, min(choice.num_experts, -(-said[key] // ranks) * ranks))
    return cut_layers(small, parts)


def _stock_logprobs(stock: Any, segment: list[int]) -> Tensor:
    """Return the logprobs of the next tokens, [T], 0 at the last."""
    ids = torch.tensor(segment)
    logprobs = stock(ids[None]).logits[0].log_softmax(-1)
    return torch.cat([logprobs[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)])
