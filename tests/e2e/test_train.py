"""Whole runs from the command line: metrics, exports, resumes, and the report of a run."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdptrain.config.recipe import load_recipe
from tests.e2e import command
from tests.e2e.command import metrics_of, rows_of, trained
from tests.e2e.conftest import Finished
from tests.matrix import only
from tests.tensors import load_files, same
from tests.testing import save_tiny_checkpoint, wait_until, write_rows

EMITTED = """
reward/mean reward/std reward/reasoning_gym reward/variety reward/unscored_fraction group/zero_std_fraction
completion/length_mean completion/length_min completion/length_max completion/truncated_fraction loss/total
loss/policy loss/kl loss/entropy policy/ratio_mean policy/clip_fraction_low policy/clip_fraction_high
policy/approx_kl policy/entropy mismatch/abs_mean mismatch/abs_max mismatch/k3 mismatch/ess
mismatch/out_of_bounds optim/grad_norm optim/lr optim/skipped_steps perf/step_s perf/generate_s perf/logprobs_s
perf/train_s perf/sync_s perf/idle_s perf/tokens_per_s perf/tokens_per_s_per_device
perf/pack_fill perf/rank_imbalance perf/shared_tokens perf/skipped_tokens perf/host_rss_gib
weight_sync/bytes progress/samples progress/tokens progress/epoch progress/too_long_prompts progress/held_out_prompts
eval/heldout/accuracy eval/heldout/pass@1 eval/heldout/pass@2 eval/heldout/length_mean eval/heldout_greedy/accuracy
"""


LABELS = ["luck", "0", "1", "luck", "1", "luck", "0", "1", "0"]
SELECTIVE = [  # two epochs of two steps on groups that differ in reward, with a reference
    *("--algorithm", "dapo", "--reward", "tests.e2e.rewards:by_label", "--global-batch-size", "8"),
    *("--epochs-per-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-rollout", "3"),
    *("--rollout-max-response-len", "8", "--max-tokens-per-gpu", "512", "--eval-interval", "0", "--no-bf16"),
    *("--kl-loss-coef", "0.1", "--save-interval", "1", "--lr", "1e-3", "--reward-workers", "0", "--log-to"),
]


def learned(run: Path) -> list[dict[str, float]]:
    """What must be equal between equal runs: no times, memory, or weight syncs, of which the end of a run has none."""
    others = ("perf/", "weight_sync/", "time")
    return [{k: v for k, v in row.items() if not k.startswith(others)} for row in metrics_of(run)]


def test_run_emits_every_metric_and_leaves_a_model_that_transformers_loads(
    finished: Finished, checkpoint: Path
) -> None:
    run = finished.folder
    emitted = set().union(*metrics_of(run))
    assert [name for name in EMITTED.split() if name not in emitted] == []
    assert "samples with advantage 0 are not skipped: --kl-loss-coef 0.1" in finished.err
    assert "reference model: on the host, 0.00 GiB per rank, one more forward pass per rollout" in finished.err
    assert load_recipe(run / "config.yaml").algorithm.kl_loss_coef == 0.1
    AutoModelForCausalLM.from_pretrained(run / "hf")
    found, start = load_files(run / "hf"), load_files(checkpoint)
    assert found.keys() == start.keys()
    assert not same(found, start)
    assert AutoTokenizer.from_pretrained(run / "hf").chat_template is not None
    assert {row["set"] for row in rows_of(run / "samples.jsonl")} == {"train", "heldout"}
    for row in trained(metrics_of(run)):
        assert -1 <= row["reward/overlong"] < 0
        parts = row["reward/variety"] + row["reward/reasoning_gym"] + row["reward/overlong"]
        assert row["reward/mean"] == pytest.approx(parts)


@pytest.mark.parametrize(
    ("num_ranks", "saving"), only([(2, ["--async-save"])], [(1, []), (2, []), (2, ["--async-save"])])
)
def test_a_killed_run_resumes_bitwise(checkpoint: Path, tmp_path: Path, num_ranks: int, saving: list[str]) -> None:
    rows = [{"prompt": f"say {i}", "label": label} for i, label in enumerate(LABELS)]
    data, reference = write_rows(tmp_path / "rows.jsonl", rows), save_tiny_checkpoint(tmp_path / "reference", seed=5)
    base = ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--ref-load", str(reference), *SELECTIVE]
    base += ["--record-rollouts"]
    whole, killed, replayed = (tmp_path / name for name in ("whole", "killed", "replayed"))
    result = command.run([*base, "--output-dir", str(whole)], tmp_path / "1", num_ranks=num_ranks)
    assert result.code == 0, result.err

    argv = [*base, *saving, "--output-dir", str(killed)]
    with command.start_ranks(argv, tmp_path / "2", num_ranks) as ranks:
        wait_until((killed / "checkpoints" / "step_00000002").exists, 300, alive=ranks[0].is_alive)
        for rank in ranks:
            rank.kill()
            rank.join()
    resumed = command.run(argv, tmp_path / "3", num_ranks=num_ranks)

    assert resumed.code == 0, resumed.err
    argv = [*base, "--no-record-rollouts", "--rollout-engine", "no:engine", "--output-dir", str(replayed)]
    argv += ["--replay-rollouts", str(killed / "rollouts")]
    replay = command.run(argv, tmp_path / "4", num_ranks=num_ranks)
    assert replay.code == 0, replay.err
    assert learned(replayed) == learned(killed) == learned(whole)
    shards = (sorted((run / "checkpoints" / "step_00000003" / "shards").iterdir()) for run in (whole, replayed))
    assert all(same(load_file(a), load_file(b)) for a, b in zip(*shards, strict=True))  # weights and optimizer
    assert same(load_files(killed / "hf"), load_files(whole / "hf"))
    for row in trained(metrics_of(whole)):
        assert row["selection/rounds"] > 1
        assert 0 < row["selection/kept_fraction"] < 1
        assert row["loss/kl"] > 0


def test_the_same_command_goes_on_where_the_run_has_ended_with_changed_options(
    finished: Finished, tmp_path: Path
) -> None:
    """What it refuses: tests/distributed/test_folder.py."""
    run = shutil.copytree(finished.folder, tmp_path / "run")
    argv = [*finished.argv, "--output-dir", str(run)]
    again = command.run(argv, tmp_path / "1")
    assert (again.code, "nothing to train: step 2 of --num-rollout 2" in again.err) == (0, True), again.err
    assert again.err.count("in place of") == again.err.count("--output-dir") == 1  # it is a copy
    longer = command.run([*argv, "--lr", "0.5", "--num-rollout", "3"], tmp_path / "2")
    assert longer.code == 0, longer.err
    assert "--lr 0.5 in place of 0.001" in longer.err
    assert [row["step"] for row in trained(metrics_of(run))] == [1, 2, 3]


def test_report_of_a_real_run(finished: Finished, checkpoint: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished.folder, tmp_path / "run")
    result = command.run(["report", str(run)], tmp_path)
    assert (result.code, result.err) == (0, "")
    last = metrics_of(run)[-2]
    table = {line.split("  ")[0]: line.split() for line in result.out.splitlines()}
    assert table["reward"][-2:] == [f"{last['reward/mean']:.3f}", "2"]
    assert "accuracy" in table
    assert f"grpo of {checkpoint.name} on " in result.out  # the page is shared: no path of this machine
    with gzip.open(run / "profile" / "rank0_step2-2.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"phase: train", "aten::mm"} <= names
    assert "</html>" in (run / "report.html").read_text()
    both = command.run(["report", str(run), str(finished.folder)], tmp_path)
    assert all(f"{folder}: grpo of " in both.out for folder in (run, finished.folder))  # by paths: both are named run
    planned = command.run(["plan", str(run)], tmp_path)
    assert planned.code == 0, planned.err
    assert planned.out.splitlines()[-2].endswith("exports in float32")
    assert planned.out.splitlines()[-1] == f"  fsdptrain --recipe {run}/config.yaml"
    assert f"give {run}/hf" in command.run(["inspect", "--hf-checkpoint", str(run)], tmp_path).err
