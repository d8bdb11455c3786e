"""The most that a rank holds in a training step: the trace of a pack, the sharded state, and what FSDP2 gathers.

The candidates are the moments at which something is at its largest: the end of the forward pass, the backward of the
head, the backward of each layer, the reduction of its gradients, and the reduction of the root's. For each layer FSDP2
gathers it and the next one, and holds the float32 buffer of the reduction before until the next one begins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fsdptrain.memory.demand import MASTER_BYTES
from fsdptrain.tools.plan.trace import LayerTrace, Trace

REDUCED_BYTES = 4  # gradients are reduced in float32


@dataclass(frozen=True)
class Moment:
    """What is held at one time, by purpose. [bytes]"""

    name: str
    parts: Mapping[str, int]
    on_host: int = 0  # activations there: not among the parts

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Sharding:
    """What FSDP2 adds."""

    outside: int  # parameters of the root group: embedding, last norm, head
    outside_trained: int
    num_shards: int
    compute_bytes: int
    reshard_after_forward: bool
    prefetch: bool
    cpu_offload: bool
    state: int  # bytes of this rank's shards of weights, gradients and Adam's moments, on the device


def training_peak(trace: Trace, sharding: Sharding) -> Moment:
    return max(training_moments(trace, sharding), key=lambda moment: moment.total)


def training_moments(trace: Trace, sharding: Sharding) -> Iterator[Moment]:
    """Every candidate; layers are taken to be ordered as their kinds are."""
    layers = [layer for layer in trace.layers for _ in range(layer.count)]
    root = sharding.compute_bytes * sharding.outside
    always = {"weights, gradients, Adam": sharding.state}
    saved = trace.before + sum(layer.saved for layer in layers)
    on_host = sum(layer.on_host for layer in layers)
    leaving = layers[-2].on_host if len(layers) > 1 else 0  # while the next layer computes
    last = _gathered(layers, len(layers) - 1, sharding, running=False)
    yield Moment(
        "forward of the last layer",
        {
            **always,
            "gathered layers": root + _gathered(layers, len(layers) - 1, sharding, running=True),
            "activations": saved - layers[-1].saved + layers[-1].forward_peak + leaving,
        },
        on_host,
    )
    held = saved + layers[-1].on_host  # no layer comes after it
    yield Moment(
        "forward of the head",
        {**always, "gathered layers": root + last, "activations": held, "logprobs": trace.head_forward_peak},
        on_host,
    )
    yield Moment(
        "backward of the head",
        {
            **always,
            "gathered layers": root + last,
            "activations": held,
            "logprobs": trace.head_saved + trace.head_backward_peak,
        },
        on_host,
    )
    left = trace.head_saved + trace.head_left
    for i in _places(layers):
        for moment in _backward(layers, i, saved, left, root, sharding, always):
            yield replace(moment, on_host=on_host)
        saved -= layers[i].saved
        on_host -= layers[i].on_host
    yield _root_reduction(trace, layers, root, sharding, always)


def _backward(
    layers: list[LayerTrace], i: int, saved: int, left: int, root: int, sharding: Sharding, always: Mapping[str, int]
) -> Iterator[Moment]:
    """While a layer goes backward, and while its gradients are reduced. `left`: gradients of the head."""
    layer = layers[i]
    gradients = sharding.compute_bytes * layer.trained
    before = REDUCED_BYTES * layers[i + 1].trained if i + 1 < len(layers) else 0
    coming = layers[i - 1].on_host if i > 0 else 0  # back from the host, for the layer that follows
    yield Moment(
        "backward of a layer",
        {
            **always,
            "gathered layers": root + _gathered(layers, i, sharding, running=True),
            "activations": saved + layer.backward_peak - gradients + coming,
            "gradients before they are reduced": left + gradients + before,
        },
    )
    reduced = REDUCED_BYTES * layer.trained
    yield Moment(
        "reduction of a layer",
        {
            **always,
            "gathered layers": root + _gathered(layers, i, sharding, running=False),
            "activations": saved - layer.saved + layer.input_bytes + coming,
            "gradients before they are reduced": left + gradients + reduced + reduced // sharding.num_shards,
        },
    )


def _root_reduction(
    trace: Trace, layers: list[LayerTrace], root: int, sharding: Sharding, always: Mapping[str, int]
) -> Moment:
    """At the end of the backward pass: the gradient of the embedding, then the reduction of all that is no layer."""
    left = trace.before + trace.head_saved + trace.head_left
    embedding = left + trace.end_peak + root + REDUCED_BYTES * layers[0].trained
    reduced = REDUCED_BYTES * sharding.outside_trained
    reduction = trace.before + root + reduced + reduced // sharding.num_shards
    return Moment("gradients of embedding and head", {**always, "embedding and head": max(embedding, reduction)})


def _places(layers: list[LayerTrace]) -> Iterator[int]:
    yield from range(len(layers) - 1, -1, -1)


def _gathered(layers: list[LayerTrace], i: int, sharding: Sharding, *, running: bool) -> int:
    """Layer `i` where it is running, and the one that is prefetched; with no resharding all of them."""
    if not sharding.reshard_after_forward:
        return sharding.compute_bytes * sum(layer.numel for layer in layers)
    own = layers[i].numel if running else 0
    following = layers[max(0, i - 1)].numel if sharding.prefetch or running else 0
    shard = MASTER_BYTES * following // sharding.num_shards if sharding.cpu_offload else 0
    return sharding.compute_bytes * (own + following) + shard
