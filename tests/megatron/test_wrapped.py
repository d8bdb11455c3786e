"""Models whose mixers megatron-core lacks: logprobs and gradients of transformers, however the model is split."""

import pytest
import torch

from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.forward import layout_of
from fsdptrain.megatron.hf_spec import hf_modules
from fsdptrain.megatron.model import WRAPPED
from fsdptrain.model.rows import Layout
from tests import zoo
from tests.matrix import chosen, only
from tests.megatron import cases, wrapped_cases
from tests.megatron.comparison import Case, Found, compared
from tests.testing import spawn

STAGES, EXPERTS = {"pipeline_parallel": 2}, {"expert_parallel": 2}
TENSOR = {"tensor_parallel": 2}
FAMILIES = (*cases.RECURRENT, "deepseek_v3")
CASES = [
    *(Case(family, {}, 2) for family in FAMILIES),  # rows
    *(Case(family, split, 2, "packed") for family in FAMILIES for split in ({}, STAGES, TENSOR)),
    *(Case(family, EXPERTS, 2, "packed") for family in FAMILIES if family != "qwen3_5_text"),
    Case("qwen3_next", STAGES | EXPERTS, 4, "packed"),
]
FEW = [Case("qwen3_next", {}, 2), Case("qwen3_5_text", TENSOR, 2, "packed"), Case("deepseek_v3", EXPERTS, 2, "packed")]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """Of each case what each rank found."""
    return compared([case._replace(num_packs=2) for case in chosen(request, "case")], tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("case", only(FEW, CASES), ids=[case.name for case in CASES])
def test_logprobs_and_gradients_are_those_of_transformers_and_what_was_loaded_comes_out_bitwise(
    found: dict[str, list[Found]], case: Case
) -> None:
    for rank in found[case.name]:
        rank.require(gradient=1e-4)


@pytest.mark.matrix
def test_a_users_layers_take_rows_of_any_length_under_tensor_parallel():
    assert max(spawn(2, wrapped_cases.with_own_spec_and_tensor_parallel)) < 1e-5


def test_classes_are_those_that_the_models_own_layers_have():
    found = hf_modules(cases.config("qwen3_5_text"))
    assert [(name, made.__name__) for name, made in found.mixers] == [
        ("linear_attn", "Qwen3_5GatedDeltaNet"),
        ("self_attn", "Qwen3_5Attention"),
    ] * 2
    assert found.norm_class.__name__ == "Qwen3_5RMSNorm"
    other = hf_modules(zoo.config("llama"))  # nothing is listed: it is the same for any model of this form
    assert {made.__name__ for _, made in other.mixers} == {"LlamaAttention"}


@pytest.mark.parametrize(
    ("family", "split", "layout"),
    [
        ("qwen3", {}, {"engine bf16": "packed", "engine fp32": "padded", "plain": "padded"}),
        ("qwen3", {"spec": WRAPPED}, {"plain": "packed"}),
        ("qwen3_next", {"spec": "my.layers:mine"}, {"engine bf16": "packed", "plain": "padded"}),
        ("qwen3_next", {}, dict.fromkeys(("engine bf16", "engine fp32", "plain"), "packed")),
    ],
)
def test_packs_go_only_where_their_boundaries_are_understood(family: str, split: dict, layout: dict[str, Layout]):
    """Transformer Engine has no kernel for packs in float32."""
    for name, wanted in layout.items():
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        found = layout_of(zoo.config(family), MegatronConfig(**split), has_engine="engine" in name, dtype=dtype)
        assert found == wanted, name
