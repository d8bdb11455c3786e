"""The same run by the real command line on either backend, and from one to the other."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.e2e import command
from tests.e2e.command import TINY_RUN
from tests.megatron import cases
from tests.tensors import load_files, same

MEGATRON = ["--backend", "megatron"]
EXPERTS = [*MEGATRON, "--megatron-expert-parallel", "2"]
# old logprobs, a reference, two optimizer steps on each rollout: ten in all
FLAGS = ["--global-batch-size", "8", "--kl-loss-coef", "0.1", "--num-rollout", "5", "--save-interval", "3"]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save("qwen3_moe", tmp_path_factory.mktemp("hub") / "moe")


def run(checkpoint: Path, folder: Path, *flags: str, num_ranks: int = 2, bf16: bool = False) -> list[dict[str, float]]:
    """The metrics of the rollouts."""
    tiny = [flag for flag in TINY_RUN if flag != "--no-bf16" or not bf16]
    rows = command.train(checkpoint, folder, *tiny, *FLAGS, *flags, num_ranks=num_ranks, timeout=600.0)
    return command.trained(rows)


def assert_same(
    found: list[dict[str, float]], wanted: list[dict[str, float]], *, rel: float = 1e-4, abs: float = 1e-6
) -> None:
    """Up to the rounding of float32, but for times."""
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        names = [name for name in theirs if not name.startswith(("perf/", "weight_sync/", "time"))]
        assert {n: ours[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, rel=rel, abs=abs)


class Runs(NamedTuple):
    """The same on either backend, in the folders `fsdp` and `megatron` of one."""

    folder: Path
    fsdp: list[dict[str, float]]
    megatron: list[dict[str, float]]

    def exported(self, name: str) -> Path:
        return self.folder / name / "run" / "hf"

    def taken_back(self, folder: Path) -> Path:
        """The run on megatron-core as it was in its middle."""
        shutil.copytree(self.folder / "megatron" / "run", folder / "run")
        shutil.rmtree(folder / "run" / "checkpoints" / "step_00000005")
        return folder


@pytest.fixture(scope="module")
def both(moe, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    return Runs(folder, run(moe, folder / "fsdp"), run(moe, folder / "megatron", *EXPERTS))


def test_a_run_learns_on_megatron_what_it_learns_on_fsdp(both, moe) -> None:
    assert_same(both.megatron, both.fsdp)
    found, wanted = (load_files(both.exported(name)) for name in ("megatron", "fsdp"))
    assert found.keys() == wanted.keys() == load_files(moe).keys()


@pytest.mark.matrix
@pytest.mark.parametrize("made_by", ["megatron", "fsdp"])
def test_what_one_backend_has_exported_goes_on_alike_on_both(made_by: str, both, tmp_path) -> None:
    one = ("--num-rollout", "1", "--no-export")
    on_fsdp = run(both.exported(made_by), tmp_path / "a", *one, num_ranks=1)
    on_megatron = run(both.exported(made_by), tmp_path / "b", *one, *MEGATRON, num_ranks=1)
    assert_same(on_megatron, on_fsdp)


def exported_again(run: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint, exported by one process."""
    argv = ["export", "--checkpoint", str(run / "checkpoints" / "step_00000005"), "--output", str(run / "again")]
    result = command.run(argv, run.parent)
    assert result.code == 0, result.err
    return load_files(run / "again")


@pytest.mark.matrix
def test_a_checkpoint_of_split_experts_is_exported_by_one_process(both) -> None:
    assert same(exported_again(both.folder / "megatron" / "run"), load_files(both.exported("megatron")))


@pytest.mark.matrix
def test_stages_and_experts_on_four_ranks_learn_the_same(both, moe, tmp_path) -> None:
    assert_same(run(moe, tmp_path, *EXPERTS, "--megatron-pipeline-parallel", "2", num_ranks=4), both.fsdp)


