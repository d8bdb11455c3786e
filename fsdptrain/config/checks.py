"""Check a configuration: the rules of its fields, then the `problems` of its sections. The first problem is raised.

Each problem is one line with the flags, the values and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdptrain.config.keys import Key, all_keys
from fsdptrain.config.rules import Condition, Excludes, NoEffectError, Problem, Requires, Rule
from fsdptrain.errors import ConfigError

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


def check(config: Config) -> None:
    """Raise ConfigError for the first problem of the configuration."""
    rules = [(key, rule) for flat, key in all_keys().items() if config.is_set(flat) for rule in key.rules]
    _raise_first(filter(None, (problem_of(config, *each) for each in rules if not isinstance(each[1], Excludes))))
    _raise_first(filter(None, (problem_of(config, *each) for each in rules if isinstance(each[1], Excludes))))
    for section in config.sections:
        _raise_first(section.problems(config))


def check_data_options(config: Config) -> None:
    """Raise ConfigError for an option that does not apply to --prompt-data.

    Not part of `check`, because Python callers may pass their own data.
    """
    _raise_first(config.data.source_problems(config))


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
            inner = [other for other in config.rank_groups if other.size > 1 and other.lies_within(group)]
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


def problem_of(config: Config, key: Key, rule: Rule) -> Problem | None:
    """Return the line for an option that was set and breaks `rule`."""
    reason = _broken(config, key, rule)
    if reason and isinstance(rule, Excludes):
        return f"{key.shown(config)} does not work {reason}"
    return NoEffectError(f"{key.flag} has no effect {reason}", key.flat) if reason else None


def _raise_first(problems: Iterable[Problem]) -> None:
    for problem in problems:
        raise problem if isinstance(problem, NoEffectError) else ConfigError(problem)


def _broken(config: Config, key: Key, rule: Rule) -> str:
    """Return the end of the message if the option breaks `rule`, else ""."""
    held = [condition for condition in rule.conditions if config.holds(condition)]
    if bool(held) == isinstance(rule, Requires):
        return ""
    if rule.reason:
        return rule.reason
    if isinstance(rule, Requires):
        return _what_is_missing(config, key, rule)
    other = all_keys()[held[0].key]
    fix = rule.fix or ("leave one of them out" if isinstance(rule, Excludes) else "remove it")
    return f"with {other.shown(config)}: {fix}"


def _what_is_missing(config: Config, key: Key, rule: Requires) -> str:
    names = [_described(condition) for condition in rule.conditions]
    other = all_keys().get(rule.conditions[0].key)  # None: its feature is not installed
    if len(names) == 1 and other is not None and config.is_set(other.flat):
        only = f", only with {names[0]}" if rule.conditions[0].relation else ""
        return f"with {other.shown(config)}{only}: {rule.fix or 'remove it'}"
    return f"without {' or '.join(names)}: {rule.fix or f'add it, or leave {key.flag} out'}"


def _described(condition: Condition) -> str:
    flag = "--" + condition.key.replace("_", "-")
    if condition.relation == ">":
        return f"{flag} above {condition.values[0]}"
    return f"{flag} {' or '.join(condition.values)}".strip()
