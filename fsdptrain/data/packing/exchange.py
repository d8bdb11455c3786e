"""Exchange of samples between the ranks that generated them and the ranks that train them, over gloo.

Every rank gathers the lengths of all samples (`sample_index.gather_index`), computes the same plan, and sends each
sample to the rank that needs it. Tokens, masks and versions are sent as int64, logprobs and weights as float64, and
routes unchanged, so samples arrive bit-exact; the few other fields of a sample are gathered on all ranks. The functions
are collective over the default group, whose CPU backend is gloo.

Measured on torch 2.13: gloo's all_to_all_single supports uneven splits on 1, 2 and 4 ranks, so no padding is needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptrain.data.packing.sample_index import SampleIndex
from fsdptrain.data.routes import join_routes
from fsdptrain.distributed import gather
from fsdptrain.types import Sample


def exchange_samples(
    samples: Sequence[Sample], destinations: Sequence[Sequence[int]], *, index: SampleIndex
) -> list[Sample]:
    """Send samples to their destination ranks. Returns this rank's samples, in the order of `destinations`.

    Args:
        samples: the samples that this rank passed to `gather_index`.
        destinations: [rank] -> global indices, each at most once per rank; equal on all ranks.
    """
    assert all(len(set(wanted)) == len(wanted) for wanted in destinations), "a rank gets a sample twice"
    rank = dist.get_rank()
    first = sum(owner < rank for owner in index.owners)
    outgoing = [[samples[i - first] for i in wanted if index.owners[i] == rank] for wanted in destinations]
    integers = _all_to_all([_column(map(_integers, batch), np.int64) for batch in outgoing])
    columns = [[[*s.rollout_logprobs, *(s.token_weights or ())] for s in batch] for batch in outgoing]
    floats = _all_to_all([_column(column, np.float64) for column in columns])
    records = [record for part in gather([_without_tokens(sample) for sample in samples]) for record in part]
    arrived: dict[int, Sample] = {}
    for source in range(dist.get_world_size()):
        numbers = [i for i in destinations[rank] if index.owners[i] == source]
        lengths = [index.lengths[i] for i in numbers]
        counts = [(2 + (records[i].versions is not None)) * index.lengths[i] for i in numbers]
        sizes = [(1 + (records[i].token_weights is not None)) * index.lengths[i] for i in numbers]
        parts = zip(numbers, lengths, integers[source].split(counts), floats[source].split(sizes), strict=True)
        arrived |= {i: _with_tokens(records[i], length, *both) for i, length, *both in parts}
    found = [arrived[i] for i in destinations[rank]]
    return found if index.route_shape is None else _with_routes(found, outgoing, destinations[rank], index)


def _all_to_all(parts: Sequence[Tensor]) -> list[Tensor]:
    """Send `parts[r]` to rank r. Returns the parts received, by source rank. Sizes may differ."""
    send_sizes = torch.tensor([part.numel() for part in parts])
    receive_sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(receive_sizes, send_sizes)
    received = parts[0].new_empty(int(receive_sizes.sum()))
    dist.all_to_all_single(received, torch.cat(list(parts)), receive_sizes.tolist(), send_sizes.tolist())
    return list(received.split(receive_sizes.tolist()))


def _without_tokens(sample: Sample) -> Sample:
    values = {name: None if getattr(sample, name) is None else [] for name in ("versions", "token_weights")}
    return replace(sample, token_ids=[], loss_mask=[], rollout_logprobs=[], routes=None, **values)


def _integers(sample: Sample) -> list[int]:
    return [*sample.token_ids, *sample.loss_mask, *(sample.versions or ())]


def _with_tokens(record: Sample, length: int, integers: Tensor, floats: Tensor) -> Sample:
    """Undo `_without_tokens`. integers: [2 L] or [3 L], as from `_integers`; floats: [L] or [2 L] f64, with weights."""
    token_ids, loss_mask, *versions = integers.view(-1, length).unbind()
    logprobs, *weights = floats.view(-1, length).unbind()
    return replace(
        record,
        token_ids=token_ids.tolist(),
        loss_mask=loss_mask.bool().tolist(),
        rollout_logprobs=logprobs.tolist(),
        versions=versions[0].tolist() if versions else None,
        token_weights=weights[0].tolist() if weights else None,
    )


def _with_routes(
    found: Sequence[Sample], outgoing: Sequence[Sequence[Sample]], numbers: Sequence[int], index: SampleIndex
) -> list[Sample]:
    """Exchange the routes of `outgoing` and add them to `found`, the samples `numbers`. Collective.

    They are sent as bytes, because gloo does not support int16.
    """
    assert index.route_shape is not None
    joined = [join_routes(batch) for batch in outgoing]
    empty = torch.empty(0, dtype=torch.uint8)
    received = _all_to_all([empty if x is None else x.flatten().view(torch.uint8) for x in joined])
    routed = list(found)
    for source, sent in enumerate(received):
        places = [place for place, i in enumerate(numbers) if index.owners[i] == source]
        if len(sent):  # else no sample from there has routes
            routes = sent.view(torch.int16).view(-1, *index.route_shape)
            for place, part in zip(places, routes.split([index.lengths[numbers[p]] for p in places]), strict=True):
                routed[place] = replace(found[place], routes=part)
    return routed


def _column(parts: Iterable[Sequence[float]], dtype: type) -> Tensor:
    """Concatenate to [T]."""
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *(np.array(part, dtype) for part in parts)]))
