"""Record the experts that the embedded engine chooses while it decodes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fsdptrain.features.moe.replay import RouterReplay
from fsdptrain.types import NO_ROUTE


class EngineRoutes:
    """Routes of one `decode` call: first of all tokens of the prompts, then of one token per row and step."""

    def __init__(self, replay: RouterReplay, prompt_lengths: Sequence[int], prompt_of_row: Sequence[int]) -> None:
        self._replay = replay
        self._lengths = prompt_lengths
        self._prompt_of_row = prompt_of_row
        self._prompts: list[Tensor] = []  # [P, layers, k] of each prompt, on the CPU
        self._steps: list[tuple[Tensor, Tensor]] = []  # (rows [A], routes [A, layers, k]) on the device

    def recording(self) -> AbstractContextManager[None]:
        """Record the forward passes of `decode` in the context."""
        return self._replay.choosing()

    def read_prompts(self) -> None:
        """Store the routes of the prompts. Call it after the forward pass over all prompts, padded on the left."""
        rows = self._replay.routes.unflatten(0, (len(self._lengths), -1)).cpu()
        self._prompts = [row[row.shape[0] - length :] for row, length in zip(rows, self._lengths, strict=True)]

    def read_tokens(self, rows: Tensor) -> None:
        """Store the routes of one token for each of `rows`. Call it after the forward pass over them."""
        self._steps.append((rows, self._replay.routes))

    def of_rows(self, num_tokens: Sequence[int]) -> list[Tensor]:
        """Return [P + n - 1, layers, k] for each row with n tokens: the model has not read the last token."""
        shape = self._prompts[0].shape[1:]
        responses = torch.full((len(num_tokens), len(self._steps), *shape), NO_ROUTE, dtype=torch.int16)
        for step, (rows, routes) in enumerate(self._steps):
            responses[rows.cpu(), step] = routes.cpu()
        prompts = [self._prompts[prompt] for prompt in self._prompt_of_row]
        return [
            torch.cat([prompt, response[: count - 1]])
            for prompt, response, count in zip(prompts, responses, num_tokens, strict=True)
        ]
