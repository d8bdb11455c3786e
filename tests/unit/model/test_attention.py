"""Attention over packs is dense attention within each segment, and refuses what it cannot keep apart."""

import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.model.attention import attention
from fsdptrain.model.attention.attention import SEGMENTS, VARLEN, Boundaries, attend, resolve_attention

MODULE = nn.Identity()


def boundaries(lengths: list[int], *, padded: bool = False) -> Boundaries:
    return Boundaries(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), padded)


def heads(rows: int, length: int, *widths: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Random [rows, heads, length, width] in float64 for each (heads, width)."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, h, length, d, generator=generator, dtype=torch.float64) for h, d in widths]
    return [tensor.requires_grad_() for tensor in made]


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, softcap: float | None, sinks: Tensor | None, scaling: float
) -> Tensor:
    """Attention written out for one segment: [1, H, L, .] -> [1, L, H, .]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (ahead >= 0) & (ahead < (window or q.shape[2]))  # a window of W keys holds the query's own
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.view(1, -1, 1, 1).exp()
    return ((weights / total) @ v).transpose(1, 2)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 21), min_size=1, max_size=5),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    widths=st.sampled_from([(8, 8), (12, 8), (8, 12)]),
    window=st.sampled_from([None, 1, 2, 7, 40]),
    softcap=st.sampled_from([None, 1.5]),
    has_sinks=st.booleans(),
    block=st.sampled_from([8, 512]),
)
def test_attention_and_its_gradients_are_those_of_dense_attention_segment_by_segment(
    lengths: list[int],
    kv_heads: int,
    groups: int,
    widths: tuple[int, int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    block: int,
) -> None:
    num_heads, total = kv_heads * groups, sum(lengths)
    q, k, v = heads(1, total, (num_heads, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    sinks = torch.linspace(-1, 1, num_heads, dtype=torch.float64).requires_grad_() if has_sinks else None
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", block)
        found, _ = attend(
            MODULE,
            q,
            k,
            v,
            None,
            varlen=False,
            scaling=0.3,
            sliding_window=window,
            softcap=softcap,
            s_aux=sinks,
            boundaries=boundaries(lengths),
        )
        probe = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
        gradients = torch.autograd.grad((found * probe).sum(), inputs)
    pieces = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "scaling": 0.3}
    wanted = torch.cat([dense(*piece, **options) for piece in pieces], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for got, expected in zip(gradients, torch.autograd.grad((wanted * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
def test_padded_rows_hold_what_each_row_gives_alone(window: int | None, softcap: float | None) -> None:
    lengths = [13, 4, 1]
    q, k, v = heads(3, 13, (4, 8), (2, 8), (2, 8))
    options: dict[str, Any] = {"varlen": False, "sliding_window": window, "softcap": softcap}
    rows, _ = attend(MODULE, q, k, v, None, boundaries=boundaries(lengths, padded=True), **options)
    for row, length in enumerate(lengths):
        mine = [x[row : row + 1, :, :length] for x in (q, k, v)]
        alone, _ = attend(MODULE, *mine, None, boundaries=boundaries([length]), **options)
        torch.testing.assert_close(rows[row : row + 1, :length], alone)


def call(**changes: Any) -> Tensor:
    q, k, v = heads(1, 6, (2, 8), (2, 8), (2, 8))
    options = {"attention_mask": None, "varlen": False, "boundaries": boundaries([2, 4]), **changes}
    return attend(changes.pop("module", MODULE), q, k, v, **{k: v for k, v in options.items() if k != "module"})[0]


def test_a_call_without_boundaries_is_an_error_and_not_a_leak() -> None:
    with pytest.raises(NumericsError, match="came without its boundaries"):
        call(boundaries=None)


@pytest.mark.parametrize("wrong", [boundaries([2, 3]), boundaries([2, 4], padded=True)])
def test_boundaries_of_another_batch_are_an_error(wrong: Boundaries) -> None:
    with pytest.raises(NumericsError, match="and boundaries for"):
        call(boundaries=wrong)


@pytest.mark.parametrize(
    "change",
    [{"attention_mask": torch.zeros(1, 1, 6, 6)}, {"position_bias": torch.zeros(1, 2, 6, 6)}, {"is_causal": False}],
)
def test_what_would_be_ignored_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(NumericsError, match="Identity"):
        call(**change)


def test_scores_never_exist_whole_where_they_are_written_out() -> None:
    length = 4 * attention.BLOCK
    q, k, v = (x.detach().float().requires_grad_() for x in heads(1, length, (1, 8), (1, 8), (1, 8)))
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    same: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, same):
        attend(MODULE, q, k, v, None, varlen=False, softcap=5.0, boundaries=boundaries([length]))
    assert sum(saved) < 100 * length  # linear in the length; the scores would be length^2 / 2


@pytest.mark.parametrize(
    ("requested", "device_type", "name"),
    [
        ("auto", "cpu", SEGMENTS),
        ("auto", "cuda", VARLEN if find_spec("flash_attn") is None else "flash_attention_2"),
        ("sdpa", "cpu", SEGMENTS),
        ("sdpa", "cuda", SEGMENTS),
        ("varlen", "cuda", VARLEN),
        ("eager", "cpu", "eager"),
    ],
)
def test_names_of_the_flag(requested: str, device_type: str, name: str) -> None:
    assert resolve_attention(requested, device_type) == name


@pytest.mark.parametrize(
    ("requested", "device_type"), [("varlen", "cpu"), ("flash_attention_2", "cpu"), ("flash_attention_3", "cuda")]
)
def test_an_attention_that_cannot_run_here_is_a_config_error(requested: str, device_type: str) -> None:
    with pytest.raises(ConfigError, match=f"--attn-implementation {requested} needs"):
        resolve_attention(requested, device_type)


SHAPES = [(4, 4, 64, 64), (8, 2, 64, 64), (4, 4, 96, 64), (4, 2, 20, 20)]


def varlen_as_documented(q: Tensor, k: Tensor, v: Tensor, *limits: Any, scale: float, window_size: Any, **gqa: bool):
    """torch.nn.attention.varlen.varlen_attn on [T, heads, width]: a window (W, 0) holds W keys and the query's own."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0, "the flash kernels want multiples of 8"
    assert q.shape[1] == k.shape[1] or gqa == {"enable_gqa": True}
    (left, right), cu = window_size, limits[0].tolist()
    assert (limits[1].tolist(), right) == (cu, 0)
    assert limits[2:] == (max(b - a for a, b in itertools.pairwise(cu)),) * 2
    window = None if left < 0 else left + 1
    parts = [
        dense(
            *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), window=window, softcap=None, sinks=None, scaling=scale
        )
        for a, b in itertools.pairwise(cu)
    ]
    return torch.cat(parts, dim=1)[0]


