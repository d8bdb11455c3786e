"""Rollout engines generate completions. `engine_factory` finds one by its name."""

import importlib.util
import logging
from typing import TYPE_CHECKING

from fsdptrain.registry import Table, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdptrain.protocols import RolloutEngine

log = logging.getLogger(__name__)

ENGINES: "Table[Callable[..., RolloutEngine]]" = Table(
    {
        "hf": "fsdptrain.rollout.embedded.engine:build_hf_engine",
        "vllm": "fsdptrain.vllm.in_process:build_vllm_engine",
        "vllm-server": "fsdptrain.vllm.server.build:build_vllm_server_engine",
    }
)


def engine_factory(name: str) -> "Callable[..., RolloutEngine]":
    """Return the function that builds the engine of `--rollout-engine`; call it as (config, *, checkpoint, device).

    The name is one of `ENGINES` (`choose_engine` resolves `auto`), `package.module:function`, or that of an entry point
    `rollout.<name>` in the group `fsdptrain.plugins`. Raises ConfigError for an unknown name, so call it before a model
    is loaded. The engine has no weights before the first `update_weights`.
    """
    return resolve(
        name,
        ENGINES,
        flag="--rollout-engine",
        plugins="rollout",
        call=lambda build: build("config", checkpoint="path", device="device"),
    )


def choose_engine(requested: str, *, device_type: str) -> str:
    """Resolve `auto`: vLLM if it is installed and there is a GPU, else the embedded engine."""
    if requested != "auto":
        return requested
    if device_type != "cuda":
        return "hf"
    if importlib.util.find_spec("vllm") is not None:
        return "vllm"
    log.warning("vLLM is not installed: the slower embedded engine generates: in the clone, pip install '.[vllm]'")
    return "hf"
