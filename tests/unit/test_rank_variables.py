"""Invalid variables of torchrun are refused in one line."""

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.rank_variables import read_rank_variables
from tests.testing import rank_variables

GOOD = rank_variables(1, 2, 29500)


def test_variables_are_read():
    assert read_rank_variables({}) is None
    ranks = read_rank_variables(GOOD)
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (1, 2, 1, 2)
    assert (ranks.master_addr, ranks.master_port, ranks.store_of_agent) == ("127.0.0.1", 29500, False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"RANK": "abc"}, "RANK=abc in the environment is not an integer"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=None in the environment is not an integer"),
        ({"RANK": "2"}, "RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR do not fit together"),
        ({"MASTER_ADDR": ""}, "RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR do not fit together"),
    ],
)
def test_invalid_variables_are_one_line(changes, line):
    with pytest.raises(ConfigError) as caught:
        read_rank_variables(GOOD | changes)
    assert str(caught.value).startswith(line)
    assert "torchrun" in str(caught.value)
