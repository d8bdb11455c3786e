"""Metrics of some runs only: the turns of episodes, and the age of the weights that sampled the tokens."""

from collections.abc import Sequence
from itertools import pairwise

from fsdptrain.trainer.metrics import reduce_max, reduce_sums
from fsdptrain.types import Metrics, Sample


def episode_metrics(samples: Sequence[Sample]) -> Metrics:
    """Compute episode/* over all ranks: turns of the model, and tokens from the environment."""
    masks = [[sequence.loss_mask for sequence in sample.sequences] for sample in samples]
    turns = [sum(now and not before for mask in found for before, now in pairwise([False, *mask])) for found in masks]
    observed = [mask[mask.index(True) :].count(False) for found in masks for mask in found if True in mask]
    total = reduce_sums(
        {"samples": len(samples), "turns": sum(turns), "longer": sum(n > 1 for n in turns), "observed": sum(observed)}
    )
    num_samples = max(1.0, total["samples"])
    return {
        "episode/turns_mean": total["turns"] / num_samples,
        "episode/several_turns_fraction": total["longer"] / num_samples,
        "episode/observation_length_mean": total["observed"] / num_samples,
    }


def staleness_metrics(samples: Sequence[Sample], step: int) -> Metrics:
    """Compute staleness/* over all ranks. Collective.

    The staleness of a token is the number of versions between its weights and the current version, `step`.
    """
    sequences = [sample for episode in samples for sample in episode.sequences]
    versions = [sample.versions or [sample.policy_version] * len(sample.loss_mask) for sample in sequences]
    ages = [
        step - version
        for row, sample in zip(versions, sequences, strict=True)
        for version, own in zip(row, sample.loss_mask, strict=True)
        if own
    ]
    mixed = sum(any(s.versions is not None for s in sample.sequences) for sample in samples)
    total = reduce_sums({"ages": sum(ages), "count": len(ages), "mixed": mixed})
    return {
        "staleness/mean": total["ages"] / max(1.0, total["count"]),
        "staleness/max": reduce_max({"age": max(ages, default=0)})["age"],
        "staleness/mixed_version_samples": total["mixed"],
    }
