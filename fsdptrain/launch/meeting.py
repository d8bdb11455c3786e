"""The machines of a run: they meet before each round of ranks, stop it together, and agree on why it ended.

Node 0 listens at --rdzv-endpoint, the others come to it. What is said on a line:

    node k: ready (who I am, and   node 0: refused (why), or go (round, store of the ranks)
            what I was told to do)
    node k: ended (how)            node 0: stop, and in the end the verdict, the same for all
    either: alive, leaving (why)
"""

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from fsdptrain.errors import ConfigError, RankError
from fsdptrain.launch.addresses import free_port, listen
from fsdptrain.launch.alike import Description, difference
from fsdptrain.launch.failures import Level, Report
from fsdptrain.launch.lines import Line, Message

TICK = 0.1  # [s]
_CONNECTS = 5.0  # [s]
_TOLD = {"round": int, "launch": str, "before": str}  # what a node 0 that was lost has told, as far as it counts
_LATE = 2.0  # [s] after a refusal, in which those that come hear of it


@dataclass(frozen=True)
class Terms:
    """What a machine knows before it meets the others."""

    node: int
    nnodes: int
    endpoint: tuple[str, int]  # of node 0
    meets_s: float  # to wait for the others
    silence_s: float  # after which one of them is lost
    max_restarts: int
    launch: str  # name of the run of this command, that of node 0 counts
    name: str  # of the machine, and of this process
    description: Description
    newest: Callable[[], str] = str  # the newest checkpoint of the run, by name; "": there is none


@dataclass(frozen=True)
class Go:
    """A round of ranks begins now."""

    round: int
    endpoint: str  # host:port of the ranks' store on node 0
    launch: str
    before: str  # the newest checkpoint when the first round began
    saved: bool  # there is another now: it is what the run goes on from
    address: str | None = None  # of this machine, at which others reach it


@dataclass(frozen=True)
class Verdict:
    cause: Report
    again: bool


class Meeting(Protocol):
    def gather(self) -> Go:
        """When all machines are ready. ConfigError where they are not alike, RankError where they do not come."""
        ...

    def tick(self) -> bool:
        """Takes a moment; whether this round of ranks is to be stopped."""
        ...

    def settle(self, own: Report | None) -> Verdict | None:
        """When all machines have ended the round. None: all is done, and well."""
        ...

    def leave(self, why: str) -> None: ...


def meet(terms: Terms) -> Meeting:
    if terms.nnodes == 1:
        return Alone(terms)
    return Host(terms) if terms.node == 0 else Guest(terms)


