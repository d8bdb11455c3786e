"""Option of quantized frozen weights."""

from typing import Annotated

from fsdptrain.config.rules import FSDP_ONLY, Excludes, Package, Requires
from fsdptrain.config.section import Section


class QuantizedBaseConfig(Section):
    """Frozen weights in 4 bits under an adapter (QLoRA): docs/lora.md."""

    NAME = "quantized_base"
    RULES = (
        Requires("lora_rank", fix="set it, e.g. 32: only frozen weights can be quantized"),
        Excludes("fsdp_cpu_offload", "compile", "liger", "ref_load"),
        FSDP_ONLY,
    )

    load_in_4bit: Annotated[bool, Package("bitsandbytes", "qlora")] = False
    """Store the frozen weights of linear layers in 4 bits (NF4, QLoRA)."""
