"""examples/verifiers and examples/openenv, with a scripted model, in a Python that has these packages."""

import json
import os
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from fsdptrain.agents.calls import Choice, ModelCall
from fsdptrain.agents.endpoint import Endpoint
from fsdptrain.agents.harness import Command
from fsdptrain.types import Prompt
from tests.agents.scripted import KEY, ScriptedEpisodes
from tests.testing import reserved_port

VERIFIERS, OPENENV = (os.environ.get(f"FSDPTRAIN_{name}_PYTHON", "") for name in ("VERIFIERS", "OPENENV"))
EXAMPLES = Path(__file__).parents[2] / "examples"


def play(endpoint: Endpoint, *command: Any, **metadata: Any) -> Any:
    prompt = Prompt("0", [1], "", source="play", metadata=metadata)
    return Command(shlex.join(map(str, command)))(prompt, url=endpoint.url, key=KEY, timeout=100.0)


@pytest.mark.matrix
@pytest.mark.skipif(not VERIFIERS, reason="FSDPTRAIN_VERIFIERS_PYTHON names no Python")
def test_textarena_rewards_the_model_that_finds_the_word(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("game\n")  # the model repeats the message, which begins with [GAME]
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setenv("TASKSET", json.dumps({"taskset": {"id": "textarena", "game": "Hangman-v0"}}))
    program = [VERIFIERS, EXAMPLES / "verifiers" / "play.py"]
    [row] = subprocess.check_output([*program, "--rows", "1"], text=True).splitlines()
    assert play(endpoint, *program, task=json.loads(row)["task"]) == 1.0


class Guesses(ScriptedEpisodes):
    """Guesses the number of seed 5."""

    def _choice(self, call: ModelCall) -> Choice:
        return replace(super()._choice(call), content=json.dumps({"guess": Random(5).randint(1, 100)}))


@pytest.mark.matrix
@pytest.mark.skipif(not OPENENV, reason="FSDPTRAIN_OPENENV_PYTHON names no Python")
def test_an_openenv_server_rewards_the_model_that_finds_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, folder = Endpoint(Guesses()), EXAMPLES / "openenv"
    with reserved_port() as port:
        argv = [OPENENV, "-m", "uvicorn", "guess_number:app", "--port", str(port)]
        with subprocess.Popen(argv, cwd=folder) as server:
            monkeypatch.setenv("OPENENV_URL", url := f"http://127.0.0.1:{port}")
            wait_for(url)
            assert play(endpoint, OPENENV, folder / "play.py", seed=5) == 1.0
            assert play(endpoint, OPENENV, folder / "play.py", seed=6) == 0.0
            server.kill()
    endpoint.close()


def wait_for(url: str) -> None:
    for _ in range(600):
        try:
            httpx.get(f"{url}/health", trust_env=False).raise_for_status()
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server does not start")
