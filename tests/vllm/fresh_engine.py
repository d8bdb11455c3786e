"""Greedy answers of an engine that has just started: a program for vLLM's environment, and how tests run it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_TOKENS = 24
Answers = list[list[Any]]  # of each prompt [tokens, logprobs]


@dataclass(frozen=True)
class Start:
    """What an engine is started with."""

    model: str
    dtype: str = "float32"


def fresh_answers(python: Path | str, starts: Mapping[str, Start], prompts: list[list[int]]) -> dict[str, Answers]:
    """Of an engine for each of `starts`, one after the other, in a process of their own."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_WAIT_POLICY": "PASSIVE"}
    work = json.dumps([{name: asdict(start) for name, start in starts.items()}, prompts])
    command = [str(python), __file__]
    done = subprocess.run(command, env=environment, input=work, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(starts: dict[str, dict[str, Any]], prompts: list[list[int]]) -> dict[str, Answers]:
    import torch
    import vllm

    if torch.cpu._is_amx_tile_supported():  # as our workers do: `cpu_quirks.request_amx`
        torch.cpu._init_amx()
    answers = {}
    for name, start in starts.items():
        llm = vllm.LLM(
            **start, max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=50 * 2**20,
            enable_chunked_prefill=False, logprobs_mode="processed_logprobs", skip_tokenizer_init=True,
        )  # fmt: skip
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0, stop_token_ids=[1], ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        answers[name] = [
            [list(out.outputs[0].token_ids), [next(iter(step.values())).logprob for step in out.outputs[0].logprobs]]
            for out in outputs
        ]
        del llm
    return answers


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(*json.load(sys.stdin))))
