"""`--environment verifiers`: environments of verifiers 0.4, in a Python that has it. See docs/verifiers_openenv.md."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptrain.agents.harness import AgentError
from fsdptrain.environments.worker import Rows, Worker, check_num_tasks
from fsdptrain.types import Prompt

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Verifiers:
    """An agent that leaves its episodes to a taskset of verifiers, with its tools, users and rewards."""

    def __init__(
        self,
        taskset: str | Mapping[str, Any],
        *,
        python: str = ".venv-verifiers/bin/python",
        num_tasks: int | None = None,
        **env: Any,
    ) -> None:
        """
        taskset: its id, or the values of its config, with an id
        python: of the environment that has verifiers and the taskset
        num_tasks: number of rows; default: all, 1000 of a taskset that does not end
        env: other values of verifiers' EnvConfig, such as `agent`
        """
        check_num_tasks(num_tasks, "verifiers")
        taskset = {"id": taskset} if isinstance(taskset, str) else taskset
        options = {"taskset": taskset, "num_tasks": num_tasks, **env}
        self._worker = Worker("verifiers", "verifiers_episodes.py", python=python, options=options)

    async def __call__(self, client: "AsyncOpenAI", prompt: Prompt) -> Any:
        if "task" not in prompt.metadata:
            raise AgentError("--environment verifiers has its own tasks: use --prompt-data environment")
        return await self._worker.run(prompt, url=str(client.base_url), key=client.api_key)

    def dataset(self) -> Rows:
        return self._worker.rows

    def close(self) -> None:
        self._worker.close()
