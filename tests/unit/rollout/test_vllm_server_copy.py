"""What the workers of one server hold of its weights: parts of a layer on each, or layers of its own."""

import pytest

from fsdptrain.vllm.server.push import Deadline
from fsdptrain.vllm.server.replica import read_checksums
from tests.unit.rollout.scripted_server import ANSWERS, ScriptedServer


def read(monkeypatch: pytest.MonkeyPatch, *workers: dict[str, int]) -> dict[str, int]:
    monkeypatch.setitem(ANSWERS, "/collective_rpc", lambda server, body: {"results": list(workers)})
    return read_checksums(ScriptedServer().client, ["a", "b", "c"], "bits", Deadline(60.0))


def test_layers_of_all_stages_of_a_pipeline_are_read(monkeypatch):
    assert read(monkeypatch, {"a": 1, "c": 3}, {"b": 2, "c": 3}) == {"a": 1, "b": 2, "c": 3}


def test_workers_that_hold_the_same_layer_must_agree(monkeypatch):
    assert read(monkeypatch, {"a": 1, "b": 2}, {"a": 1, "b": 5}, {"b": 2}) == {"a": 1, "b": -1}
