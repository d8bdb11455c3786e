"""The checks of a policy at its start, and the logits that it holds, on a sharded model.

Its gradients are compared with those of the plain model in test_sweep.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdptrain.features.activation_memory.checkpointing import enable_gradient_checkpointing
from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import check_head, install_policy_forward, plain_batch, policy_logprobs
from fsdptrain.model.probes.layout import choose_layout
from fsdptrain.types import LogProbs
from tests import zoo
from tests.testing import spawn

from .sharded import SHARDING
from .storages import LargestTensor

CPU = torch.device("cpu")
LONG = 512  # tokens
SEGMENT_LENGTHS = ((9, 21), (3, 14), (30,), (1, 5, 2))  # of four packs, each rank takes every world_size-th


def prepare(name: str, attention: str = SEGMENTS) -> PreTrainedModel:
    model = zoo.build(name)
    register_attention()
    model.set_attn_implementation(attention)
    install_policy_forward(model, chunk_size=16)
    return model


def shard(model: PreTrainedModel, compute_dtype: torch.dtype = torch.float32) -> None:
    shard_model(model, build_mesh(1), compute_dtype=compute_dtype, **SHARDING)


def objective(found: LogProbs) -> Tensor:
    assert found.entropy is not None
    return found.values.sum() + 0.3 * found.entropy.sum()


def gradients(model: PreTrainedModel, layout: Any, rank: int, world_size: int) -> dict[str, Tensor]:
    for number in range(rank, len(SEGMENT_LENGTHS), world_size):
        generator = torch.Generator().manual_seed(number)
        lengths = SEGMENT_LENGTHS[number]
        segments = [torch.randint(zoo.VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
        batch = plain_batch(segments, device=CPU)
        objective(policy_logprobs(model, batch, layout=layout, temperature=0.8, with_entropy=True)).backward()
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def probe_and_train(name: str, attention: str, dtype: torch.dtype) -> tuple[str, str, float, dict[str, Tensor]]:
    model = prepare(name, attention)
    shard(model, dtype)
    options = {"vocab_size": zoo.VOCAB_SIZE, "compute_dtype": dtype}
    probe = choose_layout(model, "auto", **options)
    head = check_head(model, layout=probe.layout, **options)
    found = gradients(model, probe.layout, dist.get_rank(), dist.get_world_size())
    return probe.layout, probe.reason, head, found


def test_an_attention_that_leaks_is_found_on_the_sharded_model() -> None:
    for layout, reason, _, _ in spawn(2, probe_and_train, "gpt_oss", "eager", torch.float32):
        assert layout == "padded"
        assert "packed with eager: differs by" in reason


def test_bfloat16_compute_with_float32_shards_passes_the_checks() -> None:
    for layout, reason, head, found in spawn(2, probe_and_train, "gemma2", SEGMENTS, torch.bfloat16):
        assert layout == "packed", reason
        assert head < 2e-2
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}


def largest_tensor() -> tuple[int, float]:
    model = prepare("qwen2")
    enable_gradient_checkpointing(model)
    shard(model, torch.bfloat16)
    tokens = torch.randint(zoo.VOCAB_SIZE, (LONG,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = plain_batch([tokens], device=CPU)
    with LargestTensor() as watch:
        objective(policy_logprobs(model, batch, layout="packed", with_entropy=True)).backward()
    return watch.numel, sum(p.grad.full_tensor().norm().item() for p in model.parameters() if p.grad is not None)


def test_all_logits_never_exist_on_the_sharded_model_either() -> None:
    """Where it counts: inside the root's forward, whose head was gathered, and backward."""
    for numel, norm in spawn(2, largest_tensor):
        assert norm > 0
        assert LONG * zoo.HIDDEN <= numel < LONG * zoo.VOCAB_SIZE  # activations are seen, logits of a chunk only
