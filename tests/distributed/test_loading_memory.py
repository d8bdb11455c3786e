"""No rank holds more of a tied model than its shard while it loads, a defect of slime's backend."""

import threading
import time
from pathlib import Path
from typing import Any

import torch

from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from tests.testing import spawn, tiny_qwen3

from .sharded import SHARDING

RANKS = 4
VOCAB, WIDTH = 65_536, 256  # 64 MiB of float32 in the embedding, which is the head too


class PeakMemory:
    """The most anonymous memory of this process above what it had before; pages of mapped files do not count."""

    def __enter__(self) -> "PeakMemory":
        self.base = self.peak = _anonymous_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, _anonymous_memory())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.peak, _anonymous_memory())
        self._done.set()
        self._thread.join()

    @property
    def above(self) -> int:
        """[bytes]"""
        return self.peak - self.base


def _anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def load(path: Path) -> dict[str, Any]:
    with PeakMemory() as building:
        model = build_meta_model(path, trust_remote_code=False, attn_implementation="eager")
        shard_model(model, build_mesh(1), compute_dtype=torch.bfloat16, **SHARDING)
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    with PeakMemory() as loading:
        load_weights(model, path)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return {"on_meta": on_meta, "tied": tied, "building": building.above, "loading": loading.above}


def test_a_tied_model_is_on_meta_until_each_rank_reads_its_own_shard(tmp_path: Path) -> None:
    model = tiny_qwen3(vocab_size=VOCAB, hidden_size=WIDTH)
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="10MB")  # float32 files would be mapped, not read
    whole = VOCAB * WIDTH * 4
    by_rank = spawn(RANKS, load, tmp_path)
    for rank in by_rank:
        assert rank["on_meta"]
        assert rank["tied"]
        assert rank["building"] < whole / 4
        assert whole / RANKS < rank["loading"] < whole / 2, "its own shard, and what reading it takes"
