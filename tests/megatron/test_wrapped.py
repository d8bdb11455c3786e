"""Models whose mixers megatron-core lacks: logits and gradients of transformers, however the model is split."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from fsdptrain.backends.megatron.forward import layout_of
from fsdptrain.backends.megatron.hf_modules import hf_modules
from fsdptrain.backends.megatron.transformer_config import refuse_split_mixers
from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.errors import ConfigError
from fsdptrain.models.inputs import Layout
from fsdptrain.testing import spawn
from tests import zoo
from tests.megatron import wrapped_cases

SPLITS: dict[str, tuple[dict[str, Any], Layout]] = {
    "data, rows": ({}, "padded"),
    "data, packs": ({}, "packed"),
    "stages": ({"pipeline_parallel": 2}, "packed"),
    "context": ({"context_parallel": 2}, "packed"),
    "sequence": ({"tensor_parallel": 2, "sequence_parallel": True}, "packed"),
}
OF_EXPERTS: dict[str, tuple[dict[str, Any], Layout]] = {
    "experts, all to all": ({"expert_parallel": 2}, "packed"),
    "experts, gathered": ({"expert_parallel": 2, "moe_dispatcher": "allgather"}, "padded"),
    "experts and context": ({"expert_parallel": 2, "context_parallel": 2}, "packed"),
}
PLAIN_ON_FOUR: dict[str, tuple[dict[str, Any], Layout]] = {
    "context and data": ({"context_parallel": 2}, "packed"),
    "context and sequence": ({"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}, "packed"),
}
ON_FOUR: dict[str, tuple[dict[str, Any], Layout]] = {  # ranks: stages, and something else
    "stages and experts": ({"pipeline_parallel": 2, "expert_parallel": 2}, "packed"),
    "stages and context": ({"pipeline_parallel": 2, "context_parallel": 2}, "packed"),
    "stages, experts and context": ({"pipeline_parallel": 2, "expert_parallel": 2, "context_parallel": 2}, "packed"),
}
CASES = [
    *((family, split) for family in wrapped_cases.CONFIGS for split in SPLITS),
    *((family, split) for family in wrapped_cases.OF_EXPERTS for split in OF_EXPERTS),
    *(("qwen3_next", split) for split in ON_FOUR),
    *((family, split) for family in wrapped_cases.PLAIN for split in ["context"]),
    *(("qwen3_moe", split) for split in PLAIN_ON_FOUR),
]


def num_ranks_of(split: str) -> int:
    return 4 if split in ON_FOUR or split in PLAIN_ON_FOUR else 2


@cache
def differences(families: tuple[str, ...], num_ranks: int) -> list[dict[tuple[str, str], wrapped_cases.Found]]:
    """By rank, family and split: all in one set of processes, which import megatron-core once."""
    chosen = [case for case in CASES if case[0] in families and num_ranks_of(case[1]) == num_ranks]
    every = SPLITS | OF_EXPERTS | ON_FOUR | PLAIN_ON_FOUR
    with TemporaryDirectory() as folder:
        paths = {family: wrapped_cases.save(family, Path(folder) / family) for family in families}
        models = [(paths[family], *every[split]) for family, split in chosen]
        ranks = spawn(num_ranks, wrapped_cases.differences, models, timeout=480.0)
    return [dict(zip(chosen, rank, strict=True)) for rank in ranks]


def found_by_ranks(family: str, split: str) -> list[wrapped_cases.Found]:
    families = wrapped_cases.PLAIN if family in wrapped_cases.PLAIN else (family,)
    return [rank[family, split] for rank in differences(families, num_ranks_of(split))]


@pytest.mark.parametrize(("family", "split"), CASES)
def test_logits_and_gradients_are_those_of_transformers(family: str, split: str):
    for rank in found_by_ranks(family, split):
        assert rank.logits < 1e-5
        assert rank.gradient < 1e-4, rank.tensor
        assert rank.norm < 1e-5


@pytest.mark.parametrize(("family", "split"), CASES)
def test_what_was_loaded_comes_out_bitwise(family: str, split: str):
    for rank in found_by_ranks(family, split):
        assert rank.changed == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wrapped_cases.save("qwen3_next", tmp_path_factory.mktemp("hub") / "model")


def test_what_cannot_be_aligned_is_refused(checkpoint: Path):
    for said in spawn(2, wrapped_cases.refusals, checkpoint):
        assert said["rows"].startswith("ConfigError: --megatron-context-parallel deals packed sequences")
        assert said["mask"].startswith("NumericsError: a mask that is not plain causal")


def test_there_is_one_norm_before_each_half_of_a_layer(checkpoint: Path):
    (layers,) = spawn(1, wrapped_cases.norms, checkpoint)
    assert layers == [dict.fromkeys(("input_layernorm", "pre_mlp_layernorm"), "Qwen3NextRMSNorm")] * 4


def test_a_users_function_makes_the_layers(checkpoint: Path):
    assert spawn(1, wrapped_cases.with_own_spec, checkpoint) == [["Qwen3NextAttention"] * 4]


def test_a_users_layers_take_rows_of_any_length_under_sequence_parallel():
    assert max(spawn(2, wrapped_cases.with_own_spec_and_sequence_parallel)) < 1e-5


def test_classes_are_those_that_the_models_own_layers_have():
    found = hf_modules(wrapped_cases.CONFIGS["qwen3_5_text"])
    assert [(mixer.module_class.__name__, mixer.hub_name) for mixer in found.mixers] == [
        ("Qwen3_5GatedDeltaNet", "linear_attn"),
        ("Qwen3_5Attention", "self_attn"),
    ] * 2
    assert [mixer.is_recurrent for mixer in found.mixers] == [True, False] * 2
    assert found.norm_class.__name__ == "Qwen3_5RMSNorm"
    other = hf_modules(zoo.config("llama"))  # nothing is listed: it is the same for any model of this form
    assert {mixer.module_class.__name__ for mixer in other.mixers} == {"LlamaAttention"}


def test_layers_of_another_form_are_refused():
    with pytest.raises(ConfigError, match=r"^--backend megatron: Gemma2DecoderLayer is not norm, mixer, norm and MLP"):
        hf_modules(zoo.config("gemma2"))


@pytest.mark.parametrize(
    ("family", "split", "layout"),
    [
        ("qwen3", {}, {"engine bf16": "packed", "engine fp32": "padded", "plain": "padded"}),
        ("qwen3", {"context_parallel": 2}, dict.fromkeys(("engine bf16", "engine fp32", "plain"), "packed")),
        ("qwen3_next", {}, dict.fromkeys(("engine bf16", "engine fp32", "plain"), "packed")),
        ("qwen3_next", {"moe_dispatcher": "allgather"}, dict.fromkeys(("engine bf16", "plain"), "padded")),
    ],
)
def test_packs_go_only_where_their_boundaries_are_understood(family: str, split: dict, layout: dict[str, Layout]):
    """Transformer Engine has no kernel for packs in float32."""
    for name, wanted in layout.items():
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        found = layout_of(zoo.config(family), MegatronConfig(**split), has_engine="engine" in name, dtype=dtype)
        assert found == wanted, name


def test_mixers_are_not_split():
    config = wrapped_cases.CONFIGS["qwen3_next"]
    with pytest.raises(ConfigError, match=r"^--megatron-tensor-parallel 2: the mixers .* use --megatron-expert"):
        refuse_split_mixers(config, 2, sequence=False)
    refuse_split_mixers(config, 2, sequence=True)
