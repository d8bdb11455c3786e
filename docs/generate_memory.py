"""Write docs/memory.md from the planner and tests/data/configs: `python docs/generate_memory.py`.

Takes some minutes. A test in `make test-matrix` checks that the page is up to date.
"""

# ruff: noqa: E501 - rows of tables are long

import logging
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from fsdptrain.config import Config  # noqa: E402
from fsdptrain.memory.demand import GIB, count  # noqa: E402
from fsdptrain.tools.inspect.inspection import meta_model  # noqa: E402
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
    "all state on the host, full": "--fsdp-cpu-offload --gradient-checkpointing",
}
MEASURED = """\
Peak bytes of tensors in a step of two packs of 2048 tokens (Qwen3 with 8 layers of width 128, float32, one CPU rank,
`measured` in `test_memory_plan.py`): 203.3 MiB without checkpointing, 125.9 selective, 121.0 with every second layer,
59.2 full.
"""

HEAD = f"""\
# Memory

<!-- made by docs/generate_memory.py: change that file, or fsdptrain/tools/plan -->

    fsdptrain plan --hf-checkpoint Qwen/Qwen3-4B --num-gpus 8 --gpu-memory-gib 80

This computes from config.json alone the memory that each GPU and each host needs, and suggests flags if that is too much. It
accepts every option of a run and prints the planned command line. The exit code is 1 if the run does not fit; `--json` prints
JSON.

## What to do if a run does not fit, fastest first

| flags | saves on the device | cost |
|---|---|---|
| `--offload-optimizer` | Adam's state, 8 bytes per element of a shard | it crosses the bus twice per step |
| `--activation-memory-budget 0.5`, with `--compile` | a part of the activations | recomputes cheap operations, then matrix products |
| `--gradient-checkpointing --gradient-checkpointing-kind selective` | activations, except results of matrix products and attention | recomputes cheap operations |
| `--gradient-checkpointing --gradient-checkpointing-every 2` | activations of every second layer | half a forward pass |
| `--gradient-checkpointing` | all activations except layer inputs | a forward pass, about a third of a step |
| `--offload-activations` in addition | layer inputs too | copies, overlapped with computation |
| `--fsdp-cpu-offload` | weights, gradients, Adam's state | weights are copied twice per pack, gradients are copied and added on the host, the optimizer runs there |

- These flags combine, except selective checkpointing with `--offload-activations` or `--compile`. Gradients, weights and
  checkpoints stay bitwise the same. Tests cover several packs, clipping, replicas, experts with replayed routes,
  adapters, float16, and resuming from a checkpoint of another kind.
- `--offload-optimizer-step host` copies gradients and weights to the host and runs the optimizer there; `device` streams the
  state through the device, 64 MiB of weights at a time.
- On the host, `--ref-dtype bfloat16` halves the reference: 2 bytes per element of a shard instead of 4. While the reference
  computes, the policy takes the place of its gradients on the device. With `--fsdp-cpu-offload` it would stay on the host,
  so the two options cannot be combined.
- `--offload-activations` without checkpointing copies everything that layers save; a bus is rarely fast enough.
- Host memory for copies is pinned, and torch allocates it in powers of two: up to twice the planned size.
- `--fsdp-cpu-offload` with several packs per step is faster if the gradients of one pack and their sum (pinned) take at most
  half of the free host memory; otherwise the host waits for each tensor. This is decided at start, and not part of the plan.
- With `--compile`, layers keep less, and `--activation-memory-budget` replaces checkpointing: see
  [compile.md](compile.md#memory-budget). Operations are fused: while a layer runs it needs less than planned.

{MEASURED}
## How the plan is computed

- **Weights, gradients, Adam**: 16 bytes per element of the rank's shard, in float32, from the real shapes; 8 with
  `--offload-optimizer`, 0 with `--fsdp-cpu-offload`.
- **Activations and logprobs**: one layer of each kind, the head and the loss run forward and backward on tensors without data,
  with `--max-tokens-per-gpu` tokens. Everything that the model's code, the attention and checkpointing save is counted; no
  formula of an architecture is used. Attention runs segment by segment; a kernel for the whole pack saves one output less
  per layer. With `--offload-activations` they count on the host, and two layers at a time on the device.
- **Gathered layers**: the current layer, the next one, and the root group (embedding, last norm, head). Before gradients are
  reduced: one layer in the compute dtype and two in float32.
- **Generation**: the embedded engine's weights in addition to the trainer's weights and moments, and the cache of all rows
  that a rank may generate at once, at full length.
- The peak counts, with a margin of 5 % for fragmentation and workspaces. Not counted: the CUDA context and reclaimable file
  pages.

The layout is assumed, because no probe runs: padded if a recurrent mixer lacks its packages on this machine, else packed.
Models whose experts run one by one cannot be planned and are rejected.

`test_memory_plan.py` compares the plan with the bytes of tensors on two CPU ranks, for 16 small models (dense, experts, sinks,
recurrent, MLA) with all kinds of checkpointing, offload, resharding, prefetch, half precision, split layers and experts,
and an adapter: within 10 % of the mean over ranks, without the copies of gloo. The bound does not hold for packs of few tokens,
where gradient buffers dominate. The plan was not compared with a GPU yet; a run logs `perf/planned_memory_gib`, without the
margin, and `perf/peak_memory_gib`.

## Public models on {GPUS} GPUs of {MEMORY} GiB

Defaults of a run: bfloat16, packs of 8192 tokens, responses of 2048, 32 prompts with 8 samples each. GiB per GPU, margin
included. A dash: not supported by the model's code. `selective` and `full` are kinds of checkpointing; `generation` is
the embedded engine; `fastest way` is the first suggestion of the planner.

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
