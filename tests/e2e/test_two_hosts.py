"""Two hosts and one command on each: a cut cable ends both in time, and what is started again goes on."""

import json
import signal
import time

import pytest

from tests.e2e.command import TINY_RUN
from tests.e2e.two_hosts import ADDRESSES, two_hosts

pytestmark = pytest.mark.slow
SILENCE = 8  # [s]
ENDS = SILENCE + 10 + 5  # [s] and what ranks and those who watch them get to end by themselves
BUSY = 15  # [s] of a machine that has other things to do


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


def start(hosts, argv, variables=None):
    launch = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
    waits = ["--node-timeout", str(SILENCE), "--dist-timeout", "300"]
    return [
        hosts.start(node, ["fsdptrain", *argv, *launch, *waits, "--node-rank", str(node)], variables)
        for node in range(2)
    ]


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").is_file() else []
    return {row["step"]: row for row in map(json.loads, lines) if "reward/mean" in row}


def messages(err):
    """Without what rank 0 says of its model."""
    lines = err.splitlines()
    return [line for line in lines if not line.startswith(("memory to load", "layout: ", "prompts of a group: "))]


def newest(folder):
    steps = [int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*")]
    return max(steps, default=0)


def test_a_cut_cable_ends_both_hosts_and_the_next_run_goes_on_and_outlives_a_killed_rank(hosts, checkpoint, tmp_path):
    folder, marker = tmp_path / "run", tmp_path / "killed"
    argv = [*TINY_RUN, "--hf-checkpoint", str(checkpoint), "--output-dir", str(folder), "--save-interval", "1"]
    argv += ["--eval-interval", "1000", "--no-export", "--reward", "tests.e2e.rewards:killed_once"]
    variables = {"KILLED": str(marker)}
    marker.touch()

    machines = start(hosts, [*argv, "--num-rollout", "1000"], variables)
    deadline = time.monotonic() + 240
    while newest(folder) < 2 and time.monotonic() < deadline and all(m.poll() is None for m in machines):
        time.sleep(0.05)
    hosts.cut()
    cut = time.monotonic()
    outputs = [machine.communicate(timeout=ENDS + BUSY) for machine in machines]
    assert time.monotonic() - cut < ENDS + BUSY
    for machine, (out, err), other in zip(machines, outputs, ("node 1", f"node 0 ({ADDRESSES[0]})"), strict=True):
        assert (machine.returncode, out) == (2, "")
        (line,) = messages(err)
        assert line.startswith(f"fsdptrain: {other}")
        assert line.endswith(f" has not answered for {SILENCE} s (--node-timeout)")

    hosts.mend()
    marker.unlink()
    before, reached = rows(folder), newest(folder)
    machines = start(hosts, [*argv, "--num-rollout", str(reached + 4), "--max-restarts", "1"], variables)
    outputs = [machine.communicate(timeout=240) for machine in machines]
    assert marker.exists()
    for machine, (out, err) in zip(machines, outputs, strict=True):
        assert (machine.returncode, out) == (0, "")
        (line,) = messages(err)
        assert line.startswith("fsdptrain: node 1 (")
        assert "rank 1 was killed by SIGKILL" in line
        assert line.endswith("; restart 1 of 1")
    after = rows(folder)
    assert sorted(after) == list(range(1, reached + 5))
    assert reached >= 2
    assert {step: after[step] for step in range(1, reached + 1)} == {s: before[s] for s in range(1, reached + 1)}


def test_with_restarts_both_hosts_go_on_by_themselves_when_a_cut_cable_is_mended(hosts, checkpoint, tmp_path):
    folder = tmp_path / "run"
    argv = [*TINY_RUN, "--hf-checkpoint", str(checkpoint), "--output-dir", str(folder), "--save-interval", "1"]
    argv += ["--eval-interval", "1000", "--no-export", "--max-restarts", "1", "--num-rollout", "400"]
    machines = start(hosts, argv)
    deadline = time.monotonic() + 240
    while newest(folder) < 2 and time.monotonic() < deadline and all(m.poll() is None for m in machines):
        time.sleep(0.05)
    hosts.cut()
    time.sleep(ENDS)
    reached = newest(folder)
    assert [machine.poll() for machine in machines] == [None, None]
    hosts.mend()
    while newest(folder) < reached + 2 and time.monotonic() < deadline and all(m.poll() is None for m in machines):
        time.sleep(0.05)
    machines[0].send_signal(signal.SIGTERM)
    for machine, other in zip(machines, ("node 1", f"node 0 ({ADDRESSES[0]})"), strict=True):
        _, err = machine.communicate(timeout=60)
        first = messages(err)[0]
        assert first.startswith(f"fsdptrain: {other}")
        assert first.endswith(f" has not answered for {SILENCE} s (--node-timeout); restart 1 of 1")
    found = sorted(rows(folder))
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= reached + 2 > 3


def test_hosts_that_differ_are_refused_before_anything_is_loaded(hosts, tmp_path):
    argv = ["fsdptrain", "--hf-checkpoint", str(tmp_path / "nowhere"), "--nnodes", "2", "--nproc-per-node", "1"]
    argv += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
    machines = [hosts.start(n, [*argv, "--node-rank", str(n), "--lr", f"{n + 1}e-6"]) for n in range(2)]
    for machine in machines:
        out, err = machine.communicate(timeout=60)
        assert (machine.returncode, out) == (2, "")
        assert err.startswith("fsdptrain: machines of one run must be alike: --lr is 1e-06 on node 0 (")
        assert " and 2e-06 on node 1 (" in err
        assert err.count("\n") == 1
