"""--profile-steps: a trace of torch's profiler over some steps of each rank, and a memory snapshot on a GPU."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.phases import RANGE

log = logging.getLogger(__name__)

FOLDER = "profile"  # in the output directory
SUMMARY = "summary.json"  # of rank 0
_LONGEST = 30  # operations in the summary
_MOST_ALLOCATIONS = 200_000  # events of a memory snapshot


class StepProfiler:
    """`with profiler(step): ...` around each step."""

    def __init__(self, steps: tuple[int, int], run: Path) -> None:
        """steps: the first and the last, counted from 1; (0, 0): none."""
        self._first, self._last = steps
        self._done = False  # the profile is written, or the run has resumed after its steps
        self._folder = run / FOLDER
        self._profile: profile | None = None

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Start before the first step and write after the last one; an error ends the trace unwritten."""
        if self._first <= step <= self._last and self._profile is None:
            self._start(step)
        elif self._last and step > self._last and not self._done:
            self._done = True
            log.warning("--profile-steps %d:%d: these steps were trained before", self._first, self._last)
        try:
            yield
        except BaseException:
            if self._stop() is not None and torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)
            raise
        if step == self._last and (found := self._stop()) is not None:
            self._write(found)

    def _start(self, step: int) -> None:
        self._first = step  # of a resumed run
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._profile = profile(
            activities=supported_activities(), record_shapes=True, profile_memory=True, acc_events=True
        )
        self._profile.start()

    def _stop(self) -> profile | None:
        found, self._profile = self._profile, None
        if found is not None:
            found.stop()
        return found

    def _write(self, found: profile) -> None:
        """Write the files of this rank. Collective: an error of one rank is raised on all."""
        self._done = True
        name = f"rank{dist.get_rank()}_step{self._first}-{self._last}"
        with raise_on_all_ranks(ConfigError, f"--profile-steps: {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}_memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            if dist.get_rank() == 0:
                summary = {"steps": [self._first, self._last], **summarize(found)}
                (self._folder / SUMMARY).write_text(json.dumps(summary, indent=1))
        log.info("profile of steps %d to %d: %s", self._first, self._last, self._folder)


def summarize(found: profile) -> dict[str, object]:
    """Return the time of the phases, and of the operations that take longest by themselves. [s]"""
    averages = found.key_averages()
    on_device = ProfilerActivity.CUDA in found.activities
    phases = {  # on a device each range is listed a second time, from its first kernel on
        e.key: e.cpu_time_total / 1e6 for e in averages if e.key.startswith(RANGE) and e.device_type == DeviceType.CPU
    }
    clock = "device" if on_device else "cpu"
    operations = [
        {"name": e.key, "calls": e.count, "seconds": getattr(e, f"self_{clock}_time_total") / 1e6}
        for e in averages
        if not e.is_user_annotation and (e.device_type != DeviceType.CPU or not on_device)  # kernels, not their calls
    ]
    operations.sort(key=lambda row: -row["seconds"])
    return {"clock": clock, "phases": phases, "operations": operations[:_LONGEST]}
