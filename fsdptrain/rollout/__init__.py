"""Rollout engines: what makes completions. `engine_factory` is the way in."""

import importlib.util
from typing import TYPE_CHECKING, Any

from fsdptrain.errors import ConfigError
from fsdptrain.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdptrain.protocols import RolloutEngine

# Name -> "module:function", imported when it is chosen and called as function(config, checkpoint=..., device=...).
ENGINES = {
    "hf": "fsdptrain.rollout.embedded.engine:build_hf_engine",
    "vllm": "fsdptrain.vllm.in_process:build_vllm_engine",
    "vllm-server": "fsdptrain.vllm.server.build:build_vllm_server_engine",
}


def engine_factory(requested: str, *, device_type: str) -> "Callable[..., RolloutEngine]":
    """What makes the engine that `--rollout-engine` names: of `ENGINES`, `package.module:function`, or a plug-in's.

    Call it before a model is loaded: ConfigError where there is none of that name. What it returns is called as
    (config, *, checkpoint, device). An entry point lies in the group `fsdptrain.plugins` and is named
    `rollout.<engine>`. The engine holds no weights before the first `update_weights`.
    """
    name = choose_engine(requested, device_type=device_type)
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--rollout-engine vllm: vLLM is not installed here: pip install 'fsdptrain[vllm]', or use "
            "--rollout-engine hf"
        )
    known: dict[str, Any] = {"auto": None, **ENGINES}
    return resolve(ENGINES.get(name, name), known, flag="--rollout-engine", plugins="rollout")


def choose_engine(requested: str, *, device_type: str) -> str:
    """What `auto` stands for: vLLM where it is installed and has a GPU; else the embedded engine."""
    if requested != "auto":
        return requested
    ready = device_type == "cuda" and importlib.util.find_spec("vllm") is not None
    return "vllm" if ready else "hf"
