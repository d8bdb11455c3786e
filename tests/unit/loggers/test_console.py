"""What a run writes to the console."""

import os
import re

import pytest

from fsdptrain.config import Config
from fsdptrain.loggers import RunInfo
from fsdptrain.loggers.console import ConsoleLogger, header, number

STEP = {
    "reward/mean": 0.25,
    "reward/std": 0.43,
    "completion/length_mean": 131.7,
    "completion/truncated_fraction": 0.125,
    "optim/grad_norm": 0.31,
    "perf/tokens_per_s": 1234.0,
}


@pytest.fixture
def run(tmp_path, capsys):
    def run(*, resumed_step: int | None = None, total_steps: int = 4) -> str:
        now = [0.0]
        config = Config(hf_checkpoint="Qwen/Qwen3-4B", num_rollout=4)
        info = RunInfo(tmp_path, "p", "run-a", total_steps, resumed_step, config)
        logger = ConsoleLogger(info, clock=lambda: now[0])
        now[0] = 140.0  # loading the model is no part of the pace of steps
        for step in range((resumed_step or 0) + 1, 5):
            now[0] += 20.0
            logger.log({**STEP, "reward/mean": 0.25 * step, "loss/total": 0.1}, step)
        logger.log({"eval/held_out/accuracy": 0.5, "eval/held_out_greedy/accuracy": 1.0, "eval/b/accuracy": 0.25}, 4)
        logger.close()
        return capsys.readouterr().out

    return run


def test_plain_output_has_one_line_per_step(run):
    lines = run().splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 5
    assert steps[1] == "step 2/4  reward 0.500  std 0.430  len 132  cut 0.125  grad 0.310  tok/s 1.2k  ETA 40s"
    assert steps[4] == "step 4/4  acc held_out 0.500  acc b 0.250"


def test_without_steps_to_train_nothing_is_counted(run):
    out = run(total_steps=0, resumed_step=4)
    assert "acc held_out 0.500" in out
    assert "/0" not in out


@pytest.mark.parametrize(("own", "rows"), [([], "held-out rows of a.jsonl"), ("b.jsonl", "b.jsonl")])
def test_an_evaluation_names_the_checkpoint_and_its_rows(tmp_path, own, rows):
    config = Config(hf_checkpoint="m", prompt_data="a.jsonl", eval_prompt_data=own, num_rollout=0, resume="r/step_2")
    line = header(RunInfo(tmp_path, "p", "run-a", 0, 2, config)).splitlines()[1]
    assert line == f"  evaluation of r/step_2 ({config.compute_dtype_name}) on {rows}"


def test_the_last_line_tells_a_finished_run_from_a_stopped_one(run, tmp_path):
    assert re.match(r"done in 3m40s, written to ", run().splitlines()[-1])
    stopped = run(total_steps=9).splitlines()[-1]
    assert re.match(r"stopped after step 4 of 9, 3m40s, written to ", stopped)
    assert stopped.endswith("; there is no checkpoint yet (--save-interval)")
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    again = run(total_steps=9).splitlines()[-1]
    assert again.endswith("; rerun the same command to resume after step 3")


def test_a_resumed_run_names_its_step_and_a_finished_one_the_flag_that_continues_it(run):
    assert "resumes after step 2 of 4" in run(resumed_step=2)
    assert "is complete, step 4 of 4; raise --num-rollout to continue" in run(resumed_step=4)


def test_numbers_are_rounded_before_their_unit_is_chosen():
    values = {0.5314: "0.531", 9.9996: "10.0", 99.96: "100", 999.4: "999", 999.96: "1k", 1000: "1k", -1234: "-1.2k"}
    values |= {9_960: "10k", 12_345: "12k", 999_400: "999k", 999_960: "1M", 3_400_000: "3.4M"}
    assert {value: number(value) for value in values} == values


def test_a_run_outlives_who_reads_its_output(run, monkeypatch, caplog):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        run()
    assert caplog.text.count("stdout is closed: the run continues without printing its steps") == 1
