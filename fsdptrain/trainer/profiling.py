"""--profile-steps: a trace of torch's profiler over some steps of each rank, and a memory snapshot on a GPU."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import profile, supported_activities

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = "profile"  # in the output directory
_MOST_ALLOCATIONS = 200_000  # events of a memory snapshot


class StepProfiler:
    """`with profiler(step): ...` around each step; an error ends the trace unwritten."""

    def __init__(self, steps: tuple[int, int], run: Path) -> None:
        """steps: the first and the last, counted from 1."""
        self._first, self._last = steps
        self._folder = run / FOLDER
        self._profile: profile | None = None

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if self._first <= step <= self._last and self._profile is None:
            self._first = step  # of a resumed run
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
            self._profile = profile(
                activities=supported_activities(), record_shapes=True, profile_memory=True, acc_events=True
            )
            self._profile.start()
        is_over, found = True, self._profile
        try:
            yield
            is_over = step == self._last
        finally:
            if is_over and found is not None:
                self._profile = None
                found.stop()
        if is_over and found is not None:
            self._write(found)

    def _write(self, found: profile) -> None:
        """Write the files of this rank. Collective: an error of one rank is raised on all."""
        name = f"rank{dist.get_rank()}_step{self._first}-{self._last}"
        with raise_on_all_ranks(ConfigError, f"--profile-steps: {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}_memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profile of steps %d to %d: %s", self._first, self._last, self._folder)
