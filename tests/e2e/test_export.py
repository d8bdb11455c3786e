"""The exported model is the model that the run evaluated last."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from fsdptrain import Trainer
from fsdptrain.fsdp.export_folder import MARKER
from fsdptrain.trainer.evaluation import Evaluation, eval_sampling
from tests import vision_zoo, zoo
from tests.matrix import REAL_MODEL
from tests.tensors import load_files, same
from tests.testing import save_hub, spawn, tiny_run

ADAPTER = {"lora_rank": 4, "lora_export": "merged"}
EXPERTS = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]
IMAGES = {"image_key": "images", "train_vision": True}
TOWER = ["all-linear", "visual.merger.linear_fc1"]


def parity(prompt: Any, response: str) -> float:
    del prompt
    return sum(map(ord, response)) % 2


def rows(values: dict[str, Any]) -> list[dict[str, Any]]:
    pictures = [vision_zoo.picture((9 * i, 255 - 9 * i, 40), (16, 16 + 8 * (i % 3))) for i in range(16)]
    if "image_key" not in values:
        return [{"prompt": f"say {i}", "label": str(i)} for i in range(16)]
    return [{"prompt": f"<image>say {i}", "label": str(i), "images": [pictures[i]]} for i in range(16)]


def trainer_of(family: str, folder: Path, **values: Any) -> Trainer:
    """Of a checkpoint in bfloat16."""
    if family in vision_zoo.FAMILIES:
        source = vision_zoo.save(folder / "source", family, dtype=torch.bfloat16)
    elif family == "smollm2":
        source = folder / "source"
        source.symlink_to(REAL_MODEL)
    else:
        source = save_hub(zoo.build(family).bfloat16(), folder / "source")
    options = {"num_rollout": 2, "n_samples_per_prompt": 4, "lr": 1e-3, "eval_size": 2, "eval_interval": 2}
    options |= {"rollout_max_response_len": 8, "n_samples_per_eval_prompt": 2, "system_prompt": ""}
    config = tiny_run(source, folder / "run", export=True, keep_last=0, **options, **values)
    return Trainer(config, reward=parity, dataset=rows(values))


def difference(family: str, folder: Path, values: dict[str, Any]) -> float:
    """Train; return how far logprobs of the exported model are from those of the engine that was evaluated last."""
    with trainer_of(family, folder, **values) as trainer:
        trainer.fit()
        loop = trainer._loop
        assert loop is not None
        assert loop.weight_sync is not None
        assert isinstance(loop.evaluation, Evaluation)
        prompts = {prompt.id: prompt for prompt in loop.evaluation.prompts["heldout"]}
        completions = loop.weight_sync.engine.generate(list(prompts.values()), eval_sampling(loop.config))
        held = dict(loop.backend.hf_weights())
    assert same(load_files(folder / "run" / "hf"), held)
    config = json.loads((folder / "run" / "hf" / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder / "run" / "hf").eval()
    differences = []
    for completion in completions:
        prompt = prompts[completion.prompt_id]
        tokens, start = torch.tensor([[*prompt.token_ids, *completion.token_ids]]), len(prompt.token_ids)
        if prompt.images is None:
            inputs = {}
        elif vision_zoo.IMAGE_TOKEN_ID in completion.token_ids:  # the stock model takes it for a picture
            continue
        else:
            types = torch.zeros_like(tokens)
            types[0, :start] = prompt.images.token_types
            name = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
            inputs = {**prompt.images.inputs, name: types}
        with torch.no_grad():
            logprobs = model(tokens, **inputs).logits[0].float().log_softmax(-1)
        found = logprobs[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0]
        differences.append((found - torch.tensor(completion.logprobs)).abs().max().item())
    return max(differences)


def others(folder: Path) -> dict[str, bytes]:
    """The files but weights."""
    paths = [path for path in folder.iterdir() if not path.name.startswith("model") and path.name != MARKER]
    return {path.name: path.read_bytes() for path in paths}


def in_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """`config` with this dtype, in nested configs too."""
    inner = {key: in_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    return inner | ({"dtype": dtype} if "dtype" in config else {})


@pytest.mark.parametrize(
    ("family", "values", "bound"),
    [
        ("qwen3", {"bf16": False}, 1e-5),
        ("qwen3", {"bf16": True}, 0.05),
        ("qwen3", {"bf16": False, **ADAPTER}, 1e-5),
        ("qwen3", {"bf16": True, **ADAPTER}, 0.05),
        ("qwen3", {"bf16": False, **ADAPTER, "load_in_4bit": True}, 1e-5),
        ("qwen3_moe", {"bf16": False}, 1e-5),
        ("qwen3_moe", {"bf16": False, **ADAPTER, "lora_targets": EXPERTS}, 1e-5),
        ("deepseek_v3", {"bf16": False}, 1e-5),
        ("qwen3_vl", {"bf16": False, **IMAGES}, 1e-5),
        pytest.param("qwen3_vl", {"bf16": True, **IMAGES}, 0.05, marks=pytest.mark.matrix),
        ("qwen3_vl", {"bf16": False, "image_key": "images", **ADAPTER, "lora_targets": TOWER}, 1e-5),
        ("gemma3", {"bf16": False, **IMAGES}, 1e-5),
        pytest.param("smollm2", {"bf16": False}, 1e-4, marks=pytest.mark.matrix),
        pytest.param("smollm2", {"bf16": False, **ADAPTER}, 1e-4, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", {"bf16": False, "backend": "megatron"}, 1e-5, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", {"bf16": True, "backend": "megatron"}, 0.05, marks=pytest.mark.matrix),
    ],
)
def test_plain_transformers_gives_the_logprobs_of_the_last_evaluation(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, values: dict[str, Any], bound: float
) -> None:
    if family == "smollm2":
        request.getfixturevalue("real_model")
    if "backend" in values:  # megatron-core changes its process
        [found] = spawn(1, difference, family, tmp_path, values)
    else:
        found = difference(family, tmp_path, values)
    assert found < bound
    source, exported = tmp_path / "source", tmp_path / "run" / "hf"
    assert not same({name: x.bfloat16() for name, x in load_files(exported).items()}, load_files(source))
    files, expected = others(exported), others(source)
    found_config, config = (json.loads(of.pop("config.json")) for of in (files, expected))
    assert files == expected
    assert found_config == in_dtype(config, "bfloat16" if values["bf16"] else "float32")


def test_what_rounding_to_the_dtype_of_the_source_costs_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a source that declares no dtype, and whose names lack the prefix of the base model."""
    trainer, source = trainer_of("qwen3", tmp_path, bf16=False, export_dtype="source"), tmp_path / "source"
    tensors = load_files(source)
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": None}))
    with caplog.at_level("INFO", logger="fsdptrain"), trainer:
        trainer.fit()
        loop = trainer._loop
        assert loop is not None
        held = dict(loop.backend.hf_weights())
    exported = load_files(tmp_path / "run" / "hf")
    trained = sum(int((held[name] != x.float()).sum()) for name, x in tensors.items())
    lost = sum(int(((held[name] != x.float()) & (exported[name] == x)).sum()) for name, x in tensors.items())
    assert 0 < lost < trained
    assert f"of {trained} trained elements {lost} get their old value back" in caplog.text
    assert {x.dtype for x in exported.values()} == {torch.bfloat16}
