"""Continuous rollouts: a step trains on the first groups that are finished, and the others go on into later steps."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.config.rollout import NEEDS_IN_FLIGHT
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.protocols import RolloutEngine
from fsdptrain.rollout.in_flight import InFlightEngine, SteppedEngine
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.selection import GroupResult, Selection, SelectionRules, group_result, joined, only
from fsdptrain.trainer.samples.single_turn import GenerationRound
from fsdptrain.trainer.samples.source import RolloutBatch, RolloutSource, images_of, sampling_at
from fsdptrain.types import Metrics, Prompt

MAX_THREADS = 512  # of one rank
POLL_S = 0.1  # between two exchanges of what has finished on each rank


@dataclass(eq=False)
class Group:
    """The samples of one prompt, while they are generated or wait to be trained."""

    prompt: Prompt
    owner: int  # rank
    watch: Stopwatch
    work: Future[GenerationRound] | None = None  # on the owner
    result: GroupResult | None = None  # None: not known to be finished; the same on all ranks


@dataclass
class ContinuousSource(RolloutSource):
    """Generates each group on its own, for an engine that keeps requests across weight syncs.

    With `max_staleness` K and B prompts per rollout, at most (K + 1) B groups are open: in generation, or finished and
    not yet trained. Each weight sync starts B new ones. A step takes the B finished groups that were started first.
    Others go on, across weight syncs. While no group takes longer than K steps, each is trained at most K steps after
    its start.
    """

    threads: Executor = field(kw_only=True)  # one thread per group that is generated at the same time
    max_staleness: int = field(kw_only=True)  # versions
    num_rollouts: int = field(kw_only=True)  # of the run: no rollouts are started beyond it
    stepped: SteppedEngine | None = None  # the engine, if it generates on the thread that waits
    timeout: float = math.inf  # in which a group must finish on any rank [s]
    _open: list[Group] = field(init=False, default_factory=list)  # in the order in which they were started
    _first_step: int | None = field(init=False, default=None)
    _num_started: int = field(init=False, default=0)
    _changed: threading.Event = field(init=False, default_factory=threading.Event)  # a group of this rank has finished

    @classmethod
    def of(cls, config: Config, engine: RolloutEngine | None, threads: Executor, values: Mapping[str, Any]) -> Self:
        """values: those of RolloutSource."""
        return cls(
            **values,
            threads=threads,
            stepped=engine if isinstance(engine, SteppedEngine) else None,
            max_staleness=config.sync.max_staleness,
            num_rollouts=config.run.num_rollout,
            timeout=config.launch.dist_timeout,
        )

    @property
    def in_flight(self) -> bool:
        return self.stepped is None

    def run_ahead(self, step: int) -> None:
        """Start the groups that are allowed when the engine has the weights of version `step`."""
        if self._first_step is None:
            self._first_step = step
        self._start_up_to((self.last_allowed(step) - step + 1) * self.num_prompts - len(self._open))

    def last_allowed(self, step: int) -> int:
        """Return the number of the last rollout that may start when the engine has the weights of version `step`."""
        return min(step + self.max_staleness, max(step, self.num_rollouts - 1))

    def _start_up_to(self, room: int) -> None:
        assert self._first_step is not None
        while room > 0:
            rollout, started = divmod(self._num_started, self.num_prompts)
            count = min(room, self.num_prompts - started)
            self._start(self.draw(count), self._first_step + rollout)
            room -= count

    def collect(self, step: int) -> RolloutBatch:
        watch = Stopwatch()
        selection, taken = Selection(self.rules or SelectionRules(), wanted=self.num_prompts), list[Group]()
        rounds, own = list[GenerationRound](), dist.get_rank()
        self.run_ahead(step)
        self._exchange()
        while True:
            judged = self._judge(selection, taken)
            for result, is_kept in ((g.work.result(), g in taken) for g in judged if g.owner == own and g.work):
                rounds.append(result if is_kept else only((), result))  # of dropped groups only the rewards
            if len(selection.generated) >= self.num_prompts:
                self.check_rewards(joined(rounds).results)
            if not selection.needs_round:
                break
            self._replace_dropped(step, selection, len(taken))
            with watch("generate") if self.stepped else nullcontext():
                self._wait()
        selection.check(step)
        for group in taken:
            self._open.remove(group)
        longest = {"generate": 0.0, "reward": 0.0}
        for group in taken:
            longest |= {stage: max(longest[stage], group.watch.seconds.get(stage, 0.0)) for stage in longest}
        return self.batch(
            joined(rounds),
            images=images_of([group.prompt for group in taken]),
            seconds={**longest, **watch.seconds},
            metrics=selection.metrics() | self._slot_metrics(),
        )

    def _replace_dropped(self, step: int, selection: Selection, num_taken: int) -> None:
        """Start new groups in place of dropped ones; in the last step no more than it may still judge."""
        if self.last_allowed(step) > step:
            self.run_ahead(step)
            return
        most = selection.rules.max_rounds * self.num_prompts - len(selection.generated)  # groups
        self._start_up_to(min(self.num_prompts - len(self._open), most - (len(self._open) - num_taken)))

    def _start(self, prompts: Sequence[Prompt], rollout: int) -> None:
        """Assign the prompts to the ranks with the fewest unfinished groups, and start those of this rank."""
        sampling = sampling_at(self.sampling, rollout)
        unfinished = [group.owner for group in self._open if group.result is None]
        open_groups = [unfinished.count(rank) for rank in range(dist.get_world_size())]
        for prompt, owner in zip(prompts, assign(len(prompts), open_groups), strict=True):
            group = Group(prompt, owner, Stopwatch())
            if owner == dist.get_rank():
                group.work = self.threads.submit(self.sampler.sample, [prompt], sampling, group.watch, in_flight=True)
                group.work.add_done_callback(lambda _: self._changed.set())
            self._open.append(group)
        self._num_started += len(prompts)

    def _judge(self, selection: Selection, taken: list[Group]) -> list[Group]:
        """Take or drop groups that are finished, in the order in which they were started, until enough are taken."""
        judged, most = [], selection.rules.max_rounds * selection.wanted
        for group in list(self._open):
            if not selection.missing or len(selection.generated) >= most:
                break
            if group.result is None or group in taken:
                continue
            [is_kept] = selection.add([group.result])
            self.stream.record(group.prompt)
            judged.append(group)
            if is_kept:
                taken.append(group)
            else:
                self._open.remove(group)
        selection.rounds = len(selection.generated) // selection.wanted
        return judged

    def _wait(self) -> None:
        """Generate or wait until another group has finished on any rank. Collective."""
        end, is_alone = time.monotonic() + self.timeout, dist.get_world_size() == 1
        while True:
            with raise_on_all_ranks(RolloutError, "rollout"):
                if time.monotonic() > end:
                    raise RolloutError(self._why_late())
                if self.stepped is None:
                    self._changed.wait(POLL_S)
                else:  # other ranks step for the whole time too
                    self.stepped.work(until=lambda: is_alone and self._changed.is_set(), seconds=POLL_S)
            if self._exchange():
                return

    def _why_late(self) -> str:
        oldest = next(group for group in self._open if group.result is None)
        return (
            f"no group has finished for --dist-timeout {self.timeout:g} s; the oldest has prompt "
            f"{oldest.prompt.id}, on rank {oldest.owner}: raise --dist-timeout if responses take that long"
        )

    def _exchange(self) -> bool:
        """Exchange the results of groups that have finished. Returns whether there are any. Collective."""
        self._changed.clear()
        with raise_on_all_ranks(RolloutError, "rollout"):
            own = [
                (i, group_result(group.work.result().samples, owner=group.owner))
                for i, group in enumerate(self._open)
                if group.result is None and group.work is not None and group.work.done()
            ]
        found = [pair for pairs in gather(own) for pair in pairs]
        for index, result in found:
            self._open[index].result = result
        return bool(found)

    def _slot_metrics(self) -> Metrics:
        finished = sum(group.result is not None for group in self._open)
        return {
            "rollout/finished_groups": float(finished),
            "rollout/unfinished_groups": float(len(self._open) - finished),
        }


def assign(count: int, open_groups: Sequence[int]) -> list[int]:
    """Return the rank of each of `count` new groups, in rank order: the ranks with the fewest `open_groups`."""
    totals = list(open_groups)
    for _ in range(count):
        totals[totals.index(min(totals))] += 1
    return [rank for rank, total in enumerate(totals) for _ in range(total - open_groups[rank])]


def open_threads(
    config: Config, engine: RolloutEngine, stack: ExitStack, *, has_deadlines: bool = False
) -> ThreadPoolExecutor:
    """Create the threads in which groups are generated.

    has_deadlines: episodes must end while the engine generates. Raises ConfigError if the engine cannot keep requests
    across weight syncs.
    """
    flag = f"--max-staleness {config.sync.max_staleness}"
    if not isinstance(engine, InFlightEngine):
        raise ConfigError(f"{flag} {NEEDS_IN_FLIGHT}")
    if isinstance(engine, SteppedEngine) and (has_deadlines or not engine.keeps_requests):
        reason = "episodes of agents have deadlines" if has_deadlines else "it cannot keep requests with these options"
        raise ConfigError(
            f"{flag} does not work with --rollout-engine {config.rollout.engine}, which pauses while the trainer "
            f"works, because {reason}: use vllm-server, or set it to 0"
        )
    threads = ThreadPoolExecutor(_num_threads(config), thread_name_prefix="rollout")
    stack.callback(threads.shutdown, wait=False, cancel_futures=True)  # do not wait: other ranks wait for an error
    return threads


def _num_threads(config: Config) -> int:
    """Return the number of groups that this rank generates at the same time."""
    groups = -(-config.rollout.batch_size // (dist.get_world_size() if dist.is_initialized() else 1))
    if config.environment.has_episodes:
        groups = min(groups, config.environment.environment_workers // config.algorithm.n_samples_per_prompt)
    return max(1, min((1 + config.sync.max_staleness) * groups, MAX_THREADS))
