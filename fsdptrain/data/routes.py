"""Routes of a sample, from those that an engine reports."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdptrain.errors import RolloutError
from fsdptrain.types import NO_ROUTE, Sample


def sample_routes(reported: Sequence[Tensor | None], length: int) -> Tensor | None:
    """[length, layers, k] of a sample, from what the engine reported of its turns, the first one first.

    Each turn speaks of the sample from its first token on, up to the last one that the engine read. A token has the
    routes of the first turn that read it, and NO_ROUTE if none did, as the last token. None where a turn has none.
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
    """RolloutError for a sample without routes."""
    without = sum(sample.routes is None for sample in samples)
    if without:
        raise RolloutError(
            f"--router-replay rollout: the engine reported no routes for {without} of {len(samples)} samples; use "
            "--rollout-engine hf, or --router-replay scoring"
        )


def join_routes(samples: Sequence[Sample]) -> Tensor | None:
    """[T, layers, k] of samples in a row: NO_ROUTE for those that have none, None where no sample has any."""
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
