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
        ({"RANK": "abc"}, "RANK=abc in the environment must be an integer from 0 to 1"),
        ({"RANK": "9" * 5000}, "RANK=9"),
        ({"RANK": "2"}, "RANK=2 in the environment must be an integer from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment must be an integer of at least 1"),
        ({"WORLD_SIZE": ""}, "RANK is set in the environment and WORLD_SIZE is not"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 in the environment must be an integer from 0 to 1"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 in the environment must be an integer from 1 to 2"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 in the environment must be an integer from 1 to 65535"),
    ],
)
def test_invalid_variables_are_one_line(changes, line):
    with pytest.raises(ConfigError) as caught:
        read_rank_variables(GOOD | changes)
    assert str(caught.value).startswith(line)
    assert "torchrun" in str(caught.value)
