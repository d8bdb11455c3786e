"""Whole layers of transformers in megatron-core's pipeline, for decoders that megatron-core lacks.

A stage is the language model of transformers with the layers of this stage: its own forward makes masks, rotary tables
and arguments. On later stages the first layer gets what was received, in place of what that forward made before it. No
family is listed; layers are found as for FSDP. Each rank has whole layers: no tensor and no expert parallelism.
"""

import copy
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import one_line
from fsdptrain.errors import ConfigError
from fsdptrain.megatron.hub_names import stored_as
from fsdptrain.megatron.table import Entry, stored_tensors, text_path
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION, resolve_attention
from fsdptrain.model.layer_kinds import one_of_each_kind
from fsdptrain.model.loading.files import some_of
from fsdptrain.model.loading.materialize import store_in
from fsdptrain.model.loading.meta import model_from_config
from fsdptrain.model.policy import MODEL_ERRORS
from fsdptrain.model.probes.copy_probe import probe_random_copy
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.probes.random_copy import keep_layers
from fsdptrain.model.rows import Layout, core_rows
from fsdptrain.model.structure import base_model, decoder_layers, lm_head
from fsdptrain.types import PackedBatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

LAYOUT, _ATTENTION = "packs_layout", "packs_attention"  # keys of a text config, set by `note_layout`


def note_layout(config: PreTrainedConfig) -> LayoutProbe:
    """Probe the layout of a text config on a small random copy, and note it there. Collective. Raises ConfigError."""
    try:
        check_structure(config)
        probe = probe_random_copy(config)
    except MODEL_ERRORS as error:
        raise _refusal(config, one_line(error)) from error
    if probe.attention in PACKAGE_ATTENTION:  # on the CPU, of the probe
        probe = replace(probe, attention=resolve_attention("auto", platform.device_type()))
    vars(config).update({LAYOUT: probe.layout, _ATTENTION: probe.attention})
    return probe


