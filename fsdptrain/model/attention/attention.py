"""Attention over packs through transformers' AttentionInterface, with explicit segment boundaries.

Two implementations are registered. Neither builds a dense mask:

    fsdptrain_segments   scaled_dot_product_attention per segment: any device, any dtype
    fsdptrain_varlen     torch.nn.attention.varlen: one kernel for the whole pack, on CUDA in half precision. Falls
                         back to segments for float32, softcap, sinks, dropout and heads over 256. On another device:
                         its plug-in.

Both read the segments from the argument `boundaries`, which the model passes through its keyword arguments. It is
already on the host, so no layer waits for the device. A call without it is an error, because guessed boundaries may
leak. A feature may put another attention into `boundaries` (context parallelism, shared prefixes).

Padded rows need no mask: padding is on the right, and causal queries never see tokens to their right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.model.attention.masks import no_mask
from fsdptrain.registry import plugin_names, resolve

SEGMENTS = "fsdptrain_segments"
VARLEN = "fsdptrain_varlen"
PACKAGE_ATTENTION = (SEGMENTS, VARLEN)
_TOWER = "sdpa"
MAX_VARLEN_HEAD_DIM = 256  # limit of the flash kernels behind varlen_attn
_FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a layer's attention."""

    scale: float
    dropout: float = 0.0
    window: int | None = None  # number of keys that a query sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] attention sink logits
    varlen: bool = False  # use torch's flash kernel where it applies


@dataclass(eq=False)  # not frozen: dynamo of torch 2.11 would compile again for each number of segments
class Boundaries:
    """Position of the sequences in the hidden states. Do not change its fields.

    Packed: N segments in one row. Padded: N rows with padding on the right.
    """

    seqlens: tuple[int, ...]  # (N,)
    cu_seqlens: Tensor  # [N+1] i32
    padded: bool
    attention: "PackedAttention | None" = None  # replaces `packed_attention`; set by a feature


# (query [B, H, S, D], key [B, HK, S, D], value [B, HK, S, DV], boundaries, options) -> [B, S, H, DV]
PackedAttention = Callable[[Tensor, Tensor, Tensor, Boundaries, AttentionOptions], Tensor]


def register_attention() -> None:
    """Register both implementations with transformers, and exclude cuDNN from scaled_dot_product_attention.

    Calling it again keeps the functions that `compile_layers` installed.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan per shape; segments and decoding have new shapes
    if SEGMENTS in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    AttentionInterface.register(SEGMENTS, partial(attend, varlen=False))
    AttentionInterface.register(VARLEN, partial(attend, varlen=True))
    for name in PACKAGE_ATTENTION:
        AttentionMaskInterface.register(name, no_mask)


def resolve_attention(requested: str, device_type: str, *, needs_package_attention: bool = False) -> str:
    """Return the name of the attention implementation for the model's config.

    `requested` is auto, varlen, sdpa, or any name that transformers knows. On CUDA auto selects torch's varlen kernel;
    on Hopper flash-attn 3 if installed, unless `needs_package_attention`. On other devices it selects the plug-in
    `attention.<device type>` if there is one, under the name of varlen, else segments. Raises ConfigError if the device
    or a package is missing.
    """
    register_attention()
    has_varlen = _register_plugin(device_type) or device_type == "cuda"
    if requested == "auto":
        if device_type != "cuda":
            return VARLEN if has_varlen else SEGMENTS
        has_3 = not needs_package_attention and is_flash_attn_3_available()
        return "flash_attention_3" if has_3 and torch.cuda.get_device_capability()[0] == 9 else VARLEN
    if requested in {"sdpa", SEGMENTS}:
        return SEGMENTS
    if requested in {"varlen", VARLEN}:
        if not has_varlen:
            line = f"varlen needs CUDA or a plug-in attention.{device_type}, and this machine has neither"
            raise ConfigError(f"--attn-implementation {line}: auto or sdpa works on every device")
        return VARLEN
    if requested in _FLASH and not _FLASH[requested]():
        raise ConfigError(f"--attn-implementation {requested} needs a GPU and its package: auto takes what there is")
    return requested


def _register_plugin(device_type: str) -> bool:
    """Let the plug-in `attention.<device type>`, a `PackedAttention`, compute attention under the name of varlen."""
    found = device_type in plugin_names("attention")
    if found:
        own = resolve(device_type, {}, flag="--attn-implementation", plugins="attention")
        AttentionInterface.register(VARLEN, partial(attend, varlen=True, own=own))
    return found


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the language model to `name`.

    A vision tower keeps transformers' attention: it is not causal, and it separates its images itself.
    """
    text = model.config.get_text_config()
    parts = {key: getattr(model.config, key) for key in model.config.sub_configs}  # declared sub-configs
    others = {key: _TOWER for key, part in parts.items() if part is not None and part is not text}
    model.set_attn_implementation({"": name, **{key: name for key in parts if key not in others}, **others})


