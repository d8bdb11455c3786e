"""`fsdptrain watch` and `fsdptrain report` in a browser, also while a run goes on."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from fsdptrain.loggers import RunInfo
from fsdptrain.loggers.jsonl import JsonlLogger
from tests.browser import Browser, open_browser
from tests.e2e import command
from tests.e2e.command import TINY_RUN, rows_of, trained
from tests.testing import wait_until

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<!--<script>",
    "${window.hacked = 1} `'\"&amp; \u2028 \ud800 \x00\x1b[2J",
]
NUM_POINTS = "document.querySelectorAll('[data-metric=\"reward/mean\"] circle').length"
STATE = "document.querySelector('.run .state')?.textContent ?? ''"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser; at the end of a test, no script may have failed and nothing may have been loaded from elsewhere."""
    browser.messages.clear()
    browser.requests.clear()
    browser.resize(1200, 900)
    yield browser
    hosts = {url.partition("?")[0] for url in browser.requests if not url.startswith(("http://127.0.0.1:", "file://"))}
    assert (browser.messages, hosts) == ([], set())
    browser.open("about:blank#done")


@contextmanager
def watching(runs: Sequence[Path], folder: Path) -> Iterator[str]:
    """Run `fsdptrain watch` and return the address that it prints."""
    process = command.start(["watch", *map(str, runs)], folder)
    try:
        out = folder / "out"
        wait_until(lambda: out.is_file() and out.read_text().endswith("\n"), alive=process.is_alive)
        yield out.read_text().strip()
    finally:
        process.kill()
        process.join()
    assert (folder / "err").read_text() == ""


def write_run(folder: Path, *, name: str = "reward/mean", texts: Sequence[str] = ("a", "b\n", "c")) -> None:
    logger = JsonlLogger(RunInfo(folder, "p", "n", 4))
    sampled: dict[str, Any] = {"tokens": list(texts), "rollout_logprobs": [-1.0, *[-0.5 for _ in texts[2:]], None]}
    for step in range(1, 5):
        logger.log({name: step / 4, "reward/mean": step / 4, "eval/heldout/accuracy": step / 8}, step)
        row = {"set": "train", "prompt": texts[0], "response": "".join(texts), "label": texts[-1], "reward": 0.5}
        logger.log_samples([{**row, **sampled, "advantage": -1.0 if step % 2 else 2.0}], step)
    logger.close()


def test_the_page_shows_a_run_while_it_goes_on(page: Browser, checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    with watching([run], tmp_path / "watch") as url:
        page.open(url)
        page.wait(f"{STATE} === 'waiting for the first step'")
        flags = ["--output-dir", str(run), "--num-rollout", "9"]
        process = command.start(["--hf-checkpoint", str(checkpoint), *TINY_RUN, *flags], tmp_path / "train")
        try:
            for wanted in (2, 5):
                count = stopped_at(process, run / "metrics.jsonl", wanted, tmp_path / "train" / "err")
                page.wait(f"{NUM_POINTS} === {count} && ({STATE}).startsWith('step {count} of 9 · ')")
                send_signal(process, signal.SIGCONT)
            page.wait(f"{NUM_POINTS} === 9 && ({STATE}).startsWith('step 9 of 9 · finished')")
            process.join()
        finally:
            process.kill()
    assert process.exitcode == 0
    shown = page.get("[...document.querySelectorAll('[data-metric]')].map(x => x.dataset.metric)")
    assert shown[:4] == ["reward/mean", "reward/std", "reward/reasoning_gym", "reward/variety"]
    logged = rows_of(run / "samples.jsonl")
    last = [row for row in logged if row["set"] == "train" and row["advantage"]][-1]
    page.get("{const set = document.getElementById('samples-set'); set.value = 'train'; set.oninput()}")
    cards = "[...document.querySelectorAll('.sample')]"
    colored = f"{cards}.map(c => [...c.querySelectorAll('.token')].filter(t => t.style.background).length)"
    assert max(page.get(colored)) == len([text for text in last["tokens"] if text])
    assert page.get(f"{cards}.length") == 20
    page.get("document.getElementById('samples-more').onclick()")
    assert page.get(f"{cards}.length") == 36


def stopped_at(process: ForkServerProcess, metrics: Path, wanted: int, errors: Path) -> int:
    """Stop the run after `wanted` steps or a little later; return how many it has logged."""
    while (count := len(trained(rows_of(metrics))) if metrics.is_file() else 0) < wanted:
        assert process.is_alive(), errors.read_text()
        time.sleep(0.01)
    send_signal(process, signal.SIGSTOP)
    count = len(trained(rows_of(metrics)))
    assert count < 9
    return count


def send_signal(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


@pytest.mark.parametrize("saved", [False, True])
def test_texts_of_a_run_stay_texts(page: Browser, tmp_path: Path, saved: bool) -> None:
    run = tmp_path / "<img src=x onerror='window.hacked=1'>"
    write_run(run, name=f"eval/{HOSTILE[2].replace('/', '')}/accuracy", texts=HOSTILE)
    if saved:
        result = command.run(["report", str(run)], tmp_path / "out")
        assert (result.code, result.err) == (0, "")
        page.open((run / "report.html").as_uri())
        check_hostile(page)
        return
    with watching([run], tmp_path / "watch") as url:
        page.open(url)
        check_hostile(page)


def check_hostile(page: Browser) -> None:
    page.wait("document.querySelectorAll('.sample').length === 4")
    page.get("document.getElementById('metrics-menu').open = true")
    page.wait("document.querySelectorAll('#metrics-list label').length === 3")
    page.get("document.querySelector('.token').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))")
    assert "rollout logprob -1.0000" in page.get("document.getElementById('tip').textContent")
    text = page.get("document.body.innerText")
    for hostile in (*HOSTILE[:4], "${window.hacked = 1} `'\"&amp;"):
        assert hostile in text, hostile
    assert page.get("[window.hacked === undefined, document.images.length, document.scripts.length]") == [True, 0, 2]
    assert page.get("document.querySelector('.run h3').textContent") == "<img src=x onerror='window.hacked=1'>"
