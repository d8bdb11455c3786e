"""A taskset of verifiers with a tool, which verifiers serves over MCP. See test_episodes.py."""
# pyright: reportMissingImports=false

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["WeatherTaskset"]


class Weather(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def report(self, city: str) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"


class WeatherTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Weather(vf.ToolsetConfig())]

    @vf.reward
    async def sunny(self, trace: vf.Trace) -> float:
        return float("sunny" in trace.last_reply)


class WeatherTaskset(vf.Taskset[WeatherTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[WeatherTask]:
        while True:
            yield WeatherTask(vf.TaskData(prompt="Rome Oslo"), self.config.task)


if __name__ == "__main__":
    Weather.run()
