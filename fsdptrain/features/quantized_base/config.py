"""Options of quantized frozen weights."""

from typing import Annotated, Literal

from fsdptrain.config.rules import FSDP_ONLY, Excludes, Requires
from fsdptrain.config.section import Section

BLOCK = 64  # weights of a row that share a scale
_MERGED = "use --lora-sync merged: the engine has other weights than those that the adapter is trained on"

Kind = Literal["nf4", "8-bit"]


class QuantizedBaseConfig(Section):
    """Frozen weights in 4 or 8 bits under an adapter (QLoRA): docs/lora.md."""

    NAME = "quantized_base"
    RULES = (
        Requires("lora_rank", fix="set it, e.g. 32: only frozen weights can be quantized"),
        Excludes("fsdp_cpu_offload", "compile", "liger", "ref_load"),
        Excludes("lora_sync=adapter", fix=_MERGED),
        FSDP_ONLY,
    )

    load_in_4bit: bool = False
    """Store the frozen weights of linear layers in 4 bits (NF4, QLoRA)."""
    load_in_8bit: Annotated[bool, Excludes("load_in_4bit")] = False
    """Store the frozen weights of linear layers in 8 bits."""

    @property
    def enabled(self) -> bool:
        return self.load_in_4bit or self.load_in_8bit

    @property
    def kind(self) -> Kind:
        return "nf4" if self.load_in_4bit else "8-bit"
