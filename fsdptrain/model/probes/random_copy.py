"""Build a small random model with the code paths of a large one: real layers, one of each kind, no weights needed.

`inspect` measures it. Widths are reduced where that changes only the size. Sliding windows are
shortened so that the probe exceeds them.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.model.layer_kinds import are_of_the_text, one_of_each_kind, per_layer_lists
from fsdptrain.model.loading.meta import model_from_config
from fsdptrain.model.policy import MODEL_ERRORS

AT_MOST = {"vocab_size": 512, "intermediate_size": 512, "moe_intermediate_size": 128, "sliding_window": 16}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOKEN_KEYS = ("pad_token_id", "bos_token_id", "eos_token_id")  # may be outside the smaller vocabulary


def random_copy(
    config: PreTrainedConfig, *, trust_remote_code: bool = False, all_layers: bool = False
) -> PreTrainedModel:
    """Build a float32 model on the CPU from a reduced copy of `config`, in eval mode."""
    small = copy.deepcopy(config)
    cut_widths(small.get_text_config(), AT_MOST)
    with torch.device("meta"):
        model = model_from_config(small, dtype=torch.float32, trust_remote_code=trust_remote_code)
    if not all_layers:
        keep_one_of_each_kind(model)
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    model.init_weights()
    return model.eval()


def guarded_copy(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a `random_copy`, with all layers if needed, without changing the global random state."""
    with torch.random.fork_rng(devices=[]):
        try:
            return random_copy(config, trust_remote_code=trust_remote_code)
        except MODEL_ERRORS:  # a few families tie other parts to the number of layers
            return random_copy(config, trust_remote_code=trust_remote_code, all_layers=True)


def cut_widths(text: PreTrainedConfig, at_most: Mapping[str, int]) -> None:
    """Limit size-only fields of `text` to `at_most`, and the number of experts to what its router needs."""
    values = text.to_dict()
    for key, limit in at_most.items():
        if isinstance(values.get(key), int) and values[key] > limit:
            setattr(text, key, limit)
    enough = max(2 * (values.get("num_experts_per_tok") or 1), 4 * (values.get("n_group") or 1))
    for key in EXPERT_KEYS:
        if isinstance(values.get(key), int) and values[key] > enough:
            setattr(text, key, enough)
    for key in _TOKEN_KEYS:
        if values.get(key) is not None:
            setattr(text, key, 0)


def keep_one_of_each_kind(model: PreTrainedModel) -> dict[str, list[int]]:
    """Keep one layer of each kind in each list of layers of a meta model, and adjust the per-layer lists of its config.

    Returns the original indices of the kept layers by the path of their list.
    """
    kept = one_of_each_kind(model)
    for path, indices in kept.items():
        keep_layers(model, path, indices)
    return kept


def keep_layers(model: PreTrainedModel, path: str, indices: Sequence[int]) -> None:
    """Keep some layers of one list of a meta model, and their entries in the per-layer lists of its config."""
    layers, text = cast(nn.ModuleList, model.get_submodule(path)), model.config.get_text_config()
    if are_of_the_text(model, layers):
        lists = per_layer_lists(model, layers)
        text.num_hidden_layers = len(indices)
        for key, values in lists.items():
            setattr(text, key, [values[index] for index in indices])
    model.set_submodule(path, nn.ModuleList([layers[index] for index in indices]))
