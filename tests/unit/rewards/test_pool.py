"""A reward that hangs or crashes costs one sample, wherever it hangs. Results do not depend on the processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partialmethod
from heapq import heapreplace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rewards import parallel
from fsdptrain.rewards.build import Component, WeightedSum
from fsdptrain.rewards.local import InProcess
from fsdptrain.rewards.parallel import ParallelReward, build_parallel, default_workers
from fsdptrain.rewards.patience import Patience
from fsdptrain.rewards.pool import Worker, worker_environment
from fsdptrain.rewards.results import compute_rewards
from fsdptrain.types import Prompt
from tests.unit.rewards import user_rewards
from tests.unit.rewards.user_rewards import (
    HANGS,
    Judge,
    LoadedBy,
    Unloadable,
    judge,
    list_for_one,
    lists,
    obedient,
    of_trl,
    one_argument,
    says_what_it_is_not,
    sleeps,
)

PROMPT = Prompt("a", [1], "label")
MINUTE = 60.0
SHORT = 0.5


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that hang have half a second; all others have a minute, however busy the machine is."""
    send = Worker.send

    def limit(hangs: bool, timeout: float) -> float:
        return SHORT if hangs and timeout == MINUTE else timeout

    def send_in_time(self: Worker, job: list[int], samples: Sequence[bytes], timeout: float) -> None:
        hangs = any(text.encode() in sample[-30:] for text in HANGS for sample in samples)
        send(self, job, samples, limit(hangs, timeout))

    def score_in_time(self: InProcess, samples: Any, *, score: Any) -> Any:
        reward = self.reward
        timeout = self._threads.timeout = limit(samples[0][1] in HANGS, reward.timeout)
        self.reward = replace(reward, timeout=timeout)
        try:
            return score(self, samples)
        finally:
            self.reward = reward

    monkeypatch.setattr(Worker, "send", send_in_time)
    for name in ("_on_main_thread", "_in_thread"):
        monkeypatch.setattr(InProcess, name, partialmethod(score_in_time, score=getattr(InProcess, name)))


@contextmanager
def pool(
    reward: Any, num_workers: int = 2, timeout: float = MINUTE, patience: float = 600.0
) -> Iterator[ParallelReward]:
    with closing(ParallelReward(reward, num_workers=num_workers, timeout=timeout, patience=patience)) as rewards:
        yield rewards


def scores(rewards: ParallelReward, texts: list[str], prompt: Prompt = PROMPT) -> list[float | None]:
    return [result.reward for result in compute_rewards(rewards, [prompt] * len(texts), texts).results]


def with_metadata(**metadata: Any) -> Prompt:
    return replace(PROMPT, metadata=metadata)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + MINUTE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_results_are_in_the_order_of_the_samples_for_any_number_of_processes(num_workers: int) -> None:
    texts = [str((7 * i) % 11 / 200) for i in range(30)]
    with pool(sleeps, num_workers) as rewards:
        assert scores(rewards, texts) == [float(text) for text in texts]
        assert scores(rewards, []) == []
        assert scores(rewards, texts[:3]) == [float(text) for text in texts[:3]]


OBEDIENT = "--reward tests.unit.rewards.user_rewards:obedient"
CAUSES = {
    "regex": f"{OBEDIENT}: no answer within --reward-timeout 60 s",
    "deaf": f"{OBEDIENT}: no answer within --reward-timeout 60 s",
    "_exit": f"{OBEDIENT}: its process ended with exit code 3",
    "leaves a process": f"{OBEDIENT}: its process ended with exit code 3",
    "segfault": f"{OBEDIENT}: its process ended with signal SIGSEGV",
    "real-time signal": f"{OBEDIENT}: its process ended with signal {signal.SIGRTMIN + 5}",
    "canceled": "CancelledError: no message (user_rewards.py:",
    "exit": "SystemExit: 1 (user_rewards.py:",
    "raise": "ValueError: no (user_rewards.py:",
    "nan": "ValueError: the reward returned nan (values.py:",
    "none": "the reward returned None",
}


