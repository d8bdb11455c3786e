"""Environments: what answers the model between its turns."""

from fsdptrain.environments.build import ENVIRONMENTS, LoadedEnvironment, build_environment
from fsdptrain.environments.threads import DeadlineError, StepThreads

__all__ = ["ENVIRONMENTS", "DeadlineError", "LoadedEnvironment", "StepThreads", "build_environment"]
