"""Whole runs from the command line: metrics, exports, and resumes."""

import shutil
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdptrain.config import load_recipe
from tests.e2e import command
from tests.e2e.command import TINY_RUN, metrics_of, rows_of, trained
from tests.matrix import only

EMITTED = """
reward/mean reward/std reward/reasoning_gym reward/variety reward/unscored_fraction group/zero_std_fraction
completion/length_mean completion/length_min completion/length_max completion/truncated_fraction loss/total
loss/policy loss/kl loss/entropy policy/ratio_mean policy/clip_fraction_low policy/clip_fraction_high
policy/approx_kl policy/entropy mismatch/abs_mean mismatch/abs_max mismatch/k3 mismatch/ess
mismatch/out_of_bounds optim/grad_norm optim/lr optim/skipped_steps perf/step_s perf/generate_s perf/logprobs_s
perf/train_s perf/sync_s perf/idle_s perf/tokens_per_s perf/tokens_per_s_per_device perf/mfu perf/mfu_causal
perf/pack_fill perf/rank_imbalance perf/shared_tokens perf/skipped_tokens perf/peak_memory_gib perf/host_rss_gib
progress/samples progress/tokens progress/epoch progress/too_long_prompts eval/heldout/accuracy eval/heldout/pass@1
eval/heldout/pass@2 eval/heldout/length_mean
eval/heldout_greedy/accuracy
"""


def learned(run: Path) -> list[dict[str, float]]:
    """What must be equal between equal runs: no times, memory, or weight syncs, of which the end of a run has none."""
    others = ("perf/", "weight_sync/", "time")
    return [{k: v for k, v in row.items() if not k.startswith(others)} for row in metrics_of(run)]


def test_run_emits_every_metric_and_leaves_a_model_that_transformers_loads(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--kl-loss-coef", "0.1", "--entropy-coef", "0.01", "--global-batch-size", "8"]
    flags += ["--n-samples-per-eval-prompt", "2", "--eval-greedy"]
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(run), *TINY_RUN, *flags]

    result = command.run(argv, tmp_path)

    assert result.code == 0, result.err
    emitted = set().union(*metrics_of(run))
    assert [name for name in EMITTED.split() if name not in emitted] == []
    assert "samples with advantage 0 are not skipped: --kl-loss-coef 0.1" in result.err
    config = load_recipe(run / "config.yaml")
    assert config.algorithm.kl_loss_coef == 0.1
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(run / "hf").chat_template is not None
    assert {row["set"] for row in rows_of(run / "samples.jsonl")} == {"train", "heldout"}


@pytest.mark.parametrize(
    ("num_ranks", "saving"), only([(2, ["--async-save"])], [(1, []), (2, []), (2, ["--async-save"])])
)
def test_a_killed_run_resumes_bitwise(checkpoint: Path, tmp_path: Path, num_ranks: int, saving: list[str]) -> None:
    flags = ["--num-rollout", "4", "--save-interval", "1"]
    flags += ["--steps-per-rollout", "4", "--epochs-per-rollout", "2"]
    base = ["--hf-checkpoint", str(checkpoint), *TINY_RUN, *flags]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command.run([*base, "--output-dir", str(whole)], tmp_path / "1", num_ranks=num_ranks).code == 0

    argv = [*base, *saving, "--output-dir", str(killed)]
    with command.start_ranks(argv, tmp_path / "2", num_ranks) as ranks:
        wait_for(killed / "checkpoints" / "step_00000002", ranks[0], tmp_path / "2" / "err")
        for rank in ranks:
            rank.kill()
            rank.join()
    resumed = command.run(argv, tmp_path / "3", num_ranks=num_ranks)

    assert resumed.code == 0, resumed.err
    assert learned(killed) == learned(whole)
    for ours, theirs in zip(weights(killed), weights(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_changed_options_are_reported_on_resume_and_refused_for_a_finished_run(
    checkpoint: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    base = ["--hf-checkpoint", str(checkpoint), *TINY_RUN, "--output-dir", str(run)]
    assert command.run(base, tmp_path / "1").code == 0
    before = (run / "config.yaml").read_text()
    again = command.run(base, tmp_path / "again")
    assert (again.code, "nothing to train: step 2 of --num-rollout 2" in again.err) == (0, True), again.err
    assert "in place of" not in again.err

    refused = command.run([*base, "--lr", "0.5"], tmp_path / "2")
    assert refused.code == 2
    assert "--lr 0.5 in place of 0.001" in refused.err.strip().splitlines()[-1]
    assert (run / "config.yaml").read_text() == before

    longer = command.run([*base, "--lr", "0.5", "--num-rollout", "3"], tmp_path / "3")
    assert longer.code == 0, longer.err
    assert "--lr 0.5 in place of 0.001" in longer.err
    assert [row["step"] for row in trained(metrics_of(run))] == [1, 2, 3]


def test_one_process_exports_a_run_of_replicas_without_its_reference(checkpoint: Path, tmp_path: Path) -> None:
    run, reference = tmp_path / "run", Path(shutil.copytree(checkpoint, tmp_path / "reference"))
    argv = ["--hf-checkpoint", str(checkpoint), "--output-dir", str(run), *TINY_RUN]
    argv += ["--fsdp-replicate-size", "2"]
    argv += ["--kl-loss-coef", "0.1", "--kl-loss-type", "k1", "--ref-load", str(reference)]
    assert command.run(argv, tmp_path / "1", num_ranks=2).code == 0
    shutil.rmtree(reference)

    exported = ["export", "--checkpoint", str(run / "checkpoints" / "step_00000002"), "--output", str(tmp_path / "hf")]
    result = command.run(exported, tmp_path / "2")

    assert result.code == 0, result.err
    for path in (run / "hf").iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes()

    over_run = command.run([*exported[:-1], str(run)], tmp_path / "3")
    assert over_run.code == 2
    assert over_run.err.splitlines()[-1].startswith(f"fsdptrain: --output {run}: the model cannot be written")
    assert (run / "checkpoints" / "step_00000002").is_dir()


def wait_for(path: Path, process: ForkServerProcess, said: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.is_alive(), said.read_text()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


def weights(run: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).state_dict().values())
