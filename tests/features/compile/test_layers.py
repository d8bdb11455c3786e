"""Layers are compiled once for packs of any shape. A missing compiler is one line."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.feature import enable_gradient_checkpointing
from fsdptrain.features.compile.feature import check_compiler, compile_layers
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward, policy_logprobs
from fsdptrain.model.probes.head import check_backward, check_head
from fsdptrain.model.probes.layout import choose_layout
from tests import zoo
from tests.exact import Exact, in_float64
from tests.seam import logprobs_and_gradients, random_pack

OF_ROUNDING = 5.0  # times the error of float32 without the compiler
PACKS = [(7, 1, 12, 3), (30,), (40, 10, 4, 4), (1, 1)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(name: str, *, compiler: CompileCounterWithBackend | None, recomputed: bool, **changes: int):
    register_attention()
    model = zoo.build(name, **changes)
    model.set_attn_implementation(SEGMENTS)
    if compiler is not None:
        compile_layers(model, backend=compiler)
    if recomputed:
        enable_gradient_checkpointing(model, on_host=True)
    install_policy_forward(model, chunk_size=64)
    return model


def step(model, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """A pack is scored, then trained on: logprobs and gradients."""
    batch = random_pack(lengths, seed=len(lengths))
    with torch.no_grad():
        policy_logprobs(model, batch, layout="packed")
    return logprobs_and_gradients(model, batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize(
    ("name", "changes", "recomputed"),
    [
        ("qwen3", {"num_hidden_layers": 3}, False),
        pytest.param("qwen3", {"num_hidden_layers": 5}, True, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", {}, False, marks=pytest.mark.matrix),
    ],
)
def test_graphs_of_the_first_pack_serve_all_others(name, changes, recomputed):
    """With dynamo and AOT autograd, without inductor."""
    compiler = CompileCounterWithBackend("aot_eager")
    compiled = model_of(name, compiler=compiler, recomputed=recomputed, **changes)
    plain = model_of(name, compiler=None, recomputed=recomputed, **changes)
    exact = in_float64(model_of(name, compiler=None, recomputed=False, **changes))
    counts = []
    for lengths in PACKS:
        found, wanted = step(compiled, lengths), step(plain, lengths)
        counts.append(compiler.frame_count)
        with Exact():
            true = step(exact, lengths)
        assert found.keys() == wanted.keys() == true.keys()
        rounding = max((wanted[key] - true[key]).abs().max() for key in true)
        for key in true:
            assert (found[key] - true[key]).abs().max() <= OF_ROUNDING * rounding, key
    assert set(counts) == {counts[0]}
    assert 0 < counts[0] <= 12  # before, between and after attention, with and without gradient; not for each layer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_probes_compile_the_two_variants_that_training_runs():
    """With and without gradient. Attention that only the probes use is not compiled."""
    compiler = CompileCounterWithBackend("aot_eager")
    model = model_of("qwen3", compiler=compiler, recomputed=False)
    options: dict[str, Any] = {"vocab_size": 264, "device": torch.device("cpu")}
    probe = choose_layout(model, "auto", compute_dtype=torch.float32, **options)
    check_head(model, layout=probe.layout, compute_dtype=torch.float32, **options)
    check_backward(model, layout=probe.layout, **options)
    of_probes = compiler.frame_count
    step(model, PACKS[0])
    assert compiler.frame_count == of_probes, "training compiles nothing that the probes did not"
    torch._dynamo.reset()
    step(model_of("qwen3", compiler=compiler, recomputed=False), PACKS[0])
    assert compiler.frame_count == 2 * of_probes, "the probes compile nothing that training does not run"


def test_names_stay_and_attention_is_called_from_the_graph():
    model = model_of("qwen3", compiler=CompileCounterWithBackend("eager"), recomputed=False)
    assert list(model.state_dict()) == list(zoo.build("qwen3").state_dict())


@pytest.mark.parametrize(
    ("device", "missing"), [("cpu", r"looked for g\+\+, clang\+\+"), ("cuda", "triton|looked for gcc")]
)
def test_a_missing_compiler_is_one_line_with_a_fix(monkeypatch, device, missing):
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=missing) as caught:
        check_compiler(device)
    assert "leave --compile out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_compiler_that_is_named_must_be_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="looked for no-such-compiler"):
        check_compiler("cpu")
