"""Runs in vLLM's environment: what an engine says that has just loaded a checkpoint. Greedy, in float32."""

import json
import sys
from pathlib import Path


def main(folders: dict[str, str], prompts: list[list[int]], target: Path) -> None:
    import vllm

    answers = {}
    for name, folder in folders.items():
        llm = vllm.LLM(
            folder, dtype="float32", max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=50 * 2**20,
            logprobs_mode="processed_logprobs", skip_tokenizer_init=True,
        )  # fmt: skip
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=24, logprobs=0, stop_token_ids=[1], ignore_eos=True, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        answers[name] = [
            [list(out.outputs[0].token_ids), [next(iter(step.values())).logprob for step in out.outputs[0].logprobs]]
            for out in outputs
        ]
        del llm
    target.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
