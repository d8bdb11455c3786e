"""With servers the verification names every fault and the server."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.vllm.server import push
from fsdptrain.vllm.server.client import Deadline, VLLMClient
from tests.matrix import only
from tests.testing import spawn
from tests.vllm import contract
from tests.vllm.faults import FaultyTransfer, plant_faults, require_named, sync
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import wait_for_both

# A hundred faults of dense models and of mixtures of experts; in `make test` each kind twice.
CASES = [("tied", 10), ("tied", 50), ("untied", 50), ("moe", 100)]
_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ".experts.")


def is_part_of_a_layer(name: str) -> bool:
    """A server itself refuses an update that lacks the only tensor of a layer."""
    return any(part in name for part in _FUSED)


@pytest.mark.parametrize(("name", "tries"), only(CASES[:1], CASES))
def test_each_fault_is_named(models, urls, tmp_path: Path, name: str, tries: int) -> None:
    options = cases.attached(models[name].first, urls[name], output_dir=str(tmp_path), max_tokens_per_gpu=1024)
    transfer = FaultyTransfer(droppable=is_part_of_a_layer)
    [outcomes] = spawn(1, plant_faults, options, tries, transfer, timeout=500)
    assert len(outcomes) == tries
    require_named(outcomes, replica=urls[name])


@pytest.mark.matrix
def test_of_two_servers_the_one_with_a_wrong_tensor_is_named(pair, models, monkeypatch):
    broken, victim = pair.clients[1].url, "model.layers.1.self_attn.o_proj.weight"
    right = push.load_files

    async def load_files(client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        if client.url != broken:
            return await right(client, files, deadline)
        tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
        tensors[victim] = tensors[victim].flip(0)
        save_file(tensors, files[0].with_suffix(".wrong"))
        return await right(client, [files[0].with_suffix(".wrong")], deadline)

    wait_for_both(pair)
    options = cases.options(models["tied"].first, rollout_num_servers=2, max_tokens_per_gpu=1024)
    backend = FSDPBackend(Config(**options), total_steps=1)
    verifier, transfer = contract.verifier_of(options, pair), FaultyTransfer()
    for version in (100, 101):
        sync(backend, pair, verifier, version, transfer)
    monkeypatch.setattr(push, "load_files", load_files)
    with pytest.raises(RolloutError, match=f"{broken} does not hold {victim} of version 102"):
        sync(backend, pair, verifier, 102, transfer)
