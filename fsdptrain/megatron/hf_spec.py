"""Layers for models that megatron-core does not support: its own, with mixers of transformers as `self_attention`.

With tensor parallelism megatron-core gives each rank a contiguous part of the sequence. The mixer is not sharded, so
it receives the tokens of all these ranks, and each rank keeps its own part of the output. Its weights get the full
gradient on each rank. The gather with tensor_parallel_output_grad=False belongs to the scatter: other pairs give wrong
gradients without an error.

    [S / R, B, D] -> gather -> [B, S, D] mixer -> scatter -> [S / R, B, D]

A pack is one row with boundaries, which attention uses. A recurrent mixer gets one row per sequence if its kernels do
not support packed sequences. Tokens are left-aligned, so the padding on the right cannot affect them.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from fsdptrain import platform
from fsdptrain.megatron import model as own
from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION, Boundaries, attention_kwargs, resolve_attention
from fsdptrain.model.loading.meta import model_from_config
from fsdptrain.model.structure import base_model, decoder_layers

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

_ATTENTION, _RECURRENT = "self_attn", "linear_attn"  # names in a transformers layer and in the files
_PACKED_KERNELS = ("fla", "causal_conv1d")  # both: for recurrent states, for convolutions


class HFModules(NamedTuple):
    """The transformers modules of one model."""

    config: PreTrainedConfig  # a copy, with an attention that uses no dense masks
    mixers: list[tuple[str, type[nn.Module]]]  # of each layer: its name in the files, its class
    rotary_class: type[nn.Module]


def hf_modules(hf_config: PreTrainedConfig) -> HFModules:
    """Find the modules of a model: it is built on meta, and the classes are taken from its layers."""
    config = copy.deepcopy(hf_config)
    config.use_cache = False
    asked = str(config._attn_implementation)
    attention = (
        asked if asked in PACKAGE_ATTENTION or "flash" in asked else resolve_attention("auto", platform.device_type())
    )
    config._attn_implementation = attention
    with torch.device("meta"):
        model = model_from_config(config, dtype=torch.float32, attn_implementation=attention)
    names = [_ATTENTION if _ATTENTION in layer._modules else _RECURRENT for layer in decoder_layers(model)]
    mixers = [(name, type(layer.get_submodule(name))) for name, layer in zip(names, decoder_layers(model), strict=True)]
    return HFModules(config, mixers, type(base_model(model).get_submodule("rotary_emb")))


class HFMixer(nn.Module):
    """Wraps `hf`, the transformers module of one layer, and gathers and slices the tokens around it."""

    def __init__(
        self,
        config: "TransformerConfig",
        layer_number: int,
        *,
        modules: HFModules,
        pg_collection: "ProcessGroupCollection",
        cp_comm_type: str | None = None,
    ) -> None:
        """layer_number: counted from 1 over all stages."""
        super().__init__()
        name, module_class = modules.mixers[layer_number - 1]
        around = torch.get_default_device()
        with around if around.type == "meta" else platform.local_device():
            self.hf = module_class(modules.config, layer_number - 1).to(config.params_dtype)
        self.hf.hub_name = name  # type: ignore[assignment]  # table.py reads it
        self._is_recurrent = name == _RECURRENT
        # A tuple hides it from nn.Module, so that the angles stay in float32 when the model is cast
        self._rotary: Any = (modules.rotary_class(config=modules.config),)
        self._runs = pg_collection.tp if config.sequence_parallel else None

    def forward(
        self,
        hidden_states: Tensor,  # [S / R, B, D]; B = 1 for a pack
        attention_mask: Tensor | None = None,  # causal
        *,
        packed_seq_params: "PackedSeqParams | None" = None,
        **_: Any,  # rotary tables and caches; the mixer has its own
    ) -> tuple[Tensor, None]:
        """Return the mixer's output in the shape of its input, and no bias."""
        from megatron.core import tensor_parallel as tp

        x, seqlens = hidden_states, None if packed_seq_params is None else _seqlens(packed_seq_params)
        if self._runs is not None:
            x = tp.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self._runs)
        out = self._mix(x.transpose(0, 1), seqlens).transpose(0, 1)
        return (out if self._runs is None else tp.scatter_to_sequence_parallel_region(out, group=self._runs)), None

    def _mix(self, x: Tensor, seqlens: Sequence[int] | None) -> Tensor:
        """Apply the mixer: [B, S, D] -> [B, S, D]. seqlens: lengths of the sequences in the row of a pack."""
        has_kernels = x.device.type != "cpu" and all(find_spec(name) is not None for name in _PACKED_KERNELS)
        if seqlens is None or not self._is_recurrent or has_kernels:
            return self._call(x, seqlens)
        rows = pad_sequence(list(x[0].split(list(seqlens))), batch_first=True)
        return torch.cat([row[:n] for row, n in zip(self._call(rows, None), seqlens, strict=True)])[None]

    def _call(self, x: Tensor, seqlens: Sequence[int] | None) -> Tensor:
        batch, length = x.shape[:2]
        if seqlens is None:
            starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.device)
            kwargs: dict[str, Any] = {"boundaries": Boundaries((length,) * batch, starts, padded=True)}
            positions = torch.arange(length).expand(batch, -1)
        else:
            starts = torch.tensor((0, *accumulate(seqlens)), dtype=torch.int32, device=x.device)
            kwargs = attention_kwargs(tuple(seqlens), starts)
            positions = torch.cat([torch.arange(n) for n in seqlens])[None]
        if self._is_recurrent:
            del kwargs["boundaries"]
        else:
            kwargs["position_embeddings"] = self._rotary[0](x, positions.to(x.device))
        found = self.hf(x, attention_mask=None, **kwargs)
        return found[0] if isinstance(found, tuple) else found


def _seqlens(packed: "PackedSeqParams") -> tuple[int, ...]:
    """Return the sequence lengths over all ranks, including padding. Reads them from the device once for all layers."""
    known = vars(packed)
    if "seqlens" not in known:
        known["seqlens"] = tuple(packed.cu_seqlens_q.diff().tolist())
    return known["seqlens"]


def layer_spec(
    transformer_config: "TransformerConfig", hf_config: PreTrainedConfig, *, vp_stage: int | None = None
) -> "TransformerBlockSubmodules":
    """Return the layers of this rank's stage. Attention with a gate is megatron-core's."""
    with quiet_megatron():
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    modules = hf_modules(hf_config)
    mixer = ModuleSpec(module=HFMixer, params={"modules": modules})
    block = own.layer_spec(transformer_config, hf_config, vp_stage=vp_stage)
    layers: list[Any] = list(block.layer_specs or ())
    start = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage)
    for index, layer in enumerate(layers):
        if modules.mixers[start + index][0] == _RECURRENT or not transformer_config.attention_output_gate:
            # not the norm that Transformer Engine would fuse into the first matrix of megatron-core's attention
            parts = replace(layer.submodules, input_layernorm=block.layer_norm, self_attention=mixer)
            layers[index] = replace(layer, submodules=parts)
    return replace(block, layer_specs=layers)
