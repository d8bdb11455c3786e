"""Writes docs/memory.md from the planner and tests/data/configs: `python docs/generate_memory.py`.

Takes some minutes. A test holds the words of the page, and the rows of two models, to what this makes.
"""

import logging
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from fsdptrain.config import Config  # noqa: E402
from fsdptrain.memory.demand import GIB  # noqa: E402
from fsdptrain.tools.inspect.inspection import meta_model  # noqa: E402
from fsdptrain.tools.inspect.text import count  # noqa: E402
from fsdptrain.tools.plan.plan import Machine, Plan, make_plan, with_margin  # noqa: E402

CONFIGS = DOCS.parent / "tests" / "data" / "configs"
GPUS, MEMORY = 8, 80  # GiB

COLUMNS = {
    "training": "as given",
    "optimizer on the host": "--offload-optimizer",
    "selective": "--gradient-checkpointing --gradient-checkpointing-kind selective",
    "full": "--gradient-checkpointing",
    "full, inputs on the host": "--gradient-checkpointing --offload-activations",
    "all state on the host": "--fsdp-cpu-offload",
    "that and full": "--fsdp-cpu-offload --gradient-checkpointing",
}
MEASURED = """\
Measured, most bytes that tensors held in a step of two packs of 2048 tokens (Qwen3 of 8 layers and width 128, float32,
one CPU rank, by `measured` of tests/distributed/test_memory_plan.py): 203.3 MiB with no checkpointing, 125.9 selective,
121.0 with each second layer, 59.2 full.
"""

HEAD = f"""\
# Memory

<!-- made by docs/generate_memory.py: change that file, or fsdptrain/planning -->

    fsdptrain plan --hf-checkpoint Qwen/Qwen3-4B --num-gpus 8 --gpu-memory-gib 80

says from config.json alone what each GPU and each host will hold, and, where that is too much, which flags make it fit.
It takes every option of a run and prints the command line that it planned. It ends with exit code 1 where that does not
fit, and with `--json` speaks to programs.

## How it knows

- **Weights, gradients, Adam**: 16 bytes for each number of the rank's shard, in float32, counted on the real shapes;
  8 with `--offload-optimizer`, none with `--fsdp-cpu-offload`.
- **Activations and logprobs**: one layer of each kind, the head and the loss go through a forward and a backward pass
  on tensors without data, as long as --max-tokens-per-gpu; whatever the model's own code, our attention and
  checkpointing keep is counted. No formula of an architecture is used. Attention runs segment by segment there; a
  kernel for the whole pack holds one output less in each layer. What `--offload-activations` moves is counted on the
  host; the device still holds it for two layers at a time, the one that computes and the one on its way.
- **Gathered layers**: the one that computes, the next one, and the root group (embedding, last norm, head); before
  gradients are reduced, a layer's in the compute dtype and two layers' in float32.
- **Generation**: the embedded engine's weights beside the trainer's weights and moments, and the cache of as many rows
  of full length as one rank may have at one time. Measured the same way, on a row without data.
- The fullest moment counts, with a margin of 5 % for fragmentation and workspaces. Not counted: the CUDA
  context, which is there before any tensor, and pages of files that the system gives back.

Without a probe the layout is a guess: padded where a recurrent mixer lacks its packages on this machine, else packed.
A model whose experts run one by one asks for values and cannot be planned; it says so.

A test holds the plan against what tensors hold on two CPU ranks, for 13 small shapes (dense, experts, sinks, recurrent,
MLA; with and without checkpointing of all kinds, offload, resharding, prefetch, half precision, split layers and
experts, an adapter): within 10 % of the mean of the ranks. Copies that gloo makes for itself are not counted. Not held
to that: few tokens, where buffers of gradients and not activations make the peak. The plan has not been held against a
GPU yet; there a run logs `perf/planned_memory_gib`, without the margin, beside
`perf/peak_memory_gib`.

## What a run can do about it, fastest first

| flags | less on the device | what it costs |
|---|---|---|
| `--offload-optimizer` | Adam's state, 8 bytes for each number of a shard | it crosses the bus twice a step |
| `--gradient-checkpointing --gradient-checkpointing-kind selective` | all but dear activations | cheap ones again |
| `--gradient-checkpointing --gradient-checkpointing-every 2` | activations of each second layer | half a forward pass |
| `--gradient-checkpointing` | all activations but inputs of layers | a forward pass, about a third of a step |
| `--offload-activations`, beside it | inputs of layers too | copies beside the computation |
| `--fsdp-cpu-offload` | weights, gradients, Adam's state | weights cross twice in each pack, steps on the host |

Dear are the results of matrix products and of attention. All of this combines, and no bit of gradients, weights or
checkpoints depends on it: a test compares each kind with a run without, with several packs, clipping, replicas, experts
with replayed routes, adapters, float16, and a resume from the checkpoint of another kind. Selective checkpointing keeps
what it keeps on the device, so it does not go with `--offload-activations`; nor does it see into what `--compile`
fuses.

`--offload-optimizer-step host` brings gradients and weights to the host and makes the step there; `device` streams the
state through the device, 64 MiB of weights at a time. `--offload-activations` without checkpointing moves all that
layers keep; a bus is seldom fast enough for that. Host memory for copies is pinned, and torch hands that out in powers
of two: up to twice what is planned. With `--compile` a run needs less than planned: fused operations keep less.

{MEASURED}
## Public models on {GPUS} GPUs of {MEMORY} GiB

All defaults of a run: bfloat16, packs of 8192 tokens, responses of 2048, 32 prompts with 8 samples each. GiB on each
GPU, margin included. A dash: the model's own code does not allow it. `generation` is the embedded engine; `fastest way`
is the first proposal of the planner.

| model | parameters | layout | {" | ".join(COLUMNS)} | generation | fastest way |
|---|---|---|{"---|" * len(COLUMNS)}---|---|
"""


def row(name: str) -> str:
    config = Config(hf_checkpoint=str(CONFIGS / name))
    model, _ = meta_model(config)
    return _row(name, make_plan(model, config, Machine(GPUS, MEMORY * GIB)))


def _row(name: str, plan: Plan) -> str:
    assert plan.generation is not None
    found = [plan.choices.get(flags) for flags in COLUMNS.values()]
    sizes = ["-" if size is None else f"{size / GIB:.1f}" for size in found]
    generation = f"{with_margin(plan.generation) / GIB:.1f}"
    cells = [name, count(plan.counts.total), plan.layout, *sizes, generation, _way(plan)]
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
