"""A tensor parallel plan that leaves partial gradients on a rank is refused at the start, by parameter."""

import re
from pathlib import Path

from fsdptrain.errors import ConfigError
from fsdptrain.features.model_parallel import plan as split_plan
from fsdptrain.fsdp.backend import FSDPBackend
from tests import families
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