def attention_kwargs(seqlens: tuple[int, ...], cu_seqlens: Tensor) -> dict[str, Any]:
    """Return the keyword arguments for the attention and the recurrent mixers of a packed call.

    `boundaries` is for the attention of this package. The others are for flash-attn and the kernels of Mamba and Gated
    DeltaNet.
    """
    positions = torch.arange(sum(seqlens), device=cu_seqlens.device, dtype=torch.int32)
    segment = torch.searchsorted(cu_seqlens[1:], positions, right=True).to(torch.int32)
    return {
        "boundaries": Boundaries(seqlens, cu_seqlens, padded=False),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(seqlens),
        "max_length_k": max(seqlens),
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
    own: PackedAttention | None = None,  # of a plug-in
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,  # number of keys that a query sees, itself included
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] attention sink logits
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    boundaries: Boundaries | None = None,
    **_: Any,
) -> tuple[Tensor, None]:  # [B, S, H, DV]
    """Compute causal attention within each segment, exact in forward and backward.

    transformers calls this as the attention implementation of a model and defines the argument names. Raises
    NumericsError if boundaries are missing or an input is unsupported.
    """
    _refuse_unknown(module, query, key, attention_mask, position_bias, is_causal)
    if boundaries is None:
        raise NumericsError(
            "a packed attention call came without its boundaries: this model does not pass keyword arguments on to its "
            "attention, so sequences would leak into each other"
        )
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        varlen=varlen,
    )
    return (boundaries.attention or own or packed_attention)(query, key, value, boundaries, options), None


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, options: AttentionOptions
) -> Tensor:
    """Compute attention over whole sequences on this rank. [B, H, S, D] -> [B, S, H, DV]"""
    spans = segment_spans(query, boundaries)
    if not boundaries.padded and takes_flash(query, value, options):
        from fsdptrain.model.attention.varlen import varlen_attention

        return varlen_attention(query, key, value, boundaries, options.scale, options.window)
    return attention_by_segment(query, key, value, spans, spans, options)


def takes_flash(query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Return whether torch's flash kernel supports this attention."""
    fused = options.varlen and query.device.type == "cuda" and query.dtype in {torch.float16, torch.bfloat16}
    plain = options.softcap is None and options.sinks is None and options.dropout == 0.0
    return fused and plain and max(query.shape[-1], value.shape[-1]) <= MAX_VARLEN_HEAD_DIM


def attention_by_segment(
    query: Tensor, key: Tensor, value: Tensor, spans: list[int], key_spans: list[int], options: AttentionOptions
) -> Tensor:
    """Run `segment_attention` on each pair of `spans` queries and `key_spans` keys. [B, H, S, D] -> [B, S, H, DV]"""
    pieces = (query.split(spans, dim=2), key.split(key_spans, dim=2), value.split(key_spans, dim=2))
    parts = [segment_attention(*qkv, options) for qkv in zip(*pieces, strict=True)]
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1)


def segment_spans(query: Tensor, boundaries: Boundaries) -> list[int]:
    """Return the lengths of the segments along dimension 2. Segments must not attend to each other."""
    found = (query.shape[0], query.shape[2])
    wanted = (len(boundaries.seqlens), max(boundaries.seqlens)) if boundaries.padded else (1, sum(boundaries.seqlens))
    if found != wanted:
        raise NumericsError(f"attention got hidden states of {found} rows and tokens, and boundaries for {wanted}")
    return [found[1]] if boundaries.padded else list(boundaries.seqlens)


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
        raise NumericsError(f"{type(module).__name__} requires attention that is not causal over its own tokens")


def segment_attention(
    q: Tensor,  # [B, H, Q, D], the last Q tokens
    k: Tensor,  # [B, HK, L, D]
    v: Tensor,  # [B, HK, L, DV]
    options: AttentionOptions,
) -> Tensor:  # [B, H, Q, DV]
    length = k.shape[2]
    window = None if options.window is None or options.window >= length else options.window
    if options.softcap is not None or options.sinks is not None or window is not None or q.shape[2] != length:
        from fsdptrain.model.attention.blocks import attention_in_blocks

        return attention_in_blocks(q, k, v, options, window)
    v_wide = widen(v, q.shape[-1])  # the fused kernels require one head width (MLA has two)
    out = fused_attention(q, k, v_wide, is_causal=True, dropout_p=options.dropout, scale=options.scale)
    return out[..., : v.shape[-1]]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call scaled_dot_product_attention with a kernel that does not store [H, Q, L] scores.

    On CUDA only the flash kernel takes fewer heads of keys than of queries: half precision, no mask, heads up to 256.
    For others the heads are repeated.
    """
    grouped = q.shape[1] != k.shape[1]
    flash = q.dtype in {torch.float16, torch.bfloat16} and q.shape[-1] <= MAX_VARLEN_HEAD_DIM
    if grouped and q.device.type != "cpu" and (not flash or options.get("attn_mask") is not None):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)


def widen(x: Tensor, width: int) -> Tensor:
    """Zero-pad the last dimension of `x` to `width`. Returns `x` if it is wide enough."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x
