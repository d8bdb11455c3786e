"""A trap of vLLM on CPUs: a tied head answers with its old weights after an update.

Imported in vLLM's own processes too: it needs torch and nothing else.
"""

from typing import Any

from torch import nn


def repack_tied_head(model: nn.Module) -> None:
    """Give a tied head the weights that its embedding has received. Nothing to do on a GPU, where they are one tensor.

    On a CPU vLLM keeps linear layers in a packed copy, and makes it anew only for layers that received weights: a
    tied head receives none, and would go on answering with its old ones.
    """
    embeddings = {p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False) if "embed" in name}
    for name, module in model.named_modules():
        head: Any = module
        is_packed_head = name.rpartition(".")[2] == "lm_head" and hasattr(head, "cpu_linear")
        if is_packed_head and head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)
