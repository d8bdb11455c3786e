"""What a server holds is read from all of its workers, and a restarted one is checked before it is used."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fsdptrain.vllm.server.client import Deadline, ServerGoneError
from fsdptrain.vllm.server.push import Weights
from fsdptrain.vllm.server.replica import read_checksums, require_weights
from tests.event_loop import run_in_loop
from tests.tensors import checksum
from tests.unit.vllm.scripted_server import ANSWERS, ScriptedServer

NAMES = [f"layers.{i}.{part}.weight" for i in range(2) for part in ("up", "down", "norm")]


def sent(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((8,) if "norm" in name else (8, 8), generator=generator).bfloat16() for name in NAMES}


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    tensors = sent()
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, names in zip(files, (NAMES[:2], NAMES[2:]), strict=True):
        save_file({name: tensors[name] for name in names}, path)
    return Weights(files, "run/1")


def server_with(monkeypatch: pytest.MonkeyPatch, tensors: Mapping[str, Tensor]) -> ScriptedServer:
    def answer(server: ScriptedServer, body: dict) -> dict:
        names, kind = body["args"]
        return {"results": [{name: checksum(tensors[name], kind) for name in names if name in tensors}]}

    monkeypatch.setitem(ANSWERS, "/collective_rpc", answer)
    return ScriptedServer()


def test_a_restarted_server_may_have_another_dtype_and_unreadable_tensors(monkeypatch, weights):
    held = sent() | {"layers.0.norm.weight": sent()["layers.0.norm.weight"].float()}
    del held["layers.1.up.weight"]
    run_in_loop(require_weights(server_with(monkeypatch, held).client, weights, Deadline(60.0)))


@pytest.mark.parametrize("name", NAMES)
def test_a_restarted_server_with_other_weights_is_rejected(monkeypatch, weights, name):
    server = server_with(monkeypatch, sent() | {name: sent(1)[name]})
    with pytest.raises(ServerGoneError, match=f"{server.client.url} was restarted and does not hold {name} as"):
        run_in_loop(require_weights(server.client, weights, Deadline(60.0)))


@pytest.mark.parametrize(
    ("workers", "merged"),
    [
        ([{"a": 1, "c": 3}, {"b": 2, "c": 3}], {"a": 1, "b": 2, "c": 3}),  # pipeline stages
        ([{"a": 1, "b": 2}, {"a": 1, "b": 5}, {"b": 2}], {"a": 1, "b": -1}),  # workers that disagree
    ],
)
def test_the_checksums_of_all_workers_are_merged(monkeypatch, workers, merged):
    monkeypatch.setitem(ANSWERS, "/collective_rpc", lambda server, body: {"results": workers})
    assert run_in_loop(read_checksums(ScriptedServer().client, ["a", "b", "c"], "values", Deadline(60.0))) == merged
