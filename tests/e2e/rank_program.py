"""`python -m tests.e2e.rank_program <fate> ...`: two ranks that meet one fate after each restart, the next one."""

import os
import signal
import sys
import time

from fsdptrain.launch.parent import exit_with_parent


def meet(fates: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from fsdptrain.errors import CheckpointError

    rank, fate = int(os.environ["RANK"]), fates[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    total = torch.ones(())
    dist.all_reduce(total)
    if fate == "talk":
        sys.stdout.write(f"rank {rank}: {int(total)} ranks, {os.environ['OMP_NUM_THREADS']} threads\n")
        sys.stderr.write(f"rank {rank} warns\n")
    if fate == "refuse together" or (fate == "refuse" and rank == 1):
        raise CheckpointError("--hf-checkpoint x holds no config.json")
    if fate == "fail" and rank == 1:
        raise ZeroDivisionError("a bug")
    if fate == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "exit" and rank == 1:
        os._exit(9)
    if fate == "wait":
        sys.stdout.write(f"ready {os.getpid()}\n")
        sys.stdout.flush()
        time.sleep(60)
    dist.barrier()  # where the other rank waits


def main() -> int:
    from fsdptrain.config import Config

    config = Config(hf_checkpoint="unused", dist_timeout=60)
    if "RANK" in os.environ:
        from fsdptrain.launch.ranks import run_as_rank

        return run_as_rank(config, int(os.environ["RANK"]), lambda: meet(sys.argv[1:]))
    from fsdptrain.errors import FsdptrainError
    from fsdptrain.launch.local import start_ranks

    try:
        return start_ranks(sys.argv[1:], nproc=2, module="tests.e2e.rank_program")
    except FsdptrainError as error:
        sys.stderr.write(f"fsdptrain: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    exit_with_parent()
    sys.exit(main())
