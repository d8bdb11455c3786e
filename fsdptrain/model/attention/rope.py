"""Rotary frequencies that follow the longest sequence of a call: then one sequence would change those of another.

longrope    all sequences have other frequencies once one is longer than the original length (phi3)
dynamic     beyond the model's positions frequencies follow the longest length, and stay for the calls that come
"""

from typing import NamedTuple

from transformers import PreTrainedConfig

from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.types import PackedBatch


class Switch(NamedTuple):
    """Where a longer sequence changes the frequencies of a whole call."""

    tokens: int
    kind: str  # longrope or dynamic


def rope_switch(config: PreTrainedConfig) -> Switch | None:
    """The first one; None: never."""
    text = config.get_text_config()
    rope = text.to_dict().get("rope_parameters") or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for all layers, or by their type
    found = [
        Switch(k["original_max_position_embeddings"], "longrope") for k in kinds if k.get("rope_type") == "longrope"
    ]
    if any(kind.get("rope_type") == "dynamic" for kind in kinds):
        found.append(Switch(text.max_position_embeddings, "dynamic"))
    return min(found, default=None)


def check_longest(config: PreTrainedConfig, longest: int) -> None:
    """ConfigError where sequences of `longest` tokens, the most that may come, would change each other."""
    switch = rope_switch(config)
    if switch is not None and longest > switch.tokens:
        raise ConfigError(
            f"--hf-checkpoint: beyond {switch.tokens} tokens this model ({switch.kind}) rotates a whole pack by other "
            f"frequencies, and here a sequence may have {longest}: let --rollout-max-prompt-len and "
            f"--rollout-max-response-len be {switch.tokens} together, or --max-tokens-per-gpu {switch.tokens}"
        )


def refuse_both_sides(batch: PackedBatch, switch: Switch) -> None:
    """NumericsError for a pack whose sequences would not be rotated as each by itself."""
    beyond = batch.max_seqlen > switch.tokens
    if beyond and (switch.kind == "dynamic" or min(batch.seqlens) <= switch.tokens):
        raise NumericsError(
            f"a pack holds sequences of {min(batch.seqlens)} and {batch.max_seqlen} tokens, and beyond {switch.tokens} "
            f"this model ({switch.kind}) rotates all of them by other frequencies: keep prompts and responses within "
            f"{switch.tokens} tokens by --rollout-max-prompt-len and --rollout-max-response-len"
        )