@pytest.mark.parametrize("takes_gqa", [False, True])  # before torch 2.13, and since
@pytest.mark.parametrize("window", [None, 1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_of_the_device_is_called_as_it_is_documented(
    shape: tuple[int, int, int, int], window: int | None, takes_gqa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", varlen_as_documented)
    monkeypatch.setattr(attention, "_VARLEN_TAKES_GQA", takes_gqa)
    lengths = [37, 1, 65]
    num_heads, kv_heads, width, value_width = shape
    qkv = heads(1, sum(lengths), (num_heads, width), (kv_heads, width), (kv_heads, value_width))
    found = attention.varlen_attention(*qkv, boundaries(lengths), width**-0.5, window)
    wanted, _ = attend(MODULE, *qkv, None, varlen=False, sliding_window=window, boundaries=boundaries(lengths))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_of_the_device_computes_what_segments_do(
    shape: tuple[int, int, int, int], window: int | None
) -> None:
    lengths = [37, 1, 130, 64]
    num_heads, kv_heads, width, value_width = shape
    exact = heads(1, sum(lengths), (num_heads, width), (kv_heads, width), (kv_heads, value_width))
    limits = Boundaries(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda(), padded=False)
    options: dict[str, Any] = {"sliding_window": window, "boundaries": limits}
    wanted, _ = attend(MODULE, *exact, None, varlen=False, **options)
    half = [tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in exact]
    found, _ = attend(MODULE, *half, None, varlen=True, **options)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=4e-2)
    found.sum().backward()
    wanted.sum().backward()
    for got, expected in zip(half, exact, strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(got.grad.double().cpu(), expected.grad, rtol=5e-2, atol=1e-1)
