"""What the length of a response does to its reward, and which samples the loss sees.

Applied once to the samples of a rollout, whole groups, before advantages are made. What shaping adds stands in
`Sample.rewards` too, without its coefficient: `reward/overlong`, `reward/length`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptrain.algo.advantages import scored_groups
from fsdptrain.algo.correct import is_correct
from fsdptrain.errors import ConfigError
from fsdptrain.types import Sample


@dataclass(frozen=True)
class ShapingRule:
    """How a run shapes."""

    max_response_len: int  # [tokens]
    overlong_buffer: int  # [tokens]
    coefficients: Mapping[str, float]  # of the names in `SHAPES` that are on
    pass_threshold: float = 1.0  # [reward]


def shape(samples: Sequence[Sample], rule: ShapingRule) -> list[Sample]:
    """The same samples, in order, with shaped rewards; whole groups must be here. An unscored sample stays as it is."""
    shaped = list(samples)
    for indices in scored_groups(samples):
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
    """Truncated samples leave the loss and its denominators, as if they had not been sampled.

    Advantages are made before: their rewards stay in the baseline of the group and in the scale of the batch (overlong
    filtering of DAPO, arXiv 2503.14476; TRL's mask_truncated_completions counts in the same way).
    """
    return [sample for sample in samples if not sample.truncated]


def overlong(members: Sequence[Sample], rule: ShapingRule) -> list[float]:
    """-min(1, max(0, T - (L_max - B)) / B): 0 up to L_max - B tokens, -1 at L_max (DAPO, arXiv 2503.14476, eq. 13).

    T is the response's length, L_max `--rollout-max-response-len`, B `--overlong-buffer`. Of an episode T counts the
    environment's tokens too, as L_max does.
    """
    start = rule.max_response_len - rule.overlong_buffer
    extents = [len(member.loss_mask) - _prompt_len(member) for member in members]
    return [-min(1.0, max(0, extent - start) / rule.overlong_buffer) for extent in extents]


def length(members: Sequence[Sample], rule: ShapingRule) -> list[float]:
    """0.5 - (T - T_min) / (T_max - T_min) for a right answer, at most 0 for a wrong one (Kimi k1.5, arXiv 2501.12599).

    T_min and T_max are of the group; 0 for all where they are equal. Right is a reward, before shaping, that reaches
    `--pass-threshold`. Kimi raises the coefficient from 0 in the course of training; here it is constant.
    """
    lengths = [sum(member.loss_mask) for member in members]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    middle = [0.5 - (tokens - shortest) / (longest - shortest) for tokens in lengths]
    right = [is_correct(member.reward, rule.pass_threshold) for member in members]
    return [value if passed else min(0.0, value) for value, passed in zip(middle, right, strict=True)]


def _prompt_len(sample: Sample) -> int:
    """Tokens before the first that the model made."""
    return sample.loss_mask.index(True) if True in sample.loss_mask else len(sample.loss_mask)


def _new_parts(parts: Mapping[str, float], member: Sample) -> Mapping[str, float]:
    for name in parts:
        if name in member.rewards:
            raise ConfigError(f"--reward has a part {name!r}, which is a name of shaping's own: call it something else")
    return parts


SHAPES: Mapping[str, Callable[[Sequence[Sample], ShapingRule], list[float]]] = {
    "overlong": overlong,
    "length": length,
}
