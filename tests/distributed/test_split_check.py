"""A plan of transformers that leaves a rank with a part of a gradient ends the run at its start, by the parameter."""

import re

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.features.model_parallel import plan as split_plan
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.testing import spawn
from tests import families

from .test_fsdp_backend import config

NOTHING = re.compile(r"(?!)")


def said_at_start(checkpoint: str, forgets: bool) -> str:
    """By a process that does not know by name which norms plans forget, or does."""
    if forgets:
        split_plan._NORM_OF_HEADS = NOTHING
    try:
        FSDPBackend(config(checkpoint, tensor_parallel_size=2), total_steps=1)
    except ConfigError as error:
        return str(error)
    return ""


PART = r"--tensor-parallel-size 2: .* a part of the gradient of \S+[qk]_layernorm"
CASES = {
    "its norms are not known": ("phi", {"qk_layernorm": True}, True, PART),
    "its norms are known": ("phi", {"qk_layernorm": True}, False, ""),
    "a plan that forgets nothing": ("qwen3", {}, True, ""),
    "a model of which all is split": ("olmo", {}, True, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_of_which_each_rank_has_a_part_is_found_at_the_start(tmp_path, case):
    family, changes, forgets, words = CASES[case]
    families.save(family, tmp_path, **changes)
    for said in spawn(2, said_at_start, str(tmp_path), forgets):
        assert re.search(words, said) if words else not said
