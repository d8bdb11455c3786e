"""`python -m tests.e2e.rank_program <what>`: a rank that meets one fate, for the tests of the launch."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.errors import CheckpointError, FsdptrainError
from fsdptrain.launch.ranks import run_as_rank
from fsdptrain.launch.rounds import start_ranks


def meet(fate: str) -> None:
    rank = int(os.environ["RANK"])
    total = torch.ones(())
    dist.all_reduce(total)
    if fate == "fine" and rank == 0:
        sys.stdout.write(f"{int(total)} ranks, {os.environ['OMP_NUM_THREADS']} threads\n")
    if (fate == "mendable" and rank == 1) or fate == "everyone":
        raise CheckpointError("--hf-checkpoint x holds no config.json")
    if fate == "bug" and rank == 1:
        raise ZeroDivisionError("a bug")
    if fate == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "silent" and rank == 1:
        os._exit(9)
    if fate == "interrupted":
        sys.stdout.write(f"ready {os.getpid()}\n")
        sys.stdout.flush()
        time.sleep(60)
    dist.barrier()  # those who are left wait here


def main() -> int:
    if "RANK" in os.environ:
        return run_as_rank(Config(hf_checkpoint="unused", dist_timeout=60), lambda: meet(sys.argv[1]))
    nodes = {"nnodes": 2, "node_rank": int(sys.argv[2]), "rdzv_endpoint": sys.argv[3]} if len(sys.argv) > 3 else {}
    config = Config(hf_checkpoint="unused", dist_timeout=60, **nodes)
    try:
        return start_ranks(config, sys.argv[1:], nproc=1 if nodes else 2, module="tests.e2e.rank_program")
    except FsdptrainError as error:
        sys.stderr.write(f"fsdptrain: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