def check_structure(config: PreTrainedConfig) -> None:
    """Raise ConfigError if a model cannot be cut into stages of whole layers. config: of the text."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(config, "transformers has no causal language model of it")
    model = _on_meta(config, "eager")
    outer_modules(model)
    layers_path(model)


def outer_modules(model: PreTrainedModel) -> tuple[str, list[str]]:
    """Return the names of the embedding and of the norm, if any. Raises ConfigError if others have weights."""
    base: Any = base_model(model)
    names = {module: name for name, module in base.named_modules()}
    embedding = base.get_input_embeddings()
    inside = {embedding, *(module for layer in decoder_layers(model) for module in layer.modules())}
    norms = [name for m, name in names.items() if m not in inside and dict(m.named_parameters(recurse=False))]
    if len(norms) > 1:
        reason = f"it has weights in {some_of(norms)}, and only one norm may be outside of the layers"
        raise _refusal(model.config, reason)
    return names[embedding], norms


def _refusal(config: PreTrainedConfig, reason: str) -> ConfigError:
    return ConfigError(f"--backend megatron cannot take layers of a {config.model_type}: {reason}: use --backend fsdp")


def cut_layers(config: PreTrainedConfig, num_stages: int) -> PreTrainedConfig:
    """Return a config with the layers up to the first of every kind, and as many on each stage."""
    model = _on_meta(config, "eager")
    path, total = layers_path(model), len(decoder_layers(model))
    needed = max(1, *one_of_each_kind(model)[path]) + 1
    keep_layers(model, path, range(min(-(-needed // num_stages) * num_stages, total - total % num_stages)))
    return model.config


class WholeLayers(nn.Module):
    """A part of a stage, with the attributes that megatron-core's schedule and DistributedDataParallel read."""

    def __init__(self, config: "TransformerConfig", hf_config: PreTrainedConfig, vp_stage: int | None) -> None:
        from megatron.core import parallel_state
        from megatron.core.enums import ModelType
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        self._attention = vars(hf_config).get(_ATTENTION) or resolve_attention("auto", platform.device_type())
        self._pad_token_id = hf_config.to_dict().get("pad_token_id")
        self._received: Tensor | None = None
        self._start = get_transformer_layer_offset(config, vp_stage)
        stock = _on_meta(copy.deepcopy(hf_config), self._attention)
        store_in(stock, config.params_dtype)
        for parameter in stock.parameters():  # those that are never trained, e.g. of routing, keep their digits
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.float()
        embedding, norms = outer_modules(stock)
        path = layers_path(stock)
        keep_layers(stock, path, range(self._start, self._start + get_num_layers_to_build(config, vp_stage)))
        self.hf: Any = base_model(stock)
        self._path = path.removeprefix(f"{text_path(stock)}.")
        head: Any = lm_head(stock)
        self.share_embeddings_and_output_weights = head.weight is self.hf.get_input_embeddings().weight
        for name in [*([] if self.pre_process else [embedding]), *([] if self.post_process else norms)]:
            self.hf.set_submodule(name, nn.Identity())
        self.hf.to_empty(device=platform.local_device())
        for tensor in self.hf.state_dict(keep_vars=True).values():  # loaded later; what no file holds is computed now
            vars(tensor)["_is_hf_initialized"] = True
        self.hf.init_weights()
        if self.post_process:
            self.output_layer: Any = head.to_empty(device=platform.local_device())
        self._tie()
        layers = self.hf.get_submodule(self._path)
        layers[0].register_forward_pre_hook(self._take_received, with_kwargs=True)
        for layer in layers if config.recompute_granularity else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        self.eval()

    def _tie(self) -> None:
        """Tie the head to the embedding. On another stage it is a copy: megatron-core sums gradients of marked ones."""
        weight = self.shared_embedding_or_output_weight()
        if self.share_embeddings_and_output_weights and weight is not None:
            if self.pre_process and self.post_process:
                self.output_layer.weight = weight
            else:
                vars(weight).update(shared_embedding=True, shared=not self.pre_process)

    def _take_received(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._received is None:
            return None
        return (self._received, *args[1:]), {name: x for name, x in kwargs.items() if name != "hidden_states"}

    def set_input_tensor(self, tensors: Any) -> None:
        """Take what the stage before sent. megatron-core's schedule calls it before each forward pass."""
        self._received = tensors[0]

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        if self.pre_process:
            return self.hf.get_input_embeddings().weight
        return self.output_layer.weight if self.post_process else None

    def forward(self, batch: PackedBatch, layout: Layout) -> Tensor:
        """Return the hidden states of this stage, [N, S, D]."""
        inputs = core_rows(batch, layout, self._attention).inputs(pad_token_id=self._pad_token_id)
        if self._received is not None:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = self._received  # for its shape: `_take_received` replaces what is made of it
        return self.hf(**inputs).last_hidden_state.contiguous()

    def entries(self, stock: PreTrainedModel) -> list[Entry]:
        """Return the table of this stage. `stock` may have a vision part too."""
        path, names = text_path(stock), {module: name for name, module in stock.named_modules()}
        found, stored = [], stored_as(stock)
        for name in stored_tensors(self):
            owner, _, rest = name.partition(".")
            tied = name == "output_layer.weight" and self.share_embeddings_and_output_weights
            prefix = path if owner == "hf" else names[stock.get_input_embeddings() if tied else lm_head(stock)]
            rest = re.sub(rf"^({self._path}\.)(\d+)", lambda own: f"{own[1]}{int(own[2]) + self._start}", rest)
            found.append(Entry(name, *stored[f"{prefix}.{rest}"], is_copy=tied))
        return found


def _on_meta(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    with torch.device("meta"):
        return model_from_config(config, dtype=torch.float32, attn_implementation=attention)


def layers_path(model: PreTrainedModel) -> str:
    """Return the path of the list of layers. Raises ConfigError if they are not one list."""
    lists, layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)], decoder_layers(model)
    path = next((name for name, module in lists if list(module) == layers), None)
    if path is None:
        raise _refusal(model.config.get_text_config(), "they are not one list")
    return path
