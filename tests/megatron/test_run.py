"""The same run by the real command line on either backend, and from one to the other."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e import command
from tests.e2e.command import TINY_RUN
from tests.megatron import cases

MEGATRON = ["--backend", "megatron"]
EXPERTS = [*MEGATRON, "--megatron-expert-parallel", "2"]
# old logprobs, a reference, two optimizer steps on each rollout: ten in all
FLAGS = ["--steps-per-rollout", "2", "--kl-loss-coef", "0.1", "--num-rollout", "5", "--save-interval", "3"]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save("qwen3_moe", tmp_path_factory.mktemp("hub") / "moe")


def run(checkpoint: Path, folder: Path, *flags: str, num_ranks: int = 2) -> list[dict[str, float]]:
    """The metrics of the rollouts."""
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(folder / "run"), *TINY_RUN, *FLAGS, *flags]
    result = command.run(argv, folder, timeout=300, num_ranks=num_ranks)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss/total" in row]


def same(found: list[dict[str, float]], wanted: list[dict[str, float]], *, rel: float = 1e-4) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        names = [name for name in theirs if not name.startswith(("perf/", "sync/"))]
        assert {n: ours[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, rel=rel, abs=1e-6)


def test_a_run_learns_on_megatron_what_it_learns_on_fsdp_and_goes_on_bitwise(moe, tmp_path) -> None:
    plain = run(moe, tmp_path / "fsdp")
    rows = run(moe, tmp_path / "megatron", *EXPERTS)
    same(rows, plain)

    again = tmp_path / "again"  # from the checkpoint in its middle
    shutil.copytree(tmp_path / "megatron" / "run", again / "run")
    shutil.rmtree(again / "run" / "checkpoints" / "step_00000005")
    shutil.rmtree(again / "run" / "hf")
    resumed = run(moe, again, *EXPERTS)
    same(resumed[-2:], rows[-2:], rel=0)
    whole, other = (load_file(folder / "run" / "hf" / "model.safetensors") for folder in (tmp_path / "megatron", again))
    assert whole.keys() == load_file(moe / "model.safetensors").keys()
    assert all((whole[name] == other[name]).all() for name in whole)

    split_otherwise = tmp_path / "one"
    shutil.copytree(again / "run", split_otherwise / "run")
    shutil.rmtree(split_otherwise / "run" / "checkpoints" / "step_00000005")
    same(run(moe, split_otherwise, *MEGATRON, num_ranks=1)[-2:], rows[-2:])


def test_what_one_backend_has_made_goes_on_on_the_other(moe, tmp_path) -> None:
    first = ("--num-rollout", "1", "--kl-loss-coef", "0", "--steps-per-rollout", "1", "--eval-interval", "0")
    run(moe, tmp_path / "a", *MEGATRON, *first, num_ranks=1)
    run(moe, tmp_path / "b", *first, num_ranks=1)
    trained = [load_file(tmp_path / name / "run" / "hf" / "model.safetensors") for name in "ab"]
    assert trained[0].keys() == trained[1].keys()
    on_fsdp = run(tmp_path / "a" / "run" / "hf", tmp_path / "c", *first, num_ranks=1)
    on_megatron = run(tmp_path / "b" / "run" / "hf", tmp_path / "d", *MEGATRON, *first, num_ranks=1)
    same(on_megatron, on_fsdp, rel=1e-3)
