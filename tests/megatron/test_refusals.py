"""What --backend megatron cannot do with a model, or with a split, is one line that names it and the way out."""

import shutil
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.megatron import cpu_shims
from fsdptrain.megatron.config import MegatronConfig
from tests import zoo
from tests.e2e import command
from tests.megatron import cases
from tests.megatron.training import backend_of
from tests.testing import spawn

OWN = "fsdptrain: "
TP, PP, EP = "tensor_parallel", "pipeline_parallel", "expert_parallel"
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MODELS: list[tuple[str, dict[str, Any], str]] = [  # family, what its config says besides, what --backend megatron says
    ("mistral", {}, " does not build sliding_window = 16"),
    ("llama", {"attention_bias": True}, " does not build attention_bias = True"),
    ("llama", {"mlp_bias": True}, " does not build mlp_bias = True"),
    ("llama", {"hidden_act": "gelu"}, " does not build hidden_act = gelu"),
    ("deepseek_v3", {"norm_topk_prob": False}, ": norm_topk_prob off"),
]
SPLITS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [  # what --megatron-... says, and the way out
    ("llama", {}, {TP: 4}, "tensor-parallel 4 must divide the 2 key-value heads", "lower it"),
    ("llama", {"intermediate_size": 129}, {TP: 2}, "tensor-parallel 2 must divide the 129 columns of each", "lower it"),
    ("gemma2", {}, {TP: 2}, "tensor-parallel and --megatron-expert-parallel split layers of", "remove them"),
    ("llama", {}, {PP: 3}, "pipeline-parallel 3 must divide the 2 layers", "lower it"),
    ("llama", {"num_hidden_layers": 6}, {PP: 4, "first_stage_layers": 1}, "first-stage-layers 1", "change them"),
    ("llama", {"num_hidden_layers": 6}, {PP: 2, "virtual_pipeline": 2}, "virtual-pipeline 2 must divide", "remove it"),
    ("llama", {}, {EP: 2}, "expert-parallel: a llama has no experts", "remove it"),
    ("qwen3_moe", {}, {EP: 4}, "expert-parallel 4 must divide the 6 experts", "lower it"),
    ("qwen3_moe", {"moe_intermediate_size": 47}, {TP: 2}, "tensor-parallel 2 must divide the 47 columns", "lower it"),
    ("qwen3_moe", {}, {TP: 2, EP: 2}, "expert-parallel with --megatron-tensor-parallel gathers", "leave one out"),
    # 3 rows of the vocabulary each, of which the last process would have none
    ("llama", {"vocab_size": 9} | FOUR_HEADS, {TP: 4}, "tensor-parallel 4 leaves a process without a", "lower it"),
]
CASES = [(name, changes, {}, f"--backend megatron{line}", "use --backend fsdp") for name, changes, line in MODELS]
CASES += [(name, changes, split, f"--megatron-{line}", out) for name, changes, split, line, out in SPLITS]


def refusals(folder: Path) -> tuple[list[str], str, str]:
    """In a process of their own, because megatron-core is imported: of CASES, a reference that is not there, weights
    outside of layers."""
    from fsdptrain.megatron.transformer_config import transformer_config

    said = [
        cases.refusal(
            partial(transformer_config, zoo.config(family, **changes), MegatronConfig(**split), **cases.OPTIONS)
        )
        for family, changes, split, *_ in CASES
    ]
    reference = cases.refusal(partial(backend_of, folder, kl_loss_coef=0.1, ref_load="/nowhere"))
    return said, reference, cases.refusal(partial(backend_of, cases.save("gpt2", folder.parent / "gpt2")))


def test_models_splits_and_files_that_cannot_be_are_one_line_each(dense: Path) -> None:
    ((found, reference, outside),) = spawn(1, refusals, dense)
    for said, (_, _, _, begin, way_out) in zip(found, CASES, strict=True):
        assert said.startswith(f"ConfigError: {begin}")
        assert way_out in said
        assert "\n" not in said
    assert reference.startswith("CheckpointError: --ref-load /nowhere is not a folder")
    assert "a gpt2: it has weights in wpe, ln_f, and only one norm may be outside of the layers: use" in outside


