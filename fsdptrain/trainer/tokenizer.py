"""Load the tokenizer of a checkpoint."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fsdptrain.distributed import one_line
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.meta import model_config


def load_tokenizer(checkpoint: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer. CheckpointError if there is none: transformers would create an empty one by model type."""
    config = model_config(checkpoint, trust_remote_code=trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = one_line(error)
        raise CheckpointError(f"--hf-checkpoint {checkpoint} has no tokenizer that can be loaded: {reason}") from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise CheckpointError(
            f"--hf-checkpoint {checkpoint} has no tokenizer with a vocabulary: is tokenizer.json missing?"
        )
    tokenizer.clean_up_tokenization_spaces = False  # it changes the text of tokenizers that are not BPE
    largest, size = _largest_used_id(tokenizer), getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and largest >= size:
        raise CheckpointError(
            f"--hf-checkpoint {checkpoint}: its tokenizer uses token id {largest}, and its model has {size} tokens: "
            "the tokenizer is of another model, or tokens were added without resizing the model"
        )
    return tokenizer


def _largest_used_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id of text, of the end of text and of the chat template.

    Other added tokens, such as that of an image, may have no row in the embedding.
    """
    added = tokenizer.added_tokens_decoder
    used = [id_ for id_ in tokenizer.get_vocab().values() if id_ not in added]
    used += [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    try:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
        used += tokenizer(str(chat), add_special_tokens=False)["input_ids"]
    except Exception:  # noqa: BLE001  # there is no template, or it needs something else
        pass
    return max(used)
