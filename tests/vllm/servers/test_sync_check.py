"""With servers too, --sync-check names the tensor that did not arrive, and sees a prefix cache that was kept."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fsdptrain.backends.fsdp import FSDPBackend
from fsdptrain.config import Config
from fsdptrain.errors import RolloutError
from fsdptrain.rollout.vllm_http import VLLMClient
from fsdptrain.rollout.weight_push import Deadline, FilePush
from fsdptrain.testing import spawn
from tests.distributed.test_sync_check import Courier, train_a_little
from tests.vllm import contract
from tests.vllm.servers import cases
from tests.vllm.servers.conftest import wait_for_both

FAULTS = ("stale", "permuted", "transposed", "not sent", "prefix cache kept")
TRIES = {"tied": 50, "untied": 50, "moe": 100}  # a hundred of dense models, and of mixtures
_PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ".experts.")


class Mover(Courier):
    def victims(self, fault: str) -> list[str]:
        """A server refuses a layer without its only tensor; one without a part of it, it does not see."""
        found = super().victims(fault)
        return [name for name in found if fault != "not sent" or any(part in name for part in _PARTS)]


def keep_cache(post: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for a server that is not told to forget, and says that it was."""

    def posted(client: VLLMClient, path: str, body: Any = None, **more: Any) -> Any:
        if path == "/reset_prefix_cache":
            return {"success": True}
        return post(client, path + "&clear_cache=false" * (path == "/pause?mode=abort"), body, **more)

    return posted


def what_the_check_said(options: dict[str, Any], tries: int) -> tuple[list[tuple[str, str, str | None]], list[float]]:
    """(fault, tensor, error) of each try, every other one at the hand-over that --sync-check first looks at; after each
    fault all goes well."""
    backend, engine, check = contract.build_checked(options)
    courier, draw, found, apart = Mover(), random.Random(1), [], []

    def hand_over(version: int, fault: str = "", victim: str = "") -> str | None:
        train_a_little(backend, version)
        post = VLLMClient.post
        try:
            if fault == "prefix cache kept":
                VLLMClient.post = keep_cache(post)
            engine.update_weights(courier.carry(check.watch(backend.hf_weights("hub")), fault, victim), version)
            check.check(version)
        except RolloutError as error:
            return str(error)
        finally:
            VLLMClient.post = post
        apart.extend(check.metrics().values())
        return None

    try:
        assert hand_over(0) is None
        assert set(engine.copies()[0].checksums(courier.before)) == set(courier.before)  # all can be read
        every = check
        for version in range(1, tries + 1):
            check = contract.check_of(options | {"sync_check": "first"}, engine, backend) if version % 2 else every
            fault = FAULTS[version % len(FAULTS)]
            victim = "" if fault == "prefix cache kept" else draw.choice(courier.victims(fault))
            found.append((fault, victim, hand_over(version, fault, victim)))
            assert (said := hand_over(1000 + version)) is None, said
    finally:
        engine.close()
    return found, apart


@pytest.mark.parametrize("name", TRIES)
def test_each_fault_is_named(models, urls, tmp_path: Path, name: str) -> None:
    options = cases.attached(models[name].first, urls[name], output_dir=str(tmp_path), max_tokens_per_gpu=1024)
    [(found, apart)] = spawn(1, what_the_check_said, options, TRIES[name], timeout=500)
    assert len(found) == TRIES[name]
    assert max(apart) < 1e-5, apart  # far from what the check allows
    for fault, victim, said in found:
        assert said is not None, f"{fault} {victim} was not seen"
        assert (victim or "prefix cache") in said, f"{fault} {victim}: {said}"
        assert urls[name] in said


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
