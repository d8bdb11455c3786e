"""Map the tensors of megatron-core to the tensors of the files, for plain and Transformer Engine names.

    decoder.layers.3.self_attention.linear_qkv.weight  <->  model.layers.3.self_attn.{q,k,v}_proj.weight   by groups

`model` is the path of the language model; beside a vision part it is `model.language_model`. A module with a string
attribute `hub_name` (a transformers module inside a layer) is not looked up: its tensors are copies of
model.layers.<i>.<hub_name>. A tensor without a mapping is an error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.errors import CheckpointError
from fsdptrain.megatron.conversions import Columns, Conversion, Copy, Interleaved, Vocabulary
from fsdptrain.megatron.model import padded_vocab
from fsdptrain.megatron.transformer_config import family_of, text_config
from fsdptrain.model.loading.files import some_of
from fsdptrain.model.structure import language_model

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<id>\d+)\.(?P<part>linear_fc[12])\.weight"),  # plain
    re.compile(r"mlp\.experts\.(?P<part>linear_fc[12])\.weight(?P<id>\d+)"),  # Transformer Engine, grouped
)
_COPIED = {  # in a layer
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}


@dataclass(frozen=True)
class Entry:
    """The mapping of one tensor of this rank's stage."""

    name: str  # in the model
    hub: tuple[str, ...]  # in the files; for experts, {expert} stands for the index in the layer
    conversion: Conversion
    expert: int | None = None  # index on this rank
    is_copy: bool = False  # copy of a tensor of another stage: loaded, never exported

    def hub_names(self, expert_rank: int, experts_per_rank: int) -> list[str]:
        """Return the names in the files for the expert-parallel rank `expert_rank`."""
        if self.expert is None:
            return list(self.hub)
        return [name.format(expert=expert_rank * experts_per_rank + self.expert) for name in self.hub]


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and learned buffers by name: everything that files store."""
    found: Mapping[str, object] = model.state_dict(keep_vars=True)
    return {name: t for name, t in found.items() if isinstance(t, Tensor) and not name.endswith(_NOT_STORED)}


_NOT_STORED = ("_extra_state", "local_tokens_per_expert")


def text_path(stock: PreTrainedModel) -> str:
    """Return the path of the language model."""
    text = language_model(stock)
    return next(name for name, module in stock.named_modules() if module is text)


def table(model: "GPTModel", stock: PreTrainedModel) -> list[Entry]:
    """Build the table of a part of a stage. Raises CheckpointError, with their names, for tensors without a mapping."""
    wrapped = {name: str(vars(m)["hub_name"]) for name, m in model.named_modules() if "hub_name" in vars(m)}
    config, path = text_config(stock.config), text_path(stock)
    entries, unknown = [], []
    for name in stored_tensors(model):
        entry = _outside(name, model, config, path) or _inside(name, model, config, path, wrapped)
        entries += [entry] if entry else []
        unknown += [] if entry else [name]
    if unknown:
        raise CheckpointError(f"--backend megatron has no names in the files for {some_of(unknown)}: extend table.py")
    return entries


def _outside(name: str, model: "GPTModel", config: PreTrainedConfig, path: str) -> Entry | None:
    """Map embedding, last norm and head."""
    tensor = model.config.tensor_model_parallel_size
    vocabulary = Vocabulary(config.vocab_size, padded_vocab(config.vocab_size, tensor))
    embedding = (f"{path}.embed_tokens.weight",)
    if name == "embedding.word_embeddings.weight":
        return Entry(name, embedding, vocabulary)
    if name == "output_layer.weight":
        tied = config.tie_word_embeddings
        return Entry(name, embedding if tied else ("lm_head.weight",), vocabulary, is_copy=tied)
    return Entry(name, (f"{path}.norm.weight",), Copy()) if name == "decoder.final_layernorm.weight" else None


def _inside(
    name: str, model: "GPTModel", config: PreTrainedConfig, path: str, wrapped: Mapping[str, str]
) -> Entry | None:
    """Map a tensor of a layer. Layer numbers in the files count over all stages."""
    match = LAYER.fullmatch(name)
    if match is None:
        return None
    layer = model.decoder.layers[int(match[1])].layer_number - 1  # type: ignore[operator, union-attr]
    prefix, rest = f"{path}.layers.{layer}.", match[2]
    for module, hub_name in wrapped.items():
        if name.startswith(f"{module}."):
            return Entry(name, (f"{prefix}{hub_name}.{name.removeprefix(module + '.')}",), Copy())
    expert = next((m for pattern in EXPERT if (m := pattern.fullmatch(rest))), None)
    if expert is not None:
        names, conversion = _gated(prefix + "mlp.experts.{expert}.", expert["part"])
        return Entry(name, names, conversion, expert=int(expert["id"]))
    found = _of_layer(rest, prefix, config)
    return Entry(name, *found) if found else None


def _of_layer(rest: str, prefix: str, config: PreTrainedConfig) -> tuple[tuple[str, ...], Conversion] | None:
    if rest in _COPIED:
        return (prefix + _COPIED[rest],), Copy()
    owner, _, last = rest.rpartition(".")
    if owner == "self_attention.linear_qkv" and last in ("weight", "bias"):
        groups, gated = config.num_key_value_heads, family_of(config).gated
        heads = config.num_attention_heads // groups
        conversion = Interleaved((heads * (1 + gated), 1, 1), groups, gated=heads if gated else 1)
        return tuple(f"{prefix}self_attn.{x}_proj.{last}" for x in "qkv"), conversion
    if rest == "self_attention.linear_proj.weight":
        return (f"{prefix}self_attn.o_proj.weight",), Columns()
    match = re.fullmatch(r"mlp\.(shared_experts\.)?(linear_fc[12])\.weight", rest)
    if match is None:
        return None
    shared = "shared_experts." if "n_shared_experts" in config.to_dict() else "shared_expert."
    return _gated(f"{prefix}mlp." + (shared if match[1] else ""), match[2])


def _gated(prefix: str, part: str) -> tuple[tuple[str, ...], Conversion]:
    """Map the matrices of a gated MLP."""
    if part == "linear_fc1":
        return (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), Interleaved((1, 1))
    return (f"{prefix}down_proj.weight",), Columns()
