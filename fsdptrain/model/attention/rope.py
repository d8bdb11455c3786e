"""Detect rotary frequencies that depend on the longest sequence of a call, so that one sequence changes another.

longrope    all sequences get other frequencies once one is longer than the original length (phi3)
dynamic     beyond the model's positions the frequencies depend on the longest length and persist in later calls
"""

from transformers import PreTrainedConfig

from fsdptrain.errors import ConfigError


def rope_switch(config: PreTrainedConfig) -> tuple[int, str] | None:
    """Return the sequence length beyond which the frequencies of a whole call change, and why: longrope or dynamic.

    None: they never change.
    """
    text = config.get_text_config()
    rope = text.to_dict().get("rope_parameters") or {}
    # one entry for all layers, or one per layer type
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    found = [(k["original_max_position_embeddings"], "longrope") for k in kinds if k.get("rope_type") == "longrope"]
    if any(kind.get("rope_type") == "dynamic" for kind in kinds):
        found.append((text.max_position_embeddings, "dynamic"))
    return min(found, default=None)


def check_longest(config: PreTrainedConfig, longest: int) -> None:
    """Raise ConfigError if sequences of up to `longest` tokens would change each other's frequencies."""
    most, kind = rope_switch(config) or (longest, "")
    if longest > most:
        raise ConfigError(
            f"--hf-checkpoint: beyond {most} tokens this model ({kind}) rotates a whole pack by other "
            f"frequencies, and here a sequence may have {longest}: let --rollout-max-prompt-len and "
            f"--rollout-max-response-len be {most} together, or --max-tokens-per-gpu {most}"
        )
