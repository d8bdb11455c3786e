"""Attention over packs, through transformers' AttentionInterface: boundaries are passed, never inferred.

A transformers model asks for its attention by name. Two names are ours, and neither ever builds a dense mask:

    fsdptrain_segments   scaled_dot_product_attention segment by segment: any device, any dtype
    fsdptrain_varlen     torch.nn.attention.varlen, one kernel for the whole pack, on the device and in half precision;
                         what that kernel cannot do (float32, softcap, sinks, dropout, heads over 256) goes by segments

Both read where segments begin from the argument `boundaries` that travels through the model's keyword arguments. It is
on the host already, so no layer waits for the device. A call without it is an error: a guess would be a leak.

Padded rows need no mask either: tokens stand at the left, and a causal query never sees what is to the right of it.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.features.prefix_sharing.attention import merged_attention
from fsdptrain.model.attention.masks import no_mask
from fsdptrain.overrides import overridable
from fsdptrain.types import PackedBatch, SharedPrefixes

SEGMENTS = "fsdptrain_segments"
VARLEN = "fsdptrain_varlen"
OURS = (SEGMENTS, VARLEN)
_TOWER = "sdpa"
BLOCK = 512  # queries that are taken at once where scores are materialised
MAX_VARLEN_HEAD_DIM = 256  # of the flash kernels behind varlen_attn
_VARLEN_TAKES_GQA = (
    "enable_gqa" in inspect.signature(varlen_attn).parameters
)  # torch >= 2.13; before, heads are repeated
_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


@dataclass(frozen=True)
class Boundaries:
    """Where sequences lie in the hidden states. Packed: N segments in one row. Padded: N rows, tokens at the left."""

    seqlens: tuple[int, ...]  # (N,)
    cu_seqlens: Tensor  # [N+1] i32
    padded: bool
    context: UlyssesGroup | None = None  # over whose ranks the hidden states are dealt
    whole: "Whole | None" = None


@dataclass(frozen=True)
class Whole:
    """Where segments share prefixes: what the queries of each, which `Boundaries` bounds, look at."""

    shared: SharedPrefixes
    seqlens: tuple[int, ...]  # (N,) of the segments with their prefixes
    cu_seqlens: Tensor  # [N+1] i32


def register_attention() -> None:
    """Make both names known to transformers. Calling it again does not undo what `compile_layers` made of them."""
    if SEGMENTS in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    AttentionInterface.register(SEGMENTS, partial(attend, varlen=False))
    AttentionInterface.register(VARLEN, partial(attend, varlen=True))
    for name in OURS:
        AttentionMaskInterface.register(name, no_mask)


def resolve_attention(requested: str, device_type: str, *, ours: bool = False) -> str:
    """The name for the model's config. `requested`: auto, varlen, sdpa, or any name that transformers knows.

    Auto takes flash-attn where it is installed and there is a GPU, else torch's own kernel there, else segments; with
    `ours` never flash-attn. Raises ConfigError where the device or a package is missing.
    """
    register_attention()
    if requested == "auto":
        return _best(device_type, ours=ours)
    if requested in {"sdpa", SEGMENTS}:
        return SEGMENTS
    if requested in {"varlen", VARLEN}:
        if device_type == "cpu":
            raise ConfigError(
                "--attn-implementation varlen needs a GPU and there is none here: auto or sdpa works on a CPU"
            )
        return VARLEN
    package = _FLASH_PACKAGES.get(requested)
    if package is not None and (device_type == "cpu" or find_spec(package) is None):
        missing = (
            "a GPU and there is none here" if device_type == "cpu" else f"the package {package}, not installed here"
        )
        raise ConfigError(f"--attn-implementation {requested} needs {missing}: auto takes what there is")
    return requested


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make `name` the attention of the language model. A vision tower keeps transformers' own: it is not causal, and
    keeps its images apart itself."""
    text = model.config.get_text_config()
    parts = {key: getattr(model.config, key) for key in model.config.sub_configs}  # names that the config declares
    others = {key: _TOWER for key, part in parts.items() if part is not None and part is not text}
    model.set_attn_implementation({"": name, **{key: name for key in parts if key not in others}, **others})


