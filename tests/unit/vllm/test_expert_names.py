"""One expert that does not come is missed, though vLLM has loaded the others into the same tensor."""

import pytest

from fsdptrain.vllm.worker.expert_names import missing_experts

NAMES = [
    "model.norm.weight",
    *(
        f"model.layers.{i}.mlp.experts.{k}.{part}.weight"
        for i in (1, 2)
        for k in range(3)
        for part in ("w1", "w2", "w3")
    ),
]


def test_complete_and_absent_layers_have_no_missing_experts():
    assert missing_experts(NAMES) == []
    assert missing_experts(name for name in NAMES if "layers.2" not in name) == []


@pytest.mark.parametrize("name", [name for name in NAMES if "experts" in name])
def test_a_missing_tensor_is_named(name):
    assert missing_experts(other for other in NAMES if other != name) == [name]


@pytest.mark.parametrize("number", range(3))
def test_a_missing_expert_is_named(number: int):
    left = [name for name in NAMES if f"layers.1.mlp.experts.{number}." not in name]
    assert missing_experts(left) == [
        f"model.layers.1.mlp.experts.{number}.{part}.weight" for part in ("w1", "w2", "w3")
    ]
