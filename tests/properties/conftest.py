"""Hypothesis without deadlines, which fail on a busy machine, and with the same examples in each run."""

from hypothesis import settings

settings.register_profile("fsdptrain", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fsdptrain")
