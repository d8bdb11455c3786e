"""Servers that are killed or hang: the run recovers, with every answer in its place, or ends with one clear message."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain.errors import RolloutError
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.server.engine import VLLMServerEngine
from tests.vllm import contract
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import wait_for_both, weights_of
from tests.vllm.servers.processes import send, worker
from tests.vllm.servers.test_push import build
from tests.vllm.servers.watched import GENERATE, Watched

pytestmark = pytest.mark.matrix

SILENCE = cases.SILENCE
HANGS = 20.0  # --weight-sync-timeout where a server does not answer: so long the test waits, and the others have [s]
PROMPTS = [Prompt(f"p{i}", [5 + i] * (1 + 7 * i), "") for i in range(6)]
LONG_ANSWERS = SamplingParams(num_samples=6, max_tokens=400, temperature=1.0, seed=7)  # takes seconds
RESTART = cases.RESTART


@pytest.fixture
def engine(pair) -> VLLMServerEngine:
    return pair


def meanwhile(work: Callable[[], Any], *, once: threading.Event, do: Callable[[], None]) -> tuple[Any, float]:
    """What `work` returns, or its error, and how long it took after `do`, which comes while it is under way."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001  # the test looks at it
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert once.wait(RESTART), f"it did not come so far: {found}"
    assert thread.is_alive(), f"it was over before it could be disturbed: {found}"
    start = time.monotonic()
    do()
    thread.join()
    return found[0], time.monotonic() - start


