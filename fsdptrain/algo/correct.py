"""Definition of a correct response."""

_TOLERANCE = 1e-6  # weighted sums of rewards reach 1.0 only up to rounding


def is_correct(reward: float | None, threshold: float = 1.0) -> bool:
    """Return whether `reward` reaches `threshold` (--pass-threshold), up to rounding."""
    return reward is not None and reward >= threshold - _TOLERANCE
