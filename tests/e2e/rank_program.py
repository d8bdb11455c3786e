"""`python -m tests.e2e.rank_program <what>`: a rank that meets one fate, for the tests of the launch.

OPTIONS in the environment holds more options, as JSON; ONCE the name of a file: a fate that finds it there is spared.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import CheckpointError, FsdptrainError
from fsdptrain.launch.ranks import run_as_rank
from fsdptrain.launch.rounds import start_ranks


def meet(fate: str) -> None:
    rank = int(os.environ["RANK"])
    fate = "fine" if _is_spared(rank) else fate
    total = torch.ones(())
    dist.all_reduce(total)
    if fate == "fine" and rank == 0:
        sys.stdout.write(f"{int(total)} ranks, {os.environ['OMP_NUM_THREADS']} threads\n")
    if (fate == "mendable" and rank == 1) or fate == "everyone":
        raise CheckpointError("--hf-checkpoint x holds no config.json")
    if fate == "bug" and rank == 1:
        raise ZeroDivisionError("a bug")
    if fate == "aborted" and rank == 0:  # as a watchdog in C++ does, once another rank has raised
        failures = Path(os.environ["FSDPTRAIN_FAILURES"])
        while not list(failures.glob("rank*.json")):
            time.sleep(0.001)
        os.abort()
    if fate == "aborted":
        raise ZeroDivisionError("a bug")
    if fate == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "silent" and rank == 1:
        os._exit(9)
    if fate == "deaf" and rank == 1:  # who watches it does not hear any more, not even that it should end
        os.kill(os.getppid(), signal.SIGSTOP)
        raise ZeroDivisionError("a bug")
    if fate == "talks":
        sys.stdout.write(f"rank {rank} says\n")
        sys.stderr.write(f"rank {rank} warns\n")
    if fate == "interrupted":
        sys.stdout.write(f"ready {os.getpid()}\n")
        sys.stdout.flush()
        time.sleep(60)
    dist.barrier()  # those who are left wait here


def _is_spared(rank: int) -> bool:
    """Fates that are met once: whether this was before."""
    marker = Path(os.environ.get("ONCE", os.devnull))
    met = marker.is_file()
    dist.barrier()
    if rank == 0 and "ONCE" in os.environ:
        marker.touch()
    dist.barrier()
    return met


def main() -> int:
    if "RANK" in os.environ:
        return run_as_rank(Config(hf_checkpoint="unused", dist_timeout=60), lambda: meet(sys.argv[1]))
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    nodes = {"nnodes": 2, "node_rank": int(sys.argv[2]), "rdzv_endpoint": sys.argv[3]} if len(sys.argv) > 3 else {}
    config = Config(hf_checkpoint="unused", **{"dist_timeout": 60, **nodes, **options})
    try:
        return start_ranks(config, sys.argv[1:], nproc=1 if nodes else 2, module="tests.e2e.rank_program")
    except FsdptrainError as error:
        sys.stderr.write(f"fsdptrain: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
