"""Plans that leave partial gradients are refused, by parameter; meshes of other families. Laws: test_laws.py."""

import re
from pathlib import Path

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.features.model_parallel import plan as split_plan
from fsdptrain.features.model_parallel.plan import IS_NEW
from fsdptrain.fsdp.backend import FSDPBackend
from tests import families
from tests.sweep import sweep
from tests.testing import spawn

from .test_fsdp_backend import config

NOTHING = re.compile(r"(?!)")


def errors_at_start(folder: Path) -> dict[str, str]:
    """For each case; with `forgets` the process does not know by name which norms plans leave out."""
    known, found = split_plan._NORM_OF_HEADS, {}
    for case, (_, _, forgets, _) in CASES.items():
        split_plan._NORM_OF_HEADS = NOTHING if forgets else known
        try:
            FSDPBackend(config(str(folder / case), tensor_parallel_size=2), total_steps=1)
            found[case] = ""
        except ConfigError as error:
            found[case] = str(error)
    return found


PART = r"--tensor-parallel-size 2: .* a part of the gradient of \S+[qk]_layernorm"
CASES = {
    "its norms are not known": ("phi", {"qk_layernorm": True}, True, PART),
    "its norms are known": ("phi", {"qk_layernorm": True}, False, ""),
    "a plan that forgets nothing": ("qwen3", {}, True, ""),
    "a model of which all is split": ("olmo", {}, True, ""),
}


def test_a_plan_that_leaves_a_rank_with_a_part_of_a_gradient_is_found_at_the_start(tmp_path: Path) -> None:
    for case, (family, changes, _, _) in CASES.items():
        families.save(family, tmp_path / case, **changes)
    for found in spawn(2, errors_at_start, tmp_path):
        for case, (_, _, _, words) in CASES.items():
            assert re.search(words, found[case]) if words else not found[case], case


WITHOUT_PLANS = {} if IS_NEW else {"nemotron_h": "no plan that splits", "granitemoe": "splits 0% of the layers"}
SWEPT = {
    "expert": {name: "" for name in ("mixtral", "olmoe", "dots1", "hunyuan_v1_moe", "nemotron_h", "lfm2_moe")},
    "tensor": {name: "" for name in ("llama", "gemma4_text", "olmo2", "granitemoe")}
    | {"falcon_h1": "splits 0% of the layers", "gemma3n_text": "drops activations by the mean"},
}


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", SWEPT)
def test_other_families_are_exact_or_refused_by_one_line_and_nothing_crashes(tmp_path, mesh):
    for row in sweep([*SWEPT[mesh]], tmp_path, mesh=mesh):
        words = WITHOUT_PLANS.get(row.name, SWEPT[mesh][row.name])
        assert not row.crash, row.name
        assert "\n" not in row.refusal
        assert words in row.refusal
        assert bool(row.refusal) is bool(words), row.refusal
        assert row.refusal or (row.exact and row.exported and row.loaded and row.streamed), row.name
        assert bool(row.beside) is (row.name == "granitemoe" and not words)  # its experts are dealt beside
