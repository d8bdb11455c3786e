"""What is a right answer: one rule for evaluations, the curriculum and the length penalty."""

_TOLERANCE = 1e-6  # weighted sums of rewards reach 1.0 but for rounding


def is_correct(reward: float | None, threshold: float = 1.0) -> bool:
    """Whether a response passes: its reward reaches `threshold` (--pass-threshold), but for rounding."""
    return reward is not None and reward >= threshold - _TOLERANCE
