"""Convert weights with the tables of mbridge instead of ours: --megatron-bridge mbridge.

mbridge names the tensors of Transformer Engine layers only, so plain layers get those names here. It is given the
config, but none of its models is built: they read `rope_theta`, which transformers 5 moved. Its conversions take full
tensors, so each tensor-parallel rank reads all of a tensor and keeps its part.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.distributed import gather, one_line, raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.megatron.conversions import Bridged
from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.megatron.groups import process_groups
from fsdptrain.megatron.model import padded_vocab
from fsdptrain.megatron.table import EXPERT, LAYER, Entry, stored_tensors, table
from fsdptrain.megatron.transformer_config import text_config
from fsdptrain.megatron.whole import WholeLayers
from fsdptrain.model.probes.kernels import Kernel

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def entries_of(asked: str, model: nn.ModuleList, stock: PreTrainedModel) -> tuple[list[Entry], Kernel]:
    """Return the mapping of this rank's stage, and whose it is. Collective.

    asked: --megatron-bridge. If any rank cannot use mbridge, all ranks use our table, and the result is a fallback.
    Raises CheckpointError on all ranks for tensors that our table does not map.
    """
    reason = ""
    if asked == "mbridge":
        found = list[Entry]()
        try:
            found = _of_parts(model, _by_mbridge(text_config(stock.config)))
        except Exception as error:  # noqa: BLE001  # mbridge may break with any version of what it imports
            reason = one_line(error)
        reason = next(filter(None, gather(reason)), "")
        if not reason:
            return found, Kernel("weights", asked)
    with raise_on_all_ranks(CheckpointError, "--backend megatron"):
        found = _of_parts(model, lambda p: p.entries(stock) if isinstance(p, WholeLayers) else table(p, stock))
    return found, Kernel("weights", "the table of fsdptrain", asked if reason else "", reason)


def _of_parts(model: nn.ModuleList, entries: Callable[[Any], list[Entry]]) -> list[Entry]:
    return [
        replace(entry, name=f"{number}.{entry.name}") for number, part in enumerate(model) for entry in entries(part)
    ]


def _by_mbridge(config: PreTrainedConfig) -> "Callable[[GPTModel], list[Entry]]":
    """Return what maps the tensors of a part. Both raise what mbridge raises for families and tensors that it lacks."""
    size = process_groups().tp.size()
    untied: Any = copy.deepcopy(config)
    untied.tie_word_embeddings = False  # for a tied head mbridge changes its tables, also for later models
    with quiet_megatron():
        from mbridge import AutoBridge
        from mbridge.core.parallel_states import ParallelStates

        sizes = ParallelStates(tp_size=size, etp_size=size)
        bridge: Any = AutoBridge.from_config(untied, parallel_states=sizes, make_vocab_size_divisible_by=size)
    bridge.dtype = None  # keep the dtype of the files
    bridge.vocab_size, bridge.padded_vocab_size = config.vocab_size, padded_vocab(config.vocab_size, size)

    def entries(part: "GPTModel") -> list[Entry]:
        found = []
        for name, tensor in stored_tensors(part).items():
            is_copy = name == "output_layer.weight" and bool(config.tie_word_embeddings)
            engine, expert = ("embedding.word_embeddings.weight", None) if is_copy else _engine_name(name, part)
            hub = tuple(bridge._weight_name_mapping_mcore_to_hf(engine))
            found.append(Entry(name, hub, Bridged(bridge, engine, tensor), expert, is_copy))
        return found

    return entries


def _engine_name(name: str, model: "GPTModel") -> tuple[str, int | None]:
    """Return the name of a tensor in Transformer Engine layers, and the index of its expert on this rank.

    Layers are counted over all stages. mbridge copies the number of an expert into its names, and so `{expert}`.
    """
    match = LAYER.fullmatch(name)
    if match is None:
        return name, None
    layer: Any = model.decoder.layers[int(match[1])]
    fused = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
    if not hasattr(layer.mlp, "router"):
        fused["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    rest, prefix = fused.get(match[2], match[2]), f"decoder.layers.{layer.layer_number - 1}."
    expert = next((m for pattern in EXPERT if (m := pattern.fullmatch(rest))), None)
    if expert is None:
        return prefix + rest, None
    return f"{prefix}mlp.experts.{expert['part']}.weight{{expert}}", int(expert["id"])
