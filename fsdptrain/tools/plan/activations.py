"""Peak memory of a rank in a training step: pack trace, sharded state, and the layers that FSDP2 gathers.

The candidates for the peak are the end of the forward pass, the backward of the head, the backward of each layer, the
reduction of its gradients, and the reduction of the root gradients. For each layer, FSDP2 gathers the layer and the
next one, and holds the previous reduction buffer, in float32 as the masters, until the next reduction starts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fsdptrain.memory.demand import MASTER_BYTES
from fsdptrain.tools.plan.trace import LayerTrace, Trace


@dataclass(frozen=True)
class MemoryPeak:
    """Memory in use at one point of a step, by purpose. [bytes]"""

    name: str
    parts: Mapping[str, int]
    on_host: int = 0  # activations on the host; not part of `parts`

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Sharding:
    """Memory that FSDP2 adds."""

    outside: int  # parameters of the root group: embedding, last norm, head
    outside_trained: int
    num_shards: int
    compute_bytes: int
    reshard_after_forward: bool
    prefetch: bool
    cpu_offload: bool
    layer_bytes: float  # of a gathered weight in a layer
    state: Mapping[str, int]  # bytes of this rank's shards of weights, gradients and optimizer state, on the device


def training_peak(trace: Trace, sharding: Sharding) -> MemoryPeak:
    return max(training_peaks(trace, sharding), key=lambda peak: peak.total)


def training_peaks(trace: Trace, sharding: Sharding) -> Iterator[MemoryPeak]:
    """Yield every candidate for the peak. Assumes that layers are ordered as their kinds are."""
    layers = [layer for layer in trace.layers for _ in range(layer.count)]
    root = sharding.compute_bytes * sharding.outside
    state = sharding.state
    saved = trace.before + sum(layer.saved for layer in layers)
    on_host = sum(layer.on_host for layer in layers)
    outgoing = layers[-2].on_host if len(layers) > 1 else 0  # still on the device while the next layer runs
    last = _gathered(layers, len(layers) - 1, sharding, running=False)
    yield MemoryPeak(
        "forward of the last layer",
        {
            **state,
            "gathered layers": root + _gathered(layers, len(layers) - 1, sharding, running=True),
            "activations": saved - layers[-1].saved + layers[-1].forward_peak + outgoing,
        },
        on_host,
    )
    held = saved + layers[-1].on_host  # the last layer has no following layer
    yield MemoryPeak(
        "forward of the head",
        {**state, "gathered layers": root + last, "activations": held, "logprobs": trace.head_forward_peak},
        on_host,
    )
    yield MemoryPeak(
        "backward of the head",
        {
            **state,
            "gathered layers": root + last,
            "activations": held,
            "logprobs": trace.head_saved + trace.head_backward_peak,
        },
        on_host,
    )
    head_gradients = trace.head_saved + trace.head_gradients
    for i in reversed(range(len(layers))):
        for peak in _backward(layers, i, saved, head_gradients, root, sharding, state):
            yield replace(peak, on_host=on_host)
        saved -= layers[i].saved
        on_host -= layers[i].on_host
    yield _root_reduction(trace, layers, root, sharding, state)


def _backward(
    layers: list[LayerTrace],
    i: int,
    saved: int,
    head_gradients: int,
    root: int,
    sharding: Sharding,
    state: Mapping[str, int],
) -> Iterator[MemoryPeak]:
    """Yield the peaks of a layer's backward pass and gradient reduction. `head_gradients`: gradients of the head."""
    layer = layers[i]
    gradients = sharding.compute_bytes * layer.trained
    before = MASTER_BYTES * layers[i + 1].trained if i + 1 < len(layers) else 0
    incoming = layers[i - 1].on_host if i > 0 else 0  # copied back from the host for the next layer
    yield MemoryPeak(
        "backward of a layer",
        {
            **state,
            "gathered layers": root + _gathered(layers, i, sharding, running=True),
            "activations": saved + layer.backward_peak - gradients + incoming,
            "gradients before they are reduced": head_gradients + gradients + before,
        },
    )
    reduced = MASTER_BYTES * layer.trained
    yield MemoryPeak(
        "reduction of a layer",
        {
            **state,
            "gathered layers": root + _gathered(layers, i, sharding, running=False),
            "activations": saved - layer.saved + layer.input_bytes + incoming,
            "gradients before they are reduced": head_gradients + gradients + reduced + reduced // sharding.num_shards,
        },
    )


def _root_reduction(
    trace: Trace, layers: list[LayerTrace], root: int, sharding: Sharding, state: Mapping[str, int]
) -> MemoryPeak:
    """Return the peak at the end of the backward pass: embedding gradient, then the reduction of the root group."""
    held = trace.before + trace.head_saved + trace.head_gradients
    embedding = held + trace.end_peak + root + MASTER_BYTES * layers[0].trained
    reduced = MASTER_BYTES * sharding.outside_trained
    reduction = trace.before + root + reduced + reduced // sharding.num_shards
    return MemoryPeak("gradients of embedding and head", {**state, "embedding and head": max(embedding, reduction)})


def _gathered(layers: list[LayerTrace], i: int, sharding: Sharding, *, running: bool) -> int:
    """Return the bytes of gathered layers: layer `i` if `running`, and the prefetched one. All without resharding."""
    if not sharding.reshard_after_forward:
        return math.ceil(sharding.layer_bytes * sum(layer.numel for layer in layers))
    own = layers[i].numel if running else 0
    following = layers[max(0, i - 1)].numel if sharding.prefetch or running else 0
    shard = MASTER_BYTES * following // sharding.num_shards if sharding.cpu_offload else 0
    return math.ceil(sharding.layer_bytes * (own + following)) + shard
