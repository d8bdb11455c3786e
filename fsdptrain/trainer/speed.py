"""Model FLOPs of a step and peak FLOPs of the device, for `perf/mfu`.

Model FLOPs exclude recomputation: 2 per weight and token forward, twice that backward, or once if the weight is frozen;
adapters are small enough to ignore. Attention uses the true head widths, in both published conventions (every pair of
tokens, or causal pairs only). The embedding is a look-up and counts nothing; the head counts only for the loss tokens,
where it is computed; a vision tower counts nothing. Convention of PaLM (Chowdhery et al. 2022, appendix B).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from fsdptrain.model.sizes import active_sizes, head_widths, is_of_adapter, layer_config
from fsdptrain.model.structure import lm_head
from fsdptrain.trainer.batches import StepBatches
from fsdptrain.trainer.metrics import reduce_sums
from fsdptrain.types import Metrics

# Dense bfloat16, by a part of the device name; the first that fits. NVIDIA's data sheets.
PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H200 NVL": 835.0, "H100": 989.0, "H200": 989.0,
    "B200": 2250.0, "A100": 312.0,
}  # fmt: skip


@dataclass(frozen=True)
class ModelFlops:
    """The cost of one forward pass."""

    body_weights: float  # weights that multiply each token; only the active share of experts
    head_weights: int  # weights of the LM head
    attention_width: float  # sum over attention layers of heads x (width of a key + width of a value) / 2
    frozen: bool = False  # only an adapter is trained: other weights need no gradient

    def forward(
        self, seqlens: Sequence[int], num_head_tokens: int, *, causal: bool, prefixes: Sequence[int] = ()
    ) -> float:
        """Compute the FLOPs of one forward pass over sequences of these lengths.

        prefixes: number of leading tokens of each sequence that are computed in another sequence. The other tokens
        attend to them.
        """
        both = list(zip(seqlens, prefixes or [0] * len(seqlens), strict=True))
        if causal:
            pairs = sum(length**2 - before**2 for length, before in both) / 2
        else:
            pairs = sum((length - before) * length for length, before in both)
        products = self._products(sum(seqlens) - sum(prefixes), num_head_tokens)
        return 2 * products + 4 * self.attention_width * pairs

    def training(
        self, seqlens: Sequence[int], num_head_tokens: int, *, causal: bool, prefixes: Sequence[int] = ()
    ) -> float:
        """Compute the FLOPs of one forward and backward pass."""
        num_tokens = sum(seqlens) - sum(prefixes)
        saved = 2 * self._products(num_tokens, num_head_tokens) if self.frozen else 0.0
        return 3 * self.forward(seqlens, num_head_tokens, causal=causal, prefixes=prefixes) - saved

    def _products(self, num_tokens: int, num_head_tokens: int) -> float:
        return self.body_weights * num_tokens + self.head_weights * num_head_tokens


@dataclass(frozen=True)
class Speed:
    """Model FLOPs utilization (MFU) of the training passes."""

    flops: ModelFlops
    peak_tflops: float
    copies: int = 1  # ranks that share the work on a pack; each of them counts all of it

    def utilization(self, steps: Sequence[StepBatches], *, train_s: float) -> Metrics:
        """Compute perf/mfu and perf/mfu_causal of the forward and backward passes, mean over ranks."""
        packs = [pack for step in steps for pack in step.packs]
        own = {"perf/mfu": 0.0, "perf/mfu_causal": 0.0}
        for pack in packs:  # a shared prompt counts once; every response attends to it
            sizes = (pack.seqlens, pack.loss_positions.numel())
            prefixes = () if pack.shared is None else pack.shared.lengths
            for name in own:
                own[name] += self.flops.training(*sizes, causal=name == "perf/mfu_causal", prefixes=prefixes)
        possible = self.peak_tflops * 1e12 * max(train_s, 1e-9) * dist.get_world_size() * self.copies
        return {name: total / possible for name, total in reduce_sums(own).items()}


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Count the weights of `model`, of any architecture, sharded or on meta."""
    text = model.config.get_text_config()
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = set(lm_head(model).parameters())
    adapters = {p for name, p in model.named_parameters() if is_of_adapter(name)}
    elsewhere = embeddings | head | adapters
    body = sum((size for p, size in active_sizes(model).items() if p.ndim >= 2 and p not in elsewhere), 0.0)
    kinds = vars(text).get("layer_types") or ["full_attention"] * text.num_hidden_layers
    attending = [index for index, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind]
    layers = [layer_config(model.config, index) for index in attending]
    width = sum(layer.num_attention_heads * sum(head_widths(layer)) / 2 for layer in layers)
    return ModelFlops(body, sum(p.numel() for p in head), width, frozen=bool(adapters))


def peak_tflops(device: torch.device) -> float | None:
    """Return the published peak of a GPU in the table [TFLOPS]."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
