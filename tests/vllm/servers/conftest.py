"""Real vLLM servers in an environment of their own, spoken to from the trainer's: `make test-vllm` runs these.

FSDPTRAIN_VLLM_PYTHON names the Python of the environment with vLLM. Servers take long to start: tests share them.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.vllm.server.build import server_arguments
from fsdptrain.vllm.server.process import ServerProcess
from tests.event_loop import run_in_loop
from tests.vllm import contract
from tests.vllm import models as checkpoints
from tests.vllm.fresh_engine import Answers, Start, fresh_answers
from tests.vllm.servers import cases

PYTHON = os.environ.get("FSDPTRAIN_VLLM_PYTHON")
ONE_SERVER = ["--rollout-engine", "vllm-server", "--rollout-num-servers", "1", "--rollout-kv-cache-gib", "0.05"]

if PYTHON is None:
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True)
class Models:
    """Checkpoints of one shape: `first` is what a server starts with, `other` what it is given."""

    first: Path
    other: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Models]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: Models(*(checkpoints.save(name, folder / f"{name}{seed}", seed) for seed in (0, 1)))
        for name in checkpoints.NAMES
    }


class Servers(dict[str, str]):
    """The address of a server for each model, by its name, and of another in bfloat16 for each "<name> bf16": started
    when it is first asked for."""

    def __init__(self, models: Mapping[str, Models], folder: Path) -> None:
        super().__init__()
        self._models, self._folder = models, folder
        self._numbers = count()
        self._processes: dict[str, ServerProcess] = {}

    def __missing__(self, name: str) -> str:
        model = self._models[name.partition(" ")[0]].first
        args = {"max_num_seqs": 8}
        options = cases.options(model, max_tokens_per_gpu=1024, bf16=cases.is_bf16(name), rollout_engine_args=args)
        arguments = server_arguments(Config(**options), model, on_gpu=False)
        log = self._folder / f"server{next(self._numbers)}.log"
        process = ServerProcess(str(PYTHON), arguments, log, api_key=cases.KEY)
        self._processes[name] = process
        wait_until_up(process)
        self[name] = process.client.url
        return self[name]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


@pytest.fixture(scope="session")
def urls(models, tmp_path_factory) -> Iterator[Servers]:
    """Servers as a user would start them, with the API key in cases.KEY."""
    servers = Servers(models, tmp_path_factory.mktemp("servers"))
    try:
        yield servers
    finally:
        servers.close()


def wait_until_up(process: ServerProcess) -> None:
    run_in_loop(process.wait_until_up(400.0))


@pytest.fixture(scope="session")
def fresh(models) -> Callable[[str], Answers]:
    """Greedy answers of an engine just started on the other weights, for a name of `Servers`."""

    @cache
    def answers(name: str) -> Answers:
        model = models[name.partition(" ")[0]].other
        start = Start(str(model), "bfloat16" if cases.is_bf16(name) else "float32")
        return fresh_answers(str(PYTHON), {name: start}, [prompt.token_ids for prompt in contract.PROMPTS])[name]

    return answers


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    """A group of this process, for an engine in the test itself."""
    torch.set_num_threads(1)
    with platform.process_group(600):
        yield


@pytest.fixture(autouse=True)
def _api_key(monkeypatch) -> None:
    monkeypatch.setenv("ROLLOUT_API_KEY", cases.KEY + "\n")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """By the names of the files, in their order."""
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return dict(sorted(found.items()))
