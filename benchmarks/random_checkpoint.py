"""Write checkpoints with random weights in the shape of known models and in the Hub's format. Downloads nothing."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from fsdptrain.fsdp.hub_files import HubWriter

FILE_BYTES = 1_000_000_000
_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 1e6}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
# hidden size, intermediate size, layers, heads
_SIZES = {
    "tiny": (64, 128, 2, 4),
    "Qwen3-0.6B": (1024, 3072, 28, 16),
    "Qwen3-1.7B": (2048, 6144, 28, 16),
    "Qwen3-4B": (2560, 9728, 36, 32),
    "Qwen3-8B": (4096, 12_288, 36, 32),
    "Llama-3.1-8B": (4096, 14_336, 32, 32),
}
SHAPES = tuple(_SIZES)


def shape(name: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a shape, with up to 131,072 positions."""
    hidden, intermediate, layers, heads = _SIZES[name]
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 131_072,
    }
    if name == "Llama-3.1-8B":
        sizes |= {"vocab_size": 128_256, "num_key_value_heads": 8, "rope_parameters": _LLAMA3_ROPE}
        return LlamaConfig(**sizes | changes, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    sizes |= _QWEN3
    if name == "tiny":
        sizes |= {"vocab_size": 1024, "head_dim": 16, "num_key_value_heads": 2}
    tied = name != "Qwen3-8B"
    return Qwen3Config(**sizes | changes, tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"])


def write_random(folder: Path, config: PreTrainedConfig, *, seed: int, max_bytes: int = FILE_BYTES) -> int:
    """Write random bfloat16 weights to files of at most `max_bytes`. Returns the number of bytes.

    Holds the tensors of one file at a time.
    """
    from tests.testing import tiny_tokenizer  # found after `record` is imported

    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    writer = HubWriter(folder, max_bytes=max_bytes)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # billions of random numbers
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            drawn = torch.ones(tensor.shape, dtype=tensor.dtype)
        else:
            drawn = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).uniform_(
                -0.03, 0.03, generator=generator
            )
        writer.add(name, drawn)
    writer.finish()
    return writer.num_bytes
