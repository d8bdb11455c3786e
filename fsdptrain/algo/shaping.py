"""Length-based reward shaping and removal of truncated samples.

Applied once to the samples of a rollout, before advantages are computed. The shaping term is also stored in
`Sample.rewards`, without its coefficient: `reward/overlong`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdptrain.errors import ConfigError
from fsdptrain.types import Sample


@dataclass(frozen=True)
class ShapingRule:
    """Configuration of reward shaping."""

    max_response_len: int  # [tokens]
    overlong_buffer: int  # [tokens]
    overlong_penalty: float  # coefficient

    def apply(self, samples: Sequence[Sample]) -> list[Sample]:
        """Shape the rewards of `samples`. Keeps the order; skips unscored samples."""
        return [self._shaped(sample) for sample in samples]

    def _shaped(self, sample: Sample) -> Sample:
        if sample.reward is None:
            return sample
        if "overlong" in sample.rewards:
            raise ConfigError("--reward has a component 'overlong', which is the name of a shaping term: rename it")
        value = overlong(sample, self)
        reward = sample.reward + self.overlong_penalty * value
        return replace(sample, reward=reward, rewards={**sample.rewards, "overlong": value})


def without_truncated(samples: Sequence[Sample]) -> list[Sample]:
    """Remove truncated samples from the loss and its denominators, after advantages are computed.

    Their rewards still count in the group baseline and the batch scale (overlong filtering of DAPO, arXiv 2503.14476;
    TRL's mask_truncated_completions counts the same way).
    """
    return [sample for sample in samples if not sample.truncated]


def overlong(sample: Sample, rule: ShapingRule) -> float:
    """-min(1, max(0, T - (L_max - B)) / B): 0 up to L_max - B tokens, -1 at L_max (DAPO, arXiv 2503.14476, eq. 13).

    T is the response length, L_max `--rollout-max-response-len`, B `--overlong-buffer`. For an episode, T includes the
    environment's tokens, as L_max does.
    """
    start = rule.max_response_len - rule.overlong_buffer
    mask = sample.loss_mask
    extent = len(mask) - (mask.index(True) if True in mask else len(mask))
    return -min(1.0, max(0, extent - start) / rule.overlong_buffer)
