"""Processes: one in place, or one for each device of one or several machines, and how their errors end the run.

    fsdptrain ...                    one device: trains in this process
    fsdptrain --nproc-per-node 8     starts `python -m fsdptrain` eight times, on each machine of --nnodes
    torchrun ... -m fsdptrain        the ranks are there already: trains as one of them

An error of any rank ends all of them, on all machines, and is shown once on each, by the process that started them:

    this process    meets the other machines (meeting.py), starts rounds of ranks, judges (rounds.py); no torch in it
      agent         one round: torch's elastic agent (agent.py)
        ranks       train (ranks.py)
"""

import os
from collections.abc import Sequence

from fsdptrain.config import Config
from fsdptrain.config.checks import check_world_size


def run(config: Config, argv: Sequence[str]) -> int:
    """Train on all processes that `config.launch` asks for; the exit code. `argv` is what each of them is given."""
    from fsdptrain.launch import rounds

    launch = config.launch
    if "RANK" in os.environ:
        from fsdptrain.launch.ranks import run_as_rank

        return run_as_rank(config)
    nproc = launch.nproc_per_node or _number_of_devices()
    if nproc * launch.nnodes > 1 or launch.max_restarts or launch.log_rank_dir:
        check_world_size(config, nproc * launch.nnodes)
        return rounds.start_ranks(config, argv, nproc=nproc)
    from fsdptrain.launch.ranks import run_alone  # torch: only now

    return run_alone(config)


def _number_of_devices() -> int:
    from fsdptrain.platform import device_count  # torch: only now

    return device_count()
