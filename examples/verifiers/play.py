"""Train on a taskset of verifiers 0.4: each episode is one run of this program in the Python that has verifiers.

python -m venv .venv-verifiers && .venv-verifiers/bin/pip install 'verifiers[ta]==0.4.0'
export TASKSET='{"taskset": {"id": "textarena", "game": "Hangman-v0"}}'  # an EnvConfig of verifiers
.venv-verifiers/bin/python examples/verifiers/play.py --rows 1000 > tasks.jsonl
fsdptrain --hf-checkpoint Qwen/Qwen3-4B --prompt-data tasks.jsonl --reward environment \
    --environment-command '.venv-verifiers/bin/python examples/verifiers/play.py'
"""
# pyright: reportMissingImports=false

import asyncio
import json
import os
import sys
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Chat"]


class Chat(vf.Harness[vf.HarnessConfig]):
    """One response in this process. Harnesses of verifiers start a program for each turn; tools need one of those."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any) -> Any:
        system, prompt = self.resolve_prompt(rest[-1])
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        texts = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=[*messages, *texts])
            except BadRequestError as error:
                if "context_length_exceeded" not in str(error):
                    raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def load() -> Any:
    """Load the environment of $TASKSET. Agents without a harness of their own chat in this process."""
    config = vf.resolve_env_config(json.loads(os.environ["TASKSET"]))
    local = {"harness": vf.HarnessConfig(id="play"), "runtime": vf.SubprocessConfig()}
    agents = {name: agent for name, agent in config if isinstance(agent, vf.AgentConfig) and agent.harness is None}
    return vf.load_environment(
        config.model_copy(update={name: agent.model_copy(update=local) for name, agent in agents.items()})
    )


async def play(row: dict[str, Any]) -> float:
    """Play the task of a row against the endpoint of the trainer, and return the mean reward of its traces."""
    environment = load()
    task_class = type(environment.taskset).task_type()
    data = task_class.data_type().model_validate(row["metadata"]["task"])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            task_class(data, environment.config.taskset.task),
            vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client),
        )
    if not episode.ok:
        sys.exit(f"{[*episode.errors, *(trace.last_error for trace in episode.traces)]}")
    return sum(trace.reward for trace in episode.traces) / len(episode.traces)


if __name__ == "__main__" and sys.argv[1:2] == ["--rows"]:
    for task in islice(load().taskset, int(sys.argv[2])):
        print(json.dumps({"prompt": task.data.prompt_text or "play", "task": task.data.model_dump(mode="json")}))
elif __name__ == "__main__":
    print(asyncio.run(play(json.load(sys.stdin))))