@pytest.mark.matrix
def test_in_bfloat16_a_run_begins_as_on_fsdp_and_goes_on_bitwise(moe, tmp_path) -> None:
    """After the first steps rollouts are other ones: bfloat16 rounds otherwise here and there."""
    fsdp = run(moe, tmp_path / "fsdp", "--num-rollout", "1", bf16=True)
    megatron = run(moe, tmp_path / "megatron", *EXPERTS, bf16=True)
    for name in ("optim/grad_norm", "policy/entropy", "reward/mean"):
        assert megatron[0][name] == pytest.approx(fsdp[0][name], rel=5e-2), name
    whole = Runs(tmp_path, fsdp, megatron)
    rows = run(moe, whole.taken_back(tmp_path / "again"), *EXPERTS, bf16=True)
    assert_same(rows[-2:], megatron[-2:], rel=0, abs=0)


STAGES = ("--megatron-pipeline-parallel", "2")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "flag"),
    [("cohere2", "first-stage-layers=1"), ("nemotron_h", "virtual-pipeline=2"), ("ernie4_5_moe", "bridge=own")],
)
def test_whole_layers_go_on_bitwise_and_are_exported_as_on_fsdp(family: str, flag: str, tmp_path: Path) -> None:
    checkpoint, flags = cases.save(family, tmp_path / "model"), [*MEGATRON, *STAGES, f"--megatron-{flag}"]
    fsdp = run(checkpoint, tmp_path / "fsdp", "--num-rollout", "1", bf16=True)
    megatron = run(checkpoint, tmp_path / "megatron", *flags, bf16=True)
    runs = Runs(tmp_path, fsdp, megatron)
    again = runs.taken_back(tmp_path / "again")
    assert_same(run(checkpoint, again, *flags, bf16=True)[-2:], megatron[-2:], rel=0, abs=0)
    found, wanted = (load_files(runs.exported(name)) for name in ("megatron", "fsdp"))
    assert same(found, load_files(again / "run" / "hf"))
    assert same(found, exported_again(again / "run"))
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in wanted.items()}


SPLITS = {
    "qwen3_5_moe": ("--megatron-expert-parallel", "2"),
    # which gathers again in the backward pass
    "qwen3_next": ("--megatron-tensor-parallel", "2", "--gradient-checkpointing"),
    "qwen3_5": (*STAGES, "--megatron-virtual-pipeline", "2"),
    "cohere2": STAGES,
    "nemotron_h": STAGES,
}
CLOSER = ("optim/grad_norm", "policy/entropy", "policy/ratio_mean", "reward/mean", "progress/tokens")


@pytest.mark.matrix
@pytest.mark.parametrize("family", SPLITS)
def test_metrics_of_wrapped_mixers_are_those_of_fsdp(family: str, tmp_path: Path):
    """Of two updates on two processes, the later after the weights came back from the engine's samples."""
    checkpoint, found = cases.save(family, tmp_path / "model"), {}
    for name, flags in {"fsdp": [], "megatron": [*MEGATRON, *SPLITS[family]]}.items():
        # with a small eps, Adam makes of a gradient that is a rounding error a step of any size: one such element of
        # 113,616 moved the next grad_norm by 1.1e-5
        flags = [*TINY_RUN, "console", "--adam-eps", "1e-4", *flags]
        rows = command.train(checkpoint, tmp_path / name, *flags, num_ranks=2, timeout=600.0)
        found[name] = command.trained(rows)
        said = (tmp_path / name / "err").read_text()
        assert any(words in said for words in (" HFMixer", " WholeLayers")) == (name == "megatron")
    assert len(found["megatron"]) == 2
    assert_same(found["megatron"], found["fsdp"])
    before, after = load_files(checkpoint), load_files(tmp_path / "megatron" / "run" / "hf")
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if ".visual." in name)
    for ours, theirs in zip(found["megatron"], found["fsdp"], strict=True):  # measured: 8e-8
        assert {name: ours[name] for name in CLOSER} == pytest.approx({name: theirs[name] for name in CLOSER}, rel=1e-6)
