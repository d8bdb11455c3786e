"""What is asked of models whose mixers are wrapped, in the ranks that a test spawns; and layers of a user's own."""

import copy
from typing import Any

from transformers import PreTrainedConfig

from tests.megatron import cases


def with_own_spec_and_tensor_parallel() -> float:
    """How far logprobs are from those of transformers, in padded rows whose length the ranks do not divide."""
    config = cases.config("qwen3_next")
    vars(config)["layer_types"] = ["full_attention"] * config.num_hidden_layers
    return cases.parity(config, cases.start(tensor_parallel=2, spec=f"{__name__}:only_attention"))


def only_attention(transformer_config: Any, hf_config: PreTrainedConfig, *, vp_stage: int | None = None) -> Any:
    """A user's layers: as those of the backend, of a config of their own."""
    from fsdptrain.megatron.hf_spec import layer_spec

    changed = copy.deepcopy(hf_config)
    vars(changed)["layer_types"] = ["full_attention"] * changed.num_hidden_layers
    return layer_spec(transformer_config, changed, vp_stage=vp_stage)


def other_rotation(transformer_config: Any, hf_config: PreTrainedConfig, *, vp_stage: int | None = None) -> Any:
    """Layers as a user may get them wrong: queries and keys turned by neighbors and not by halves, by the same angles.

    Of this no fact is reported.
    """
    from fsdptrain.megatron.model import layer_spec

    transformer_config.rotary_interleaved = True
    return layer_spec(transformer_config, hf_config, vp_stage=vp_stage)
