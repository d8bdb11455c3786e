"""After every push, servers have exactly the trainer's weights, and equal an engine that starts with them."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rollout import engine_factory
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.engine import VLLMServerEngine
from fsdptrain.vllm.weight_file import WeightFile
from tests.event_loop import run_in_loop
from tests.matrix import only
from tests.testing import spawn
from tests.vllm import contract
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import PYTHON, weights_of


def build(options: dict[str, Any]) -> VLLMServerEngine:
    config = Config(**options)
    make = engine_factory(config.rollout.engine)
    return make(config, checkpoint=Path(config.model.hf_checkpoint), device=torch.device("cpu"))


def test_responses_end_at_stop_strings(tmp_path):
    """With a server that the run starts, which loads the tokenizer."""
    options = cases.options(tmp_path / "model", rollout_server_python=str(PYTHON), output_dir=str(tmp_path / "run"))
    spawn(1, contract.require_stops, tmp_path / "model", options, timeout=400)


TWO_GPUS = pytest.mark.skipif(platform.device_count() < 2, reason="one GPU for the trainer, one for the server")
PUSHES = only([("tied", "file")], [("tied", "file"), ("untied", "file"), ("moe", "file")])
PUSHES.append(pytest.param("tied", "nccl", marks=[pytest.mark.gpu, TWO_GPUS]))


@pytest.mark.parametrize(("name", "way"), PUSHES)
def test_servers_and_trainer_agree_after_every_push(models, urls, tmp_path, name, way):
    options = cases.attached(models[name].first, urls[name], weight_transfer=way, output_dir=str(tmp_path))
    for found in spawn(1 if way == "nccl" else 2, contract.agreement, options, 3, timeout=200):
        assert max(found) < 1e-4, found


@pytest.mark.parametrize("name", only(["tied"], ["tied", "untied", "moe", "tied bf16", "moe bf16"]))
def test_a_server_after_a_push_equals_an_engine_that_starts_with_the_weights(
    models, urls, fresh, alone, tmp_path, name
):
    bf16, model = cases.is_bf16(name), models[name.partition(" ")[0]]
    dtype = torch.bfloat16 if bf16 else torch.float32
    engine = build(cases.attached(model.first, urls[name], output_dir=str(tmp_path), bf16=bf16))
    said = []
    try:
        for version, folder in enumerate([model.first, model.other]):
            weights = {name: tensor.to(dtype) for name, tensor in weights_of(folder).items()}
            engine.update_weights(weights.items(), version)
            said.append(engine.generate(contract.PROMPTS, cases.GREEDY))
    finally:
        engine.close()
    before, after = said
    assert [[c.token_ids, c.logprobs] for c in after] == fresh(name)
    assert [c.logprobs for c in before] != [c.logprobs for c in after]


def test_an_update_that_failed_half_way_is_in_nobodys_way(models, urls, fresh, alone, tmp_path):
    """It ended the run, or the run was killed within it. The next run is not disturbed."""
    model, client = models["tied"], VLLMClient(urls["tied"], cases.KEY)
    other = weights_of(model.other)
    part = {name: 3 * tensor for name, tensor in other.items() if "q_proj" in name}
    failed = build(cases.attached(model.first, urls["tied"], output_dir=str(tmp_path / "failed")))
    try:
        failed.update_weights(weights_of(model.first).items(), 4)
        with pytest.raises(RolloutError, match="parameters got no weights"):
            failed.update_weights(part.items(), 5)
        run_in_loop(client.post("/start_weight_update", timeout=60))
        info = WeightFile(tmp_path / "part").write(part.items())
        run_in_loop(VLLMClient(client.url, cases.KEY).post("/update_weights", {"update_info": info}, timeout=60))
    finally:
        failed.close()
    resumed = build(cases.attached(model.first, urls["tied"], output_dir=str(tmp_path / "resumed")))
    try:
        resumed.update_weights(other.items(), 4)
        said = resumed.generate(contract.PROMPTS, cases.GREEDY)
    finally:
        resumed.close()
    assert [[c.token_ids, c.logprobs] for c in said] == fresh("tied")


def test_servers_listen_on_the_loopback_interface(urls):
    port = int(urls["tied"].rpartition(":")[2])
    listening = {c.laddr.ip for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_a_server_with_another_dtype_or_key_is_refused_and_the_key_is_in_no_file_of_the_run_and_in_no_error(
    models, urls, alone, tmp_path, monkeypatch
):
    options = cases.attached(models["tied"].first, urls["tied"], output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        build({**options, "bf16": True})
    monkeypatch.delenv("ROLLOUT_API_KEY")
    with pytest.raises(ConfigError, match="401"):
        build(options)
    monkeypatch.setenv("ROLLOUT_API_KEY", "another key\n")
    with pytest.raises(ConfigError, match="401") as caught:
        build(options)
    assert "another key" not in str(caught.value)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("another key" in text or cases.KEY in text for text in [*files, json.dumps(str(caught.value))])


# A hundred faults of dense models and of mixtures of experts.
CASES = [("tied", 50), ("untied", 50), ("moe", 100)]
_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ".experts.")


def is_part_of_a_layer(name: str) -> bool:
    """A server itself refuses an update that lacks the only tensor of a layer."""
    return any(part in name for part in _FUSED)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "tries"), CASES)
def test_each_fault_is_named(models, urls, tmp_path: Path, name: str, tries: int) -> None:
    options = cases.attached(models[name].first, urls[name], output_dir=str(tmp_path), max_tokens_per_gpu=1024)
    transfer = FaultyTransfer(droppable=is_part_of_a_layer)
    [outcomes] = spawn(1, plant_faults, options, tries, transfer, timeout=500)
    assert len(outcomes) == tries
    require_named(outcomes, replica=urls[name])
