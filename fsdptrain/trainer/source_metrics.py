"""Metrics of each source of a mixture (several --prompt-data)."""

import math
from collections.abc import Iterable, Sequence

from fsdptrain.trainer.metrics import reduce_sums
from fsdptrain.types import Metrics, Sample


def source_metrics(samples: Sequence[Sample], sources: Iterable[str]) -> Metrics:
    """Compute source/<name>/samples, tokens and, if there are rewards, reward_mean, over all ranks. Collective."""
    names = list(sources)
    sums: dict[str, float] = {}
    for name in names:
        own = of_source(samples, name)
        rewards = [sample.reward for sample in own if sample.reward is not None]
        sums[f"{name}/samples"] = len(own)
        sums[f"{name}/tokens"] = sum(len(s.token_ids) for sample in own for s in sample.sequences)
        sums[f"{name}/scored"], sums[f"{name}/reward"] = len(rewards), math.fsum(rewards)
    total = reduce_sums(sums)
    metrics: Metrics = {}
    for name in names:
        metrics |= {f"source/{name}/{kind}": total[f"{name}/{kind}"] for kind in ("samples", "tokens")}
        if total[f"{name}/scored"]:
            metrics[f"source/{name}/reward_mean"] = total[f"{name}/reward"] / total[f"{name}/scored"]
    return metrics


def of_source(samples: Sequence[Sample], name: str) -> list[Sample]:
    """Return the samples of a source: ids of a mixture's prompts begin with its name."""
    return [sample for sample in samples if sample.group_id.startswith(f"{name}/")]