def attention_kwargs(batch: PackedBatch, context: UlyssesGroup | None = None) -> dict[str, Any]:
    """What the attention and the recurrent mixers of a packed call need to know; the standard names of transformers.

    `boundaries` is ours; the others serve flash-attn and the kernels of Mamba and Gated DeltaNet.
    """
    if batch.shared is not None:  # there is no name for this: what does not know ours is found out by the probe
        own = tuple(x - y for x, y in zip(batch.seqlens, batch.shared.lengths, strict=True))
        whole = Whole(batch.shared, batch.seqlens, batch.cu_seqlens)
        return {"boundaries": Boundaries(own, batch.shared.cu_seqlens, padded=False, whole=whole)}
    positions = torch.arange(batch.num_tokens, device=batch.cu_seqlens.device, dtype=torch.int32)
    segment = torch.searchsorted(batch.cu_seqlens[1:], positions, right=True).to(torch.int32)
    return {
        "boundaries": Boundaries(batch.seqlens, batch.cu_seqlens, padded=False, context=context),
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
        "seq_idx": segment[None],  # [1, T] i32
    }


def attend(
    module: nn.Module,
    query: Tensor,  # [B, H, S, D]; packed: B = 1, S = T
    key: Tensor,  # [B, HK, S, D]
    value: Tensor,  # [B, HK, S, DV]
    attention_mask: Tensor | None,
    *,
    varlen: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,  # keys that a query sees, itself included
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] logits of the sinks: weight that goes to no key
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    boundaries: Boundaries | None = None,
    **_: Any,
) -> tuple[Tensor, None]:  # [B, S, H, DV]
    """Causal attention within each segment, exact in forward and backward. Raises NumericsError rather than leak."""
    _refuse_unknown(module, query, key, attention_mask, position_bias, is_causal)
    context = None if boundaries is None else boundaries.context
    if context is not None:
        query, key, value = context.to_heads(query, key, value)
        s_aux = None if s_aux is None else context.own_heads(s_aux)
    spans = _spans(query, boundaries)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    fused = varlen and query.device.type != "cpu" and query.dtype in {torch.float16, torch.bfloat16}
    plain = softcap is None and s_aux is None and dropout == 0.0
    narrow = max(query.shape[-1], value.shape[-1]) <= MAX_VARLEN_HEAD_DIM
    whole = boundaries.whole if boundaries is not None else None
    if whole is not None:
        unlimited = sliding_window is None or sliding_window >= max(whole.seqlens)
        if plain and unlimited and query.device.type == "cpu":
            width = max(query.shape[-1], value.shape[-1])
            wide = (_widen(x, width) for x in (query, key, value))
            found = merged_attention(*wide, spans=spans, shared=whole.shared, scale=scale)
            return found.transpose(1, 2)[..., : value.shape[-1]], None
        key, value = (x.index_select(2, whole.shared.rows) for x in (key, value))
    if fused and plain and narrow and boundaries is not None and not boundaries.padded:
        out = varlen_attention(query, key, value, boundaries, scale, sliding_window)
    else:
        one = partial(
            segment_attention, scale=scale, dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux
        )
        key_spans = spans if whole is None else list(whole.seqlens)
        pieces = (query.split(spans, dim=2), key.split(key_spans, dim=2), value.split(key_spans, dim=2))
        parts = [one(*qkv) for qkv in zip(*pieces, strict=True)]
        out = torch.cat([part.transpose(1, 2) for part in parts], dim=1)
    return (out if context is None else context.to_tokens(out)), None


def _best(device_type: str, *, ours: bool) -> str:
    if device_type == "cpu":
        return SEGMENTS
    return "flash_attention_2" if find_spec("flash_attn") is not None and not ours else VARLEN


def _spans(query: Tensor, boundaries: Boundaries | None) -> list[int]:
    """Lengths of the pieces of dimension 2 that must not see each other."""
    batch, length = query.shape[0], query.shape[2]
    if boundaries is None:
        raise NumericsError(
            "a packed attention call came without its boundaries: this model does not pass keyword arguments on to its "
            "attention, so sequences would leak into each other"
        )
    found = (batch, length)
    wanted = (len(boundaries.seqlens), max(boundaries.seqlens)) if boundaries.padded else (1, sum(boundaries.seqlens))
    if found != wanted:
        raise NumericsError(f"attention got hidden states of {found} rows and tokens, and boundaries for {wanted}")
    return [length] if boundaries.padded else list(boundaries.seqlens)


def _refuse_unknown(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    is_causal: bool | None,
) -> None:
    if attention_mask is not None or position_bias is not None:
        raise NumericsError(
            f"{type(module).__name__} hands a mask or a position bias to its attention, which has no place for it"
        )
    causal = vars(module).get("is_causal", True) if is_causal is None else is_causal
    if not causal or query.shape[2] != key.shape[2]:
        raise NumericsError(f"{type(module).__name__} asks for attention that is not causal over its own tokens")


