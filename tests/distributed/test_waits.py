"""A training step runs the designed collectives, and waits for the device once, at its end."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrain.algo.losses import LOSSES
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.shards import local_shard
from fsdptrain.platform import has_accelerator
from fsdptrain.rollout.embedded.engine import HFEngine
from fsdptrain.rollout.weight_sync.checksum import StartedChecksum, finish_checksums, start_checksum
from fsdptrain.types import LossConfig, PackedBatch
from fsdptrain.vllm.weight_file import WeightFile
from tests import zoo
from tests.testing import save_hub, save_tiny_checkpoint, spawn

from .collectives import Collectives
from .test_fsdp_backend import GRPO, config, packs_of_this_rank, samples, scored

LAYERS = 3
# On a device the host waits for the result of each of these: it is a number for Python, or the size of a tensor. And it
# waits where a tensor is made of Python's numbers (lift_fresh), as they are copied from memory that is not pinned.
READS = (
    "lift_fresh",
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "item", "bincount", "histc"),
    *("_unique", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave"),
)
BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")  # indexing with a bool mask reads it
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "KL and entropy": {"kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "adapter": {"lora_rank": 4},
    "truncated sampling": {"rollout_top_k": 5, "rollout_temperature": 0.7},
    "offloaded": {"fsdp_cpu_offload": True},
}


HOST_READS = ("tolist", "cpu", "numpy", "__array__")  # these do not pass the dispatcher on a CPU


class Reads(TorchDispatchMode):
    """Records calls that would make the host wait for a device: operations, and methods that return Python values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Any:
        for name in HOST_READS:
            self._patch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        masked = name in BY_MASK and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masked or (name in READS and not (kwargs or {}).get("output_size")):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def packs_of(max_tokens: int) -> list[PackedBatch]:
    return packs_of_this_rank(samples(12), max_tokens)


def counted_reads(checkpoint: str) -> dict[str, Counter[str]]:
    return {name: reads_of(checkpoint, values) for name, values in OPTIONS.items()}


def reads_of(checkpoint: str, values: dict[str, Any]) -> Counter[str]:
    backend = FSDPBackend(config(checkpoint, **values), total_steps=10)
    packs = scored(backend, packs_of(64), reference="kl_loss_coef" in values)
    assert len(packs) > 2
    with Reads() as seen:
        backend.train_step(packs, LOSSES["grpo"], GRPO if "kl_loss_coef" in values else LossConfig())
    return seen.calls


def counted_collectives(checkpoint: str, values: dict[str, Any]) -> list[tuple[int, Counter[str], int]]:
    """(packs, calls by kind, bytes of all-reduces) of steps with few and with many packs."""
    backend = FSDPBackend(config(checkpoint, **values), total_steps=10)
    found = []
    for max_tokens in (4096, 64):
        packs = packs_of(max_tokens)
        with Collectives() as seen:
            backend.train_step(packs, LOSSES["grpo"], LossConfig())
        calls: Counter[str] = Counter()
        for (kind, _), count in seen.calls.items():
            calls[kind] += count
        small = sum(size for (kind, _), size in seen.bytes.items() if kind == "all-reduce")
        found.append((len(packs), calls, small))
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=LAYERS))


def test_a_step_reads_the_device_once_for_its_final_metrics(checkpoint: str) -> None:
    [calls] = spawn(1, counted_reads, checkpoint)
    assert calls == {name: {"tolist": 1} for name in OPTIONS}


def reads_of_syncs(checkpoint: str, folder: str) -> tuple[Counter[str], Counter[str], int, int]:
    """Of a sync to the embedded engine with checksums of both sides, and of one to a file; bytes gathered; of all."""
    backend = FSDPBackend(config(checkpoint), total_steps=10)
    engine = HFEngine(Path(checkpoint), dtype=torch.float32, device=torch.device("cpu"))
    file = WeightFile(Path(folder) / str(dist.get_rank()))
    sent: dict[str, StartedChecksum] = {}

    def recorded() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in backend.hf_weights("module"):
            sent[name] = start_checksum(tensor)
            yield name, tensor

    with Reads() as with_checksums, Collectives() as gathers:
        engine.update_weights(recorded(), 1)
        found = finish_checksums(sent)
        weights = engine.model.state_dict()
        held = finish_checksums({name: start_checksum(weights[name]) for name in found})
    assert held == found
    with Reads() as to_file, Collectives() as gathers_to_file:
        file.write(backend.hf_weights("hub"))
    nbytes = sum(parameter.nbytes for parameter in backend.model.parameters())
    gathered = sum(gathers.bytes.values())
    assert gathers_to_file.bytes == gathers.bytes
    return with_checksums.calls, to_file.calls, gathered, nbytes


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_verified_weight_sync_waits_twice_however_many_tensors_there_are(architecture: str, tmp_path: Path) -> None:
    """Once for the checksums of each side; for servers once per buffer of the file. Every weight is gathered once."""
    for num_layers in (2, 5):
        folder = save_hub(zoo.build(architecture, num_hidden_layers=num_layers), tmp_path / str(num_layers))
        for with_checksums, to_file, gathered, nbytes in spawn(2, reads_of_syncs, str(folder), str(folder)):
            assert with_checksums == {"tolist": 2}
            assert to_file == {"numpy": 1}
            assert gathered == nbytes


