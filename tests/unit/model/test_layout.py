"""The probe accepts a layout exactly if the model computes it exactly, and reports why it rejects one."""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fsdptrain.errors import NumericsError
from fsdptrain.model.attention.attention import SEGMENTS, Boundaries, attend
from fsdptrain.model.probes.copy_probe import probe_random_copy
from fsdptrain.model.probes.layout import LayoutProbe, choose_layout, probe_segments
from fsdptrain.model.probes.random_copy import random_copy
from fsdptrain.model.structure import repeated_layers
from tests import configs, families, zoo
from tests.exact import Exact, in_float64
from tests.matrix import only
from tests.seam import CPU, policy_model

OPTIONS: dict[str, Any] = {"vocab_size": zoo.VOCAB_SIZE, "compute_dtype": torch.float32, "device": CPU}


def with_attention(name: str, attention: str, **changes: Any) -> PreTrainedModel:
    model = policy_model(name, **changes)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(
    "name", only(["qwen3", "gpt_oss"], [name for name in zoo.ARCHITECTURES if name != "qwen3_next"])
)
def test_attention_models_are_packed(name: str) -> None:
    probe = in_exact_numbers(name)
    assert (probe.layout, probe.attention, probe.reason) == ("packed", SEGMENTS, "")


def in_exact_numbers(name: str) -> LayoutProbe:
    with Exact():
        probe = choose_layout(in_float64(policy_model(name)), "auto", **OPTIONS)
    assert probe.max_difference < 1e-12
    return probe


def test_a_model_that_cannot_be_packed_is_padded_with_the_reason() -> None:
    """Without kernels its recurrent mixers raise an error, and with transformers 5.17 they mix the sequences."""
    probe = in_exact_numbers("qwen3_next")
    assert (probe.layout, probe.attention) == ("padded", SEGMENTS)
    assert any(words in probe.line for words in ("can't keep packed sequences apart", "differs by"))


def test_an_attention_that_leaks_is_padded_with_the_difference() -> None:
    model = with_attention("gpt_oss", "eager")  # this file of transformers does not mask by position ids
    probe = choose_layout(model, "auto", **OPTIONS)
    assert (probe.layout, probe.attention) == ("padded", "eager")
    assert probe.line.startswith("layout: padded, attention eager (probe: ")
    assert "packed with eager: differs by" in probe.line


def test_a_model_that_is_not_causal_is_refused() -> None:
    model = policy_model("qwen3")
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: (args[0] + 0.3 * args[0].roll(-1, 1),))
    with pytest.raises(NumericsError, match=r"^Qwen3ForCausalLM is not a causal language model: later tokens change"):
        choose_layout(model, "auto", **OPTIONS)


def test_a_model_with_infinite_weights_is_refused() -> None:
    model = policy_model("qwen3")
    model.model.norm.weight.data[3] = float("inf")
    with pytest.raises(NumericsError, match="its logprobs are not finite"):
        choose_layout(model, "auto", **OPTIONS)


def blind_to(what: str) -> Any:
    """Our attention without one of its inputs."""

    def blind(*args: Any, boundaries: Boundaries, **options: Any) -> Any:
        if what == "boundaries" and not boundaries.padded:
            total = boundaries.cu_seqlens[-1:]
            boundaries = Boundaries((int(total),), torch.cat([torch.zeros_like(total), total]), padded=False)
        options.pop(what, None)
        return attend(*args, varlen=False, boundaries=boundaries, **options)

    return blind


@pytest.mark.parametrize(
    ("name", "what", "dtype"),
    [
        ("qwen3", "boundaries", torch.float32),
        ("qwen3", "boundaries", torch.bfloat16),
        ("gpt_oss", "sliding_window", torch.float32),  # in bfloat16 a window of 16 hides in the noise of 40 tokens
        ("gpt_oss", "s_aux", torch.float32),
        ("gpt_oss", "s_aux", torch.bfloat16),
    ],
)
def test_an_attention_that_ignores_an_input_is_refused(name: str, what: str, dtype: torch.dtype) -> None:
    model = policy_model(name).to(dtype)
    ours = ALL_ATTENTION_FUNCTIONS[SEGMENTS]
    AttentionInterface.register(SEGMENTS, blind_to(what))
    try:
        with pytest.raises(NumericsError, match="packed with fsdptrain_segments: differs by"):
            choose_layout(model, "packed", **{**OPTIONS, "compute_dtype": dtype})
    finally:
        AttentionInterface.register(SEGMENTS, ours)


def test_probe_segments_exceed_the_window_but_not_the_positions() -> None:
    lengths = [len(segment) for segment in probe_segments(policy_model("mistral", sliding_window=100), 264)]
    assert lengths[1] > 100
    lengths = [len(s) for s in probe_segments(policy_model("mistral", max_position_embeddings=30), 264)]
    assert max(lengths) <= 30


def test_out_of_memory_is_raised_and_chooses_no_layout() -> None:
    model = policy_model("qwen3")

    def fail_on_packs(_: Any, args: Any, kwargs: Any) -> None:
        if (kwargs["position_ids"] == 0).sum() > 1:
            raise torch.OutOfMemoryError("no room")

    model.model.layers[0].register_forward_pre_hook(fail_on_packs, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        choose_layout(model, "auto", **OPTIONS)


def test_a_random_copy_holds_one_layer_of_each_kind_of_each_list() -> None:
    deepseek = random_copy(zoo.config("deepseek_v3", num_hidden_layers=6, first_k_dense_replace=2))
    assert [layer.mlp.__class__.__name__ for layer in deepseek.model.layers] == ["DeepseekV3MLP", "DeepseekV3MoE"]
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    gpt_oss = random_copy(zoo.config("gpt_oss", num_hidden_layers=4, layer_types=types))
    assert gpt_oss.config.layer_types == ["full_attention", "sliding_attention"]
    assert len(gpt_oss.model.layers) == gpt_oss.config.num_hidden_layers == 2
    config = configs.meta_model("gemma-3-12b").config
    config.get_text_config().hidden_size = 64
    gemma3 = random_copy(config)
    layers = [type(layer).__name__ for layer in repeated_layers(gemma3)]
    assert layers == ["SiglipEncoderLayer", "Gemma3DecoderLayer", "Gemma3DecoderLayer"]
    assert gemma3.config.get_text_config().layer_types == ["sliding_attention", "full_attention"]


def test_chunked_attention_uses_the_masks_of_transformers() -> None:
    config = families.config("llama4_text", num_hidden_layers=4, attention_chunk_size=16)
    probe = probe_random_copy(config)
    assert (probe.layout, probe.attention) == ("padded", "sdpa")
    assert "its attention is chunked" in probe.reason
