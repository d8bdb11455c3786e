"""Real vLLM servers in an environment of their own, spoken to from the trainer's: `make test-vllm` runs these.

FSDPTRAIN_VLLM_PYTHON names the Python of the environment with vLLM. Servers take long to start: tests share them.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.rollout import engine_factory
from fsdptrain.rollout.vllm_http import ServerError, VLLMClient
from fsdptrain.rollout.vllm_process import Launch, ServerProcess
from fsdptrain.rollout.vllm_server import VLLMServerEngine
from fsdptrain.rollout.vllm_server_build import server_arguments
from fsdptrain.testing import save_tiny_checkpoint
from tests.vllm import contract
from tests.vllm.servers import cases

PYTHON = os.environ.get("FSDPTRAIN_VLLM_PYTHON")

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
    made = {}
    for name, tied in [("tied", True), ("untied", False)]:
        first, other = (
            save_tiny_checkpoint(folder / f"{name}{seed}", seed, head_dim=32, tie_word_embeddings=tied)
            for seed in (0, 1)
        )
        made[name] = Models(first, other)
    return made


class Servers(dict[str, str]):
    """The address of a server for each model, by its name: started when it is first asked for."""

    def __init__(self, models: Mapping[str, Models], folder: Path) -> None:
        super().__init__()
        self._models, self._folder = models, folder
        self._processes: list[ServerProcess] = []

    def __missing__(self, name: str) -> str:
        model = self._models[name].first
        arguments = server_arguments(Config(**cases.options(model, max_tokens_per_gpu=1024)), model, on_gpu=False)
        launch = Launch(str(PYTHON), arguments, self._folder, self._folder, cases.KEY)
        process = ServerProcess(launch, len(self._processes), None)
        self._processes.append(process)
        process.start()
        wait_until_up(process)
        self[name] = process.url
        return process.url

    def end(self) -> None:
        for process in self._processes:
            process.end()


@pytest.fixture(scope="session")
def urls(models, tmp_path_factory) -> Iterator[Servers]:
    """Servers as a user would start them, with the API key in cases.KEY."""
    servers = Servers(models, tmp_path_factory.mktemp("servers"))
    try:
        yield servers
    finally:
        servers.end()


def wait_until_up(process: ServerProcess) -> None:
    client, end = VLLMClient(process.url, cases.KEY), time.monotonic() + 400
    while not client.is_healthy(timeout=1.0):
        assert not process.has_ended, process.last_words()
        assert time.monotonic() < end, process.last_words()
        time.sleep(0.3)


@pytest.fixture(scope="session")
def fresh_answers(models, tmp_path_factory) -> dict[str, list]:
    """What an engine that was just started on the other weights says, greedily: [tokens, logprobs] of each prompt."""
    target = tmp_path_factory.mktemp("fresh") / "answers.json"
    folders = {name: str(model.other) for name, model in models.items()}
    prompts = [prompt.token_ids for prompt in contract.PROMPTS]
    program = Path(__file__).with_name("fresh_engine.py")
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [str(PYTHON), str(program), json.dumps(folders), json.dumps(prompts), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(target.read_text())


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    """A group of this process, for an engine in the test itself."""
    torch.set_num_threads(1)
    with platform.process_group(600):
        yield


@pytest.fixture(scope="session")
def pair(models, alone, tmp_path_factory) -> Iterator[VLLMServerEngine]:
    """An engine with two servers of its own, and weights. Tests kill them: `wait_for_both`, and push anew."""
    config = Config(
        **cases.options(
            models["tied"].first, rollout_num_servers=2, rollout_server_python=PYTHON, sync_timeout=cases.SILENCE,
            rollout_max_response_len=400, max_tokens_per_gpu=800, output_dir=str(tmp_path_factory.mktemp("run")),
        )
    )  # fmt: skip
    make = engine_factory(config.rollout.engine, device_type="cpu")
    engine = make(config, checkpoint=models["tied"].first, device=torch.device("cpu"))
    try:
        engine.update_weights(weights_of(models["tied"].first).items(), 0)
        yield engine
    finally:
        engine.close()


def wait_for_both(engine: VLLMServerEngine) -> None:
    """Until both are there in their own words too: the fleet learns of a death when it looks next."""
    end = time.monotonic() + cases.RESTART
    while True:
        engine.fleet.wait_for(2, cases.RESTART)
        try:
            if {client.version(timeout=cases.SILENCE) for client in engine.clients} == {engine._tag}:
                return
        except ServerError:
            assert time.monotonic() < end
        time.sleep(0.3)


@pytest.fixture(autouse=True)
def _api_key(monkeypatch) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", cases.KEY)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight" or not tied(model)}


def tied(model) -> bool:
    return bool(model.config.tie_word_embeddings)


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
