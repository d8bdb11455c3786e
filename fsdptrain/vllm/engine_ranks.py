"""An engine that is spread over several ranks: they ask it the same, and each takes the answers to its own prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from fsdptrain.types import Completion, Prompt, SamplingParams


def ask_together(
    ranks: dist.ProcessGroup,
    ask: Callable[[Sequence[Prompt], SamplingParams], list[Completion]],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
) -> list[Completion]:
    """What `ask` says to `prompts`, when it is asked those of all `ranks`. Collective of them.

    What several ranks ask, as the probe of --sync-check, is asked once: the answers would be the same.
    """
    shares: list[list[Prompt]] = [[]] * dist.get_world_size(ranks)
    dist.all_gather_object(shares, [_bare(prompt) for prompt in prompts], group=ranks)
    asked = {_key(prompt): prompt for share in shares for prompt in share}
    made, count = ask(list(asked.values()), sampling), sampling.num_samples
    answers = {key: made[i * count : (i + 1) * count] for i, key in enumerate(asked)}
    return [completion for prompt in prompts for completion in answers[_key(prompt)]]


def _bare(prompt: Prompt) -> Prompt:
    """What an engine is told of it."""
    return replace(prompt, text="", label=None, metadata={}, images=None)


def _key(prompt: Prompt) -> tuple[str, tuple[int, ...], int | None]:
    return prompt.id, tuple(prompt.token_ids), prompt.max_tokens
