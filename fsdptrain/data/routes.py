"""Expert routes of samples, from the routes that an engine reports."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from fsdptrain.errors import RolloutError
from fsdptrain.types import NO_ROUTE, Sample


class RouteRecorder(Protocol):
    """Records what the embedded engine's model chose while it decodes one chunk."""

    def recording(self) -> AbstractContextManager[None]: ...

    def read_prompts(self) -> None:
        """Called after the forward pass over all prompts."""
        ...

    def read_tokens(self, rows: Tensor) -> None:
        """Called after a forward pass over one token of each of `rows`."""
        ...

    def of_rows(self, num_tokens: Sequence[int]) -> list[Tensor]:
        """[P + n - 1, layers, k] of each row, where n is its number of sampled tokens."""
        ...


def sample_routes(reported: Sequence[Tensor | None], length: int) -> Tensor | None:
    """Merge the routes of all turns into those of a sample, [length, layers, k]. `reported` starts with the first turn.

    The routes of each turn cover the sample from its first token to the last one that the engine processed. A token
    gets the routes of the first turn that processed it, or NO_ROUTE if none did, as for the last token. Returns None if
    a turn has no routes.
    """
    known: Tensor | None = None
    for routes in reported:
        if routes is None:
            return None
        known = routes if known is None else torch.cat([known, routes[len(known) :]])
    if known is None:
        return None
    missing = known.new_full((length - len(known), *known.shape[1:]), NO_ROUTE)
    return torch.cat([known, missing])


def check_routes(samples: Sequence[Sample]) -> None:
    """Raise RolloutError if a sample has no routes."""
    without = sum(sample.routes is None and any(sample.loss_mask) for sample in samples)
    if without:
        raise RolloutError(
            f"--router-replay rollout: the engine reported no routes for {without} of {len(samples)} samples; use "
            "--rollout-engine hf, or --router-replay scoring"
        )


def join_routes(samples: Sequence[Sample]) -> Tensor | None:
    """Concatenate routes to [T, layers, k], with NO_ROUTE for samples without. Returns None if no sample has routes."""
    shape = next((sample.routes.shape[1:] for sample in samples if sample.routes is not None), None)
    if shape is None:
        return None
    parts = [
        torch.full((len(sample.token_ids), *shape), NO_ROUTE, dtype=torch.int16)
        if sample.routes is None
        else sample.routes
        for sample in samples
    ]
    return torch.cat(parts)
