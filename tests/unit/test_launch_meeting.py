"""Machines that meet: laws of what each of them is told. A machine is a thread here, its line a real connection."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from fsdptrain.errors import ConfigError, RankError
from fsdptrain.launch.addresses import interface_of, own_address
from fsdptrain.launch.failures import Level, Report
from fsdptrain.launch.meeting import Guest, Host, Terms, meet
from fsdptrain.testing import free_port


def terms(nnodes, **changes):
    common = Terms(0, nnodes, ("127.0.0.1", free_port()), 20.0, 10.0, 0, "launch", "host0:1", {"--lr": "1e-06"})
    common = replace(common, **changes)
    return [replace(common, node=node, name=f"host{node}:{node + 1}") for node in range(nnodes)]


def at_once(calls):
    """What each call returns or raises."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def run(terms_of_one, reports):
    """One machine through a round for each of `reports`; what it was told in the end."""
    meeting = meet(terms_of_one)
    try:
        for report in reports:
            go = meeting.gather()
            if report is None:
                while not meeting.tick() and any(reports):
                    pass
            verdict = meeting.settle(report)
            if verdict is None or not verdict.again:
                return go, verdict
        raise AssertionError("one round too many")
    finally:
        meeting.leave("has ended")


def test_machines_begin_the_same_round_and_all_end_well():
    for (go, verdict), node in zip(at_once([lambda t=t: run(t, [None]) for t in terms(3)]), range(3), strict=True):
        assert verdict is None, node
        assert (go.round, go.launch, go.address) == (0, "launch", "127.0.0.1")
    assert interface_of("127.0.0.1") == "lo"


@pytest.mark.parametrize("node", [0, 1, 2])
def test_the_error_of_one_machine_is_the_verdict_on_all_before_those_of_ranks_that_miss_it(node):
    own, lost = Report("rank 3 failed", 1), Report("rank 0 failed", 1, Level.LOST)

    def machine(t):
        time.sleep(0.2 * (t.node == node))  # the cause may come last
        return run(t, [own if t.node == node else lost])

    for _, verdict in at_once([lambda t=t: machine(t) for t in terms(3)]):
        assert verdict.cause == replace(own, text=f"node {node} (host{node}): rank 3 failed")
        assert not verdict.again


def test_restarts_are_counted_by_all_alike():
    failure = Report("rank 1 failed", 1)
    plans = [[failure, failure, failure], [None, None, None]]
    results = at_once([lambda t=t: run(t, plans[t.node]) for t in terms(2, max_restarts=2)])
    assert [go.round for go, _ in results] == [2, 2]
    assert len({go.endpoint for go, _ in results}) == 1


def test_what_a_user_must_mend_is_not_tried_again():
    plans = [[None], [Report("--lr is bad", again=False)]]
    for go, verdict in at_once([lambda t=t: run(t, plans[t.node]) for t in terms(2, max_restarts=2)]):
        assert (go.round, verdict.again) == (0, False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"description": {"--lr": "1e-05"}}, "--lr is 1e-06 on node 0 (host0) and 1e-05 on node 2 (host2)"),
        ({"description": {"--lr": "1e-06", "torch": "1"}}, "torch is None on node 0 (host0) and 1 on node 2 (host2)"),
        ({"node": 1}, "--node-rank 1 is given to two machines"),
    ],
)
def test_machines_that_do_not_fit_are_refused_in_the_same_words_everywhere(changes, line, monkeypatch):
    monkeypatch.setattr("fsdptrain.launch.meeting._LATE", 60.0)
    first, second, third = terms(3)
    found = at_once([lambda t=t: run(t, [None]) for t in (first, second, replace(third, **changes))])
    assert {type(error) for error in found} == {ConfigError}
    assert len({str(error) for error in found}) == 1
    assert line in str(found[0])


def test_machines_that_do_not_come_are_named_to_those_that_did():
    first, second, _ = terms(3, meets_s=5.0)
    found = at_once([lambda t=t: run(t, [None]) for t in (first, second)])
    assert {type(error) for error in found} == {RankError}
    assert {"there is no node 2." in str(error) for error in found} == {True}


def test_a_machine_alone_says_whom_it_does_not_reach():
    _, second = terms(2, meets_s=1.0)
    with pytest.raises(RankError, match=r"did not meet at --rdzv-endpoint 127.0.0.1:\d+ within 1 s"):
        meet(second).gather()


