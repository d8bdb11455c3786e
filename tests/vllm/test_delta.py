"""What vLLM holds after only what has changed was loaded is, bit by bit, what the trainer has."""

from itertools import product
from pathlib import Path

import pytest
import torch

from fsdptrain.fsdp.shards import local_shard
from fsdptrain.model.structure import reshard
from fsdptrain.testing import spawn
from fsdptrain.vllm.worker.readback import readable
from tests.matrix import only
from tests.vllm import contract, models

CHANGED = ("", "layers.1.self_attn.k_proj", "embed_tokens", "nothing", "layers.0.mlp.", "norm")


def held_after_each(folder: Path, bf16: bool) -> list[tuple[bool, float, float]]:
    """(all bits are the trainer's, bytes that were pushed, bytes that were not) for each of `CHANGED`."""
    backend, engine, check = contract.build_checked(contract.colocated(folder, bf16=bf16))
    found = []
    for version, changed in enumerate(CHANGED):
        reshard(backend.model)
        with torch.no_grad():
            for name, parameter in backend.model.named_parameters():
                if changed in name:
                    local_shard(parameter).mul_(1.5)
        engine.update_weights(check.watch(backend.hf_weights("hub")), version)
        check.check(version)
        sent = dict(backend.hf_weights("hub"))
        held = engine._llm.apply_model(lambda model, names=tuple(sent): dict(readable(model, names)))[0]
        metrics = engine.metrics()
        same = all(torch.equal(held[name], tensor) for name, tensor in sent.items())
        found.append((same, metrics["sync/pushed_bytes"], metrics["sync/saved_bytes"]))
    return found


@pytest.mark.parametrize(("name", "bf16"), only([("moe", True)], product(models.NAMES, (False, True))))
def test_a_delta_leaves_what_a_full_push_leaves(tmp_path, name, bf16):
    folder = models.save(name, tmp_path / "model")
    [found] = spawn(1, held_after_each, folder, bf16, timeout=400)
    total = found[0][1]
    assert all(same for same, _, _ in found)
    assert [pushed + saved for _, pushed, saved in found] == [total] * len(CHANGED)
    assert found[CHANGED.index("nothing")][1] == 0
    assert all(0 < saved < total for _, pushed, saved in found if 0 < pushed < total)
    assert found[1][1] < total / 3  # the attention of one layer