@pytest.mark.parametrize("causes", [list(CAUSES), [*reversed(CAUSES)]], ids=["forward", "backward"])
def test_a_hang_or_a_crash_costs_its_sample(causes: list[str]) -> None:
    texts = [text for i, cause in enumerate(causes) for text in (str(i), cause, str(i))]
    with pool(obedient) as rewards:
        outcomes = rewards.run([(PROMPT, text) for text in texts])
    for text, outcome in zip(texts, outcomes, strict=True):
        if isinstance(outcome, str):
            assert outcome.startswith(CAUSES[text])
        else:
            assert outcome.reward == float(text)


def test_a_sample_that_no_process_can_load_costs_itself() -> None:
    for reward in (obedient, lists):
        bad = [with_metadata(x=threading.Lock()), with_metadata(x=Unloadable())]
        with pool(reward) as rewards:
            outcomes = rewards.run([(PROMPT, "1"), (bad[0], "2"), (bad[1], "3"), (PROMPT, "4")])
        assert [getattr(outcome, "reward", outcome) for outcome in (outcomes[0], outcomes[3])] == [1.0, 4.0]
        assert str(outcomes[1]).startswith("the sample cannot be sent to a process: TypeError: cannot pickle")
        assert str(outcomes[2]).startswith("the sample cannot be loaded in a process: ValueError")


def test_a_process_that_died_between_rollouts_costs_no_sample() -> None:
    with pool(obedient, num_workers=1) as rewards:
        [pid] = scores(rewards, ["pid"])
        os.kill(int(pid or 0), signal.SIGKILL)
        wait_until(lambda: has_ended(int(pid or 0)))
        assert scores(rewards, ["1", "2"]) == [1.0, 2.0]


def test_a_replacement_that_does_not_start_costs_no_sample(tmp_path: Path) -> None:
    with pool(LoadedBy(str(tmp_path / "loads")), num_workers=1) as rewards:
        assert scores(rewards, ["1", "_exit", "2", "3"]) == [1.0, None, 2.0, 3.0]
    assert (tmp_path / "loads").read_text() == "xxx"


def test_a_run_goes_on_if_its_first_process_ends_while_others_start(tmp_path: Path) -> None:
    with pool(LoadedBy(str(tmp_path / "loads"), ends=1)) as rewards:
        assert scores(rewards, ["1", "2", "3"]) == [1.0, 2.0, 3.0]
    with (
        pool(LoadedBy(str(tmp_path / "other"), ends=1), num_workers=1) as rewards,
        pytest.raises(RolloutError, match=r"does not start: .*its process ended with exit code 1"),
    ):
        scores(rewards, ["1"])


def test_a_process_starts_without_torch() -> None:
    with pool(obedient) as rewards:
        assert scores(rewards, ["torch"]) == [0.0]


