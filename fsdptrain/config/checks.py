"""Check a configuration: the rules of its fields, then the `problems` of its sections. The first problem is raised.

Each problem is one line with the flags, the values and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fsdptrain.config.keys import all_keys
from fsdptrain.config.rules import COLUMN, Excludes, NoEffectError, Package, Problem, Requires, Rule
from fsdptrain.errors import ConfigError

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


def check(config: Config) -> None:
    """Raise ConfigError for the problems of the configuration: one per option, or the first one of several options."""
    rules = [(key, rule) for flat, key in all_keys().items() if config.is_set(flat) for rule in key.rules]
    broken = [(key, rule) for key, rule in rules if is_broken(config, rule)]
    if broken:
        from fsdptrain.config.problems import rule_problem

        broken.sort(key=lambda each: isinstance(each[1], Excludes))
        first = {key.flat: (key, rule) for key, rule in reversed(broken)}
        problems = [rule_problem(config, *first[flat]) for flat in dict.fromkeys(key.flat for key, _ in broken)]
        problems[0].args = tuple(map(str, problems))
        raise problems[0]
    for section in config.sections:
        _raise_first(section.problems(config))


def check_data_options(config: Config) -> None:
    """Raise ConfigError for an option that does not apply to --prompt-data.

    Not part of `check`, because Python callers may pass their own data.
    """
    names = [config.data.prompt_data, *config.data.eval_prompt_data]
    if all("reasoning_gym:" in name or name == "environment" for name in names):
        columns = [flat for flat, key in all_keys().items() if COLUMN in key.field.metadata]
        reason = "with data of reasoning_gym or an environment, which have no columns: remove it"
        _raise_first(config.without_effect(columns, reason))


def check_packages(config: Config, sections: Iterable[str] | None = None) -> None:
    """Raise ConfigError, with the commands, for options whose packages are not installed. sections: only of these."""
    missing = [
        f"{key.shown(config)} needs the package {package.module}: in the clone, pip install '.[{package.extra}]'"
        for key in all_keys().values()
        for package in key.marks(Package)
        if (sections is None or key.section in sections)
        and package.is_needed(key.value(config))
        and not _is_installed(package.module)
    ]
    if missing:
        raise ConfigError(*missing)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def check_world_size(config: Config, world_size: int) -> None:
    """Raise ConfigError if the number of processes does not fit. Only known after launch."""
    replicas = config.fsdp.replicate_size
    if world_size % replicas:
        raise ConfigError(
            f"--fsdp-replicate-size {replicas} must divide the number of processes, {world_size}: "
            "world size = replicas x shards"
        )
    num_ranks = world_size // replicas
    for group in config.rank_groups:
        if num_ranks % (group.size * group.stride):
            larger = [other for other in config.rank_groups if other.size > 1 and other.shares_packs]
            inner = [other for other in larger if other.stride * other.size <= group.stride]
            flags = [f"{all_keys()[each.key].flag} {each.size}" for each in (*inner, group)]
            raise ConfigError(
                f"{' x '.join(flags)} must divide the processes of a replica, {num_ranks}: choose a divisor"
            )


def check_processes(config: Config, *, world_size: int, local_world_size: int) -> None:
    """Raise ConfigError if the launched processes do not match the flags."""
    wanted = config.launch.nproc_per_node
    if wanted not in (None, local_world_size):
        raise ConfigError(
            f"--nproc-per-node {wanted} does not fit the {local_world_size} processes that were started on this "
            "machine: remove it under torchrun"
        )
    for section in config.sections:
        _raise_first(section.launch_problems(world_size, local_world_size))
    check_world_size(config, world_size)


def is_broken(config: Config, rule: Rule) -> bool:
    """Return whether an option that was set breaks `rule`."""
    return any(map(config.holds, rule.conditions)) != isinstance(rule, Requires)


def _raise_first(problems: Iterable[Problem]) -> None:
    for problem in problems:
        raise problem if isinstance(problem, NoEffectError) else ConfigError(problem)
