from collections.abc import Iterator

import pytest
from openai import OpenAI

from fsdptrain.agents.endpoint import Endpoint
from tests.agents.scripted import KEY, ScriptedEpisodes


@pytest.fixture
def episodes() -> ScriptedEpisodes:
    return ScriptedEpisodes()


@pytest.fixture
def endpoint(episodes: ScriptedEpisodes) -> Iterator[Endpoint]:
    endpoint = Endpoint(episodes)
    yield endpoint
    endpoint.close()


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[OpenAI]:
    with OpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0) as client:
        yield client
