"""Each flag of --backend megatron has an effect, or is refused in one line with the way out; so are the others' beside
it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdptrain.config import Config, check_world_size
from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import Condition, Excludes
from fsdptrain.dry_run import draw_grid
from fsdptrain.errors import ConfigError

PACKAGE = Path(__file__).parents[3] / "fsdptrain"
REFUSED_KEYS = {
    flat
    for flat, key in all_keys().items()
    for rule in key.rules
    if isinstance(rule, Excludes) and Condition.parse("backend=megatron") in rule.conditions
}


def test_ranks_that_share_packs_are_neighbors_and_must_fit() -> None:
    config = Config(hf_checkpoint="x", backend="megatron", megatron_tensor_parallel=2, megatron_pipeline_parallel=2)
    assert config.pack_copies == 4
    check_world_size(config, 8)
    assert draw_grid(config, 8)[1] == "packs [0 1 2 3] [4 5 6 7]"
    with pytest.raises(ConfigError, match="must divide the processes of a replica, 6"):
        check_world_size(config, 6)
    experts = Config(hf_checkpoint="x", backend="megatron", megatron_expert_parallel=4)
    with pytest.raises(ConfigError, match=r"--megatron-expert-parallel 4 must divide the processes of a replica, 6"):
        check_world_size(experts, 6)


def code_of_a_run() -> str:
    """Of the modules that a run on megatron-core imports, now or later: all but those of FSDP's backend alone, and the
    declarations."""
    names = {path: ".".join(path.with_suffix("").relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for path, name in names.items()}
    waiting = [name for name in paths if not re.match(r"fsdptrain\.(backends\.(?!megatron)|fsdp|models)", name)]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in paths and name not in found and not re.match(r"fsdptrain\.(backends\.fsdp|planning)", name):
            found.add(name)
            waiting += imported(paths[name])
    read = {name for name in found if not name.startswith("fsdptrain.config")} | {"fsdptrain.config.root"}
    return "\n".join(paths[name].read_text(encoding="utf-8") for name in sorted(read))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


CODE = code_of_a_run()


BY_PROPERTY = {"eps_clip_high", "mismatch_low", "mismatch_high"}  # AlgorithmConfig.clip_high, .mismatch_bounds


@pytest.mark.parametrize("flat", sorted(set(all_keys()) - REFUSED_KEYS - BY_PROPERTY))
def test_each_other_flag_is_read_on_the_way_of_a_run(flat: str) -> None:
    """By what --backend megatron goes through: that --backend fsdp reads it is not enough."""
    key = all_keys()[flat]
    owners = r"config|data|rollout|launch|run|log|model|info|algorithm|vllm|options|split|section\(\w+\)"
    pattern = rf"\b(?:{key.section}|_?(?:{owners}))\.{key.name}\b"
    assert re.search(pattern, CODE), f"{key.flag} is read by --backend fsdp alone: mark it FSDP_ONLY"
