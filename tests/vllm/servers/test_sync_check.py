"""With servers too, --sync-check names the tensor that did not arrive, and sees a prefix cache that was kept."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.testing import spawn
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.engine import VLLMServerEngine
from fsdptrain.vllm.server.push import Deadline, FilePush
from tests.distributed.test_sync_check import Courier, train_a_little
from tests.matrix import only
from tests.vllm import contract
from tests.vllm.faults import require_named, what_the_check_said
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import wait_for_both

TRIES = [("tied", 10), ("tied", 50), ("untied", 50), ("moe", 100)]  # in `make test` each fault twice
_PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ".experts.")


class Mover(Courier):
    def victims(self, fault: str) -> list[str]:
        """A server refuses a layer without its only tensor; one without a part of it, it does not see."""
        found = super().victims(fault)
        return [name for name in found if fault != "not sent" or any(part in name for part in _PARTS)]


@contextmanager
def keep_cache(engine: VLLMServerEngine) -> Iterator[None]:
    """Stands for servers that are not told to forget, and say that they were."""
    post = VLLMClient.post

    def posted(client: VLLMClient, path: str, body: Any = None, **more: Any) -> Any:
        if path == "/reset_prefix_cache":
            return {"success": True}
        return post(client, path + "&clear_cache=false" * (path == "/pause?mode=abort"), body, **more)

    VLLMClient.post = posted
    try:
        yield
    finally:
        VLLMClient.post = post


@pytest.mark.parametrize(("name", "tries"), only(TRIES[:1], TRIES))
def test_each_fault_is_named(models, urls, tmp_path: Path, name: str, tries: int) -> None:
    options = cases.attached(models[name].first, urls[name], output_dir=str(tmp_path), max_tokens_per_gpu=1024)
    [(found, apart)] = spawn(1, what_the_check_said, options, tries, Mover(), keep_cache, timeout=500)
    assert len(found) == tries
    require_named(found, apart, bound=1e-5, holder=urls[name])


@pytest.mark.matrix
def test_of_two_servers_the_one_that_was_given_another_tensor_is_named(pair, models, monkeypatch):
    broken, victim = pair.clients[1].url, "model.layers.1.self_attn.o_proj.weight"
    right = FilePush.send

    def send(push: FilePush, client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        if client.url != broken:
            return right(push, client, files, deadline)
        tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
        tensors[victim] = tensors[victim].flip(0)
        save_file(tensors, files[0].with_suffix(".wrong"))
        return right(push, client, [files[0].with_suffix(".wrong")], deadline)

    wait_for_both(pair)
    options = cases.options(models["tied"].first, rollout_num_servers=2, max_tokens_per_gpu=1024)
    backend = FSDPBackend(Config(**options), total_steps=1)
    check = contract.check_of(options, pair, backend)
    for version in (100, 101):
        train_a_little(backend, version)
        pair.update_weights(check.watch(backend.hf_weights("hub")), version)
        check.check(version)
    monkeypatch.setattr(FilePush, "send", send)
    train_a_little(backend, 102)
    pair.update_weights(check.watch(backend.hf_weights("hub")), 102)
    with pytest.raises(RolloutError, match=f"{broken} does not hold {victim} of version 102"):
        check.check(102)
