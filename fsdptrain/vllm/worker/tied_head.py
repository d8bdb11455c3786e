"""A trap of vLLM on CPUs: a tied head answers with its old weights after an update.

Imported in vLLM's own processes too: it needs torch and nothing else.
"""

from typing import Any

from torch import nn


def tied_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Heads that have the weight of an embedding, by name. What a checkpoint ties, not every model of vLLM does."""
    named = model.named_parameters(remove_duplicate=False)
    embeddings = {p.data_ptr() for name, p in named if "embed" in name and p.numel()}  # packed linears keep no weight
    heads: dict[str, Any] = {n: module for n, module in model.named_modules() if n.rpartition(".")[2] == "lm_head"}
    return {
        name: head for name, head in heads.items() if hasattr(head, "weight") and head.weight.data_ptr() in embeddings
    }


def repack_tied_head(model: nn.Module) -> None:
    """Give a tied head the weights that its embedding has received. Nothing to do on a GPU, where they are one tensor.

    On a CPU vLLM keeps linear layers in a packed copy, and makes it anew only for layers that received weights: a
    tied head receives none, and would go on answering with its old ones.
    """
    for module in tied_heads(model).values():
        head: Any = module
        if hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)
