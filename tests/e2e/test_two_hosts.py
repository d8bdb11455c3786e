"""Two hosts and one command on each: a cut cable ends both in time, and what is started again goes on."""

import json
import shutil
import signal
import time

import pytest

from fsdptrain import __version__
from tests.e2e.command import TINY_RUN
from tests.e2e.two_hosts import ADDRESSES, ROOT, two_hosts

pytestmark = pytest.mark.slow
SILENCE = 8  # [s]
ENDS = SILENCE + 10 + 5  # [s] and what ranks and those who watch them get to end by themselves
BUSY = 15  # [s] of a machine that has other things to do


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


def start(hosts, argv, variables=None, nodes=(0, 1)):
    launch = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
    waits = ["--node-timeout", str(SILENCE), "--dist-timeout", "300"]
    return [
        hosts.start(node, ["fsdptrain", *argv, *launch, *waits, "--node-rank", str(node)], variables) for node in nodes
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
    wait_for(folder, 2, machines)
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


def test_with_restarts_a_run_outlives_a_cut_cable_that_is_mended_and_a_machine_that_is_lost(
    hosts, checkpoint, tmp_path
):
    folder = tmp_path / "run"
    argv = [*TINY_RUN, "--hf-checkpoint", str(checkpoint), "--output-dir", str(folder), "--save-interval", "1"]
    argv += ["--eval-interval", "1000", "--no-export", "--max-restarts", "2", "--num-rollout", "1000"]
    machines = start(hosts, argv)
    wait_for(folder, 2, machines)
    hosts.cut()
    time.sleep(ENDS)
    reached = newest(folder)
    assert [machine.poll() for machine in machines] == [None, None]
    hosts.mend()
    wait_for(folder, reached + 2, machines)
    machines[1].send_signal(signal.SIGKILL)
    _, of_lost = machines[1].communicate(timeout=60)
    [machines[1]] = start(hosts, argv, nodes=[1])
    reached = newest(folder)
    wait_for(folder, reached + 2, machines)
    machines[0].send_signal(signal.SIGTERM)
    (_, of_first), (_, of_new) = (machine.communicate(timeout=60) for machine in machines)
    silent = f" has not answered for {SILENCE} s (--node-timeout); restart 1 of 2"
    ended = f"fsdptrain: node 0 ({ADDRESSES[0]}) was ended by SIGTERM"
    assert [line.endswith(silent) for line in messages(of_lost)] == [True]
    assert len(messages(of_first)) >= 2, of_first
    cut, lost = messages(of_first)[:2]
    assert (cut.startswith("fsdptrain: node 1 ("), cut.endswith(silent)) == (True, True)
    assert (lost.startswith("fsdptrain: node 1 ("), lost.endswith("; restart 2 of 2")) == (True, True)
    assert messages(of_new)[-1] == ended
    found = sorted(rows(folder))
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= reached + 2 > 5


def wait_for(folder, step, machines):
    """Until a checkpoint of `step` is there."""
    deadline = time.monotonic() + 240
    while newest(folder) < step and time.monotonic() < deadline and all(m.poll() is None for m in machines):
        time.sleep(0.05)
    assert newest(folder) >= step, [machine.poll() for machine in machines]


@pytest.mark.parametrize("what", ["an option", "the code"])
def test_hosts_that_differ_are_refused_before_anything_is_loaded(hosts, tmp_path, what):
    argv = ["fsdptrain", "--hf-checkpoint", str(tmp_path / "nowhere"), "--nnodes", "2", "--nproc-per-node", "1"]
    argv += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
    own = [["--node-rank", "0"], ["--node-rank", "1"]]
    variables = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    other = variables
    if what == "an option":
        own[1] += ["--lr", "2e-6"]
        named, differs = "--lr", ("1e-06", "2e-06")
    else:
        shutil.copytree(ROOT / "fsdptrain", tmp_path / "clone" / "fsdptrain")
        (tmp_path / "clone" / "fsdptrain" / "more.py").touch()
        other = variables | {"PYTHONPATH": str(tmp_path / "clone")}
        named, differs = "fsdptrain", (f"{__version__} (", f"{__version__} (")
    machines = [hosts.start(n, [*argv, *own[n]], (variables, other)[n]) for n in range(2)]
    for machine in machines:
        out, err = machine.communicate(timeout=60)
        assert (machine.returncode, out) == (2, "")
        assert err.startswith(f"fsdptrain: machines of one run must be alike: {named} is {differs[0]}")
        assert " on node 0 (" in err
        assert f" and {differs[1]}" in err
        assert " on node 1 (" in err
        assert err.count("\n") == 1
