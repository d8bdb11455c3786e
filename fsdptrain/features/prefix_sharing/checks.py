"""Check whether the configuration allows computing the prompt of a group once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdptrain.config.effects import Problem, without_effect

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


_KNOW_PREFIXES = ("auto", "varlen", "sdpa")  # values of --attn-implementation


def configured_obstacle(config: Config, *, on_gpu: bool = False) -> str:
    """Return why no model can share the prompts of a group under `config`, or ""."""
    if config.algorithm.algorithm == "sft":
        return "with --algorithm sft, which has no groups"
    if config.router.replay != "off":
        return f"with --router-replay {config.router.replay}: each sample has routes of its own for its prompt"
    if config.data.image_key is not None:
        return "with --image-key: the images of a prompt belong to each sample"
    for flag in ("tensor_parallel_size", "expert_parallel_size", "context_parallel_size"):
        if (size := getattr(config.parallel, flag)) > 1:
            return f"with --{flag.replace('_', '-')} {size}: not shown to be exact there yet"
    if config.model.layout == "padded":
        return "with --layout padded: only packs can share"
    if config.model.attn_implementation not in _KNOW_PREFIXES:
        return f"with --attn-implementation {config.model.attn_implementation}, which knows no shared prefix"
    if config.batch.prefix_sharing == "off":
        return "--prefix-sharing off"
    untried = on_gpu and config.batch.prefix_sharing == "auto"
    return "on a GPU it has not run yet: --prefix-sharing on asks for it" if untried else ""


def check_prefixes(config: Config) -> Iterator[Problem]:
    obstacle = configured_obstacle(config)
    if config.batch.prefix_sharing == "on" and obstacle:
        yield from without_effect(config, "prefix_sharing", obstacle)
