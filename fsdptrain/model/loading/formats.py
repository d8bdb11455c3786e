"""Reject checkpoint formats that cannot be trained before loading them, with a suggested fix."""

import json
from pathlib import Path
from typing import Any

from fsdptrain.checkpoints import EXPORT
from fsdptrain.errors import CheckpointError

_DEQUANTIZED_BY = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}  # config classes of transformers
_SOURCE = "train the model that it was made from, which its card names"


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of the --hf-checkpoint `path`. Raises CheckpointError if it is not a JSON object."""
    try:
        found = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"--hf-checkpoint {path}: config.json cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"--hf-checkpoint {path}: config.json holds {str(found)[:20]}, not a JSON object")
    return found


def with_config(path: Path) -> Path:
    """Return `path`. Raises CheckpointError unless it is a folder with the config.json of a model to train."""
    if not path.is_dir():
        raise CheckpointError(
            f"--hf-checkpoint {path} is not a folder; it takes one, or the name of a repository on the hub"
        )
    if not (path / "config.json").is_file():
        what = f"give {path / EXPORT}" if (path / EXPORT).is_dir() else "is it the folder of a Hugging Face model?"
        if (path / "adapter_config.json").is_file():
            what = "it is an adapter: export its run with --lora-export merged"
        raise CheckpointError(f"--hf-checkpoint {path} has no config.json: {what}")
    if (path / "adapter_config.json").is_file():  # which transformers would apply
        raise CheckpointError(f"--hf-checkpoint {path} holds an adapter beside the model: merge it by peft, or move it")
    refuse_quantized(path)
    return path


def refuse_quantized(path: Path) -> None:
    """Raise CheckpointError if config.json declares quantization, with a command for a bfloat16 copy where possible."""
    found = read_config(path).get("quantization_config")
    if not found:
        return
    method = str(found.get("quant_method") if isinstance(found, dict) else found)
    way_out = _SOURCE
    if method in _DEQUANTIZED_BY:
        loading = f"quantization_config=t.{_DEQUANTIZED_BY[method]}(dequantize=True), dtype='bfloat16'"
        # the original format would give bfloat16 tensors the names of quantized ones (transformers 5.23)
        way_out = f"write a bfloat16 copy once, by {_copy(path, loading, 'save_original_format=False')}"
    raise CheckpointError(
        f"--hf-checkpoint {path} is quantized ({method}), and weights must be bfloat16, float16 or float32 to be "
        f"trained: {way_out}"
    )


def _copy(path: Path, loading: str, saving: str) -> str:
    """Return a command that writes model and tokenizer to a new folder."""
    source, target = str(path), f"{path.resolve().name}-copy"
    load = f"t.AutoModelForCausalLM.from_pretrained({source!r}, {loading})"
    tokenizer = f"t.AutoTokenizer.from_pretrained({source!r}).save_pretrained({target!r})"
    return f'python -c "import transformers as t; {load}.save_pretrained({target!r}, {saving}); {tokenizer}"'
