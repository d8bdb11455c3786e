"""Supervised samples: prompt, label as response, and end-of-sequence token."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdptrain.data.chat import TurnRenderer
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.types import Message, Prompt, Sample


def sft_sample(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    renderer: TurnRenderer | None = None,
    eos_token_id: int | None = None,
) -> Sample:
    """Build a supervised sample. The loss covers the response and its end token (default: the tokenizer's EOS).

    The response is tokenized separately, after the prompt tokens, exactly as an engine would have to generate it. A
    label that is a list of messages is a conversation after the prompt: the loss covers each assistant turn, and
    `renderer` renders the other messages as it renders observations. There is no reward and no group; the advantage is
    1. Too long samples are handled by `pack.drop_overlong`.
    """
    end = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    if not isinstance(end, int):
        raise ConfigError(
            "--algorithm sft: the tokenizer of --hf-checkpoint has no end-of-sequence token; set eos_token in it"
        )
    token_ids, loss_mask = list(prompt.token_ids), [False] * len(prompt.token_ids)
    for is_model, messages in groupby(_conversation(prompt), key=_is_model):
        if is_model:
            [message] = messages
            ids = [*tokenizer(message["content"], add_special_tokens=False)["input_ids"], end]
        else:
            assert renderer is not None, "a conversation needs a renderer"
            ids = renderer.between(list(messages), last_token=end)
        token_ids += ids
        loss_mask += [is_model] * len(ids)
    return Sample(
        group_id=prompt.id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=[0.0] * len(token_ids),
        advantage=1.0,
    )


def _conversation(prompt: Prompt) -> Sequence[Message]:
    """Return the label as messages that start and end with the assistant, without consecutive assistant messages."""
    label: Any = prompt.label
    if label is None or label in ("", []):
        raise DataError(f"--algorithm sft: row {prompt.id} has no response; --label-key names the column that holds it")
    if not isinstance(label, list):
        return [{"role": "assistant", "content": str(label)}]
    is_conversation = all(isinstance(m, Mapping) and m.get("role") and isinstance(m.get("content"), str) for m in label)
    if any(isinstance(m, Mapping) and m.get("tool_calls") for m in label):  # their text depends on the template
        raise DataError(
            f"--algorithm sft: the response of row {prompt.id} has tool_calls, which are not supported: only `content` "
            "would be trained; write the calls into `content` as the model writes them, or remove these rows"
        )
    is_assistant = [_is_model(message) for message in label] if is_conversation else []
    if (
        not is_conversation
        or not (is_assistant[0] and is_assistant[-1])
        or any(a and b for a, b in pairwise(is_assistant))
    ):
        raise DataError(
            f"--algorithm sft: the response of row {prompt.id} is a list, {str(label)[:80]}; it is messages with role "
            "and content, the first and the last of the assistant, and others between its turns"
        )
    return label


def _is_model(message: Message) -> bool:
    return message["role"] == "assistant"
