"""Agents for the tests."""

import asyncio
import time
from typing import Any

from openai import BadRequestError

from fsdptrain.types import Prompt


def says(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def two_turns(client, prompt: Prompt) -> dict[str, float]:
    """Two turns, then a summary of them in a new conversation. The reward counts the letters `a`."""
    messages = [{"role": "user", "content": str(prompt.source)}]
    texts = []
    for answer in ("more", "and again"):
        reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=12)
        texts.append(reply.choices[0].message.content)
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": answer}]
    summary = [{"role": "user", "content": f"in short: {len(texts[0])}"}]
    reply = await client.chat.completions.create(model="any", messages=summary, max_tokens=4)
    texts.append(reply.choices[0].message.content)
    return {"a": float("".join(texts).count("a")), "length": 0.01 * len(texts[0])}


async def parallel(client, prompt: Prompt) -> float:
    """Concurrent calls, one with several choices."""
    ask = client.chat.completions.create
    calls = [ask(model="any", messages=[{"role": "user", "content": word}], max_tokens=8) for word in ("b", "c")]
    first, second = await asyncio.gather(*calls)
    both = await ask(model="any", messages=[{"role": "user", "content": "d"}], n=2, max_tokens=8)
    texts = [first.choices[0].message.content, second.choices[0].message.content]
    return float(len("".join([*texts, *(choice.message.content for choice in both.choices)])))


async def unreliable(client, prompt: Prompt) -> float:
    """Hangs, blocks its thread, fails, makes no call, or works, by the prompt."""
    case = int(str(prompt.source))
    if case == 0:
        await asyncio.sleep(600)
    if case == 1:
        time.sleep(600)
    if case == 2:
        return 1.0
    await client.chat.completions.create(model="any", messages=says(str(prompt.source)), max_tokens=8)
    if case == 3:
        raise SystemExit("enough")
    if case == 4:
        return "much"  # type: ignore[return-value]
    return float(case)


async def rude(client, prompt: Prompt) -> float:
    """Calls that the engine cannot take are refused, each alone."""
    for messages in ([], says("a" * 100), [{"role": "robot", "content": "a"}]):
        try:
            await client.chat.completions.create(model="any", messages=messages, max_tokens=4)
        except BadRequestError:
            continue
        raise AssertionError(messages)
    reply = await client.chat.completions.create(model="any", messages=says("a"), max_tokens=4, temperature=0.3)
    return float(len(reply.choices[0].message.content))
