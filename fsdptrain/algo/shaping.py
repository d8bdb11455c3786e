"""Length-based reward shaping and removal of truncated samples.

Applied once to the samples of a rollout, in whole groups, before advantages are computed. Shaping terms are also stored
in `Sample.rewards`, without their coefficients: `reward/overlong`, `reward/length`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptrain.algo.advantages import groups_with_rewards
from fsdptrain.algo.correct import is_correct
from fsdptrain.errors import ConfigError
from fsdptrain.types import Sample


@dataclass(frozen=True)
class ShapingRule:
    """Configuration of reward shaping."""

    max_response_len: int  # [tokens]
    overlong_buffer: int  # [tokens]
    coefficients: Mapping[str, float]  # by names in `SHAPES`; enabled terms only
    pass_threshold: float = 1.0  # [reward]

    def apply(self, samples: Sequence[Sample]) -> list[Sample]:
        """Shape the rewards of `samples`, which must contain whole groups. Keeps the order; skips unscored samples."""
        return shape(samples, self)


def shape(samples: Sequence[Sample], rule: ShapingRule) -> list[Sample]:
    """Apply reward shaping to `samples`, which must contain whole groups. Keeps the order; skips unscored samples."""
    shaped = list(samples)
    for indices in groups_with_rewards(samples):
        members = [samples[index] for index in indices]
        rewards = [member.reward or 0.0 for member in members]
        parts = {name: SHAPES[name](members, rule) for name in rule.coefficients}
        for at, (index, member) in enumerate(zip(indices, members, strict=True)):
            own = {name: values[at] for name, values in parts.items()}
            shaped[index] = replace(
                member,
                reward=rewards[at] + sum(rule.coefficients[name] * value for name, value in own.items()),
                rewards={**member.rewards, **_new_parts(own, member)},
            )
    return shaped


def without_truncated(samples: Sequence[Sample]) -> list[Sample]:
    """Remove truncated samples from the loss and its denominators, after advantages are computed.

    Their rewards still count in the group baseline and the batch scale (overlong filtering of DAPO, arXiv 2503.14476;
    TRL's mask_truncated_completions counts the same way).
    """
    return [sample for sample in samples if not sample.truncated]


def overlong(members: Sequence[Sample], rule: ShapingRule) -> list[float]:
    """-min(1, max(0, T - (L_max - B)) / B): 0 up to L_max - B tokens, -1 at L_max (DAPO, arXiv 2503.14476, eq. 13).

    T is the response length, L_max `--rollout-max-response-len`, B `--overlong-buffer`. For an episode, T includes the
    environment's tokens, as L_max does.
    """
    start = rule.max_response_len - rule.overlong_buffer
    extents = [len(member.loss_mask) - _prompt_len(member) for member in members]
    return [-min(1.0, max(0, extent - start) / rule.overlong_buffer) for extent in extents]


def length(members: Sequence[Sample], rule: ShapingRule) -> list[float]:
    """0.5 - (T - T_min) / (T_max - T_min) if correct, capped at 0 if incorrect (Kimi k1.5, arXiv 2501.12599).

    T_min and T_max are those of the group; if they are equal, the term is 0 for all. A response is correct if its
    reward before shaping reaches `--pass-threshold`. Kimi increases the coefficient from 0 during training; here it is
    constant.
    """
    lengths = [sum(member.loss_mask) for member in members]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    middle = [0.5 - (tokens - shortest) / (longest - shortest) for tokens in lengths]
    right = [is_correct(member.reward, rule.pass_threshold) for member in members]
    return [value if passed else min(0.0, value) for value, passed in zip(middle, right, strict=True)]


def _prompt_len(sample: Sample) -> int:
    """Return the number of tokens before the first generated one."""
    return sample.loss_mask.index(True) if True in sample.loss_mask else len(sample.loss_mask)


def _new_parts(parts: Mapping[str, float], member: Sample) -> Mapping[str, float]:
    for name in parts:
        if name in member.rewards:
            raise ConfigError(f"--reward has a component {name!r}, which is the name of a shaping term: rename it")
    return parts


SHAPES: Mapping[str, Callable[[Sequence[Sample], ShapingRule], list[float]]] = {
    "overlong": overlong,
    "length": length,
}
