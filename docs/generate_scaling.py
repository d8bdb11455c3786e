"""Write docs/scaling.md from the planner and tests/data/configs: `python docs/generate_scaling.py`.

Takes some minutes. A test in `make test-matrix` checks that the page is up to date.
"""

# ruff: noqa: E501 - rows of tables are long

import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

import torch  # noqa: E402
from transformers import AutoConfig, PreTrainedModel  # noqa: E402

from benchmarks.scale import Cluster, Estimate, best, best_for_length, flags  # noqa: E402
from fsdptrain.config import Config  # noqa: E402
from fsdptrain.memory.demand import GIB, count  # noqa: E402
from fsdptrain.model.architecture import model_from_config  # noqa: E402
from fsdptrain.model.loading.materialize import quiet_transformers  # noqa: E402
from fsdptrain.tools.plan.plan import Machine, Planner  # noqa: E402

CONFIGS = DOCS.parent / "tests" / "data" / "configs"
GPUS = (8, 64, 256, 1024)
MEMORY = 80  # GiB
PACKS, TOKENS = 1024, 8192  # one pack of so many tokens for each rank of the largest mesh
DETAILED = (("Qwen3-4B", 64), ("gpt-oss-20b", 256), ("a Qwen3-MoE of 235 B", 64))  # rows of the first table
SEQUENCES = 64  # of a step, where each is a pack
LONG_GPUS = (8, 64, 256)
LENGTHS = {"32k": 32 * 1024, "128k": 128 * 1024, "1M": 1024 * 1024}  # tokens
LONG_MODELS = ("Qwen3-4B", "Qwen3-30B-A3B", "a Llama of 70 B")
# name -> folder of a config, and what its larger relative has otherwise
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-4B": ("qwen3-4b", {}),
    "Llama-3.1-8B": ("llama-3.1-8b", {}),
    "a Llama of 70 B": (
        "llama-3.1-8b",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", {}),
    "a Qwen3-MoE of 235 B": (
        "qwen3-30b-a3b",
        {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    ),
}

HEAD = f"""\
# Scaling: estimates

<!-- made by docs/generate_scaling.py: change that file, or benchmarks/scale.py -->

Which mesh suits which model on 8 to 1,024 GPUs, what its ranks send in a training step, and what limits it first.
**Nothing on this page was timed.**

| | computed from | verified by |
|---|---|---|
| bytes of each collective | the parameters, the plans of transformers and the sizes of the mesh (`benchmarks/traffic.py`) | every byte sent by 2 and 4 gloo ranks, on 25 meshes of 8 families (`test_traffic.py`) |
| memory | `fsdptrain plan` | bytes of tensors in a step, on 2 ranks, within 10 % (`test_memory_plan.py`) |
| seconds | these bytes and FLOPs, with data sheet rates: 450 GB/s to a GPU of the same node, 50 GB/s to another node, 40 % of 989 TFLOP/s in bfloat16 | nothing |

Bytes are those that leave a rank in ring collectives: (n - 1) / n of the gathered or reduced size, twice that for an
all-reduce. Experts are assumed to be balanced.

## What is sent

| over | when | how much |
|---|---|---|
| shards | each layer is gathered before its forward and its backward pass, other parameters once; gradients are reduced after each pack | weights x 2 in the compute dtype, gradients in float32: per pack, however few its tokens |
| replicas | after each pack | a shard's gradients, float32 |
| tensor ranks | in every layer: two sums of hidden states in the forward pass, and one per matrix that reads them in the backward pass (five in a Llama) | tokens x width, in the compute dtype |
| expert ranks | in every layer with experts: to the experts and back, in forward and backward | tokens x experts per token x width |
| context ranks | in every attention: queries, keys, values and outputs; in forward, backward, and recomputation | own tokens x heads x head width, including repeated key-value heads |
| context ranks | in every mixer with `--context-parallel-recurrent gather`: hidden states in forward and recomputation, their gradients in backward | all tokens of the group x width |

The cost of shards depends on weights and packs; that of tensor, expert and context ranks on tokens. Larger packs
(`--max-tokens-per-gpu`) reduce only the first. It follows:

- **A model that fits with shards alone needs only shards**, as long as packs are full. On many nodes,
  `--fsdp-replicate-size` with a replica per node or per eight nodes keeps gathers local.
- **Expert parallelism** (`--expert-parallel-size 8`, within a node) helps if gathers take longer than computation, which
  happens first if few of many experts are active: expert weights, most of such a model, are then gathered eight times less
  or not at all. Tokens travel instead, without overlap.
- **Tensor parallelism within a node** (2 to 8) helps if one layer, or the logprobs of a pack, do not fit on one GPU, or if
  a step has fewer packs than GPUs. Its sums are not overlapped. Between nodes it is never worth it.
- **Context parallelism within a node** helps if one sequence does not fit on one GPU: activations and the head are
  split, but each rank still gathers all weights, for 1/N of the tokens. It reduces the number of GPUs on which a sequence
  fits. If there are at least as many packs as ranks, it is never faster than packs of sequences that fit. The first table
  below has none, because its sequences fit.
- **The first limit** is gathering and reduction for packs of few tokens. `least tokens` is the size from which computation
  hides it. Packs that are not full (few long sequences, small steps on many ranks) fall below it early with experts, and
  late without.

## Models and meshes

A step of {PACKS} packs of 8,192 tokens ({PACKS * TOKENS / 1e6:.1f} M tokens), forward and backward, `--gradient-checkpointing`, bfloat16,
GPUs of {MEMORY} GiB in nodes of 8. Each row shows the mesh with the shortest step that fits, of: tensor 1 to 8, experts
over one node or eight, one replica or one per node or per eight nodes. A dash: none fits. Scoring, generation and weight
sync come on top. GB leave one GPU per step.

| model | GPUs | flags | GiB | GB sharding | GB tensor | GB experts | s computing | s sharding | s step | least tokens | limit |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""

DETAILS = """
## Collective by collective

For some of these rows, per GPU and step: calls of each collective, bytes of the whole tensors (gathered, reduced, or passed to
an all-to-all), and bytes that leave the GPU.

| model | GPUs | collective | over | ranks | calls | GB | GB sent |
|---|---|---|---|---|---|---|---|
"""

LONG = f"""
## Long sequences

A step of {SEQUENCES} sequences of the given length (1k: 1,024), each its own pack: `--max-tokens-per-gpu` is the length divided
by `--context-parallel-size`. Otherwise as above. Each row shows the mesh with the shortest step that fits, of: tensor 1 to
8, experts over none or a node, and context 1 to the number of GPUs, as far as the heads allow. `attention` is its share of
the computing seconds, which grows with the square of the length. Whether a model supports such lengths is another question:
most configs here end at 40k or 128k.

- **Memory is the first limit**: models of 4 B, and of 30 B on 64 GPUs or more, leave room for about 128k tokens per GPU (more
  was not tried); 30 B on 8 GPUs and 70 B leave room for 16k to 32k. A million tokens therefore need a context group of 8,
  within a node, or of 32 to 64; more GPUs add groups.
- **Attention is the second**: nearly all of the computation at a million tokens. The exchange of heads takes at most a
  sixtieth of the step, between nodes a fiftieth. A larger group costs gathers of all weights for fewer tokens each.
- With fewer sequences than GPUs, context groups keep the GPUs busy (rows with 256 GPUs).
- The memory plan does not include the buffers of a head exchange (queries, keys, values, the output, and repeated key-value
  heads): 1 to 4 GiB for 128k tokens. Rows within that of {MEMORY} GiB need the next size.

| model | tokens | GPUs | flags | GiB | GB sharding | GB context | GB tensor, experts | s computing | attention | s sharding | s waiting | s step | limit |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""

TAIL = """
For another model, call `best(model, config, Cluster(num_gpus, gpu_memory), num_packs=...)` or `best_for_length(...,
length=..., num_sequences=...)` of `benchmarks/scale.py`, and `fsdptrain plan` for its memory.
"""


@cache
def model_of(name: str) -> PreTrainedModel:
    folder, changes = MODELS[name]
    config = AutoConfig.from_pretrained(CONFIGS / folder)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"), quiet_transformers():
        return model_from_config(config, dtype=torch.float32)


@cache
def planner_of(name: str) -> Planner:
    return Planner(model_of(name), Machine(1, MEMORY * GIB))


@cache
def best_of(name: str, num_gpus: int) -> Estimate | None:
    config = Config(hf_checkpoint=str(CONFIGS / MODELS[name][0]), gradient_checkpointing=True)
    cluster, planner = Cluster(num_gpus, MEMORY * GIB), planner_of(name)
    return best(model_of(name), config, cluster, num_packs=PACKS, planner=planner)


def rows(name: str) -> str:
    size = count(sum(p.numel() for p in model_of(name).parameters()))
    return "".join(_row(f"{name}, {size}", n, best_of(name, n)) for n in GPUS)


def details(name: str, num_gpus: int) -> str:
    mesh = best_of(name, num_gpus)
    assert mesh is not None
    found = ""
    for x in mesh.traffic:
        axis, sizes = x.axis.replace("_", " "), f"{x.size / 1e9:.1f} | {x.sent / 1e9:.1f}"
        found += f"| {name} | {num_gpus} | {x.kind} | {axis} | {x.ranks} | {x.calls} | {sizes} |\n"
    return found


def _row(name: str, num_gpus: int, mesh: Estimate | None) -> str:
    cells = [name, str(num_gpus)]
    if mesh is None:
        return f"| {' | '.join([*cells, *['-'] * 10])} |\n"
    given = " ".join(f"`{flag}`" for flag in flags(mesh.grid)) or "none"
    sent = [mesh.sent("shard", "expert_shard", "replicate"), mesh.sent("tensor"), mesh.sent("expert")]
    sizes = [f"{x / 1e9:.0f}" if x else "" for x in sent]
    times = [f"{x:.1f}" for x in (mesh.compute_s, mesh.hidden_s, mesh.step_s)]
    least = f"{TOKENS * mesh.hidden_s / mesh.busy_s:.0f}"
    return f"| {' | '.join([*cells, given, f'{mesh.memory / GIB:.1f}', *sizes, *times, least, mesh.limit])} |\n"


def long_rows(name: str, tokens: str) -> str:
    config = Config(hf_checkpoint=str(CONFIGS / MODELS[name][0]), gradient_checkpointing=True)
    more = {"length": LENGTHS[tokens], "num_sequences": SEQUENCES, "planner": planner_of(name)}
    found = ((n, best_for_length(model_of(name), config, Cluster(n, MEMORY * GIB), **more)) for n in LONG_GPUS)
    return "".join(_long_row(name, tokens, n, mesh) for n, mesh in found)


def _long_row(name: str, tokens: str, num_gpus: int, mesh: Estimate | None) -> str:
    cells = [name, tokens, str(num_gpus)]
    if mesh is None:
        return f"| {' | '.join([*cells, *['-'] * 11])} |\n"
    given = " ".join(f"`{flag}`" for flag in flags(mesh.grid)) or "none"
    sent = [mesh.sent("shard", "expert_shard"), mesh.sent("context"), mesh.sent("tensor", "expert")]
    sizes = [f"{x / 1e9:.0f}" if x else "" for x in sent]
    share = f"{mesh.attention_s / mesh.compute_s:.0%}"
    waiting = mesh.busy_s - mesh.compute_s
    times = [f"{mesh.compute_s:.1f}", share, *(f"{x:.1f}" for x in (mesh.hidden_s, waiting, mesh.step_s))]
    return f"| {' | '.join([*cells, given, f'{mesh.memory / GIB:.1f}', *sizes, *times, mesh.limit])} |\n"


def scaling_page() -> str:
    long = "".join(long_rows(name, tokens) for name in LONG_MODELS for tokens in LENGTHS)
    short = "".join(map(rows, MODELS)) + DETAILS + "".join(details(*row) for row in DETAILED)
    return HEAD + short + LONG + long + TAIL


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    (DOCS / "scaling.md").write_text(scaling_page(), encoding="utf-8")
