"""Episodes of a verifiers environment, with the Python that has verifiers 0.4. Started by environments/verifiers.py."""
# pyright: reportMissingImports=false

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from episode_server import Rows, RunEpisode, main

_NO_KEY = "FSDPTRAIN_NO_KEY"  # no variable has this name: the key of an episode is in a header of its own
_KEY_HEADER = "X-Episode-Key"
_ENDLESS = 1000  # tasks of a taskset that does not end


@asynccontextmanager
async def open_environment(options: dict[str, Any]) -> AsyncIterator[tuple[Rows, RunEpisode]]:
    """options: those of verifiers' EnvConfig, and num_tasks"""
    import verifiers.v1 as vf

    num_tasks = options.pop("num_tasks")
    environment = vf.load_environment(_local(vf.resolve_env_config(options)))
    taskset = environment.taskset
    if num_tasks is not None or not taskset.bounded:
        num_tasks = num_tasks or _ENDLESS
    rows = [_row(task.data) for task in itertools.islice(taskset, num_tasks)]
    task_class = type(taskset).task_type()
    clients = _client_per_session()

    async def run(request: dict[str, Any]) -> dict[str, float]:
        data = task_class.data_type().model_validate(request["metadata"]["task"])
        headers = {_KEY_HEADER: request["key"]}
        client = vf.EvalClientConfig(base_url=request["url"], api_key_var=_NO_KEY, headers=headers)
        context = vf.ModelContext(model=request["model"], client=client)
        task = task_class(data, environment.config.taskset.task)
        try:
            return _reward(await environment.run_episode(task, context))
        finally:
            for opened in clients.pop(request["key"], ()):
                await opened.close()

    async with environment.serving():
        yield rows, run


def _client_per_session() -> dict[str, list[Any]]:
    """Return the clients that are open, by the key of their episode.

    verifiers keeps a client for each distinct config until its end, and each episode has its own key. [verifiers 0.4]
    """
    from verifiers.v1.clients import resolve_client
    from verifiers.v1.interception.server import InterceptionServer

    clients: dict[str, list[Any]] = {}
    shared = InterceptionServer._client

    def client(self: Any, config: Any) -> Any:
        key = config.headers.get(_KEY_HEADER)
        if key is None:  # of a judge, for example
            return shared(self, config)
        opened = resolve_client(config)
        clients.setdefault(key, []).append(opened)
        return opened

    InterceptionServer._client = client
    return clients


def _local(config: Any) -> Any:
    """Run agents on this machine, by default without access to it: verifiers' own defaults need an account.

    Raises ValueError if a program that runs commands would get this machine without being given it.
    """
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import harness_class

    agents: dict[str, Any] = {}
    has_harness = vf.default_harness_id(config.taskset.id) != "bash"
    for name, agent in config:
        if isinstance(agent, vf.AgentConfig):
            changes: dict[str, Any] = {}
            if agent.harness is None and not has_harness:
                changes["harness"] = vf.HarnessConfig(id="fsdptrain_chat")
            if "runtime" not in agent.model_fields_set:
                harness = changes.get("harness", agent.harness)
                harness_id = harness.id if harness is not None else vf.default_harness_id(config.taskset.id)
                if harness_class(harness_id).EXECUTES_CODE:
                    raise ValueError(
                        f"the harness {harness_id} of {name} runs commands: set {name}.runtime.type, to docker or, to "
                        "let it run them as your user, to subprocess"
                    )
                changes["runtime"] = vf.SubprocessConfig()
            agents[name] = agent.model_copy(update=changes)
    return config.model_copy(update=agents)


def _row(data: Any) -> dict[str, Any]:
    prompt: Any = data.prompt_text or data.name or f"task {data.idx}"
    if data.system_prompt:
        prompt = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": prompt}]
    return {"prompt": prompt, "label": "", "metadata": {"task": data.model_dump(mode="json")}}


def _reward(episode: Any) -> dict[str, float]:
    """Return the mean reward of the episode's traces, with its parts and metrics. Raises RuntimeError if it failed."""
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.last_error)]
    if not episode.ok:
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "verifiers reports no reward")
    traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    parts: dict[str, list[float]] = {}
    for trace in traces:
        scores = {**trace.metrics, **{name: reward and reward.value for name, reward in trace.rewards.items()}}
        for name, score in scores.items():
            if score is not None:
                parts.setdefault(name, []).append(score)
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    return {**means, "reward": sum(trace.reward for trace in traces) / len(traces)}


if __name__ == "__main__":
    main(open_environment)