def require_right(completions: list[Completion], folder: Path, temperature: float = 1.0) -> None:
    """Each answer is in its place, whole, and from the model in `folder`."""
    assert [c.prompt_id for c in completions] == [p.id for p in PROMPTS for _ in range(LONG_ANSWERS.num_samples)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for i, completion in enumerate(completions):
        prompt = PROMPTS[i // LONG_ANSWERS.num_samples].token_ids
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 1 else "length")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == LONG_ANSWERS.max_tokens
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
        assert (logprobs - torch.tensor(completion.logprobs)).abs().max() < 1e-4


def starts(completions: list[Completion]) -> list[list[int]]:
    """The first tokens of each: by its seed they are the same wherever and beside whatever it is made."""
    return [completion.token_ids[:8] for completion in completions]


def test_killed_while_idle_it_comes_back_with_the_weights(engine, models, monkeypatch):
    engine.update_weights(weights_of(models["tied"].first).items(), 100)  # others had the servers before
    undisturbed = engine.generate(PROMPTS, LONG_ANSWERS)
    require_right(undisturbed, models["tied"].first)
    first = engine.clients[0].url
    send(first, signal.SIGKILL)
    assert starts(engine.generate(PROMPTS, LONG_ANSWERS)) == starts(undisturbed)
    wait_for_both(engine)

    monkeypatch.setattr(engine, "clients", engine.clients[:1])  # ask only the one that has come back
    completions = engine.generate(PROMPTS, LONG_ANSWERS)
    require_right(completions, models["tied"].first)
    assert starts(completions) == starts(undisturbed)


def test_killed_while_it_generates_its_requests_are_sent_elsewhere(engine, models, monkeypatch):
    wait_for_both(engine)
    engine.update_weights(weights_of(models["tied"].other).items(), 1)
    undisturbed = engine.generate(PROMPTS, LONG_ANSWERS)
    first = engine.clients[0].url
    watched = Watched(monkeypatch, first, GENERATE)  # other answers are not ready when its first one is
    completions, seconds = meanwhile(
        lambda: engine.generate(PROMPTS, LONG_ANSWERS), once=watched.answered, do=lambda: send(first, signal.SIGKILL)
    )
    require_right(completions, models["tied"].other)
    assert starts(completions) == starts(undisturbed)
    assert seconds < RESTART


def test_killed_while_it_receives_weights_the_others_go_on_with_them(engine, models, monkeypatch):
    wait_for_both(engine)
    first = engine.clients[0].url
    loading = Watched(monkeypatch, first, "/collective_rpc", before=lambda: worker(first).suspend())
    found, seconds = meanwhile(
        lambda: engine.update_weights(weights_of(models["tied"].first).items(), 2),
        once=loading.asked,
        do=lambda: send(first, signal.SIGKILL),
    )
    assert found is None
    assert seconds < SILENCE / 2, "its death was not seen: the deadline was waited for"
    completions = engine.generate(PROMPTS, LONG_ANSWERS)
    assert {completion.policy_version for completion in completions} == {2}
    require_right(completions, models["tied"].first)


def test_one_that_hangs_in_an_update_is_left_behind_within_the_deadline(engine, models, monkeypatch):
    wait_for_both(engine)
    options = engine.fleet._options.model_copy(update={"weight_sync_timeout": HANGS})
    monkeypatch.setattr(engine.fleet, "_options", options)
    send(engine.clients[1].url, signal.SIGSTOP)
    start = time.monotonic()
    engine.update_weights(weights_of(models["tied"].other).items(), 3)
    assert time.monotonic() - start < 2 * HANGS
    require_right(engine.generate(PROMPTS, LONG_ANSWERS), models["tied"].other)


def test_the_only_one_hangs_while_it_generates_the_run_ends_with_one_message(models, urls, alone, tmp_path):
    url, silence = urls["tied"], 4.0
    engine = build(cases.attached(models["tied"].first, url, output_dir=str(tmp_path)))
    sampling = SamplingParams(num_samples=6, max_tokens=60, seed=7)
    engine.update_weights(weights_of(models["tied"].first).items(), 0)
    usual = engine.response_timeout, engine.replacement_timeout
    try:
        engine.response_timeout = engine.replacement_timeout = silence  # for one that hangs only
        send(url, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RolloutError) as caught:
            engine.generate(PROMPTS[:4], sampling)
        assert time.monotonic() - start < SILENCE < min(usual)  # twice `silence`, and a moment
    finally:
        send(url, signal.SIGCONT)
        engine.response_timeout, engine.replacement_timeout = usual
    message = str(caught.value)
    assert "\n" not in message
    assert f"0 of 1 servers are up after 4 s, and --min-servers is 1: {url} did not answer" in message
    assert "generate" in (tmp_path / "stacks" / "rank0.txt").read_text()
    assert str(tmp_path / "stacks") in message
    assert len(engine.generate(PROMPTS[:4], sampling)) == 24  # it has woken up
    engine.close()


def test_a_server_that_somebody_else_gave_weights_is_not_believed(models, urls, alone, tmp_path):
    """Two runs on one server: the answers of the other's weights are not taken for ours."""
    options = cases.attached(models["tied"].first, urls["tied"])
    ours, theirs = (build({**options, "output_dir": str(tmp_path / name)}) for name in ("ours", "theirs"))
    ours.update_weights(weights_of(models["tied"].first).items(), 5)
    theirs.update_weights(weights_of(models["tied"].other).items(), 5)
    ours.replacement_timeout = 1.0
    with pytest.raises(RolloutError, match=r"weights .*/5, not .*/5"):
        ours.generate(PROMPTS[:1], contract.SAMPLING)
    ours.close()
    theirs.close()


def test_a_request_that_takes_more_than_its_time_ends_the_run(models, urls, alone, tmp_path):
    url = urls["tied"]
    engine = build(cases.attached(models["tied"].first, url, output_dir=str(tmp_path), rollout_timeout=2.0))
    engine.update_weights(weights_of(models["tied"].first).items(), 0)
    send(url, signal.SIGSTOP)
    try:
        with pytest.raises(
            RolloutError, match=f"{url} took more than --rollout-timeout, 2 s, for one request: raise it"
        ):
            engine.generate(PROMPTS[:1], contract.SAMPLING)
    finally:
        send(url, signal.SIGCONT)
    engine.close()


def test_killed_while_it_joins_the_group_that_brings_its_weights_the_run_ends_at_once(
    models, urls, alone, tmp_path, monkeypatch
):
    url, route = urls["tied"], "/collective_rpc"
    engine = build(cases.attached(models["tied"].first, url, weight_transfer="gloo", output_dir=str(tmp_path)))
    joining = Watched(monkeypatch, url, route, before=lambda: worker(url).suspend())
    found, seconds = meanwhile(
        lambda: engine.update_weights(weights_of(models["tied"].first).items(), 0),
        once=joining.asked,
        do=lambda: send(url, signal.SIGKILL),
    )
    assert isinstance(found, RolloutError)
    assert f"0 of 1 servers are up, and 1 are needed (--min-servers 1): {url}: {url} broke off POST {route}" in str(
        found
    )
    assert seconds < SILENCE / 2
    engine.close()
    urls.end("tied")
