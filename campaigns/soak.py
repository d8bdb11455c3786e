"""A tiny run for hours: does it hold more memory, files or threads at its end than at its beginning?

Law: the first 10 % of the time are warm-up. The rest is cut into tenths. From the first of these tenths to the last,

- the mean of the anonymous memory of all processes grows by less than 2 %. It is what malloc and mmap hold; pages of
  files are not in it. The process of this run has about 340 MiB, so that 2 % are 7 MiB,
- the numbers of file descriptors, threads and files in the output folder, and the shared memory, do not grow. The least
  of each tenth is compared, because a checkpoint in the background is a thread and some files for a moment,

and the run has not ended. metrics.jsonl, samples.jsonl and timeline.jsonl grow: they are the record of the run.

    python -m campaigns.soak --minutes 120
    python -m campaigns.soak --minutes 120 --ranks 2
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from campaigns.processes import MARK, memory_of, processes_of, survivors
from campaigns.report import Report
from tests.e2e.command import TINY_RUN
from tests.testing import save_tiny_checkpoint

MAX_GROWTH = 0.02
CONSTANT = ("fds", "threads", "shared_mib", "files")
RUN = [
    *TINY_RUN,
    *("--num-rollout", "10000000", "--lr", "1e-5", "--steps-per-rollout", "2", "--log-num-samples", "2"),
    *("--eval-interval", "50", "--save-interval", "25", "--keep-last", "2", "--async-save"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two looks")
    options = parser.parse_args()
    report = Report("soak" if options.ranks == 1 else f"soak_{options.ranks}_ranks", " ".join((__doc__ or "").split()))
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        samples = watch(Path(name), options.minutes * 60, options.every, options.ranks, report)
    judge(samples, report)
    report.write(samples=[{key: round(value, 2) for key, value in sample.items()} for sample in samples])
    return report.finish()


def watch(scratch: Path, seconds: float, every: float, ranks: int, report: Report) -> list[dict[str, float]]:
    """Start the run, look at it for `seconds`, and end it by SIGTERM."""
    checkpoint, folder, mark = save_tiny_checkpoint(scratch / "model"), scratch / "run", f"soak-{os.getpid()}"
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder), *RUN, "--nproc-per-node", str(ranks)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
    samples: list[dict[str, float]] = []
    with (scratch / "log").open("w") as log:
        run = subprocess.Popen([sys.executable, "-m", "fsdptrain", *argv], env=variables, stdout=log, stderr=log)
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < seconds and run.poll() is None:
                time.sleep(every)
                if (folder / "metrics.jsonl").exists() and run.poll() is None:
                    samples.append({"seconds": time.monotonic() - begin, **look(mark, folder)})
                    print("  ".join(f"{key}={value:.1f}" for key, value in samples[-1].items()), flush=True)
        finally:
            ended = run.poll()
            run.send_signal(signal.SIGTERM)
            run.wait(60)
    last = (scratch / "log").read_text().strip().splitlines()[-1:]
    report.add("alive", None if ended is None else f"ended with {ended}: {last}", steps=int(samples[-1]["steps"]))
    left = survivors(mark)
    report.add("no process left", f"{left}" if left else None)
    return samples


def look(mark: str, folder: Path) -> dict[str, float]:
    """Return sums over all processes of the run."""
    pids = processes_of(mark)
    memory = [memory_of(pid) for pid in pids]
    with (folder / "metrics.jsonl").open("rb") as file:
        steps = sum(b'"loss/total"' in line for line in file)
    return {
        "steps": steps,
        "processes": len(pids),
        "anonymous_mib": sum(one["RssAnon"] for one in memory) / 1024,
        "rss_mib": sum(one["VmRSS"] for one in memory) / 1024,
        "shared_mib": sum(one["RssShmem"] for one in memory) / 1024,
        "machine_shm_mib": _used("/dev/shm") / 2**20,  # of all programs, for information
        "fds": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        "files": sum(path.is_file() for path in folder.rglob("*")),
    }


def _used(folder: str) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def judge(samples: list[dict[str, float]], report: Report) -> None:
    """Compare the first tenth after the warm-up with the last one."""
    kept = samples[len(samples) // 10 :]
    tenth = max(1, len(kept) // 10)
    first, last = kept[:tenth], kept[-tenth:]
    before, after = (statistics.fmean(one["anonymous_mib"] for one in part) for part in (first, last))
    steps = last[-1]["steps"] - first[0]["steps"]
    report.add(
        "anonymous memory",
        None if after < before * (1 + MAX_GROWTH) else f"grew by {after / before - 1:.1%}",
        first_mib=round(before, 1),
        last_mib=round(after, 1),
        growth_percent=round(100 * (after / before - 1), 2),
        bytes_per_step=round((after - before) * 2**20 / max(1.0, steps)),
    )
    for name in CONSTANT:
        begin, end = (round(min(one[name] for one in part), 2) for part in (first, last))
        report.add(name, None if end <= begin else f"{begin} became {end}", first=begin, last=end)


if __name__ == "__main__":
    sys.exit(main())