def test_the_count_of_reads_sees_them() -> None:
    with Reads() as seen:
        values = torch.arange(4.0)
        values.sum().item()
        values[values > 1]
        values.nonzero()
        values[values > 1] = 0.0
        values.repeat_interleave(torch.ones(4, dtype=torch.long))
        torch.bincount(torch.ones(4, dtype=torch.long))
        torch.tensor(1.0)
        values.tolist()
        values.cpu()
        np.asarray(values)
    of_operations = {"_local_scalar_dense", "index", "nonzero", "index_put_", "repeat_interleave", "bincount"}
    assert set(seen.calls) >= {*of_operations, *HOST_READS, "lift_fresh"}
    assert all(count == 1 for name, count in seen.calls.items() if name in HOST_READS)
    torch.ones(1).tolist()
    assert seen.calls["tolist"] == 1


@pytest.mark.parametrize("values", [{}, {"fsdp_reshard_after_forward": False}], ids=str)
def test_collectives_of_a_step_are_those_of_the_design(values: dict[str, Any], checkpoint: str) -> None:
    """For each pack: every layer is gathered for its forward and again for its backward pass, the rest once, and
    gradients are reduced. For each step, whatever its packs: the norm, the metrics, and their maxima."""
    for ranks in spawn(2, counted_collectives, checkpoint, values):
        for num_packs, calls, small in ranks:
            gathers = 1 if values else 2
            assert calls["all-gather"] == num_packs * (gathers * LAYERS + 1)
            assert calls["reduce-scatter"] == num_packs * (LAYERS + 1)
            assert calls["all-reduce"] <= 3
            assert small < 1024
        assert len({calls["all-reduce"] for _, calls, _ in ranks}) == 1
        assert len({num_packs for num_packs, _, _ in ranks}) == 2


def copies_to_device(step: Callable[[], object]) -> int:
    counter = "null_gpu_copies_to_device"  # of tests/null_gpu, for which there is no profiler
    if hasattr(library := CDLL(None), counter):
        before = library[counter]()
        step()
        return library[counter]() - before
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("Memcpy HtoD"))


def waits_and_copies(checkpoint: str) -> list[tuple[int, int, int, int]]:
    """(packs, tensors of a pack, waits for the device, copies from the host) of one step each, after a first one."""
    backend = FSDPBackend(config(checkpoint, bf16=True), total_steps=10)
    found = []
    for max_tokens in (4096, 64):
        packs = [pack.pin_memory() for pack in packs_of(max_tokens)]
        backend.train_step(packs, LOSSES["grpo"], LossConfig())
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            backend.train_step(packs, LOSSES["grpo"], LossConfig())
            torch.cuda.set_sync_debug_mode("default")
        waits = sum("called a synchronizing CUDA operation" in str(warning.message) for warning in said)
        copies = copies_to_device(lambda packs=packs: backend.train_step(packs, LOSSES["grpo"], LossConfig()))
        tensors = sum(isinstance(value, torch.Tensor) for value in vars(packs[0]).values())
        found.append((len(packs), tensors, waits, copies))
    assert all(local_shard(p).is_cuda for p in backend.model.parameters())
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not has_accelerator(), reason="needs a GPU")
def test_a_device_is_waited_for_once_and_given_each_pack_once(checkpoint: str) -> None:
    """One wait per step, for the final metrics. Copies per pack: its tensors, and the sizes that FSDP2's `chunk_cat`
    needs on the device, once for each layer and once for the rest."""
    [steps] = spawn(1, waits_and_copies, checkpoint)
    (few, tensors, waits, copies), (many, _, more_waits, more_copies) = steps
    assert waits == more_waits == 1
    assert (copies, more_copies) == tuple(packs * (tensors + LAYERS + 1) for packs in (few, many))