def test_processes_that_a_reward_has_started_are_killed_with_its_own(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pool(obedient, timeout=600.0) as rewards, ThreadPoolExecutor(1) as thread:
        rollout = thread.submit(scores, rewards, ["starts a process"], with_metadata(path=str(path)))
        wait_until(lambda: path.exists() and path.read_text())
        rewards.close()
        assert isinstance(rollout.exception(MINUTE), RolloutError)
    wait_until(lambda: has_ended(int(path.read_text())))


def test_a_killed_trainer_leaves_no_process() -> None:
    code = (
        "from tests.unit.rewards.test_pool import *\n"
        "with pool(obedient, 1) as rewards:\n"
        "    print(int(scores(rewards, ['pid'])[0]), flush=True)\n"
        "    scores(rewards, ['regex'])\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout as output:
        worker = int(output.readline())
        assert output.readline() == "hangs\n"
        trainer.kill()
    trainer.wait()
    wait_until(lambda: has_ended(worker))


class Clock:
    """Replaces the module `time` of the patience."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_the_patience_counts_real_time_that_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("fsdptrain.rewards.patience.time", clock)
    patience = Patience(10.0)
    for _ in range(5):
        patience.begin()
        for _ in range(3):
            clock.now += 100.0
            patience.answered()  # a slow reward
            clock.now += 3.0
            for _ in range(8):
                patience.lose("eight processes at the same time", share=3.0 / 8)
        assert patience.lost == 9.0
    clock.now += 1.0
    with pytest.raises(
        RolloutError, match=r"^--reward: 25 late calls, crashes and restarts in one rollout took 10 s, .* 10 s .*it ha"
    ):
        patience.lose("it hangs", share=1.0 / 8)


def test_the_patience_counts_a_hang_while_others_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenth of 512 calls hangs, and the others take 10 s each. Without the hangs the rollout would take 640 s."""
    clock, patience, num_workers = Clock(), Patience(900.0), 8
    monkeypatch.setattr("fsdptrain.rewards.patience.time", clock)
    patience.begin()
    waiting = [300.0 if i % 10 == 0 else 10.0 for i in range(512)]
    ends = [(duration + i, duration) for i, duration in enumerate(waiting[:num_workers])]
    with pytest.raises(RolloutError, match="in one rollout took 900 s"):
        for duration in waiting[num_workers:]:
            clock.now, took = heapreplace(ends, (ends[0][0] + duration, duration))
            if took > 10.0:
                patience.lose("it hangs", took / num_workers)
            else:
                patience.answered()
    assert clock.now < 640.0 + 900.0


def test_a_hang_in_one_process_counts_while_another_answers() -> None:
    with pool(sleeps, timeout=SHORT) as rewards:
        scores(rewards, ["600"] + ["0.05"] * 20)
        assert rewards._patience.lost >= SHORT / 2


def test_a_process_that_started_between_rollouts_costs_no_time() -> None:
    with pool(obedient, num_workers=1) as rewards:
        assert scores(rewards, ["_exit"]) == [None]
        [worker] = rewards._runners[0]._workers  # type: ignore[union-attr]
        assert wait([worker.connection], MINUTE)
        time.sleep(1.0)
        assert scores(rewards, ["1"]) == [1.0]
        assert rewards._patience.lost < 1.0


@pytest.mark.parametrize("num_workers", [0, 1, 8])
def test_a_reward_that_always_hangs_ends_the_rollout_for_any_number_of_processes(
    num_workers: int, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    with (
        pool(sleeps, num_workers, timeout=SHORT, patience=3 * SHORT) as rewards,
        pytest.raises(
            RolloutError, match=r"no longer than 1.5 s for that; last: .*0.5 s \(prompt 'a'\); .*--reward-time"
        ),
    ):
        scores(rewards, ["600"] * 100, with_metadata(path=str(calls)))
    assert len(calls.read_text().split()) <= 4 * max(1, num_workers)


def test_a_reward_that_always_crashes_ends_the_rollout() -> None:
    with (
        pool(obedient, patience=0.5) as rewards,
        pytest.raises(RolloutError, match=rf"than 0.5 s for that; last: {OBEDIENT}: "),
    ):
        scores(rewards, ["_exit"] * 1000)


def test_all_rewards_of_a_run_have_one_patience() -> None:
    def hangs_for(text: str) -> Any:
        return lambda prompt, response: time.sleep(600) or 0.0 if response == text else 1.0

    parts = tuple(Component(name, 1.0, hangs_for(name)) for name in ("a", "b"))
    with (
        pool(WeightedSum(parts), 0, timeout=SHORT, patience=1.9 * SHORT) as rewards,
        pytest.raises(RolloutError, match="2 late calls, crashes and restarts in one rollout"),
    ):
        scores(rewards, ["a", "b"])


def all_ready(rewards: ParallelReward) -> bool:
    scores(rewards, ["0.01"] * 8)
    return all(worker.ready for worker in rewards._runners[0]._workers)  # type: ignore[union-attr]


def test_answers_of_a_rollout_that_failed_do_not_reach_the_next_one() -> None:
    with pool(sleeps, patience=SHORT) as rewards:
        rewards._patience.limit = 600.0
        wait_until(lambda: all_ready(rewards))
        rewards._patience.limit = SHORT
        with pytest.raises(RolloutError):
            scores(rewards, ["600", "1.5"])
        rewards._patience.limit = 600.0
        assert scores(rewards, ["0", "0", "1.2"]) == [0.0, 0.0, 1.2]


def test_closing_ends_a_rollout_of_another_thread_and_its_processes(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    with pool(sleeps, timeout=600.0) as rewards, ThreadPoolExecutor(1) as thread:
        rollout = thread.submit(scores, rewards, ["600"] * 5, with_metadata(path=str(calls)))
        wait_until(lambda: len(calls.read_text().split()) == 2)
        rewards.close()
        with pytest.raises(RolloutError, match="the run has ended"):
            rollout.result(MINUTE)
        assert all(has_ended(int(pid)) for pid in calls.read_text().split())
        with pytest.raises(RolloutError, match="the run has ended"):
            scores(rewards, ["1"])


def test_async_calls_run_at_the_same_time_and_late_ones_cost_their_samples() -> None:
    with pool(judge) as rewards:
        assert scores(rewards, ["together"] * 60) == [1.0] * 60
    with pool(judge, timeout=SHORT) as rewards:
        results = compute_rewards(rewards, [PROMPT] * 6, ["1", "late", "stubborn", "raise", "canceled", "5"])
    assert [result.reward for result in results.results] == [1.0, None, None, None, None, 5.0]
    assert results.first_error == f"{OBEDIENT[:-8]}judge: no answer within --reward-timeout 0.5 s"
    with pool(Judge()) as rewards:
        assert scores(rewards, ["1", "none", "3"]) == [1.0, None, 3.0]


def test_an_async_call_that_blocks_its_event_loop_costs_the_rollout_its_samples(monkeypatch: Any) -> None:
    monkeypatch.setattr("fsdptrain.rewards.local.GRACE_S", 0.0)
    event = threading.Event()
    with pool(judge, timeout=SHORT) as rewards:
        outcomes = rewards.run([(PROMPT, "1"), (with_metadata(event=event), "blocks"), (PROMPT, "3")])
        for outcome in outcomes[1:]:
            assert str(outcome).endswith("within --reward-timeout 0.5 s, because an async call blocks its event loop")
        rewards._runners[0].reward = replace(rewards._runners[0].reward, timeout=MINUTE)
        assert scores(rewards, ["1", "2"]) == [1.0, 2.0]
    event.set()


def test_an_async_reward_that_always_hangs_ends_the_rollout() -> None:
    with (
        pool(judge, timeout=0.1, patience=0.25) as rewards,
        pytest.raises(
            RolloutError, match=r"no longer than 0.25 s for that; last: .*--reward-timeout 0.1 s \(prompt 'a'\)"
        ),
    ):
        scores(rewards, ["late"] * 64 * 5)


def test_a_reward_of_lists_gets_all_samples_in_one_call() -> None:
    with pool(lists) as rewards:
        assert scores(rewards, ["1", "none", "nan", "4"]) == [1.0, None, None, 4.0]
        results = compute_rewards(rewards, [PROMPT] * 2, ["short", ""])
        assert scores(rewards, ["1", "_exit"]) == [None, None]
        assert scores(rewards, ["1", "2"]) == [1.0, 2.0]
    assert results.num_unscored == 2
    assert (
        results.first_error == "the reward returned 1 values, which is not a list with one value for each of 2 samples"
    )


@pytest.mark.parametrize(("prompt", "length"), [([{"role": "user", "content": "?"}], 1), ("text", 4)])
def test_a_reward_in_the_form_of_trl_gets_the_columns_of_all_samples(prompt: Any, length: int) -> None:
    metadata = [{"prompt": "a column", "answer": 4 + i, **({"level": 1} if i else {})} for i in range(2)]
    rows = [replace(PROMPT, source=prompt, metadata=each) for each in metadata]
    with pool(of_trl) as rewards:
        results = compute_rewards(rewards, rows, ["4", "4"])
        assert rewards.check([rows[1]], call=True) == []
    assert [result.reward for result in results.results] == [1.0 + length, length]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            one_argument,
            r"--reward tests.unit.rewards.user_rewards:one_argument takes \(response: str\).*which does not",
        ),
        (of_trl, r"missing a required argument: 'answer'; the data has the columns question; write f\(prompt, resp"),
        (list_for_one, r"list_for_one, called with the first row and an empty response: TypeError"),
        (user_rewards, "is not a function"),
    ],
)
def test_a_wrong_signature_is_an_error_before_the_first_rollout(reward: Any, message: str) -> None:
    with pool(reward, 0) as rewards, pytest.raises(ConfigError, match=message):
        rewards.check([with_metadata(question="?")], call=True)


def test_the_signature_must_fit_the_rows_of_evaluations_too() -> None:
    with pool(of_trl, 0) as rewards, pytest.raises(ConfigError, match="missing a required argument: 'answer'"):
        rewards.check([with_metadata(answer=1, level=1), with_metadata(question="?")], call=False)


def test_a_reward_that_cannot_score_an_empty_response_is_reported_by_one_rank() -> None:
    with pool(obedient) as rewards:
        assert rewards.check([PROMPT], call=False) == []
        [line] = rewards.check([PROMPT], call=True)
    with pool(says_what_it_is_not, 0) as rewards:
        assert len(rewards.check([PROMPT], call=True)) == 1
    assert line.startswith(
        "--reward tests.unit.rewards.user_rewards:obedient, called with the first row and an empty response: ValueErr"
    )


def test_a_closure_runs_in_this_process_and_its_hang_costs_its_sample(caplog: pytest.LogCaptureFixture) -> None:
    """On the main thread, where it may use SIGALRM, unless the rollout runs in another thread."""
    hanging, pid = threading.Event(), os.getpid()

    def closure(prompt: Prompt, response: str) -> float:
        if response == "600":
            hanging.wait()
        if response == "main":
            previous = signal.signal(signal.SIGALRM, lambda *_: None)
            signal.signal(signal.SIGALRM, previous)
        return float(os.getpid() == pid)

    with pool(closure) as rewards:
        assert scores(rewards, ["1", "600", "main", "1"]) == [1.0, None, 1.0, 1.0]
    with pool(closure) as rewards, ThreadPoolExecutor(1) as thread:
        assert thread.submit(scores, rewards, ["1", "600", "1"]).result() == [1.0, None, 1.0]
    hanging.set()
    assert "closure runs in the trainer's process, one call at a time, because no other process can load" in caplog.text
    assert caplog.text.count("define it in a module that can be imported to run it in processes") == 2


def test_a_reward_that_catches_its_interrupt_is_late_too() -> None:
    def stubborn(prompt: Prompt, response: str) -> float:
        for _ in range(2):
            with suppress(Exception):
                time.sleep(600 if response == "600" else 0)
        return 1.0

    with pool(stubborn, 0) as rewards:
        assert scores(rewards, ["1", "600", "1"]) == [1.0, None, 1.0]


@pytest.mark.parametrize("name", ["script", "main"])
def test_a_function_of_the_main_module_runs_in_this_process(
    name: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def script(prompt: Prompt, response: str) -> float:
        return 1.0

    script.__module__, script.__qualname__ = "__main__", name
    monkeypatch.setattr(sys.modules["__main__"], name, script, raising=False)
    with pool(script) as rewards:
        assert scores(rewards, ["1", "2"]) == [1.0, 1.0]
    assert f"--reward __main__:{name} runs in the trainer's process" in caplog.text
    assert "it is defined in the script itself" in caplog.text


def test_a_reward_that_no_process_can_load_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool(Unloadable()) as rewards:
        assert scores(rewards, ["1", "2"]) == [1.0, 2.0]
    with pool(Unloadable()) as rewards:

        def closed_meanwhile(*args: Any) -> InProcess:
            rewards.close()
            return InProcess(args[0])

        monkeypatch.setattr(parallel, "_without_processes", closed_meanwhile)
        with pytest.raises(RolloutError, match="the run has ended"):
            scores(rewards, ["1"])


def test_the_default_deadline_allows_three_hanging_calls() -> None:
    for dist_timeout, timeout in [(60, 10.0), (1800, 300.0), (7200, 300.0)]:
        config = Config(hf_checkpoint="x", dist_timeout=dist_timeout, reward_workers=0)
        assert build_parallel(config, obedient)._timeout == timeout


def test_ranks_share_cores_threads_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, workers in [(192, 8, 8), (4, 2, 2), (3, 2, 1), (1, 4, 1)]:
        monkeypatch.setattr(parallel, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert default_workers() == workers
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert [worker_environment(workers)["OMP_NUM_THREADS"] for workers in (1, 8, 24)] == ["12", "1", "1"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    for name in ("RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OF_USER"):
        monkeypatch.setenv(name, "2")
    left = {name for name in worker_environment(1) if re.search("RANK|WORLD|MASTER|ELASTIC|OF_USER", name)}
    assert left == {"OF_USER"}  # a library that joins the other ranks would hang
    for visible, device in [(None, "2"), ("4,5,6,7", "6"), ("", "")]:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert worker_environment(1)["CUDA_VISIBLE_DEVICES"] == device
