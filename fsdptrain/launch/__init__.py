"""Process launch of a run.

    fsdptrain ...                    one device: trains in this process
    fsdptrain --nproc-per-node 8     starts `python -m fsdptrain` eight times on this machine (local.py)
    torchrun ... -m fsdptrain        ranks already started, on one or several machines: trains as one of them

All ranks train through `ranks.py`. The first error of any rank ends all of them and is reported once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdptrain.rank_variables import read_rank_variables
from fsdptrain.stages import stage

if TYPE_CHECKING:
    from fsdptrain.config import Config


def run(config: Config, argv: Sequence[str]) -> int:
    """Train on the processes given by `config.launch` and the environment. Returns the exit code.

    `argv` is the command line, which is passed to ranks started here.
    """
    from fsdptrain.launch.process import configure_logging, train

    variables = read_rank_variables()
    configure_logging(rank=variables.rank if variables else 0)
    if variables is not None:
        with stage("importing torch"):
            from fsdptrain.launch.ranks import run_as_rank

        return run_as_rank(config, variables.rank)
    nproc = config.launch.nproc_per_node
    if nproc is None:
        with stage("importing torch"):
            from fsdptrain.platform import device_count

            nproc = device_count()
    if nproc > 1:
        from fsdptrain.config import check_world_size

        check_world_size(config, nproc)
        from fsdptrain.launch.local import start_ranks

        return start_ranks(argv, nproc=nproc)
    return train(config)
