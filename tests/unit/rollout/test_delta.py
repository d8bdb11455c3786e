"""A delta push leaves an engine with the bits of a full push, and takes fused layers whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdptrain.vllm.delta import DeltaFilter

NAMES = (
    "model.embed_tokens.weight",
    *(
        f"model.layers.{i}.{part}.weight"
        for i in range(3)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.experts.0.up_proj", "mlp.gate", "norm")
    ),
    "lm_head.weight",
)


def weights_at(changes: list[set[int]], version: int) -> dict[str, Tensor]:
    """Each tensor as of the last version that has changed it; of version 0, all."""
    found = {}
    for i, name in enumerate(NAMES):
        last = max(v for v in range(version + 1) if v == 0 or i in changes[v])
        found[name] = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * last + i)).bfloat16()
    return found


@given(st.lists(st.sets(st.integers(0, len(NAMES) - 1)), min_size=2, max_size=5), st.sets(st.integers(0, 4)))
def test_an_engine_that_gets_changes_holds_what_a_full_push_gives(changes, failing):
    delta, engine = DeltaFilter(), {}
    for version in range(len(changes)):
        weights = weights_at(changes, version)
        pushed = dict(delta.changed(weights.items()))
        assert delta.pushed_bytes == sum(tensor.nbytes for tensor in pushed.values())
        assert delta.pushed_bytes + delta.saved_bytes == sum(tensor.nbytes for tensor in weights.values())
        if version in failing:  # half way: the next update must be whole
            engine |= dict(list(pushed.items())[:2])
            continue
        delta.commit()
        engine |= pushed
        assert all(torch.equal(engine[name].view(torch.int16), weights[name].view(torch.int16)) for name in NAMES)


def test_all_of_a_block_goes_where_one_of_it_has_changed_and_nothing_else():
    delta = DeltaFilter()
    weights = weights_at([set()], 0)
    assert list(dict(delta.changed(weights.items()))) == list(NAMES)
    delta.commit()
    assert not dict(delta.changed(weights.items()))
    delta.commit()
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name].clone()
    weights[name][2, 3] *= -1
    assert list(dict(delta.changed(weights.items()))) == ["model.layers.1.self_attn.q_proj.weight", name]


def test_a_zero_that_has_changed_its_sign_is_a_change():
    delta = DeltaFilter()
    list(delta.changed([("a", torch.zeros(8))]))
    delta.commit()
    assert dict(delta.changed([("a", -torch.zeros(8))]))


def test_what_was_forgotten_or_never_committed_is_pushed_again():
    delta, weights = DeltaFilter(), [("a", torch.ones(8))]
    list(delta.changed(weights))
    assert list(delta.changed(weights))
    delta.commit()
    delta.forget()
    assert list(delta.changed(weights))
