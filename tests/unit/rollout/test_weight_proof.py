"""A server that takes the place of another is asked for what it holds before it is used."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fsdptrain.rollout.weight_sync.checksum import checksum
from fsdptrain.vllm.server.client import ServerGoneError
from fsdptrain.vllm.server.push import Deadline, Weights
from fsdptrain.vllm.server.push_check import prove
from tests.unit.rollout.scripted_server import ANSWERS, ScriptedServer

NAMES = [f"layers.{i}.{part}.weight" for i in range(2) for part in ("up", "down", "norm")]


def sent(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((8,) if "norm" in name else (8, 8), generator=generator).bfloat16() for name in NAMES}


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """In two files."""
    tensors = sent()
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, names in zip(files, (NAMES[:2], NAMES[2:]), strict=True):
        save_file({name: tensors[name] for name in names}, path)
    return Weights(files, "run/1")


def hold(monkeypatch: pytest.MonkeyPatch, tensors: Mapping[str, Tensor]) -> ScriptedServer:
    def answer(server: ScriptedServer, body: dict) -> dict:
        names, kind = body["args"]
        return {"results": [{name: checksum(tensors[name], kind) for name in names if name in tensors}]}

    monkeypatch.setitem(ANSWERS, "/collective_rpc", answer)
    return ScriptedServer()


def test_one_that_holds_what_was_sent_is_taken_also_in_another_dtype_or_where_it_cannot_be_read(monkeypatch, weights):
    held = sent() | {"layers.0.norm.weight": sent()["layers.0.norm.weight"].float()}
    del held["layers.1.up.weight"]
    server = hold(monkeypatch, held)
    prove(server.client, weights, Deadline(60.0))
    assert server.calls == ["/collective_rpc"] * 2  # the second of the tensor that has another dtype


@pytest.mark.parametrize("name", NAMES)
def test_one_that_holds_something_else_is_not(monkeypatch, weights, name):
    server = hold(monkeypatch, sent() | {name: sent(1)[name]})
    with pytest.raises(ServerGoneError, match=f"{server.client.url} .* does not hold {name} as it was sent"):
        prove(server.client, weights, Deadline(60.0))


def test_where_nobody_waits_any_more_it_ends(monkeypatch, weights):
    with pytest.raises(ServerGoneError, match="was given up during the proof"):
        prove(hold(monkeypatch, sent()).client.until(lambda: True), weights, Deadline(60.0))
