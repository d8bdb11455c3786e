"""Custom advantage estimators, for `--advantage-estimator tests.e2e.advantages:below_the_best`."""


def below_the_best(rewards: list[float], lengths: list[int]) -> list[float]:
    return [reward - max(rewards) for reward in rewards]


def too_few(rewards: list[float], lengths: list[int]) -> list[float]:
    return rewards[1:]


def zeros(rewards: list[float], lengths: list[int]) -> list[float]:
    return [0.0] * len(rewards)


def below_64_tokens(rewards: list[float], lengths: list[int]) -> list[float]:
    return [float(length < 64) for length in lengths]