@overridable
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, scale: float, window: int | None
) -> Tensor:
    """One call for the pack, [1, T, H, DV]. The kernel wants one head width for q, k and v, a multiple of 8.

    Segments that share prefixes have fewer queries than keys: their last query sees the last key.
    """
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    queries, keys, values = (_widen(x, width)[0].transpose(0, 1) for x in (q, k, v))  # [T, heads, width]
    options: dict[str, Any] = {"enable_gqa": True} if _VARLEN_TAKES_GQA else {}
    if not _VARLEN_TAKES_GQA:
        groups = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    of_keys = boundaries.whole or boundaries
    longest = max(of_keys.seqlens)
    left = -1 if window is None or window >= longest else window - 1  # the kernel counts the keys before the query
    limits = (boundaries.cu_seqlens, of_keys.cu_seqlens, max(boundaries.seqlens), longest)
    out = varlen_attn(queries, keys, values, *limits, scale=scale, window_size=(left, 0), **options)
    assert isinstance(out, Tensor)
    return out[None, :, :, : v.shape[-1]]


@overridable
def segment_attention(
    q: Tensor,  # [B, H, Q, D], of the last Q tokens
    k: Tensor,  # [B, HK, L, D]
    v: Tensor,  # [B, HK, L, DV]
    *,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # [B, H, Q, DV]
    length = k.shape[2]
    window = None if window is None or window >= length else window
    if softcap is not None or sinks is not None:
        block = partial(_by_scores, scale=scale, dropout=dropout, window=window, softcap=softcap, sinks=sinks)
        return _in_blocks(block, q, k, v, window, recompute=length > BLOCK)
    v_wide = _widen(v, q.shape[-1])  # the fused kernels want one head width (MLA has two)
    if window is None and q.shape[2] == length:
        options = {"dropout_p": dropout, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        out = F.scaled_dot_product_attention(q, k, v_wide, is_causal=True, **options)
    else:
        out = _in_blocks(partial(_by_mask, scale=scale, dropout=dropout, window=window), q, k, v_wide, window)
    return out[..., : v.shape[-1]]


def _widen(x: Tensor, width: int) -> Tensor:
    """Zeros at the end of the last dimension, up to `width`; the same tensor where it is as wide already."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def _in_blocks(
    block: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, window: int | None, *, recompute: bool = False
) -> Tensor:
    """`block(q, k, v, offset)` over runs of queries with only the keys that they can see."""
    parts = []
    ahead = k.shape[2] - q.shape[2]
    for start, stop, first in _blocks(ahead, k.shape[2], window):
        args = (q[:, :, start - ahead : stop - ahead], k[:, :, first:stop], v[:, :, first:stop], start - first)
        # Scores of all blocks together would be quadratic in memory: the backward makes them again, block by block.
        parts.append(checkpoint(block, *args, use_reentrant=False) if recompute else block(*args))
    return torch.cat(parts, dim=2)


def _blocks(begin: int, length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries and keys, first key that any of these queries sees), for queries from `begin` on"""
    for start in range(begin, length, BLOCK):
        first = 0 if window is None else max(0, start - window + 1)
        yield start, min(start + BLOCK, length), first


def _visible(num_queries: int, num_keys: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: key j for the query at position i + offset."""
    ahead = torch.arange(num_queries, device=device)[:, None] + offset - torch.arange(num_keys, device=device)
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def _by_mask(
    q: Tensor, k: Tensor, v: Tensor, offset: int, *, scale: float, dropout: float, window: int | None
) -> Tensor:
    mask = _visible(q.shape[2], k.shape[2], offset, window, q.device)
    options = {"dropout_p": dropout, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def _by_scores(
    q: Tensor,  # [B, H, Q, D]
    k: Tensor,  # [B, HK, K, D]
    v: Tensor,
    offset: int,
    *,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax written out, in float32: the one way in plain torch that takes a softcap and sinks (gemma2, gpt_oss)."""
    batch, heads, length, _ = q.shape
    groups = heads // k.shape[1]
    scores = q.unflatten(1, (-1, groups)) @ k[:, :, None].transpose(-1, -2) * scale  # [B, HK, G, Q, K]
    scores = scores.flatten(1, 2).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible(length, k.shape[2], offset, window, q.device), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, length, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(q.dtype)
    weights = F.dropout(weights, dropout) if dropout else weights
    return (weights.unflatten(1, (-1, groups)) @ v[:, :, None]).flatten(1, 2)
