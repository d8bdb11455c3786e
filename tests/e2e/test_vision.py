"""Image prompts from the command line: only the picture determines the right answer."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import vision_zoo as zoo
from tests.e2e import command
from tests.matrix import only
from tests.tensors import load_files
from tests.testing import write_rows

RUN = [
    *("--image-key", "images", "--input-key", "question", "--label-key", "answer"),
    *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "1"),
    *("--max-tokens-per-gpu", "256", "--reward-workers", "0"),
    *("--eval-size", "16", "--eval-interval", "1000", "--n-samples-per-eval-prompt", "8"),
    *("--reward", "tests.e2e.rewards:names_color", "--no-bf16", "--system-prompt", "", "--log-to"),
]


def made_task(folder: Path, size: int = 64) -> Path:
    """Pictures of two colors, no two alike, in files beside the data."""
    (folder / "pictures").mkdir(parents=True)
    generator = np.random.default_rng(0)
    rows = []
    for i in range(size):
        answer = ("red", "blue")[i % 2]
        pixels = generator.integers(0, 60, (16, 16 + 8 * (i % 3), 3), dtype=np.uint8)
        pixels[..., 0 if answer == "red" else 2] += 190
        Image.fromarray(pixels).save(folder / "pictures" / f"{i}.png")
        rows.append({"question": "<image>Which?", "answer": answer, "images": [f"pictures/{i}.png"]})
    return write_rows(folder / "task.jsonl", rows)


@pytest.mark.parametrize("num_rollouts", only([2], [2, 14]))
def test_a_model_learns_to_say_what_it_sees(tmp_path: Path, num_rollouts: int):
    checkpoint, run = zoo.save(tmp_path / "model", "qwen3_vl"), tmp_path / "run"
    data = made_task(tmp_path)
    flags = ["--num-rollout", str(num_rollouts), "--lr", "1e-2", "--save-interval", "0"]
    rows = command.train(checkpoint, tmp_path, "--prompt-data", str(data), *RUN, *flags, num_ranks=2)
    accuracy = [row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row]
    assert accuracy[0] < 0.3
    assert accuracy[-1] > (0.8 if num_rollouts > 2 else 0)
    before, after = load_files(checkpoint), load_files(run / "hf")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any("visual" in name for name in changed)  # frozen
    assert any("language_model" in name for name in changed)
    assert json.loads((run / "hf" / "config.json").read_text())["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert (run / "hf" / "preprocessor_config.json").is_file()
