"""--opd-on-policy-fraction: the other prompts have the response of the data, in the order of the stream."""

import json
from pathlib import Path

import pytest

from fsdptrain.config import Config
from fsdptrain.features.distillation.data_share import FROM_DATA, DataShare
from fsdptrain.rewards.results import RewardResults
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.single_turn import GenerationRound
from fsdptrain.types import Prompt, Sample, SamplingParams
from tests.e2e import command
from tests.e2e.command import metrics_of, trained
from tests.testing import save_tiny_checkpoint, tiny_tokenizer

SAMPLING = SamplingParams(num_samples=2, max_tokens=8)
WATCH = Stopwatch()


class Twice:
    """Two samples of each prompt."""

    def sample(self, prompts: list[Prompt], sampling: SamplingParams, watch: Stopwatch) -> GenerationRound:
        asked = [prompt for prompt in prompts for _ in range(2)]
        samples = [Sample(p.id, [*p.token_ids, 9], [False] * len(p.token_ids) + [True], [0.0, 0.0]) for p in asked]
        return GenerationRound(samples, asked, ["" for _ in asked], RewardResults([], 0, None))


def test_prompts_keep_their_order_and_the_share_is_that_of_the_option() -> None:
    tokenizer = tiny_tokenizer()
    prompts = [Prompt(f"p{i}", [7], "x", label="abc") for i in range(400)]
    config = Config(hf_checkpoint="x", algorithm="opd", opd_teacher="y", opd_loss="jsd")
    made = DataShare.of(config, Twice(), 0.7, tokenizer).sample(prompts, SAMPLING, WATCH)
    assert list(dict.fromkeys(sample.group_id for sample in made.samples)) == [prompt.id for prompt in prompts]
    given = [sample for sample in made.samples if FROM_DATA in sample.extras]
    assert abs(len(given) - 120) < 5 * (400 * 0.3 * 0.7) ** 0.5
    assert len(made.samples) == len(given) + 2 * (400 - len(given))
    response = [*tokenizer("abc", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert given[0].token_ids == [7, *response]
    assert given[0].loss_mask == [False] + [True] * len(response)
    again = DataShare.of(config, Twice(), 0.7, tokenizer).sample(prompts[::-1], SAMPLING, WATCH)
    assert {s.group_id for s in again.samples if FROM_DATA in s.extras} == {sample.group_id for sample in given}


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_student_learns_from_a_teacher_on_the_data(fraction: float, tmp_path: Path) -> None:
    student = save_tiny_checkpoint(tmp_path / "student")
    teacher = save_tiny_checkpoint(tmp_path / "teacher", 1)
    rows = [{"prompt": f"number {i}", "label": f"it is {i} and {i + 1}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--hf-checkpoint", str(student), "--prompt-data", str(tmp_path / "rows.jsonl"), "--reward", "none"]
    flags += ["--algorithm", "opd", "--opd-teacher", str(teacher), "--opd-loss", "jsd", "--eval-interval", "0"]
    flags += ["--opd-on-policy-fraction", str(fraction), "--num-rollout", "4", "--rollout-batch-size", "8"]
    flags += ["--rollout-max-response-len", "8", "--n-samples-per-prompt", "1", "--lr", "3e-3", "--no-bf16"]
    flags += ["--no-export", "--keep-last", "0", "--output-dir", str(tmp_path / "run"), "--log-to"]
    result = command.run(flags, tmp_path, num_ranks=2)
    assert result.code == 0, result.err
    steps = trained(metrics_of(tmp_path / "run"))
    assert steps[-1]["distill/divergence"] < 0.8 * steps[0]["distill/divergence"]
    assert steps[0]["mismatch/abs_max"] < 1e-4  # tokens of the data are no mismatch
    assert steps[0]["progress/samples"] == 8
