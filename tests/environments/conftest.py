"""verifiers and OpenEnv, each in an environment of its own: `make test-environments` runs these tests.

FSDPTRAIN_VERIFIERS_PYTHON and FSDPTRAIN_OPENENV_PYTHON name their Pythons.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from fsdptrain.agents.endpoint import Endpoint
from fsdptrain.types import Prompt
from tests.agents.scripted import KEY, ScriptedEpisodes

VERIFIERS = os.environ.get("FSDPTRAIN_VERIFIERS_PYTHON", "")
OPENENV = os.environ.get("FSDPTRAIN_OPENENV_PYTHON", "")
FOREIGN = Path(__file__).with_name("foreign")  # modules for their Pythons

if not (VERIFIERS and OPENENV):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _foreign_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOREIGN), prepend=os.pathsep)


@pytest.fixture
def episodes() -> ScriptedEpisodes:
    return ScriptedEpisodes()


@pytest.fixture
def play(episodes: ScriptedEpisodes) -> Iterator[Callable[..., Any]]:
    """Run an episode of an agent on one of its rows. The model is `episodes`."""
    endpoint = Endpoint(episodes)

    async def run(agent: Any, row: Mapping[str, Any], timeout: float) -> Any:
        prompt = Prompt("0", [1], row["label"], source=row["prompt"], metadata=row["metadata"])
        async with AsyncOpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0) as client:
            return await asyncio.wait_for(agent(client, prompt), timeout)

    yield lambda agent, row, timeout=30.0: asyncio.run(run(agent, row, timeout))
    endpoint.close()


def words_of_nltk(folder: Path, word: str = "game") -> Path:
    """Write a word list of NLTK with one word, instead of downloading one. Returns the folder of NLTK's data."""
    words = folder / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text(f"{word}\n")
    return folder / "nltk"
