"""Writes docs/memory.md from the planner and tests/data/configs: `python docs/generate_memory.py`.

Takes some minutes. A test holds the words of the page, and the rows of two models, to what this makes.
"""

import logging
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from fsdptrain.config import Config  # noqa: E402
from fsdptrain.planning.inspection import meta_model  # noqa: E402
from fsdptrain.planning.inspection_text import count  # noqa: E402
from fsdptrain.planning.memory import GIB  # noqa: E402
from fsdptrain.planning.plan import Machine, Plan, make_plan, with_margin  # noqa: E402

CONFIGS = DOCS.parent / "tests" / "data" / "configs"
GPUS, MEMORY = 8, 80  # GiB

HEAD = f"""\
# Memory

<!-- made by docs/generate_memory.py: change that file, or fsdptrain/planning -->

    fsdptrain plan --hf-checkpoint Qwen/Qwen3-4B --num-gpus 8 --gpu-memory-gib 80

says from config.json alone what each GPU and each host will hold, and, where that is too much, which flags make it fit.
It takes every option of a run and prints the command line that it planned. It ends with exit code 1 where that does not
fit, and with `--json` speaks to programs.

## How it knows

- **Weights, gradients, Adam**: 16 bytes for each number of the rank's shard, in float32, counted on the real shapes.
- **Activations and logprobs**: one layer of each kind, the head and the loss go through a forward and a backward pass
  on tensors without data, as long as --max-tokens-per-gpu; whatever the model's own code, our attention and
  checkpointing keep is counted. No formula of an architecture is used. Attention runs segment by segment there; a
  kernel for the whole pack holds one output less in each layer.
- **Gathered layers**: the one that computes, the next one, and the root group (embedding, last norm, head); before
  gradients are reduced, a layer's in the compute dtype and two layers' in float32.
- **Generation**: the embedded engine's weights beside the trainer's weights and moments, and the cache of as many rows
  of full length as one rank may have at one time. Measured the same way, on a row without data.
- The fullest moment counts, with a margin of 5 % for fragmentation and workspaces. Not counted: the CUDA
  context, which is there before any tensor, and pages of files that the system gives back.

Without a probe the layout is a guess: padded where a recurrent mixer lacks its packages on this machine, else packed.
A model whose experts run one by one asks for values and cannot be planned; it says so.

A test holds the plan against the allocator on two CPU ranks, for six small shapes (dense, experts, sinks, recurrent,
MLA; with and without checkpointing, resharding, prefetch, half precision): within 10 % of the mean of the ranks. Not
held to that: few tokens, where buffers of gradients and not activations make the peak. There the measured one changes
from run to run with gloo (a large tied vocabulary: 40.8 or 48.8 MiB, planned 48.7). The plan has not been held against
a GPU yet; there a run logs `perf/planned_memory_gib`, without the margin, beside `perf/peak_memory_gib`.

## Public models on {GPUS} GPUs of {MEMORY} GiB

All defaults of a run: bfloat16, packs of 8192 tokens, responses of 2048, 32 prompts with 8 samples each. GiB on each
GPU, margin included. `generation` is the embedded engine; `fastest way` is the first proposal of the planner.

| model | parameters | layout | training | with checkpointing | with offload | with both | generation | fastest way |
|---|---|---|---|---|---|---|---|---|
"""


def row(name: str) -> str:
    config = Config(hf_checkpoint=str(CONFIGS / name))
    model, _ = meta_model(config)
    return _row(name, make_plan(model, config, Machine(GPUS, MEMORY * GIB)))


def _row(name: str, plan: Plan) -> str:
    assert plan.generation is not None
    training, offload, checkpointing, both = (
        f"{plan.choices[flags] / GIB:.1f}"
        for flags in (
            "as given",
            "--fsdp-cpu-offload",
            "--gradient-checkpointing",
            "--gradient-checkpointing --fsdp-cpu-offload",
        )
    )
    generation = f"{with_margin(plan.generation) / GIB:.1f}"
    cells = [
        name,
        count(plan.counts.total),
        plan.layout,
        training,
        checkpointing,
        offload,
        both,
        generation,
        _way(plan),
    ]
    return f"| {' | '.join(cells)} |\n"


def _way(plan: Plan) -> str:
    if plan.fits:
        return "fits as it is"
    if not plan.proposals:
        return "none"
    first = plan.proposals[0]
    flags = f"`{' '.join(first.flags)}`" if first.flags else f"{first.num_gpus} GPUs"
    return f"{flags}: {first.device / GIB:.1f}"


def memory_page() -> str:
    return HEAD + "".join(row(path.parent.name) for path in sorted(CONFIGS.glob("*/config.json")))


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    (DOCS / "memory.md").write_text(memory_page(), encoding="utf-8")
