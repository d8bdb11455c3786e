"""The token ids that end a response, the same for every engine."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from fsdptrain.distributed import one_line
from fsdptrain.errors import CheckpointError


def stop_tokens(checkpoint: Path, config: PreTrainedConfig, *, trust_remote_code: bool) -> tuple[int, ...]:
    """The end-of-text ids of generation_config.json, else of the model's config, else of the tokenizer.

    Raises CheckpointError if generation_config.json is broken.
    """
    if ids := _of_generation_config(checkpoint):
        return ids
    ids = _as_ids(vars(config.get_text_config(decoder=True)).get("eos_token_id"))  # custom code may have none
    if not ids and (checkpoint / "tokenizer_config.json").is_file():
        ids = _as_ids(AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).eos_token_id)
    return ids


def _of_generation_config(checkpoint: Path) -> tuple[int, ...]:
    name = "generation_config.json"
    if not (checkpoint / name).is_file():
        return ()
    try:
        ids = _as_ids(GenerationConfig.from_pretrained(checkpoint).eos_token_id)
    except Exception as error:
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: {name} cannot be read: {one_line(error)}") from error
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: eos_token_id of {name} must be token ids, got {ids}")
    return ids


def _as_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
