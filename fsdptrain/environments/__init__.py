"""Environments: what answers the model between its turns."""

from fsdptrain.environments.build import ENVIRONMENTS, LoadedEnvironment, build_environment
from fsdptrain.environments.threads import StepThreads

__all__ = ["ENVIRONMENTS", "LoadedEnvironment", "StepThreads", "build_environment"]
