"""What the comments at the top of a recipe say, and what a recipe needs to be installed."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from fsdptrain.config import Config
from fsdptrain.features.fp8.config import Fp8Config
from fsdptrain.features.liger.config import LigerConfig
from fsdptrain.features.lora.config import LoraConfig
from fsdptrain.features.quantized_base.config import QuantizedBaseConfig
from fsdptrain.features.vision.config import VisionConfig
from fsdptrain.vllm.config import VllmConfig

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
HARDWARE = re.compile(r"CPU|(?:(\d+) nodes x )?(\d+) x (\d+) GB")


@dataclass(frozen=True)
class Header:
    summary: str
    commands: tuple[str, ...]
    hardware: str
    time: str | None

    @property
    def extras(self) -> set[str]:
        """The extras of fsdptrain that the commands install."""
        return set().union(*(extras_of(line) for line in self.commands))

    @property
    def machine(self) -> tuple[int, int, int]:
        """(nodes, GPUs per node, GB per GPU), 0 GPUs for a CPU."""
        found = HARDWARE.fullmatch(self.hardware)
        assert found, self.hardware
        nodes, gpus, size = found.groups()
        return int(nodes or 1), int(gpus or 0), int(size or 0)


def read_header(path: Path) -> Header:
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].removeprefix(" "))
    labels = dict(line.split(": ", 1) for line in lines if re.match(r"(Hardware|Time): ", line))
    commands = [line.strip() for line in lines if line.startswith("    ")]
    return Header(lines[0], tuple(commands), labels.get("Hardware", ""), labels.get("Time"))


def extras_of(command: str) -> set[str]:
    """Return the extras in a line such as `pip install 'fsdptrain[lora,vllm]' other` or `pip install .[lora]`."""
    words = shlex.split(command, comments=True) if "pip install" in command else []
    found = [re.fullmatch(r"(?:fsdptrain|\.)\[(.+)\]", word) for word in words]
    return {extra for match in found if match for extra in match[1].split(",")}


def needed_extras(config: Config, *, on_gpu: bool) -> set[str]:
    """Return the extras without which a run of `config` ends with an error, and vLLM where it generates on GPUs."""
    environment = config.environment.environment or ""
    is_agent = environment.endswith(":run_episode") or config.environment.environment_command
    quantized = config.section(QuantizedBaseConfig).enabled
    needs = {
        "agents": bool(is_agent),
        "liger": config.section(LigerConfig).liger,
        "lora": config.section(LoraConfig).rank > 0 and not quantized,
        "megatron": config.model.backend == "megatron",
        "qlora": quantized,
        "torchao": bool(config.section(Fp8Config).fp8),
        "trackio": "trackio" in config.log.to,
        "vision": config.section(VisionConfig).image_key is not None,
        "vllm": on_gpu
        and config.generates
        and uses_vllm_here(config)
        and config.section(VisionConfig).image_key is None,
        "wandb": "wandb" in config.log.to,
    }
    return {extra for extra, is_needed in needs.items() if is_needed}


def uses_vllm_here(config: Config) -> bool:
    """Whether vLLM runs in the environment of the trainer."""
    servers = config.section(VllmConfig)
    return config.rollout.engine in ("auto", "vllm") or (
        config.rollout.engine == "vllm-server" and servers.server_python is None and not servers.urls
    )
