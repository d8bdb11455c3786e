"""megatron-core computes what transformers computes, forward and backward, and gives back the bits that it was given,
however the model is split.
"""

import pytest

from tests.matrix import chosen, only
from tests.megatron import cases
from tests.megatron.comparison import Case, Found, compared

CASES = [
    Case("qwen3", {}, tied=True),
    Case("mistral", {}),
    Case("llama", {"tensor_parallel": 2}, 2, tied=True),
    Case("qwen2", {"tensor_parallel": 2}, 2),  # whose queries, keys and values have biases
    Case("qwen3_moe", {"pipeline_parallel": 2}, 2),
    Case("qwen3_moe", {"expert_parallel": 2}, 2, renormalized=True),
    Case("qwen3", {"tensor_parallel": 2}, 2, tied=True),
    Case("qwen3_moe", {"tensor_parallel": 2}, 2),
    Case("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2}, 4, tied=True),
    Case("qwen3_moe", {"pipeline_parallel": 2, "expert_parallel": 2}, 4),
    # below two ranks each have the same part of the model
    Case("qwen3_moe", {"expert_parallel": 2}, 4, renormalized=True),
    Case("qwen3", {"pipeline_parallel": 2}, 4, tied=True),  # embedding and head are on different ranks
]
FEW = [Case("qwen3", {}, tied=True), Case("qwen3", {"tensor_parallel": 2}, 2, tied=True)]
FEW += [Case("qwen3_moe", {"pipeline_parallel": 2}, 2)]
STAGES, EXPERTS, TENSOR = {"pipeline_parallel": 2}, {"expert_parallel": 2}, {"tensor_parallel": 2}
WRAPPED = (*cases.RECURRENT, "deepseek_v3")  # with mixers of transformers
SPEC = "fsdptrain.megatron.hf_spec:layer_spec"
CASES += [
    *(Case(family, split, 2, num_packs=2) for family in cases.RECURRENT for split in ({}, STAGES, TENSOR)),
    *(Case(family, {}, 2, "packed", num_packs=2) for family in ("qwen3_5", "qwen3_5_moe")),
    *(Case(family, EXPERTS, 2, num_packs=2) for family in ("qwen3_next", "qwen3_5_moe")),
    *(Case("deepseek_v3", split, 2, "packed", num_packs=2) for split in ({}, STAGES, TENSOR, EXPERTS)),
    Case("qwen3_next", STAGES | EXPERTS, 4, num_packs=2),
    Case("qwen3_next", STAGES | {"first_stage_layers": 3}, 2, num_packs=2),
    Case("qwen3_5", {"pipeline_parallel": 3, "last_stage_layers": 2}, 3, num_packs=2),
]
FEW += [Case("qwen3_next", {}, 2, num_packs=2), Case("qwen3_5", TENSOR, 2, num_packs=2)]
FEW += [Case("qwen3_5_moe", EXPERTS, 2, num_packs=2)]
# decoders that megatron-core lacks: the packed, and those whose recurrent mixers need rows
ATTENTION = ("cohere2", "ernie4_5", "exaone4", "glm4", "granite", "mixtral", "olmo3", "phi3", "smollm3")
ROWS = ("falcon_h1", "lfm2", "nemotron_h")
CASES += [
    *(Case(family, STAGES, 2, "packed", tied=family == "granite") for family in ATTENTION),
    *(Case(family, STAGES, 2) for family in ROWS),
    Case("gemma3", {"pipeline_parallel": 3}, 3, "packed", tied=True),
    Case("lfm2", {}, 2),
    Case("smollm3", {"spec": SPEC, **TENSOR}, 2, "packed"),  # layers of a user, of a family that is not listed
    Case("mistral", {"spec": "transformers"}, 1, "packed"),
]
# interleaved stages: fewer packs than stages, one more, as many; stages of unequal size
PARTS = STAGES | {"virtual_pipeline": 2}
CASES += [
    *(Case("qwen3", PARTS, 2, tied=True, num_packs=count, layers=4) for count in (1, 3)),
    Case("qwen3", PARTS | {"pipeline_parallel": 4}, 4, tied=True, layers=8),
    Case("llama", {"pipeline_parallel": 4, "last_stage_layers": 2}, 4, layers=5),
    Case("qwen3_moe", PARTS | EXPERTS, 4, layers=4),
    Case("qwen3_next", PARTS, 2, num_packs=2),
    Case("qwen3", PARTS | {"first_stage_layers": 2}, 2, layers=6),
    Case("granite", PARTS, 2, "packed", tied=True, layers=4),
]
FEW += [Case("qwen3", PARTS, 2, tied=True, num_packs=3, layers=4)]
FEW += [Case("gemma3", {"pipeline_parallel": 3}, 3, "packed", tied=True)]
BRIDGE = {"bridge": "mbridge"}
CASES += [
    *(Case(family, TENSOR | BRIDGE, 2, tied=family != "qwen2") for family in ("llama", "qwen3", "qwen2")),
    Case("qwen3", PARTS | BRIDGE, 2, tied=True, layers=4),
    *(Case("qwen3_moe", split | BRIDGE, 2) for split in (TENSOR, EXPERTS)),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """Of each case what each rank found."""
    return compared(chosen(request, "case"), tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("case", only(FEW, CASES), ids=[case.name for case in CASES])
def test_logprobs_and_gradients_are_those_of_transformers_and_what_was_loaded_comes_out_bitwise(
    found: dict[str, list[Found]], case: Case
) -> None:
    for rank in found[case.name]:
        rank.require(gradient=1e-4 if case.family in WRAPPED else 1e-5)
