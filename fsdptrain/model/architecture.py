"""Which class of transformers a config stands for: a language model, or one that sees images too."""

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
    """A model of `config` without weights. `options` are those of transformers' `from_config`.

    With its vision tower where the architecture that the config names has one (Qwen3.5 comes in that form alone), or
    where transformers knows no other; else the causal language model.
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
