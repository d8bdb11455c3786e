"""Splits that a model forbids, and meshes of other families. What a mesh computes and saves: test_laws.py."""

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.backend import FSDPBackend
from tests.families import tiny
from tests.sweep import sweep
from tests.testing import spawn

from .test_fsdp_backend import config

REFUSED = {  # other refusals: tests/unit, on meta models
    "packed experts": ("qwen3_moe", {"tensor_parallel_size": 2}, "shard the experts with --expert-parallel-size"),
    "no experts": ("qwen3", {"expert_parallel_size": 2}, "no plan that splits experts"),
    "a state": ("qwen3_next", {"context_parallel_size": 2}, "carries a state along the sequence"),
}


def refused(cases: list[tuple[str, dict]]) -> list[str]:
    lines = []
    for checkpoint, values in cases:
        with pytest.raises(ConfigError) as raised:
            FSDPBackend(config(checkpoint, **values), total_steps=1)
        lines.append(str(raised.value))
    return lines


def test_a_split_that_the_model_forbids_is_refused_in_one_line_on_every_rank(tmp_path):
    for family, _, _ in REFUSED.values():
        tiny(family).save_pretrained(tmp_path / family)
    cases = [(str(tmp_path / family), values) for family, values, _ in REFUSED.values()]
    for lines in spawn(2, refused, cases):
        for line, (_, values, words) in zip(lines, REFUSED.values(), strict=True):
            assert words in line
            assert "\n" not in line
            assert next(iter(values)).replace("_", "-") in line


SWEPT = {
    "expert": {name: "" for name in ("mixtral", "olmoe", "dots1", "hunyuan_v1_moe", "nemotron_h", "lfm2_moe")},
    "tensor": {name: "" for name in ("llama", "gemma4_text", "olmo2", "granitemoe")}
    | {"falcon_h1": "splits 0% of the layers", "gemma3n_text": "drops activations by the mean"},
}


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", SWEPT)
def test_other_families_are_exact_or_refused_by_one_line_and_nothing_crashes(tmp_path, mesh):
    for row in sweep([*SWEPT[mesh]], tmp_path, mesh=mesh):
        words = SWEPT[mesh][row.name]
        assert not row.crash, row.name
        assert "\n" not in row.refusal
        assert words in row.refusal
        assert bool(row.refusal) is bool(words), row.refusal
        assert row.refusal or (row.exact and row.exported and row.loaded and row.streamed), row.name
        assert bool(row.beside) is (row.name == "granitemoe")  # its experts are dealt beside