def warnings_of(folder: Path, **flags: Any) -> list[str]:
    with TestCase().assertLogs("fsdptrain", "WARNING") as logs:
        backend_of(folder, megatron_bridge="mbridge", **flags)
    return [record.getMessage() for record in logs.records]


def fallbacks(folder: Path) -> list[list[str]]:
    """Of a family that mbridge does not know, of whole layers of transformers, and without mbridge."""
    other = cases.save("mistral", folder.parent / "mistral", sliding_window=None)
    found = [warnings_of(other), warnings_of(folder, megatron_spec="transformers")]
    sys.modules["mbridge"] = None  # type: ignore[assignment]
    return [*found, warnings_of(folder)]


def test_mbridge_that_cannot_be_used_is_one_warning_and_the_table_is_used(dense: Path) -> None:
    reasons = ("ValueError: Unregistered model type: mistral", "NotImplementedError: ", "ModuleNotFoundError: ")
    for (line,), reason in zip(*spawn(1, fallbacks, dense), reasons, strict=True):
        assert line.startswith(f"fallback: weights: the table of fsdptrain instead of mbridge ({reason}")


def test_megatron_core_that_is_not_there_or_another_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    way_out = r"in the clone, pip install '\.\[megatron\]', or use --backend fsdp$"
    monkeypatch.setattr(cpu_shims, "version", absent)
    with pytest.raises(ConfigError, match=f"^--backend megatron needs megatron-core and einops .*{way_out}"):
        cpu_shims.require_megatron()
    monkeypatch.setattr(cpu_shims, "version", lambda name: "0.19.2")
    with pytest.raises(ConfigError, match=f"tested with megatron-core 0.16, got 0.19.2: {way_out}"):
        cpu_shims.require_megatron()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save("qwen3", tmp_path_factory.mktemp("hub") / "model")


def line_of(argv: list[str], folder: Path, **more: Any) -> str:
    """The one that ends the command."""
    result = command.run(argv, folder, **more)
    assert result.code == 2, result.err
    (line,) = [row for row in result.err.splitlines() if row.startswith(OWN)]
    return line.removeprefix(OWN)


def test_commands_of_fsdp_alone_say_so(dense: Path, tmp_path: Path) -> None:
    model = ["--hf-checkpoint", str(dense), "--backend", "megatron"]
    planned = line_of(["plan", *model, "--num-gpus", "1", "--gpu-memory-gib", "80"], tmp_path)
    assert planned.startswith("fsdptrain plan supports --backend fsdp only")
    assert line_of(["inspect", *model], tmp_path).startswith("fsdptrain inspect supports --backend fsdp only")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere", "--megatron-spec"),
        ("other_rotation", "computes other logprobs in megatron-core than in transformers"),
    ],
)
def test_layers_of_a_user_that_are_not_the_models_end_the_command(
    spec: str, words: str, dense: Path, tmp_path: Path
) -> None:
    argv = ["--hf-checkpoint", str(dense), *command.TINY_RUN, "console", "--output-dir", str(tmp_path / "run")]
    argv += ["--backend", "megatron"]
    assert words in line_of([*argv, "--megatron-spec", f"tests.megatron.test_wrapped:{spec}"], tmp_path)


@pytest.mark.matrix
def test_a_checkpoint_of_the_other_backend_is_refused_and_the_way_on_named(dense: Path, tmp_path: Path) -> None:
    run = tmp_path / "fsdp" / "run"
    argv = ["--hf-checkpoint", str(dense), *command.TINY_RUN, "console", "--output-dir", str(run)]
    result = command.run(argv, tmp_path / "out")
    assert result.code == 0, result.err
    shutil.copytree(run, tmp_path / "other")
    argv[-1] = str(tmp_path / "other")
    named = ["--resume", str(tmp_path / "other" / "checkpoints" / "step_00000002")]
    said = line_of([*argv, *named, "--num-rollout", "3", "--backend", "megatron"], tmp_path / "out")
    assert "Qwen3ForCausalLM on megatron-core" in said
    assert "--resume never" in said