class Alone:
    """One machine."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._round = -1
        self._before = terms.newest()

    def gather(self) -> Go:
        self._round += 1
        return Go(self._round, "", self._terms.launch, self._before, self._terms.newest() != self._before)

    def tick(self) -> bool:
        time.sleep(TICK)
        return False

    def settle(self, own: Report | None) -> Verdict | None:
        return own and Verdict(own, own.again and self._round < self._terms.max_restarts)

    def leave(self, why: str) -> None: ...


class Host:
    """Node 0."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._round = -1
        self._launch, self._before = terms.launch, terms.newest()
        self._new: list[Line] = []  # that have not said who they are
        self._lines: dict[int, Line] = {}  # by node
        self._names = {0: terms.name}
        self._ready: set[int] = set()
        self._reports: dict[int, Report | None] = {}
        self._stopping = False
        self._server = listen(terms.endpoint, backlog=terms.nnodes)

    def gather(self) -> Go:
        self._ready = set()
        deadline = time.monotonic() + self._terms.meets_s
        while missing := [node for node in range(1, self._terms.nnodes) if node not in self._ready]:
            if time.monotonic() > deadline:
                self._end(RankError(_not_met(self._terms, f"there is no node {', '.join(map(str, missing))}.")))
            self._wait([self._server, *(line.socket for line in self._new)])
            self._accept()
            for line in list(self._new):
                self._hear_new(line)
            self._hear()
            self._ready -= {node for node, line in self._lines.items() if line.why_lost is not None}
        self._round += 1
        self._reports, self._stopping = {}, False
        endpoint = f"{self._terms.endpoint[0]}:{free_port(self._terms.endpoint[1] + 1)}"
        go = Go(self._round, endpoint, self._launch, self._before, self._terms.newest() != self._before)
        self._tell({"what": "go", **asdict(go)})
        return replace(go, address=next(iter(self._lines.values())).own_address)

    def tick(self) -> bool:
        self._wait([])  # who comes in a round waits for the next
        self._hear()
        stop = any(report is not None for report in self._reports.values())
        if stop and not self._stopping:
            self._tell({"what": "stop"})
        self._stopping = stop
        return stop

    def settle(self, own: Report | None) -> Verdict | None:
        self._reports[0] = own
        while len(self._reports) < self._terms.nnodes:
            self.tick()
        reports = [(node, report) for node, report in self._reports.items() if report is not None]
        if not reports:
            self._tell({"what": "verdict", "cause": None})
            return None
        node, cause = min(reports, key=lambda found: found[1].level)  # of equals the one that came first
        cause = cause if cause.level == Level.NODE else cause.of_node(self._called(node))
        verdict = Verdict(cause, cause.again and self._round < self._terms.max_restarts)
        self._tell({"what": "verdict", "cause": asdict(cause), "again": verdict.again})
        return verdict

    def leave(self, why: str) -> None:
        self._tell({"what": "leaving", "why": why})
        self._server.close()
        for line in [*self._lines.values(), *self._new]:
            line.close()

    def _end(self, error: ConfigError | RankError) -> None:
        """Told to those that are here, and to those that are just about to come."""
        told: set[Line] = set()
        deadline = time.monotonic() + _LATE
        while True:
            for line in {*self._lines.values(), *self._new} - told:
                line.send({"what": "refused", "why": str(error), "mendable": isinstance(error, ConfigError)})
                told.add(line)
            if len(told) >= self._terms.nnodes - 1 or time.monotonic() > deadline:
                raise error
            select.select([self._server], [], [], TICK)
            self._accept()

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._new.append(Line(self._server.accept()[0], timeout_s=self._terms.silence_s))

    def _wait(self, others: list[socket.socket]) -> None:
        """Until a machine of the run or one of `others` says something, or for a moment."""
        sockets = [line.socket for line in self._lines.values() if line.why_lost is None]
        select.select([*others, *sockets], [], [], TICK)

    def _hear_new(self, line: Line) -> None:
        for message in line.receive():
            if not _is_machine(message):
                line.refuse()
                break
            self._new.remove(line)
            self._welcome(line, message)
            return
        if line.why_lost is not None:
            self._new.remove(line)
            line.close()

    def _welcome(self, line: Line, message: Message) -> None:
        """A new machine, or one that comes back. Before the first round one that does not fit is the end for all."""
        node, name = message["node"], message["name"]
        other = self._lines.get(node)
        error = None
        if other is not None and other.why_lost is None and self._names[node] != name:
            error = f"--node-rank {node} is given to two machines, {self._names[node]} and {name}: count them from 0"
        elif node == 0:
            error = f"--node-rank 0 is given to two machines, {self._terms.name} and {name}: count them from 0"
        else:
            pair = [(_called(0, self._terms.name), self._terms.description), (_called(node, name), message["alike"])]
            error = difference(pair)
        if error is None:
            if other is not None:
                other.close()
            self._lines[node], self._names[node] = line, name
            self._ready.add(node)
            self._take_up(message["told"])
            return
        if self._round < 0:
            self._new.append(line)
            self._end(ConfigError(error))
        line.send({"what": "refused", "why": error, "mendable": True})
        line.close()

    def _take_up(self, told: Message | None) -> None:
        """What a guest was told by the node 0 before this one, which was lost: this one goes on with it."""
        if told is not None and told["round"] > self._round:
            self._round, self._launch, self._before = told["round"], told["launch"], told["before"]

    def _hear(self) -> None:
        for node, line in self._lines.items():
            for message in line.receive():
                if message["what"] == "ready":
                    self._ready.add(node)
                elif message["what"] == "ended":
                    report = message["report"]
                    self._reports.setdefault(node, report and Report(**report))
            if line.why_lost is not None:
                self._reports.setdefault(node, Report(f"{self._called(node)} {line.why_lost}", level=Level.NODE))

    def _tell(self, message: Message) -> None:
        for line in self._lines.values():
            line.send(message)

    def _called(self, node: int) -> str:
        return _called(node, self._names[node])


