"""Train on a server of OpenEnv 0.10: each episode is one run of this program in the Python that has openenv.

python -m venv .venv-openenv && .venv-openenv/bin/pip install openenv==0.10.0
.venv-openenv/bin/python -m uvicorn --app-dir examples/openenv guess_number:app --port 8000 &
seq 0 999 | sed 's/.*/{"prompt": "game &", "seed": &}/' > tasks.jsonl
export OPENENV_URL=http://127.0.0.1:8000
fsdptrain --hf-checkpoint Qwen/Qwen3-4B --prompt-data tasks.jsonl --reward environment \
    --environment-command '.venv-openenv/bin/python examples/openenv/play.py'
"""
# pyright: reportMissingImports=false

import asyncio
import json
import os
import sys
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError
from openenv.core import GenericEnvClient

MAX_TURNS = 10
HIDDEN = ("done", "reward", "metadata")  # fields of each action or observation that are not for the model


async def play(row: dict[str, Any], url: str) -> float:
    """Answer observations with actions: JSON objects. Return the sum of the rewards."""
    schema = httpx.get(f"{url}/schema", trust_env=False).raise_for_status().json()["action"]["properties"]
    about = httpx.get(f"{url}/metadata", trust_env=False).raise_for_status().json()
    fields = {name: value for name, value in schema.items() if name not in HIDDEN}
    system = (
        f"{about['description']}\nAnswer each observation with a JSON object with these fields: {json.dumps(fields)}"
    )
    messages: list[Any] = [{"role": "system", "content": system}]
    total = 0.0
    async with AsyncOpenAI(max_retries=0, timeout=None) as model, GenericEnvClient(base_url=url) as environment:
        result = await environment.reset(seed=row["metadata"]["seed"])
        for _ in range(MAX_TURNS):
            seen = {name: value for name, value in result.observation.items() if name not in HIDDEN}
            messages.append({"role": "user", "content": json.dumps(seen)})
            try:
                reply = await model.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
                text = reply.choices[0].message.content or ""
                result = await environment.step(json.loads(text[text.find("{") : text.rfind("}") + 1]))
            except (BadRequestError, ValueError):  # the conversation is too long, or the response is no action
                break
            messages.append({"role": "assistant", "content": text})
            total += float(result.reward or 0)
            if result.done:
                break
    return total


if __name__ == "__main__":
    print(asyncio.run(play(json.load(sys.stdin), os.environ["OPENENV_URL"])))
