"""Custom advantage estimators, for `--advantage-estimator tests.e2e.advantages:zeros`."""


def zeros(rewards: list[float], lengths: list[int]) -> list[float]:
    return [0.0] * len(rewards)


def below_64_tokens(rewards: list[float], lengths: list[int]) -> list[float]:
    return [float(length < 64) for length in lengths]
