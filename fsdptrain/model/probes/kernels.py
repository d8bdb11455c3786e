"""Report which kernels a model runs on, where a slower one is used instead of a faster one, and why.

    recurrent mixer: torch instead of causal-conv1d (not installed here)

A fallback is correct but slower or needs more memory. A run warns once about each; `--strict` makes it an error.
"""

import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.model.attention.attention import MAX_VARLEN_HEAD_DIM, PACKAGE_ATTENTION, SEGMENTS, VARLEN
from fsdptrain.model.layer_kinds import module_kind
from fsdptrain.model.probes.layout import LayoutProbe

log = logging.getLogger(__name__)

# Matches how transformers declares a function from a package with a fallback in torch.
_STAND_IN = re.compile(r"@use_kernel_func_from_hub_with_fallback\(\s*\"(\w+)\",\s*\"(\w+)\"")
_DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
_WORDS = {
    SEGMENTS: "sdpa, segment by segment",
    VARLEN: "torch varlen, one kernel for a pack",
    "flash_attention_2": "flash-attn 2",
    "flash_attention_3": "flash-attn 3",
}
_WRITTEN_OUT = "softmax written out, in blocks"
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """The kernel that computes one part of the model."""

    part: str  # attention, experts ...
    used: str
    wanted: str = ""  # faster kernel that is not used; "" if `used` is the best available
    reason: str = ""  # why it is not used

    @property
    def fell_back(self) -> bool:
        return bool(self.wanted)

    @property
    def line(self) -> str:
        return f"{self.part}: {self.used}" + (f" instead of {self.wanted} ({self.reason})" if self.fell_back else "")


def kernels(
    model: PreTrainedModel, *, device_type: str, compute_dtype: torch.dtype, probe: LayoutProbe | None = None
) -> list[Kernel]:
    """Return the kernels of the parts of `model`.

    probe: result of the layout probe. Without it, the attention is the one in the model's config.
    """
    attention = probe.attention if probe is not None else str(model.config._attn_implementation)
    found = [_attention(model, attention, device_type, compute_dtype, probe)]
    if probe is not None:
        padded = probe.layout == "padded"
        found.append(Kernel("layout", probe.layout, "packed" if padded else "", probe.reason if padded else ""))
    found += [*recurrent_kernels(model, device_type), *_experts(model)]
    return found


def require_no_fallback(found: Sequence[Kernel]) -> None:
    """Raise ConfigError that lists every fallback, for --strict."""
    lines = [kernel.line for kernel in found if kernel.fell_back]
    if lines:
        raise ConfigError(f"--strict allows no fallback: {'; '.join(lines)}; install what is missing, or remove it")


def _attention(
    model: PreTrainedModel, name: str, device_type: str, compute_dtype: torch.dtype, probe: LayoutProbe | None
) -> Kernel:
    used = _WORDS.get(name, f"transformers' {name}, with dense masks")
    if name in PACKAGE_ATTENTION and _has_softcap_or_sinks(model):
        used = _WRITTEN_OUT
    if name not in PACKAGE_ATTENTION and "flash" not in name:
        return Kernel("attention", used, _WORDS[SEGMENTS], probe.reason if probe is not None else "asked for")
    if name == VARLEN and device_type != "cuda":
        return Kernel("attention", f"plug-in attention.{device_type}")
    if name == VARLEN:
        obstacle = _varlen_obstacle(model, compute_dtype)
        if obstacle:
            return Kernel("attention", used if used == _WRITTEN_OUT else _WORDS[SEGMENTS], _WORDS[VARLEN], obstacle)
    if name == SEGMENTS and device_type == "cuda":
        return Kernel("attention", used, _WORDS[VARLEN], "set by --attn-implementation sdpa")
    if name == SEGMENTS and device_type != "cpu":
        return Kernel("attention", used, f"a plug-in attention.{device_type}", "none is installed, or sdpa is set")
    return Kernel("attention", used)


def _varlen_obstacle(model: PreTrainedModel, compute_dtype: torch.dtype) -> str:
    """Return why attention uses segments although varlen is available, or "". Same conditions as `takes_flash`."""
    text = model.config.get_text_config()
    values = text.to_dict()
    if compute_dtype not in _HALF:
        return "it needs bfloat16 or float16"
    if _has_softcap_or_sinks(model):
        return "that kernel has neither softcap nor sinks"
    head_dim = values.get("head_dim") or text.hidden_size // text.num_attention_heads
    widest = max([head_dim, (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0)])
    return f"heads of {widest} are over its {MAX_VARLEN_HEAD_DIM}" if widest > MAX_VARLEN_HEAD_DIM else ""


def _has_softcap_or_sinks(model: PreTrainedModel) -> bool:
    capped = model.config.get_text_config().to_dict().get("attn_logit_softcapping")
    return bool(capped) or any(name.endswith("sinks") for name, _ in model.named_parameters())


def report_fallbacks(found: Sequence[Kernel], *, strict: bool) -> None:
    """Log one warning per fallback on rank 0. With --strict, raise ConfigError on all ranks. Collective."""
    for kernel in found:
        if kernel.fell_back and not strict and dist.get_rank() == 0:
            log.warning("fallback: %s", kernel.line)
    with raise_on_all_ranks(ConfigError, "--strict"):
        if strict:
            require_no_fallback(found)


def recurrent_kernels(model: PreTrainedModel, device_type: str) -> Iterator[Kernel]:
    """Yield a kernel for each optional package that the recurrent mixers of this model call."""
    files = {type(module).__module__ for module in model.modules() if module_kind(module) == "recurrent mixer"}
    sources = [inspect.getsource(sys.modules[name]) for name in sorted(files)]
    packages = [match[2] for source in sources for match in _STAND_IN.finditer(source)]
    for package in dict.fromkeys(packages):
        wanted: str = _DISTRIBUTIONS.get(package, package)
        if find_spec(package) is None:
            yield Kernel("recurrent mixer", "torch", wanted, "not installed here")
        elif device_type == "cpu":
            yield Kernel("recurrent mixer", "torch", wanted, "it needs a GPU")
        else:
            yield Kernel("recurrent mixer", wanted)


def _experts(model: PreTrainedModel) -> Iterator[Kernel]:
    if not any(module_kind(module) == "experts" for module in model.modules()):
        return
    name = str(model.config.get_text_config()._experts_implementation)
    if name == "grouped_mm":
        yield Kernel("experts", "grouped_mm, one kernel for all experts")
    else:
        reason = f"transformers has no grouped kernel for {type(model).__name__}" if name == "eager" else "asked for"
        yield Kernel("experts", f"{name}, one expert at a time" if name == "eager" else name, "grouped_mm", reason)
