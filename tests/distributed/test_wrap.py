"""Sharded models: meshes, and what only sharding could break: bfloat16, memory, shards that change between passes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdptrain.config import OptimConfig
from fsdptrain.errors import ConfigError
from fsdptrain.features.activation_memory.feature import enable_gradient_checkpointing
from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.optimizer import Optimizer
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.loading.materialize import store_in
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from fsdptrain.model.policy import plain_batch, policy_logprobs
from fsdptrain.model.probes.head import check_head
from fsdptrain.model.probes.layout import choose_layout
from tests import zoo
from tests.seam import policy_model
from tests.testing import spawn

from .sharded import SHARDING, backward, sharded_qwen3, tokens
from .storages import LargestTensor

STOCK = ("gemma2", "olmo2", "qwen3_moe", "gpt_oss")  # olmo2 hands float32 rotary tables to its layers
LONG = 512  # tokens


def in_bfloat16(root: Path) -> dict[str, dict[str, object]]:
    reports: dict[str, dict[str, object]] = {}
    row = torch.randint(2, zoo.VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(0))
    for name in STOCK:
        model = build_meta_model(root / name, trust_remote_code=False, attn_implementation="eager").eval()
        store_in(model, torch.float32)
        shard_model(model, build_mesh(1), compute_dtype=torch.bfloat16, **SHARDING)
        load_weights(model, root / name)
        stock = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.bfloat16, attn_implementation="eager")
        logits = model(input_ids=row, use_cache=False).logits
        logits.float().sum().backward()
        with torch.no_grad():
            equal = logits.equal(stock(input_ids=row, use_cache=False).logits)
        dtypes = {t.dtype for p in model.parameters() for t in (p, p.grad)}
        reports[name] = {"logits": equal, "masters and gradients": dtypes}
    return reports


def test_bfloat16_computes_what_the_stock_model_computes(tmp_path: Path):
    for name in STOCK:
        zoo.build(name).save_pretrained(tmp_path / name)
    for reports in spawn(2, in_bfloat16, tmp_path):
        assert reports == {name: {"logits": True, "masters and gradients": {torch.float32}} for name in STOCK}


def meshes() -> list[tuple[int, ...]]:
    return [build_mesh(replicas).shape for replicas in (1, 2, 4)]


def test_meshes():
    assert spawn(4, meshes) == [[(4,), (2, 2), (4, 1)]] * 4


def three_ranks() -> None:
    with torch.device("meta"):
        model = zoo.build("mixtral", num_local_experts=2)
    words = "2 experts with 64 columns cannot be sharded over 3 processes: set --fsdp-replicate-size"
    with pytest.raises(ConfigError, match=words):
        shard_model(model, build_mesh(1), compute_dtype=torch.float32, **SHARDING)


def test_experts_that_cannot_be_sharded_are_refused():
    spawn(3, three_ranks)


def largest_tensor() -> tuple[float, int, float]:
    """The difference that the check of the head finds; elements of the largest tensor in a pass, and its gradients."""
    model = policy_model("qwen2")
    enable_gradient_checkpointing(model)
    shard_model(model, build_mesh(1), compute_dtype=torch.bfloat16, **SHARDING)
    options = {"vocab_size": zoo.VOCAB_SIZE, "compute_dtype": torch.bfloat16}
    assert choose_layout(model, "auto", **options).layout == "packed"
    head = check_head(model, layout="packed", **options)
    row = torch.randint(zoo.VOCAB_SIZE, (LONG,), generator=torch.Generator().manual_seed(0)).tolist()
    with LargestTensor() as watch:
        found = policy_logprobs(
            model, plain_batch([row], device=torch.device("cpu")), layout="packed", with_entropy=True
        )
        assert found.entropy is not None
        (found.values.sum() + found.entropy.sum()).backward()
    norm = sum(p.grad.full_tensor().norm().item() for p in model.parameters() if p.grad is not None)
    return head, watch.numel, norm


def test_all_logits_never_exist_on_the_sharded_model_either() -> None:
    """Where it counts: inside the root's forward, whose head was gathered, and backward."""
    for head, numel, norm in spawn(2, largest_tensor):
        assert head < 2e-2
        assert norm > 0
        assert LONG * zoo.HIDDEN <= numel < LONG * zoo.VOCAB_SIZE  # activations are seen, logits of a chunk only


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens(50), use_cache=False).logits


def steps_after_evaluation():
    """Logits after an optimizer step, without and with an evaluation before it."""
    found = []
    for evaluate in (False, True):
        model = sharded_qwen3(reshard_after_forward=False)
        optimizer = Optimizer(model, OptimConfig(lr=1e-2), total_steps=3, fp16=False)
        backward(model, optimizer, seed=0)
        if evaluate:
            logits(model)
        optimizer.clip()
        optimizer.step()
        found.append(logits(model))
    return found


def test_an_optimizer_step_after_an_evaluation_is_seen_by_the_next_forward():
    for expected, found in spawn(2, steps_after_evaluation):
        assert torch.equal(found, expected)