@pytest.mark.parametrize("silent", [0, 1])
def test_a_machine_that_falls_silent_is_lost_and_its_successor_takes_part(silent):
    saved = ["step_00000002"]
    first, second = terms(2, max_restarts=1, silence_s=5.0, newest=lambda: saved[-1])
    both = [first, second]

    def survivor():
        meeting = meet(both[1 - silent])
        meeting.gather()
        while not meeting.tick():
            pass
        verdict = meeting.settle(Report("rank 0 failed", 1, Level.LOST))
        gone.set()
        rounds = meeting.gather().round, meeting.settle(None)
        meeting.leave("has ended")
        return verdict, rounds

    def dies():
        meeting = meet(both[silent])
        meeting.gather()
        saved.append("step_00000004")
        assert gone.wait(120)
        if isinstance(meeting, Host):
            meeting._server.close()
        for line in meeting._lines.values() if isinstance(meeting, Host) else [meeting._line]:
            line.socket.close()  # as a machine that is gone says nothing any more, neither that it leaves
        successor = meet(replace(both[silent], name=f"new{silent}:9", launch="another"))
        go = successor.gather()
        settled = successor.settle(None)
        successor.leave("has ended")
        return go, settled

    gone = threading.Event()
    (verdict, (round, settled)), (go, successor) = at_once([survivor, dies])
    assert (round, go.round, go.launch) == (1, 1, "launch")  # though the one who has counted may be gone
    assert (go.before, go.saved) == ("step_00000002", True)
    assert verdict.again
    assert verdict.cause.text.startswith(f"node {silent} (")
    assert verdict.cause.text.endswith("has not answered for 5 s (--node-timeout)")
    assert settled is None
    assert successor is None


def test_an_interrupted_machine_says_so():
    first, second = terms(2)

    def interrupted():
        guest = Guest(second)
        guest.gather()
        guest.leave("was ended by SIGTERM")

    def stays():
        host = Host(first)
        host.gather()
        while not host.tick():
            pass
        verdict = host.settle(Report("rank 0 failed", 1, Level.LOST))
        host.leave("has ended")
        return verdict

    verdict, _ = at_once([stays, interrupted])
    assert verdict.cause.text == "node 1 (host1) was ended by SIGTERM"


def test_a_stranger_at_the_port_disturbs_nobody():
    both = terms(2)

    def stranger():
        for _ in range(50):
            try:
                with socket.create_connection(both[0].endpoint) as sock:
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except ConnectionRefusedError:
                time.sleep(0.02)

    def late():
        time.sleep(0.5)
        return run(both[1], [None])

    (_, verdict), (_, other), _ = at_once([lambda: run(both[0], [None]), late, stranger])
    assert (verdict, other) == (None, None)


def test_node_0_listens_at_the_address_of_the_endpoint_and_nowhere_else(capsys):
    (first, _), others = terms(2), {a.address for every in psutil.net_if_addrs().values() for a in every}
    host = Host(first)
    assert host._server.getsockname()[0] == "127.0.0.1"
    for address in others - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.socket() as sock:
            sock.connect((address, first.endpoint[1]))
    host.leave("has ended")
    assert capsys.readouterr().err == ""


def test_a_name_that_is_no_address_of_this_machine_is_said(capsys):
    assert (own_address("127.0.0.1"), own_address("localhost")) == ("127.0.0.1", "127.0.0.1")
    assert own_address("192.0.2.1") is None
    assert own_address("there.is.no.such.host.invalid") is None
    (first, _) = terms(2, endpoint=("192.0.2.1", free_port()))
    host = Host(first)
    host.leave("has ended")
    assert "192.0.2.1" in (line := capsys.readouterr().err)
    assert "it listens at all that it has" in line
    assert line.count("\n") == 1


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, _ = terms(2, endpoint=("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(ConfigError, match="node 0 cannot listen there"):
            meet(first)


TOLD = b'{"what": "ready", "node": 1, "name": "x", "alike": {}, "told": {"round": "7"}}\n'


SAID = [b"GET / HTTP/1.1\r\n\r\n", b'{"what": "hi"}\n', TOLD, b"[1]\n", b"", b"x" * (1 << 21)]


@pytest.mark.parametrize("said", SAID)
def test_what_a_stranger_says_at_the_port_changes_nothing(said):
    first, second = terms(2)

    def stranger():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(first.endpoint, timeout=5) as line:
                    line.sendall(said)
                return
            except OSError:  # not there yet, or it has hung up
                time.sleep(0.01)

    def guest():
        stranger()
        return run(second, [None])

    for go, verdict in at_once([lambda: run(first, [None]), guest]):
        assert (go.round, verdict) == (0, None)


def test_who_comes_during_a_round_costs_no_time():
    first, second = terms(2)

    def host():
        meeting = meet(first)
        try:
            meeting.gather()
            socket.create_connection(first.endpoint, timeout=5).close()
            begin = time.monotonic()
            ticks = 0
            while time.monotonic() - begin < 0.5:
                meeting.tick()
                ticks += 1
            return ticks, meeting.settle(None)
        finally:
            meeting.leave("has ended")

    (ticks, verdict), _ = at_once([host, lambda: run(second, [None])])
    assert verdict is None
    assert ticks < 20


def test_a_name_of_several_addresses_here_is_listened_for_at_all_of_them(monkeypatch):
    """Other machines may know it by any of them."""
    found = [(2, 1, 6, "", (address, 0)) for address in ("10.9.0.1", "10.9.0.2")]
    own = {"a": [SimpleNamespace(address="10.9.0.1")], "b": [SimpleNamespace(address="10.9.0.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert own_address("head") is None
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[1:] * 2)
    assert own_address("head") == "10.9.0.2"
