"""Sharded gradients are the sum over ranks on any mesh, with offload, without resharding."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.loading.materialize import store_in
from fsdptrain.model.loading.meta import build_meta_model, load_weights
from tests import zoo
from tests.exact import Exact, in_float64
from tests.testing import spawn

from .sharded import SHARDING

ARCHITECTURES = ("qwen2", "qwen3_moe")  # tied; and experts that lie on no more than three ranks
STOCK = ("gemma2", "olmo2", "qwen3_moe", "gpt_oss")  # olmo2 hands float32 rotary tables to its layers
LENGTHS = (3, 40, 11, 7, 25, 2, 30)  # tokens of seven rows: no two ranks get the same work
TOLERANCE = 1e-12  # of the largest gradient, in float64: only the order of summation differs
WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "offload": {"cpu_offload": True},
    "kept": {"reshard_after_forward": False},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wrap")
    for name in (*ARCHITECTURES, *STOCK):
        zoo.build(name).save_pretrained(root / name)
    return root


def test_gradients_are_those_of_one_process(checkpoints: Path):
    """With replicas: test_laws.py."""
    for errors in spawn(2, _gradient_errors, checkpoints):
        assert {way: error for way, error in errors.items() if not error < TOLERANCE} == {}


def test_bfloat16_computes_what_the_stock_model_computes(checkpoints: Path):
    for reports in spawn(2, _bfloat16, checkpoints):
        assert reports == {name: {"logits": True, "masters and gradients": {torch.float32}} for name in STOCK}


def test_meshes():
    assert spawn(4, _meshes) == [[(4,), (2, 2), (4, 1)]] * 4


def test_experts_that_cannot_be_sharded_are_refused():
    for message in spawn(3, _three_ranks):
        assert "2 experts with 64 columns cannot be sharded over 3 processes: set --fsdp-replicate-size" in message


def _sharded(path: Path, *, dtype: torch.dtype = torch.float32, **options: bool) -> PreTrainedModel:
    model = build_meta_model(path, trust_remote_code=False, attn_implementation="eager").eval()
    options = SHARDING | options
    stored = torch.promote_types(dtype, torch.float32)
    store_in(model, stored)
    shard_model(model, build_mesh(1), compute_dtype=dtype, **options)
    load_weights(model, path, cpu_offload=options["cpu_offload"], dtype=stored)
    return model


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, zoo.VOCAB_SIZE, (1, length), generator=generator) for length in LENGTHS]


def _loss(model: PreTrainedModel, row: Tensor) -> Tensor:
    """A sum over tokens that already holds the global denominator."""
    logits = model(input_ids=row, use_cache=False).logits
    return F.cross_entropy(logits[0, :-1].float(), row[0, 1:], reduction="sum") / sum(LENGTHS)


def _backward(model: PreTrainedModel) -> dict[str, Tensor]:
    """Whole gradients of all rows: rank r has every world-size-th row, and none twice; a missing one has weight 0."""
    rows, world_size = _rows(), dist.get_world_size()
    mine = [(row, 1.0) for row in rows[dist.get_rank() :: world_size]]
    mine += [(rows[0], 0.0)] * (-(-len(rows) // world_size) - len(mine))
    for row, weight in mine:
        (_loss(model, row) * weight).backward()
    return {name: _whole(p.grad) for name, p in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gradient_errors(root: Path) -> dict[str, float]:
    """The largest difference to one process without FSDP, relative to its largest gradient."""
    errors = {}
    for name in ARCHITECTURES:
        plain = in_float64(zoo.build(name, attn_implementation="eager"))
        with Exact():
            for row in _rows():
                _loss(plain, row).backward()
        expected = {key: p.grad for key, p in plain.named_parameters()}
        scale = max(gradient.abs().max() for gradient in expected.values())
        for way in WAYS:
            model = in_float64(_sharded(root / name, dtype=torch.float64, **WAYS[way]))
            with Exact():
                found = _backward(model)
            assert list(found) == list(expected)
            errors[f"{name} {way}"] = float(max((found[k] - expected[k]).abs().max() / scale for k in expected))
    return errors


def _bfloat16(root: Path) -> dict[str, dict[str, object]]:
    reports: dict[str, dict[str, object]] = {}
    row = _rows()[1]
    for name in STOCK:
        model = _sharded(root / name, dtype=torch.bfloat16)
        stock = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.bfloat16, attn_implementation="eager")
        logits = model(input_ids=row, use_cache=False).logits
        logits.float().sum().backward()
        with torch.no_grad():
            equal = logits.equal(stock(input_ids=row, use_cache=False).logits)
        dtypes = {t.dtype for p in model.parameters() for t in (p, p.grad)}
        reports[name] = {"logits": equal, "masters and gradients": dtypes}
    return reports


def _meshes() -> list[tuple[int, ...]]:
    return [build_mesh(replicas).shape for replicas in (1, 2, 4)]


def _three_ranks() -> str:
    with torch.device("meta"):
        model = zoo.build("mixtral", num_local_experts=2)
    try:
        shard_model(model, build_mesh(1), compute_dtype=torch.float32, **SHARDING)
    except ConfigError as error:
        return str(error)
    return ""
