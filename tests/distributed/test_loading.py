"""A sharded model that was loaded from files is the plain model: logits and buffers are bitwise equal."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from tests import families, zoo
from tests.testing import spawn

from .sharded import load_sharded

# tied; experts; learned positions; a persistent buffer. Each rank its shard: test_sweep.py; dtypes: test_formats.py.
FEW = ("qwen2", "qwen3_moe", "gpt2", "deepseek_v3")
HSDP = ("qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3")
FEW_EXPERTS = {
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 6},  # chunks of 2, 2, 2 and 0
    "gpt_oss": {"num_local_experts": 2},
}
INPUT = (torch.arange(48) * 7 % zoo.VOCAB_SIZE)[None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each architecture, in several files."""
    root = tmp_path_factory.mktemp("zoo")
    for name in {*FEW, *HSDP}:
        zoo.build(name).save_pretrained(root / name, max_shard_size="200KB")
    return root


@pytest.mark.parametrize(("ranks", "names", "options"), [(2, FEW, {"whole": True}), (4, HSDP, {"replicas": 2})])
def test_ranks_hold_the_plain_model(checkpoints: Path, ranks: int, names: tuple[str, ...], options: dict[str, Any]):
    """Whose first rank reads whole tensors; two replicas of two shards."""
    for differences in spawn(ranks, _differences, checkpoints, names, options):
        assert differences == _nothing(names)


def test_a_rank_without_experts_does_not_exist(tmp_path: Path):
    for name, changes in FEW_EXPERTS.items():
        zoo.build(name, **changes).save_pretrained(tmp_path / name)
    for differences, columns in spawn(4, _few_experts, tmp_path):
        assert differences == _nothing(FEW_EXPERTS)
        assert columns == {name: {2} for name in FEW_EXPERTS}


def test_a_conversion_that_mixes_rows_is_done_on_whole_tensors(tmp_path: Path):
    """hrm_text splits one tensor of the files into q, k, v and gate: slices of it would be wrong without an error."""
    families.save("hrm_text", tmp_path)
    assert spawn(2, _hrm_differences, tmp_path) == [[], []]


def _nothing(names: Iterable[str]) -> dict[str, list[str]]:
    return {name: [] for name in names}


def _differences(root: Path, names: tuple[str, ...], options: dict[str, Any]) -> dict[str, list[str]]:
    plain = {name: zoo.build(name, attn_implementation="eager") for name in names}
    return {name: _compare(load_sharded(root / name, **options), plain[name]) for name in names}


def _few_experts(root: Path) -> tuple[dict[str, list[str]], dict[str, set[int]]]:
    differences, columns = {}, {}
    for name, changes in FEW_EXPERTS.items():
        model = load_sharded(root / name)
        experts = [p for p in model.parameters() if p.dim() == 3]
        columns[name] = {p.placements[0].dim for p in experts if isinstance(p.placements[0], Shard)}
        differences[name] = _compare(model, zoo.build(name, attn_implementation="eager", **changes))
    return differences, columns


def _hrm_differences(path: Path) -> list[str]:
    return _unequal(dict(load_sharded(path).named_parameters()), dict(families.build("hrm_text").named_parameters()))


def _compare(model: PreTrainedModel, plain: PreTrainedModel) -> list[str]:
    """Names of what is not bitwise the same."""
    unequal = _unequal(dict(model.named_parameters()), dict(plain.named_parameters()))
    unequal += _unequal(dict(model.named_buffers()), dict(plain.named_buffers()))
    with torch.no_grad():
        logits = {"logits": model(input_ids=INPUT, use_cache=False).logits}
        unequal += _unequal(logits, {"logits": plain(input_ids=INPUT, use_cache=False).logits})
    return unequal


def _unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert list(ours) == list(theirs)
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in ours.items()}
    return [name for name in ours if whole[name].dtype != theirs[name].dtype or not whole[name].equal(theirs[name])]
