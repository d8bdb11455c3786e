"""Tokens per second of the embedded engine against transformers' `generate`, in paired rounds on one model.

    python benchmarks/rollout.py --json benchmarks/results/rollout.json     # about two minutes on two quiet cores
    python benchmarks/rollout.py --quick                                    # seconds

Both sample at temperature 1 with the same random weights, prompts and number of samples. `generate` uses its fastest
settings: one left-padded batch, no scores, num_return_sequences. The engine also returns logprobs. The sides alternate,
and the median over rounds counts. On a shared machine, tokens per second of CPU time are more stable than of wall time.
Only tokens up to the first stop token count. "equal" has no stop token, so all responses have full length, the best
case for a static batch. "mixed" has eight, for a mean length of about 33.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from record import header, spread, write
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from fsdptrain.platform import local_device
from fsdptrain.rollout.embedded.engine import HFEngine
from fsdptrain.types import Prompt, SamplingParams

SIZES = {
    "0.1M": {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    "4M": {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64},
}
STOP = {"equal": [], "mixed": list(range(1, 9))}


def build(size: str, stop: list[int], vocab_scale: int, seed: int) -> PreTrainedModel:
    """Build a random model in which each group of `vocab_scale` stop ids has a probability of about 1 in 264."""
    torch.manual_seed(seed)
    stop = [token * vocab_scale + i for token in stop for i in range(vocab_scale)]
    shape = SIZES[size]
    config = Qwen3Config(
        **shape,
        intermediate_size=2 * shape["hidden_size"],
        num_key_value_heads=shape["num_attention_heads"] // 2,
        max_position_embeddings=1024,
        eos_token_id=stop or None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def run_engine(engine: HFEngine, prompts: list[Prompt], sampling: SamplingParams) -> int:
    return sum(len(completion.token_ids) for completion in engine.generate(prompts, sampling))


def run_generate(model: PreTrainedModel, prompts: list[Prompt], sampling: SamplingParams) -> int:
    width = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p.token_ids)) + p.token_ids for p in prompts])
    mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts])
    with torch.inference_mode():
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            top_k=0,
            num_return_sequences=sampling.num_samples,
            max_new_tokens=sampling.max_tokens,
        )
    stop = set(model.config.eos_token_id or [])
    responses = output[:, width:].tolist()
    ends = (next((i + 1 for i, t in enumerate(row) if t in stop), sampling.max_tokens) for row in responses)
    return sum(min(end, len(row)) for end, row in zip(ends, responses, strict=True))


def timed(run: Callable[[], int]) -> tuple[float, float]:
    """Return tokens per second of wall time and of the CPU time of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def compare(size: str, case: str, args: argparse.Namespace) -> dict:
    model = build(size, STOP[case], SIZES[size]["vocab_size"] // 256, args.seed)
    device = local_device()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = HFEngine(Path(folder), dtype=torch.float32, device=device)
    engine.update_weights(model.state_dict().items(), 0)
    model.to(device)
    generator = torch.Generator().manual_seed(args.seed + 1)
    lengths = torch.randint(8, 20, (args.prompts,), generator=generator).tolist()
    prompts = [
        Prompt(str(i), torch.randint(200, 256, (n,), generator=generator).tolist(), "") for i, n in enumerate(lengths)
    ]
    sampling = SamplingParams(num_samples=args.samples, max_tokens=args.max_tokens)
    sides = {
        "engine": lambda: run_engine(engine, prompts, sampling),
        "generate": lambda: run_generate(model, prompts, sampling),
    }
    speeds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(args.rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            measured = timed(sides[side])
            if number:  # the first round is a warm-up
                speeds[side].append(measured)
    row: dict = {"model": size, "case": case, "rows": args.prompts * args.samples, "max_tokens": args.max_tokens}
    for side, pairs in speeds.items():
        row[f"{side}_tokens_per_s"] = round(statistics.median(wall for wall, _ in pairs))
        row[f"{side}_tokens_per_cpu_s"] = round(statistics.median(cpu for _, cpu in pairs))
    for i, clock in enumerate(["wall", "cpu"]):
        ratios = [ours[i] / theirs[i] for ours, theirs in zip(speeds["engine"], speeds["generate"], strict=True)]
        row[f"speedup_{clock}"] = spread(ratios)
    return {**row, "runs": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="the smallest model only")
    add("--json", type=Path, help="path of the report")
    add("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    add("--prompts", type=int, default=32)
    add("--samples", type=int, default=8, help="samples per prompt")
    add("--max-tokens", type=int, default=96, help="response length [tokens]")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0)
    args, begin = parser.parse_args(), header()
    if args.quick:
        args.sizes, args.prompts, args.rounds = ["0.1M"], 8, 2
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for size in args.sizes:
        for case in STOP:
            rows.append(compare(size, case, args))
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "runs"}))
    write(args.json, {**begin, "device": str(local_device()), "results": rows})


if __name__ == "__main__":
    main()
