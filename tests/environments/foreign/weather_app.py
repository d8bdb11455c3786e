"""An OpenEnv server whose actions are calls of an MCP tool. See test_episodes.py."""
# pyright: reportMissingImports=false

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Weather(MCPEnvironment):
    """Report the weather."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("weather")

        @server.tool
        def report(city: str) -> str:
            """Return the weather of a city."""
            return f"sunny in {city}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"seed": seed})

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward = float(isinstance(action, CallToolAction))
        return observation

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise TypeError(f"{action!r} is no call of a tool")

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(Weather, CallToolAction, CallToolObservation, max_concurrent_envs=4)
