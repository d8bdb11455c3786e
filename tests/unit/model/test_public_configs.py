"""The configurations in tests/data have the published sizes of their models."""

import pytest

from fsdptrain.model.structure import active_sizes, count_parameters, lm_head, vision_parameters
from tests import configs

# Totals of the safetensors files on the hub where the causal language model is all that there is; of Qwen3.5 the text
# part, and the size that the name gives. Active: as published, in billions.
TOTALS = {
    "gemma-3-12b": 12_187_325_040,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
}
BILLIONS = {"qwen3.5-9b": 9.0, "qwen3.5-35b-a3b": 35.0}
ACTIVE = {"qwen3-30b-a3b": 3.3, "qwen3.5-35b-a3b": 3.4, "gpt-oss-20b": 3.61}


def test_each_configuration_has_a_published_size():
    assert set(configs.NAMES) == {*TOTALS, *BILLIONS}


@pytest.mark.parametrize("name", configs.NAMES)
def test_the_total_is_the_published_one(name: str):
    total = count_parameters(configs.meta_model(name)).total
    if name in TOTALS:
        assert total == TOTALS[name]
    else:
        tower = sum(p.numel() for p in vision_parameters(configs.meta_model(name)).values())
        assert total - tower == pytest.approx(BILLIONS[name] * 1e9, rel=0.02)


@pytest.mark.parametrize("name", configs.NAMES)
def test_the_active_share_is_the_published_one(name: str):
    model = configs.meta_model(name)
    active = round(sum(active_sizes(model).values()))
    if name not in ACTIVE:
        assert active == count_parameters(model).total - sum(p.numel() for p in vision_parameters(model).values())
        return
    if name == "gpt-oss-20b":  # its authors do not count the embedding
        active -= sum(p.numel() for p in lm_head(model).parameters())
    assert active / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)
