"""Small checkpoints that vLLM can serve on a CPU, where a head has at least 32 numbers."""

from pathlib import Path

from tests import zoo
from tests.testing import save_hub, save_tiny_checkpoint

# The first engine of a process creates the groups of all, and a dense one none for experts: mixtures come first.
NAMES = ("moe", "tied", "untied")
_EXPERTS = 48  # width: vLLM's kernels on CPUs take multiples of 32, and pad it


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """`folder`, with a model of NAMES in it."""
    if name != "moe":
        return save_tiny_checkpoint(folder, seed, head_dim=32, tie_word_embeddings=name == "tied")
    sizes = {"head_dim": 32, "moe_intermediate_size": _EXPERTS, "max_position_embeddings": 1024}
    return save_hub(zoo.build("qwen3_moe", seed, **sizes), folder)
