"""Properties of shared prompts: plans, packs, and attention over them."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.data.packing.pack import PackPlan, pack, plan_packs
from fsdptrain.data.packing.prefixes import SharedPrefixes, prefix_layout, share_prefixes
from fsdptrain.data.packing.sample_index import prompt_key
from fsdptrain.errors import ConfigError
from fsdptrain.features.prefix_sharing.attention import shared_prefix_attention
from fsdptrain.features.prefix_sharing.plan import MOST_SHARED, plan_shared
from fsdptrain.model.attention import blocks, varlen
from fsdptrain.model.attention.attention import Boundaries, attend
from fsdptrain.types import PackedBatch, Sample
from tests.varlen import require_near, varlen_attn

BUDGET = 96
# Of each group: tokens of the prompt, and of each response.
groups = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, BUDGET - 40), min_size=1, max_size=6)), max_size=8
)


def samples_of(shape: list[tuple[int, list[int]]]) -> list[Sample]:
    found = []
    for number, (prompt, responses) in enumerate(shape):
        for response in responses:
            tokens = [number + 1] * prompt + list(range(1000, 1000 + response))
            mask = [False] * prompt + [True] * response
            found.append(Sample(str(number), tokens, mask, [0.0] * len(mask)))
    return found


def plan_of(samples: list[Sample], num_ranks: int) -> PackPlan:
    lengths = [len(sample.token_ids) for sample in samples]
    prompts = [prompt_key(sample) for sample in samples]
    return plan_shared(lengths, prompts, num_ranks=num_ranks, max_tokens=BUDGET)


def packed(samples: list[Sample], *, sharing: bool) -> PackedBatch:
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    batch = pack(samples, aggregation="token_mean", totals=totals, max_response_len=64)
    return replace(batch, shared=share_prefixes(samples)) if sharing else batch


def computed(batch: PackedBatch) -> int:
    return batch.num_tokens if batch.shared is None else batch.shared.num_tokens


@given(shape=groups, num_ranks=st.integers(1, 4))
def test_a_plan_with_shared_prompts_is_a_valid_plan(shape, num_ranks):
    samples = samples_of(shape)
    plan = plan_of(samples, num_ranks)
    assert sorted(i for rank in plan.packs for members in rank for i in members) == list(range(len(samples)))
    assert {len(rank) for rank in plan.packs} == {len(plan.packs[0])}
    sharing = plan.shared > 0
    packs = [packed([samples[i] for i in members], sharing=sharing) for rank in plan.packs for members in rank]
    assert max(computed(batch) for batch in packs) <= BUDGET
    assert max(batch.num_tokens for batch in packs) <= MOST_SHARED * BUDGET
    assert plan == plan_of(samples, num_ranks)


@given(shape=groups, num_ranks=st.integers(1, 4))
def test_samples_without_a_common_prompt_are_planned_as_without_sharing(shape, num_ranks: int) -> None:
    alone = samples_of([(prompt, responses[:1]) for prompt, responses in shape])
    lengths = [len(sample.token_ids) for sample in alone]
    assert plan_of(alone, num_ranks) == plan_packs(lengths, num_ranks=num_ranks, max_tokens=BUDGET)


def test_a_group_is_split_if_ranks_would_wait() -> None:
    samples = samples_of([(40, [50] * 8)])
    whole = plan_shared([90] * 8, [(1, 40)] * 8, num_ranks=1, max_tokens=1000)
    assert whole.packs == ((tuple(range(8)),),)
    assert whole.shared == pytest.approx(7 * 40 / 720)
    cut = plan_shared([90] * 8, [(1, 40)] * 8, num_ranks=4, max_tokens=1000)
    assert [len(rank[0]) for rank in cut.packs] == [2, 2, 2, 2]
    assert cut.shared == pytest.approx(4 * 40 / 720)
    assert prompt_key(samples[0]) == prompt_key(samples[7])


def test_a_sample_longer_than_the_budget_is_an_error_with_shared_prompts_too() -> None:
    with pytest.raises(ConfigError, match=r"--max-tokens-per-gpu .* 96 is less than a sample of 97"):
        plan_shared([97, 97], [(1, 90)] * 2, num_ranks=1, max_tokens=BUDGET)


@given(shape=groups.filter(bool))
def test_fields_of_a_pack_do_not_depend_on_sharing(shape):
    samples = samples_of(shape)
    whole, batch = packed(samples, sharing=False), packed(samples, sharing=True)
    for name, value in vars(whole).items():
        other = getattr(batch, name)
        same = np.array_equal(value, other) if isinstance(value, torch.Tensor | np.ndarray) else value == other
        assert same or name == "shared", name
    if batch.shared is None:
        assert all(len(responses) == 1 for _, responses in shape)
        return
    own, rows = batch.shared.computed, batch.shared.rows
    assert torch.equal(own[rows[own]], own)
    assert torch.equal(batch.input_ids[own][rows], batch.input_ids)
    assert torch.equal(batch.position_ids[own][rows], batch.position_ids)
    assert computed(batch) == sum(prompt + sum(responses) for prompt, responses in shape)


def test_prompts_of_equal_length_and_other_tokens_are_not_shared() -> None:
    one, other = samples_of([(20, [3]), (20, [3])])
    assert packed([one, other], sharing=True).shared is None
    assert prompt_key(one) != prompt_key(other)
    without_loss = Sample("0", one.token_ids, [False] * 23, [0.0] * 23)
    assert packed([without_loss, without_loss], sharing=True).shared is None


def test_each_segment_names_the_one_that_holds_its_prefix() -> None:
    samples = samples_of([(20, [3, 4]), (9, [2]), (7, [1, 1, 5])])
    shared = packed(samples, sharing=True).shared
    assert shared is not None
    assert shared.segments == (-1, 0, -1, -1, 3, 3)
    assert shared.lengths == (0, 20, 0, 0, 7, 7)


@settings(max_examples=30, deadline=None)
@given(
    families=st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(1, 9), min_size=1, max_size=3)), min_size=1),
    kv_heads=st.integers(1, 2),
    multiple=st.integers(1, 3),
    widths=st.sampled_from([(8, 8), (12, 8), (8, 12)]),
    window=st.sampled_from([None, 1, 5, 40]),
    softcap=st.sampled_from([None, 1.5]),
    has_sinks=st.booleans(),
    block=st.sampled_from([4, 512]),
)
def test_attention_over_shared_prefixes_is_attention_over_whole_segments(
    families, kv_heads, multiple, widths, window, softcap, has_sinks, block
):
    """In value and gradient, as if the rows of the prefix preceded each segment."""
    shared, seqlens = shared_of(families)
    generator = torch.Generator().manual_seed(0)
    shapes = [(kv_heads * multiple, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1])]
    made = [torch.randn(1, h, shared.num_tokens, d, generator=generator, dtype=torch.float64) for h, d in shapes]
    qkv = [x.requires_grad_() for x in made]
    sinks = torch.linspace(-1, 1, shapes[0][0], dtype=torch.float64).requires_grad_() if has_sinks else None
    options: dict[str, Any] = {"varlen": False, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    ends = torch.tensor([0, *seqlens]).cumsum(0).to(torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        found, _ = attend(nn.Module(), *qkv, None, boundaries=limits(shared, seqlens), **options)
        rows = [x.index_select(2, shared.rows) for x in qkv]
        wanted, _ = attend(nn.Module(), *rows, None, boundaries=Boundaries(seqlens, ends, padded=False), **options)
    torch.testing.assert_close(found.index_select(1, shared.rows), wanted, rtol=1e-9, atol=1e-10)
    probe = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    inputs = qkv if sinks is None else [*qkv, sinks]
    got = torch.autograd.grad((found.index_select(1, shared.rows) * probe).sum(), inputs)
    for mine, expected in zip(got, torch.autograd.grad((wanted * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-9)


def shared_of(families: list[tuple[int, list[int]]]) -> tuple[SharedPrefixes, tuple[int, ...]]:
    """Each family: tokens of the prefix (0: not shared), and of the rest of each segment."""
    segments, lengths, seqlens = [], [], []
    for prefix, owns in families:
        first = len(seqlens)
        for number, own in enumerate(owns):
            segments.append(first if number and prefix else -1)
            lengths.append(prefix if number else 0)
            seqlens.append(prefix + own)
    return prefix_layout(segments, lengths, seqlens), tuple(seqlens)


def limits(shared: SharedPrefixes, seqlens: tuple[int, ...]) -> Boundaries:
    own = tuple(whole - prefix for whole, prefix in zip(seqlens, shared.lengths, strict=True))
    ends = torch.tensor([0, *seqlens]).cumsum(0).to(torch.int32)
    of_keys = Boundaries(seqlens, ends.to(shared.rows.device), padded=False)
    attention = partial(shared_prefix_attention, shared, of_keys)
    return Boundaries(own, shared.cu_seqlens, padded=False, attention=attention)


@pytest.mark.parametrize("window", [None, 3, 25])
def test_the_varlen_kernel_gets_the_keys_of_the_prefix(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    shared, seqlens = shared_of([(20, [3, 9, 1]), (0, [4]), (7, [2, 5])])
    q, k, v = (torch.randn(1, h, shared.num_tokens, 8, dtype=torch.float64) for h in (4, 2, 2))
    bounds = limits(shared, seqlens)
    wanted, _ = attend(nn.Module(), q, k, v, None, varlen=False, sliding_window=window, boundaries=bounds)
    keys, values = (x.index_select(2, shared.rows) for x in (k, v))
    of_keys = Boundaries(seqlens, torch.tensor([0, *seqlens]).cumsum(0).to(torch.int32), padded=False)
    found = varlen.varlen_attention(q, keys, values, bounds, 8**-0.5, window, of_keys)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3, 25])
def test_the_device_computes_shared_prefixes_as_a_cpu_does(window: int | None) -> None:
    shared, seqlens = shared_of([(130, [30, 90, 1]), (0, [4]), (7, [2, 5])])
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 64), (2, 64), (2, 64))
    made = [torch.randn(1, h, shared.num_tokens, d, generator=generator) for h, d in shapes]
    exact = [x.double().requires_grad_() for x in made]
    wanted, _ = attend(
        nn.Module(), *exact, None, varlen=False, sliding_window=window, boundaries=limits(shared, seqlens)
    )
    half = [x.to("cuda", torch.bfloat16).requires_grad_() for x in made]
    on_device = shared.map(lambda x: x.cuda())
    bounds = limits(on_device, seqlens)
    found, _ = attend(nn.Module(), *half, None, varlen=True, sliding_window=window, boundaries=bounds)
    require_near(found, half, wanted, exact, bound=2e-1)
