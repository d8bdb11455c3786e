"""`--environment openenv`: servers of OpenEnv, with a client in a Python that has it. See docs/verifiers_openenv.md."""

from typing import TYPE_CHECKING, Any

from fsdptrain.agents.harness import AgentError
from fsdptrain.environments.worker import Rows, Worker, check_num_tasks
from fsdptrain.errors import ConfigError
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class OpenEnv:
    """An agent that answers observations of an OpenEnv server with actions. Its reward is the sum over the steps."""

    def __init__(
        self,
        *,
        url: str = "",
        app: str = "",
        python: str = ".venv-openenv/bin/python",
        split: str = "",
        num_tasks: int | None = None,
        instruction: str = "",
        max_turns: int = 16,
        max_tokens: int | None = None,
    ) -> None:
        """
        url: of a server that runs already
        app: `package.module:app`, to start a server on loopback instead
        python: of the environment that has openenv, and the app
        split: of the tasks of the environment; default: episodes differ by their seed
        num_tasks: number of rows; default: all tasks of the split, or 1000 seeds
        instruction: system message; default: the description of the environment and the schema of its actions
        max_turns: actions per episode
        max_tokens: of an action; default: what remains of the episode
        """
        check_num_tasks(num_tasks, "openenv")
        if bool(url) == bool(app):
            raise ConfigError("--environment openenv: set url or app in --environment-kwargs")
        options = {"url": url, "app": app, "split": split, "num_tasks": num_tasks}
        options |= {"instruction": instruction, "max_turns": max_turns, "max_tokens": max_tokens}
        self._worker = Worker("openenv", "openenv_episodes.py", python=python, options=options)

    async def __call__(self, client: "AsyncOpenAI", prompt: Prompt) -> Any:
        if "reset" not in prompt.metadata:
            raise AgentError("--environment openenv has its own tasks: use --prompt-data environment")
        return await self._worker.run(prompt, url=str(client.base_url), key=client.api_key)

    def dataset(self) -> Rows:
        return self._worker.rows

    def close(self) -> None:
        self._worker.close()
