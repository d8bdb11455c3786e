"""The token ids that end a response, the same for every engine."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig


def stop_tokens(checkpoint: Path, config: PreTrainedConfig, *, trust_remote_code: bool) -> tuple[int, ...]:
    """The end-of-text ids of generation_config.json, else of the model's config, else of the tokenizer."""
    if (checkpoint / "generation_config.json").is_file():
        ids = _as_ids(GenerationConfig.from_pretrained(checkpoint).eos_token_id)
        if ids:
            return ids
    ids = _as_ids(vars(config.get_text_config(decoder=True)).get("eos_token_id"))  # custom code may have none
    if not ids and (checkpoint / "tokenizer_config.json").is_file():
        ids = _as_ids(AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).eos_token_id)
    return ids


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
