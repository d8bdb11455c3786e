"""`fsdptrain inspect --backend megatron`: the whole model without memory, and a small copy."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e import command
from tests.megatron import cases


@pytest.mark.parametrize(
    ("family", "flags", "layout"),
    [("qwen3_moe", [], "padded"), ("qwen3_next", ["--megatron-context-parallel", "2"], "packed")],
)
def test_the_whole_model_is_counted_and_a_copy_is_called_one(
    family: str, flags: list[str], layout: str, tmp_path: Path
) -> None:
    folder = cases.save(family, tmp_path / "model")
    argv = ["inspect", "--hf-checkpoint", str(folder), "--backend", "megatron", *flags]
    result = command.run(argv, tmp_path / "out")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    number = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert lines[0] == (
        f"{family}: {number:,} parameters by config.json, and as many in megatron-core's model, each with its place in "
        "the files"
    )
    assert lines[1] == "a small random copy of it, on one process:"
    assert f"plain layers, {layout} rows; " in result.out  # as the run has them
    assert "  it computes the logprobs of transformers: " in result.out
