"""Supervised samples: a prompt, its label as the response, and the end-of-sequence token."""

from transformers import PreTrainedTokenizerBase

from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Prompt, Sample


def sft_sample(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, eos_token_id: int | None = None) -> Sample:
    """The loss is on the response and the token that ends it (`eos_token_id`, by default the tokenizer's).

    The response is tokenised by itself, behind the prompt's tokens: exactly what an engine will have to produce. No
    reward, so no group; the advantage is 1. Too long samples are left to `packing.drop_overlong`.
    """
    end = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    if not isinstance(end, int):
        raise ConfigError(
            "--algorithm sft: the tokenizer of --hf-checkpoint has no end-of-sequence token; set eos_token in it"
        )
    if prompt.label is None or prompt.label == "":
        raise DataError(f"--algorithm sft: row {prompt.id} has no response; --label-key names the column that holds it")
    response = [*tokenizer(str(prompt.label), add_special_tokens=False)["input_ids"], end]
    num_prompt = len(prompt.token_ids)
    return Sample(
        group_id=prompt.id,
        token_ids=[*prompt.token_ids, *response],
        loss_mask=[False] * num_prompt + [True] * len(response),
        rollout_logprobs=[0.0] * (num_prompt + len(response)),
        advantage=1.0,
    )
