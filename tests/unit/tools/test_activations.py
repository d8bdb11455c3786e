"""The moments of a step, on a trace in round numbers: each holds what lives then, and not what is gone."""

from dataclasses import replace

from fsdptrain.tools.plan.activations import Moment, Sharding, training_moments, training_peak
from fsdptrain.tools.plan.trace import LayerTrace, Trace

LAYER = LayerTrace(numel=100, count=3, saved=1000, forward_peak=1100, backward_peak=700, input_bytes=10, trained=100)
TRACE = Trace(
    before=5, layers=(LAYER,), head_saved=20, head_forward_peak=300, head_backward_peak=400, head_left=200, end_peak=60
)
SHARDING = Sharding(
    outside=50,
    outside_trained=50,
    num_shards=2,
    compute_bytes=2,
    reshard_after_forward=True,
    prefetch=True,
    cpu_offload=False,
    state=10_000,
)
ROOT = 2 * 50


def moments(sharding: Sharding = SHARDING) -> dict[str, list[Moment]]:
    found: dict[str, list[Moment]] = {}
    for moment in training_moments(TRACE, sharding):
        found.setdefault(moment.name, []).append(moment)
    return found


def test_the_head_goes_backward_over_everything_that_was_saved():
    [moment] = moments()["backward of the head"]
    assert moment.parts["activations"] == 5 + 3 * 1000
    assert moment.parts["logprobs"] == 20 + 400
    assert moment.parts["gathered layers"] == ROOT + 2 * 100


def test_layers_give_back_what_they_saved_one_by_one():
    saved = [moment.parts["activations"] for moment in moments()["backward of a layer"]]
    assert saved == [5 + count * 1000 + 700 - 2 * 100 for count in (3, 2, 1)]


def test_a_layer_begins_while_the_one_before_is_reduced_in_float32():
    gradients = [moment.parts["gradients before they are reduced"] for moment in moments()["backward of a layer"]]
    assert gradients == [220 + 200, 220 + 200 + 400, 220 + 200 + 400]


def test_a_reduction_holds_its_input_its_output_and_what_went_in():
    gradients = [moment.parts["gradients before they are reduced"] for moment in moments()["reduction of a layer"]]
    assert gradients == [220 + 200 + 400 + 400 // 2] * 3


def test_the_end_holds_the_embedding_or_the_reduction_of_the_root():
    [moment] = moments()["gradients of embedding and head"]
    assert moment.parts["embedding and head"] == max(5 + 20 + 200 + 60 + ROOT + 400, 5 + ROOT + 200 + 100)


def test_layers_that_stay_gathered_are_all_there():
    kept = replace(SHARDING, reshard_after_forward=False)
    assert {m.parts["gathered layers"] for m in moments(kept)["backward of a layer"]} == {ROOT + 3 * 200}


def test_an_offloaded_shard_comes_to_the_device_before_it_is_gathered():
    offloaded = replace(SHARDING, cpu_offload=True, state=0)
    [moment] = moments(offloaded)["backward of the head"]
    assert moment.parts["gathered layers"] == ROOT + 200 + 4 * 100 // 2
    assert moment.parts["weights, gradients, Adam"] == 0


def test_the_peak_is_the_largest_moment():
    assert training_peak(TRACE, SHARDING).total == max(m.total for found in moments().values() for m in found)
