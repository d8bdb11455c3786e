"""A plan of transformers that leaves a rank with a part of a gradient ends the run at its start, by the parameter."""

import re

import pytest

from fsdptrain.backends.fsdp import FSDPBackend
from fsdptrain.errors import ConfigError
from fsdptrain.models import split_plan
from fsdptrain.testing import spawn
from tests import families, zoo

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


@pytest.mark.parametrize("forgets", [True, False])
def test_a_gradient_of_which_each_rank_has_a_part_is_found_at_the_start(tmp_path, forgets: bool):
    families.save("phi", tmp_path, qk_layernorm=True)
    said = spawn(2, said_at_start, str(tmp_path), forgets)
    assert said[0] == said[1]
    assert (
        bool(re.search(r"--tensor-parallel-size 2: .* a part of the gradient of \S+[qk]_layernorm", said[0])) == forgets
    )
    assert forgets or not said[0]


def test_a_plan_that_forgets_nothing_is_taken(tmp_path):
    zoo.build("qwen3").save_pretrained(tmp_path)
    assert spawn(2, said_at_start, str(tmp_path), True) == ["", ""]
