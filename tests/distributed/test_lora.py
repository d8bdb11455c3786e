"""Adapters on real ranks against plain peft in one process: logprobs, gradients, files and merged weights."""

import copy
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from fsdptrain.types import LossConfig
from tests.exact import Exact, backends_in_float64
from tests.testing import spawn

from .lora_cases import (
    CASES,
    backend_of,
    fill,
    logits,
    objective,
    plain,
    plain_gradients,
    plain_peft,
    trained,
    write_checkpoint,
)
from .sharded import full
from .test_fsdp_backend import keep_gradients, packs_of_this_rank, samples

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A checkpoint of each architecture."""
    folder = tmp_path_factory.mktemp("hub")
    for name in {architecture for architecture, _, _ in CASES.values()}:
        write_checkpoint(name, folder / name)
    return folder


ROUNDED = 4 * torch.finfo(torch.float32).eps  # gradients of adapters are float32
OF_ROUNDING = 4.0  # times the error of a merge by peft in float32
OFFLOADED = "2 ranks, cpu offload"  # with checkpointing bitwise: test_laws.py
WAYS = {
    "1 rank": (1, ["dense", "tied", "experts"], {}),
    "2 ranks": (2, list(CASES), {}),
    OFFLOADED: (
        2,
        ["experts", "transposed"],
        {"fsdp_cpu_offload": True},
    ),
}


def compute(hub: str, cases: list[str], values: dict, target: str):
    """For each case: the start, and with other numbers logprobs of this rank's packs, gradients, and the exports."""
    backends_in_float64()
    found = {}
    for case in cases:
        backend = backend_of(hub, case, lora_export="both", **values)
        start = {name: full(p) for name, p in trained(backend.model).items()}
        fill(backend)
        gradients = keep_gradients(backend._optimizer)
        with Exact():
            packs = packs_of_this_rank(samples(), 128)
            scores = [
                s.values[p.loss_mask] for p, s in zip(packs, backend.compute_logprobs(packs, "policy"), strict=True)
            ]
        backend.export(Path(target) / case)
        with Exact():
            backend.train_step(packs, objective, LossConfig())
        found[case] = (start, scores, gradients)
    return found


@pytest.fixture(scope="module")
def results(hub, tmp_path_factory):
    """Function of a way: the folder of its exports and what each rank found."""

    @cache
    def of(way: str):
        world, cases, values = WAYS[way]
        target = tmp_path_factory.mktemp("exports")
        return target, spawn(world, compute, str(hub), cases, values, str(target))

    return of


@pytest.fixture(scope="module")
def expected(hub):
    """Of plain peft: the model, logprobs and gradients."""
    found = {}
    for case, (architecture, _, _) in CASES.items():
        model = plain_peft(hub / architecture, case)
        with Exact():
            found[case] = (model.eval(), *plain_gradients(model, samples()))
    return found


@pytest.mark.parametrize("way", ["2 ranks", OFFLOADED])
def test_forward_and_gradients_are_those_of_plain_peft(results, expected, way):
    ranks = results(way)[1]
    for case in WAYS[way][1]:
        _, logprobs, gradients = expected[case]
        for rank in ranks:
            assert distance(rank[case][2], gradients) < ROUNDED, case
        found = torch.cat([values for rank in ranks for values in rank[case][1]]).sort().values
        assert torch.allclose(found, torch.cat(logprobs).sort().values, rtol=0, atol=1e-12), case


def distance(found: dict, wanted: dict) -> float:
    """Of the tensor that differs most, relative to its norm."""
    assert found.keys() == wanted.keys()
    return max(((found[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted)


@pytest.mark.parametrize("way", ["2 ranks", OFFLOADED])
def test_exported_adapters_and_models_are_what_plain_peft_saves_and_merges(hub, results, expected, way):
    for case in WAYS[way][1]:
        stock, exported, theirs = hub / CASES[case][0], results(way)[0] / case, expected[case][0]
        saved = load_file(exported / "adapter" / "adapter_model.safetensors")
        assert saved.keys() == get_peft_model_state_dict(theirs).keys()
        reloaded = peft.PeftModel.from_pretrained(plain(stock), exported / "adapter").eval()
        with Exact():
            wanted = logits(theirs)
            assert torch.allclose(logits(reloaded), wanted, rtol=0, atol=1e-12), case
            assert not torch.allclose(logits(plain(stock)), wanted, atol=0.1), case
        exact, rounded = (
            copy.deepcopy(model).merge_and_unload().state_dict() for model in (theirs, to_float32(theirs))
        )
        merged = plain(exported).state_dict()
        assert merged.keys() == exact.keys()
        assert largest_difference(merged, exact) <= OF_ROUNDING * largest_difference(rounded, exact), case


def to_float32(model: peft.PeftModel) -> peft.PeftModel:
    return copy.deepcopy(model).float()


def largest_difference(found: dict, wanted: dict) -> float:
    return max((found[name].double() - wanted[name]).abs().max().item() for name in wanted)


@pytest.mark.matrix
def test_an_adapter_begins_with_the_same_numbers_on_any_number_of_ranks_and_does_nothing(results):
    for case in ("dense", "experts"):
        begun = results("1 rank")[1][0][case][0]
        for rank in results("2 ranks")[1]:
            assert all(torch.equal(begun[name], value) for name, value in rank[case][0].items())
        for name, value in begun.items():
            if "lora_A" in name:
                assert torch.linalg.matrix_rank(value) == min(value.shape), name  # no row comes twice
                assert 0.9 < value.abs().max() * value.shape[1] ** 0.5 <= 1, name
            else:
                assert not value.any(), name
        first, second = (value for name, value in begun.items() if "q_proj.lora_A" in name)
        assert not torch.equal(first, second)