class Guest:
    """Any other node."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._line: Line | None = None
        self._go: Go | None = None  # of the last round
        self._heard: list[Message] = []

    def gather(self) -> Go:
        deadline = time.monotonic() + self._terms.meets_s
        asked = False
        while True:
            if self._line is None or self._line.why_lost is not None:
                if self._line is not None:
                    self._line.close()
                self._line = self._connect(deadline)
                asked = False
            if not asked:
                terms = self._terms
                about = {"node": terms.node, "name": terms.name, "alike": dict(terms.description)}
                self._line.send({"what": "ready", "told": self._go and asdict(self._go), **about})
                asked = True
            for message in self._hear(self._line):
                what = message.pop("what")
                if what == "refused":
                    raise (ConfigError if message["mendable"] else RankError)(message["why"])
                assert what == "go", what
                self._go = Go(**{**message, "address": self._line.own_address})
                return self._go

    def tick(self) -> bool:
        assert self._line is not None
        heard = self._hear(self._line)
        self._heard += heard
        return self._line.why_lost is not None or any(message["what"] == "stop" for message in self._heard)

    def settle(self, own: Report | None) -> Verdict | None:
        assert self._line is not None
        self._line.send({"what": "ended", "report": own and asdict(own)})
        while True:
            verdict = [message for message in self._heard if message["what"] == "verdict"]
            if verdict:
                self._heard = []
                cause = verdict[0]["cause"]
                return cause and Verdict(Report(**cause), verdict[0]["again"])
            if self._line.why_lost is not None:
                self._heard = []
                return self._without_host(own, self._line.why_lost)
            self.tick()

    def leave(self, why: str) -> None:
        if self._line is not None:
            self._line.send({"what": "leaving", "why": why})
            self._line.close()

    def _without_host(self, own: Report | None, why: str) -> Verdict:
        cause = Report(f"node 0 ({self._terms.endpoint[0]}) {why}", level=Level.NODE)
        if own is not None and own.level < cause.level:
            cause = own.of_node(_called(self._terms.node, self._terms.name))
        assert self._go is not None
        return Verdict(cause, cause.again and self._go.round < self._terms.max_restarts)

    def _hear(self, line: Line) -> list[Message]:
        if line.why_lost is None:
            select.select([line.socket], [], [], TICK)
        else:
            time.sleep(TICK)
        return line.receive()

    def _connect(self, deadline: float) -> Line:
        reason = ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                sock = socket.create_connection(self._terms.endpoint, timeout=min(_CONNECTS, left))
                return Line(sock, timeout_s=self._terms.silence_s)
            except OSError as error:
                reason = error.strerror or str(error)
                time.sleep(min(0.2, left))
        raise RankError(_not_met(self._terms, f"node {self._terms.node} does not reach it ({reason})."))


def _is_machine(message: Message) -> bool:
    """Whether a first message is one of a machine, of this run or of another; anything may come to an open port."""
    node, name, alike, told = (message.get(key) for key in ("node", "name", "alike", "told"))
    known = isinstance(node, int) and node >= 0 and isinstance(name, str) and isinstance(alike, dict)
    return known and (told is None or (isinstance(told, dict) and {k: type(told.get(k)) for k in _TOLD} == _TOLD))


def _called(node: int, name: str) -> str:
    return f"node {node} ({name.partition(':')[0]})"


def _not_met(terms: Terms, reason: str) -> str:
    host, port = terms.endpoint
    return (
        f"the {terms.nnodes} machines of --nnodes did not meet at --rdzv-endpoint {host}:{port} within "
        f"{terms.meets_s:g} s (--dist-timeout): {reason} Is node 0 there, each --node-rank given once, and the port "
        "open?"
    )
