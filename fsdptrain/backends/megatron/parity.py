"""Before the first step: a small random model computes the same in transformers and in megatron-core, split so.

It goes the very way of the run (config, layers, table, schedule, head), so what any of these would do wrong shows in
the logprobs: a swapped order of queries and keys, another rotary base, experts by the wrong number.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.backends.megatron.forward import Scorer, layout_of, run_packs
from fsdptrain.backends.megatron.model import build_model
from fsdptrain.backends.megatron.transformer_config import family_of, transformer_config
from fsdptrain.backends.megatron.weights import WeightMap, hub_shapes, hub_state
from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.errors import CheckpointError, ConfigError, NumericsError
from fsdptrain.models.architecture import model_from_config
from fsdptrain.models.collective import together
from fsdptrain.models.policy import TOLERANCES, over_ranks, plain_batch
from fsdptrain.models.structure import expert_choice, head_size
from fsdptrain.types import PackedBatch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_AT_MOST = {"vocab_size": 251, "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64}
_SPLIT = ("intermediate_size", "moe_intermediate_size")  # over tensor-parallel ranks, as in the model
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SEGMENTS = (17, 23)  # tokens


@torch.no_grad()
def check_parity(
    config: PreTrainedConfig,
    split: MegatronConfig,
    options: dict[str, Any],
    *,
    spec: str | None,
    device: torch.device,
) -> tuple[float, float]:
    """Mean difference of logprobs, the largest over ranks, and its tolerance. NumericsError where it is over that.

    options: of `transformer_config`. Collective.
    """
    stock, model = small_models(config, split, options, spec=spec, device=device)
    small = stock.config
    tokens = torch.randint(small.vocab_size, (sum(_SEGMENTS),), generator=torch.Generator().manual_seed(0))
    segments = [part.tolist() for part in tokens.split(_SEGMENTS)]
    batch = plain_batch(segments, device=device)
    layout = layout_of(small, split, has_engine=options["has_engine"], dtype=options["dtype"])
    scorer = Scorer(small.vocab_size, layout, chunk_size=16)

    def scored(hidden: Tensor, batch: PackedBatch) -> Tensor:
        return scorer(model, hidden, batch, with_entropy=False).values

    found = run_packs(model, [batch], scored, layout=layout, train=False)
    wanted = torch.cat([_stock_logprobs(stock, segment) for segment in segments])
    own = (found[0].cpu() - wanted).abs().sum().item() / batch.num_tokens if found else 0.0
    difference, tolerance = over_ranks(own), TOLERANCES[options["dtype"]]
    if not difference <= tolerance:
        raise NumericsError(
            f"--backend megatron: a small random {config.model_type} computes other logprobs in megatron-core than in "
            f"transformers, by {difference:.2g} (tolerance {tolerance:g}): use --backend fsdp"
        )
    return difference, tolerance


@torch.no_grad()
def small_models(
    config: PreTrainedConfig, split: MegatronConfig, options: dict[str, Any], *, spec: str | None, device: torch.device
) -> tuple[PreTrainedModel, "GPTModel"]:
    """The same random weights in transformers and in megatron-core, in float32 and the dtype of the run. Collective."""
    small = small_config(config, split)
    with platform.random_states_kept(), together(ConfigError, "--backend megatron"):
        torch.manual_seed(0)  # the same on every rank
        stock = model_from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in stock.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        model = build_model(transformer_config(small, split, **options), small, spec=spec).to(device)
    weights = WeightMap(model, small, hub_shapes(stock))
    with together(CheckpointError, "--backend megatron"):
        weights.load(hub_state(stock).__getitem__)
    return stock, model


def small_config(config: PreTrainedConfig, split: MegatronConfig) -> PreTrainedConfig:
    """One layer of each kind at least, as many of all as the split of the run divides, and heads of the true size."""
    small = copy.deepcopy(config)
    for key, limit in _AT_MOST.items():
        if isinstance(getattr(config, key, None), int):
            most = limit - limit % split.tensor_parallel if key in _SPLIT else limit
            setattr(small, key, min(most, getattr(config, key)))
    small.head_dim = head_size(config)
    groups = split.tensor_parallel * (2 if config.num_key_value_heads >= 2 * split.tensor_parallel else 1)
    small.num_attention_heads = groups * (config.num_attention_heads // config.num_key_value_heads)
    small.num_key_value_heads = groups
    choice = expert_choice(config)
    if choice is not None:
        ranks = split.expert_parallel
        enough = max(2 * choice.top_k, 4 * (config.to_dict().get("n_group") or 1))
        number = min(choice.num_experts, -(-enough // ranks) * ranks)
        for key in _EXPERT_KEYS:
            if key in config.to_dict() or key in config.attribute_map:
                setattr(small, key, number)
    _cut_layers(small, split.pipeline_parallel)
    return small


def _cut_layers(small: PreTrainedConfig, num_stages: int) -> None:
    """Those up to where each kind has been."""
    total, types = small.num_hidden_layers, small.to_dict().get("layer_types")
    sparse = family_of(small).special(small).get("moe_layer_freq", [0] * total)
    kinds = list(zip(types or [""] * total, sparse, strict=True))
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    kept = min(total, -(-max(2, needed) // num_stages) * num_stages)
    if types:
        small.layer_types = types[:kept]
    small.num_hidden_layers = kept


def _stock_logprobs(stock: Any, segment: list[int]) -> Tensor:
    """[T] of the next tokens, 0 at the last."""
    ids = torch.tensor(segment)
    logprobs = stock(ids[None]).logits[0].log_softmax(-1)
    return torch.cat([logprobs[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)])
