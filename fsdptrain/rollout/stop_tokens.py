"""The token ids that end a response, the same for every engine."""

import logging
import math
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from fsdptrain.config import DataConfig
from fsdptrain.data.text import turn_end
from fsdptrain.distributed import one_line
from fsdptrain.errors import CheckpointError

log = logging.getLogger(__name__)

_LACKED = "responses end at %s too: the chat template ends turns with it, but eos_token_id lacks it"
_UNREAD = "responses are sampled without %s of generation_config.json, which training cannot follow"
_IDLE = (  # of generation_config.json: they would change the distribution that tokens are trained under
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "repetition_penalty"),
    *("no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "stop_strings", "min_new_tokens"),
)
_NEUTRAL = {"repetition_penalty": 1, "no_repeat_ngram_size": 0, "min_new_tokens": 0}


def stop_tokens(
    checkpoint: Path, config: PreTrainedConfig, *, trust_remote_code: bool, data: DataConfig | None = None
) -> tuple[int, ...]:
    """The end-of-text ids of generation_config.json, else of the model's config, else of the tokenizer.

    With `data`, also the token with which its chat template ends turns of the model.
    Raises CheckpointError if generation_config.json is broken.
    """
    text = vars(config.get_text_config(decoder=True))  # of custom code: may lack either
    ids = _of_generation_config(checkpoint, text.get("vocab_size") or math.inf) or _as_ids(text.get("eos_token_id"))
    chat = data is not None and data.apply_chat_template
    if (chat or not ids) and (checkpoint / "tokenizer_config.json").is_file():
        tokenizer = engine_tokenizer(checkpoint, trust_remote_code)
        ids = ids or _as_ids(tokenizer.eos_token_id)
        end = turn_end(tokenizer, data) if data is not None and chat else None
        if end is not None and end not in ids:
            _tell(_LACKED, str(tokenizer.convert_ids_to_tokens(end)))
            ids = (*ids, end)
    return ids


@cache
def engine_tokenizer(checkpoint: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer for stop tokens and strings. It decodes like the one for rewards."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


@cache
def _tell(line: str, words: str) -> None:
    log.info(line, words)


def _of_generation_config(checkpoint: Path, limit: float) -> tuple[int, ...]:
    name = "generation_config.json"
    if not (checkpoint / name).is_file():
        return ()
    try:
        found = GenerationConfig.from_pretrained(checkpoint)
        ids = _as_ids(found.eos_token_id)
        if idle := [key for key in _IDLE if getattr(found, key, None) not in (None, [], _NEUTRAL.get(key))]:
            _tell(_UNREAD, ", ".join(idle).replace("stop_strings", "stop_strings (--rollout-stop sets them)"))
    except Exception as error:
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: {name} cannot be read: {one_line(error)}") from error
    if not all(type(token) is int and 0 <= token < limit for token in ids):
        line = f"eos_token_id of {name} must be token ids below {limit}, got {ids}"
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: {line}")
    return ids


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
