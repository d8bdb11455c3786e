"""Peaks of a step for options that need a GPU. tests/distributed/test_memory_plan.py measures the others."""

from dataclasses import replace

from fsdptrain.tools.plan.activations import MemoryPeak, Sharding, training_peak, training_peaks
from fsdptrain.tools.plan.trace import LayerTrace, Trace

LAYER = LayerTrace(numel=100, count=3, saved=1000, forward_peak=1100, backward_peak=700, input_bytes=10, trained=100)
TRACE = Trace(
    before=5,
    layers=(LAYER,),
    head_saved=20,
    head_forward_peak=300,
    head_backward_peak=400,
    head_gradients=200,
    end_peak=60,
)
SHARDING = Sharding(
    layer_bytes=2,
    outside=50,
    outside_trained=50,
    num_shards=2,
    compute_bytes=2,
    reshard_after_forward=True,
    prefetch=True,
    cpu_offload=False,
    state={"weights": 10_000},
)
ROOT = 2 * 50


def peaks(sharding: Sharding = SHARDING) -> dict[str, list[MemoryPeak]]:
    found: dict[str, list[MemoryPeak]] = {}
    for peak in training_peaks(TRACE, sharding):
        found.setdefault(peak.name, []).append(peak)
    return found


def test_an_offloaded_shard_is_on_the_device_before_it_is_gathered():
    offloaded = replace(SHARDING, cpu_offload=True, state={})
    [peak] = peaks(offloaded)["backward of the head"]
    assert peak.parts["gathered layers"] == ROOT + 200 + 4 * 100 // 2


def test_the_peak_is_the_largest_moment():
    assert training_peak(TRACE, SHARDING).total == max(m.total for found in peaks().values() for m in found)
