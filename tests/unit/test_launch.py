"""Of several errors the cause is shown, not its echoes; and what was started must be what the flags say."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, DataError, RankError
from fsdptrain.launch.failures import read_failures
from fsdptrain.launch.ranks import distributed, failure_of


def test_the_cause_comes_before_its_echoes_and_before_later_errors(tmp_path):
    cause = failure_of(DataError("--prompt-data x is empty"), 2)
    for failure in (
        replace(failure_of(RankError("rank 2: --prompt-data x is empty"), 0), time=cause.time - 1),
        replace(failure_of(RuntimeError("connection lost"), 1), time=cause.time + 1),
        cause,
    ):
        failure.write(tmp_path)
    assert [failure.rank for failure in read_failures(tmp_path)] == [2, 1, 0]
    assert read_failures(tmp_path)[0] == cause


def test_a_process_alone_has_a_group_that_ends_with_it():
    with distributed(Config(hf_checkpoint="x")):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        with distributed(Config(hf_checkpoint="x")):
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"nproc_per_node": 4}, "--nproc-per-node 4 does not fit the 1 processes that were started here"),
        ({"nnodes": 2, "rdzv_endpoint": "h:1"}, "--nnodes 2 does not fit the 1 machines that were started"),
        ({"fsdp_replicate_size": 2}, "--fsdp-replicate-size 2 must divide the number of processes, 1"),
    ],
)
def test_processes_that_do_not_fit_are_refused(values, line):
    with pytest.raises(ConfigError, match=line), distributed(Config(hf_checkpoint="x", **values)):
        pass
    assert not dist.is_initialized()
