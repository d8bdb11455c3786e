"""Choose the transformers class for a config: a causal language model or a vision-language model."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)


def model_from_config(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model of `config` without weights. `options` are those of transformers' `from_config`.

    The vision-language class is used if the config names it as its architecture (Qwen3.5 exists only in that form), or
    if transformers has no causal language model for the config. Otherwise the causal language model is used.
    """
    kind = type(config)
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and _names_vision(config)
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return auto.from_config(config, **options)


def _names_vision(config: PreTrainedConfig) -> bool:
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    sees: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    return sees.__name__ in (config.architectures or ())
