"""Attention over packs is dense attention within each segment. Unsupported inputs are errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedConfig, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.model.attention import attention, blocks, varlen
from fsdptrain.model.attention.attention import (
    SEGMENTS,
    VARLEN,
    Boundaries,
    attend,
    attention_kwargs,
    resolve_attention,
)
from tests.varlen import dense, flash_attn_varlen_func, require_near, varlen_attn

MODULE = nn.Identity()


def boundaries(lengths: list[int], *, padded: bool = False) -> Boundaries:
    return Boundaries(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), padded)


def heads(rows: int, length: int, *widths: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Random [rows, heads, length, width] in float64 for each (heads, width)."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, h, length, d, generator=generator, dtype=torch.float64) for h, d in widths]
    return [tensor.requires_grad_() for tensor in made]


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
def test_attention_and_its_gradients_are_those_of_dense_attention_per_segment(
    lengths, kv_heads, groups, widths, window, softcap, has_sinks, block
):
    num_heads, total = kv_heads * groups, sum(lengths)
    q, k, v = heads(1, total, (num_heads, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    sinks = torch.linspace(-1, 1, num_heads, dtype=torch.float64).requires_grad_() if has_sinks else None
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
        found, _ = attend(MODULE, q, k, v, None, varlen=False, boundaries=boundaries(lengths), **options)
        probe = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
        gradients = torch.autograd.grad((found * probe).sum(), inputs)
    pieces = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    wanted = [dense(*piece, scaling=0.3, window=window, softcap=softcap, sinks=sinks) for piece in pieces]
    wanted = torch.cat(wanted, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for got, expected in zip(gradients, torch.autograd.grad((wanted * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
def test_padded_rows_have_the_attention_of_each_row_alone(window: int | None, softcap: float | None) -> None:
    lengths = [13, 4, 1]
    q, k, v = heads(3, 13, (4, 8), (2, 8), (2, 8))
    options: dict[str, Any] = {"varlen": False, "sliding_window": window, "softcap": softcap}
    rows, _ = attend(MODULE, q, k, v, None, boundaries=boundaries(lengths, padded=True), **options)
    for row, length in enumerate(lengths):
        mine = [x[row : row + 1, :, :length] for x in (q, k, v)]
        alone, _ = attend(MODULE, *mine, None, boundaries=boundaries([length]), **options)
        torch.testing.assert_close(rows[row : row + 1, :length], alone)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"boundaries": None}, "came without its boundaries"),
        ({"boundaries": boundaries([2, 3])}, "and boundaries for"),  # of another batch
        ({"boundaries": boundaries([2, 4], padded=True)}, "and boundaries for"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "Identity"),  # would be ignored
        ({"position_bias": torch.zeros(1, 2, 6, 6)}, "Identity"),
        ({"is_causal": False}, "Identity"),
    ],
)
def test_inputs_for_which_the_result_would_be_wrong_are_refused(change: dict[str, Any], words: str) -> None:
    options = {"attention_mask": None, "varlen": False, "boundaries": boundaries([2, 4]), **change}
    with pytest.raises(NumericsError, match=words):
        attend(MODULE, *heads(1, 6, (2, 8), (2, 8), (2, 8)), **options)


def test_saved_tensors_are_linear_in_the_length() -> None:
    length = 4 * blocks.BLOCK
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
        ("auto", "cpu", SEGMENTS), ("sdpa", "cpu", SEGMENTS), ("sdpa", "cuda", SEGMENTS), ("varlen", "cuda", VARLEN),
        ("eager", "cpu", "eager"), ("auto", "xpu", SEGMENTS),
    ],
)  # fmt: skip
def test_attn_implementation_resolves_to_a_name(requested: str, device_type: str, name: str) -> None:
    assert resolve_attention(requested, device_type) == name


@pytest.mark.parametrize(
    ("installed", "capability", "own", "name"),
    [
        (True, (9, 0), False, "flash_attention_3"), (False, (9, 0), False, VARLEN), (True, (10, 0), False, VARLEN),
        (True, (9, 0), True, VARLEN),
    ],
)  # fmt: skip
def test_auto_takes_flash_attn_3_on_hopper_only(
    installed: bool, capability: tuple[int, int], own: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_flash_attn_3_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert resolve_attention("auto", "cuda", needs_package_attention=own) == name


def test_a_plug_in_computes_the_attention_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "plugin_names", lambda kind: ["xpu"])
    monkeypatch.setattr(attention, "resolve", lambda *_, **__: lambda q, *_: -q)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, VARLEN, ALL_ATTENTION_FUNCTIONS[VARLEN])
    assert resolve_attention("auto", "xpu") == VARLEN
    qkv = heads(1, 3, (2, 8), (2, 8), (2, 8))
    found, _ = ALL_ATTENTION_FUNCTIONS[VARLEN](MODULE, *qkv, None, boundaries=boundaries([1, 2]))
    assert torch.equal(found, -qkv[0])


@pytest.mark.parametrize(
    ("requested", "device_type"), [("varlen", "cpu"), ("flash_attention_2", "cpu"), ("flash_attention_3", "cuda")]
)
def test_an_attention_that_cannot_run_is_a_config_error(requested: str, device_type: str) -> None:
    with pytest.raises(ConfigError, match=f"--attn-implementation {requested} needs"):
        resolve_attention(requested, device_type)


@pytest.mark.parametrize(
    ("dtype", "width", "window", "repeats"),
    [
        (torch.bfloat16, 64, None, False),
        (torch.bfloat16, 264, None, True),
        (torch.bfloat16, 64, 5, True),  # a mask
        (torch.float32, 64, None, True),
    ],
)
def test_on_a_device_heads_are_repeated_for_kernels_that_need_it(dtype, width, window, repeats, monkeypatch):
    """CUDA's other kernels do not support grouped heads: torch would select the kernel that stores all scores."""
    calls: list[tuple[int, bool]] = []

    def attention_call(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **_: Any) -> Tensor:
        calls.append((k.shape[1], enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention_call)
    qkv = (torch.empty(1, h, 9, width, dtype=dtype, device="meta") for h in (4, 2, 2))
    attend(MODULE, *qkv, None, varlen=False, sliding_window=window, boundaries=boundaries([9]))
    assert calls == [(4, False) if repeats else (2, True)]


SHAPES = [(4, 4, 64, 64), (8, 2, 64, 64), (4, 4, 96, 64), (4, 2, 20, 20)]


@pytest.mark.parametrize("has_flag", [False, True])  # before torch 2.13, and since
@pytest.mark.parametrize("window", [None, 1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_varlen_kernel_is_called_as_documented(shape, window, has_flag, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen, "_VARLEN_HAS_GQA_FLAG", has_flag)
    lengths = [37, 1, 65]
    num_heads, kv_heads, width, value_width = shape
    qkv = heads(1, sum(lengths), (num_heads, width), (kv_heads, width), (kv_heads, value_width))
    found = varlen.varlen_attention(*qkv, boundaries(lengths), width**-0.5, window)
    wanted, _ = attend(MODULE, *qkv, None, varlen=False, sliding_window=window, boundaries=boundaries(lengths))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 16])
def test_flash_attn_is_called_by_its_signature(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers calls it, with the segments that we pass to the model."""
    functions = (None, flash_attn_varlen_func, None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: functions)
    lengths = boundaries([37, 1, 65])
    qkv = heads(1, 103, (8, 64), (2, 64), (2, 48))
    module: Any = nn.Identity()
    module.config, module.is_causal = PreTrainedConfig(attn_implementation="flash_attention_2"), True
    options: dict[str, Any] = {"scaling": 64**-0.5, "sliding_window": window}
    segments = attention_kwargs(lengths.seqlens, lengths.cu_seqlens)
    found, _ = flash_attention_forward(module, *qkv, None, **options, **segments)
    wanted, _ = attend(MODULE, *qkv, None, varlen=False, boundaries=lengths, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 264)])
def test_grouped_heads_never_take_the_kernel_that_stores_all_scores(dtype, width, window):
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    exact = heads(1, 70, (4, width), (2, width), (2, width))
    options: dict[str, Any] = {"varlen": False, "sliding_window": window, "boundaries": boundaries([40, 30])}
    wanted, _ = attend(MODULE, *exact, None, **options)
    with sdpa_kernel(fused):  # an error if neither can
        found, _ = attend(MODULE, *(x.detach().to("cuda", dtype) for x in exact), None, **options)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=1e-4 if dtype == torch.float32 else 4e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_varlen_kernel_computes_what_segments_do(shape: tuple[int, int, int, int], window: int | None) -> None:
    lengths = [37, 1, 130, 64]
    num_heads, kv_heads, width, value_width = shape
    exact = heads(1, sum(lengths), (num_heads, width), (kv_heads, width), (kv_heads, value_width))
    limits = Boundaries(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda(), padded=False)
    options: dict[str, Any] = {"sliding_window": window, "boundaries": limits}
    wanted, _ = attend(MODULE, *exact, None, varlen=False, **options)
    half = [tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in exact]
    found, _ = attend(MODULE, *half, None, varlen=True, **options)
    require_near(found, half, wanted, exact, bound=1e-1)
