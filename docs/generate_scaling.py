"""Writes docs/scaling.md from the planner and tests/data/configs: `python docs/generate_scaling.py`.

Takes some minutes. A test holds the words of the page, and some of its rows, to what this makes.
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
from benchmarks.scale import Cluster, Estimate, best, best_for_length, flags  # noqa: E402
from transformers import AutoConfig, PreTrainedModel  # noqa: E402

from fsdptrain.config import Config  # noqa: E402
from fsdptrain.memory.demand import GIB  # noqa: E402
from fsdptrain.model.architecture import model_from_config  # noqa: E402
from fsdptrain.model.loading.materialize import quiet_transformers  # noqa: E402
from fsdptrain.tools.inspect.text import count  # noqa: E402
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
# Scaling, on paper

<!-- made by docs/generate_scaling.py: change that file, or fsdptrain/planning -->

Which mesh for which model on 8 to 1,024 GPUs, what its ranks send each other in a training step, and what limits first.
**Nothing on this page was timed.** What is exact and what is a guess:

| | from | held to |
|---|---|---|
| bytes of each collective | the parameters, the plans of transformers and the sizes of the mesh (`fsdptrain/planning/traffic.py`) | every byte that 2 and 4 gloo ranks send, on 25 meshes of 8 families (`tests/distributed/test_traffic.py`) |
| memory | the plan of `fsdptrain plan` | what tensors hold in a step, on 2 ranks, within 10 % (`tests/distributed/test_memory_plan.py`) |
| seconds | those bytes and FLOPs, over the rates of data sheets: 450 GB/s to a GPU of the same node, 50 GB/s to another node, 989 TFLOP/s in bfloat16, of which 40 % are reached | nothing |

Bytes are those that leave a rank where collectives go round in rings: (n - 1) / n of what is gathered or reduced, twice
that for an all-reduce. Experts are taken to be balanced.

## What is sent

| over | when | how much |
|---|---|---|
| shards | a layer is gathered before its forward and its backward pass, all else once; after each pack gradients are reduced | weights x 2 in the compute dtype, gradients in float32: for each pack, however few its tokens |
| replicas | after each pack | a shard's gradients, float32 |
| tensor ranks | in every layer: two sums of hidden states forward, and one for each matrix that reads them backward (five in a Llama) | tokens x width, in the compute dtype |
| expert ranks | in every layer with experts: to the experts and back, forward and backward | tokens x experts of a token x width |
| context ranks | in every attention: queries, keys and values to the ranks of their heads, and what it made back; forward and backward, and for a layer that is recomputed once more | own tokens x heads x width of a head, with the key-value heads as often as they are repeated |
| context ranks | in every mixer that `--context-parallel-recurrent gather` gathers around: hidden states forward, their gradients backward, and for a layer that is recomputed once more | tokens of all of them x width |

So shards cost by weights and packs, tensor, expert and context ranks by tokens. Larger packs (`--max-tokens-per-gpu`) make the
first cheaper and change nothing of the others. From this:

- **A model that fits with shards alone needs no more than shards**, as long as packs are full. `--fsdp-replicate-size`
  with a replica for each node or eight keeps gathers near where there are many nodes.
- **Experts over ranks** (`--expert-parallel-size 8`, within a node) where gathers take longer than computation, which
  happens first where few of many experts compute: their weights, the most of such a model, are then not gathered, or
  eight times less. Tokens travel instead, and are waited for.
- **Tensor parallel within a node** (2 to 8) where one layer, or the logprobs of a pack, are too much for one GPU, and
  where there are more GPUs than packs in a step. Its sums are waited for. Between nodes it is never worth it.
- **Context parallel within a node** where one sequence, not the model, is too much for a GPU: activations and the head's
  work are shared, and each rank still gathers all weights, for a Nth of the tokens. So it makes the fewest GPUs on which
  a sequence fits, and, where packs are no fewer than ranks, never a step shorter than packs of sequences that fit would
  be. The first table below has none, for its sequences fit; the second is about nothing else.
- **What limits first** is gathering and reducing for packs of few tokens: the column `least tokens` says how many a pack
  must have so that computation hides it. Packs that are not filled (few long sequences, a small step on many ranks)
  come below that soon with experts, and late without.

## Models and meshes

A step of {PACKS} packs of 8,192 tokens ({PACKS * TOKENS / 1e6:.1f} M tokens), forward and backward, `--gradient-checkpointing`, bfloat16,
GPUs of {MEMORY} GiB in nodes of 8. Of the meshes that one would try (tensor 1 to 8, experts over a node or eight, one
replica or one for each node or eight) the row has the one with the shortest step that fits; a dash: none does. Scoring,
generation and the hand-over of weights come on top. GB are those that leave one GPU in the step.

| model | GPUs | flags | GiB | GB sharding | GB tensor | GB experts | s computing | s sharding | s step | least tokens | limit |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""

DETAILS = """
## Collective by collective

Of some of these rows, of one GPU in the step: how often each collective is called, the bytes of the whole tensors (what is
gathered, reduced, or handed to an all-to-all), and those of them that leave the GPU.

| model | GPUs | collective | over | ranks | calls | GB | GB sent |
|---|---|---|---|---|---|---|---|
"""

LONG = f"""
## Long sequences

A step of {SEQUENCES} sequences of so many tokens (1k: 1,024), each a pack of its own: `--max-tokens-per-gpu` is the length over
`--context-parallel-size`. All else as above; of the meshes with tensor 1 to 8, experts over none or a node, and context
1 to as many as there are GPUs and the heads allow, the one with the shortest step that fits. `attention` is its share of the
seconds computing: pairs of tokens, whose number grows with the square of the length. Whether a model was made for such
lengths (most configs here end at 40k or 128k, beyond which rotary embeddings are stretched) is another question.

- **What limits first is memory**: models of 4 B, and of 30 B on 64 GPUs or more, leave room for about 128k tokens on a GPU
  (more are not tried), of 30 B on 8 and of 70 B for 16k to 32k. So a million tokens take a group of 8, within a node, or of
  32 to 64, and more GPUs add groups.
- **Then attention**: nearly all of the computing at a million tokens. The exchange of heads takes a sixtieth of the
  step or less, between nodes a fiftieth; what a larger group costs is gathers, of all weights for fewer tokens each.
- Where sequences are fewer than GPUs, context groups are what keeps these busy (the rows with 256 GPUs).
- The plan of the memory leaves out what an exchange of heads holds for its moment (queries, keys, values, the output, and
  key-value heads that are repeated): 1 to 4 GiB of 128k tokens. Rows that end within that of {MEMORY} GiB need the next size.

| model | tokens | GPUs | flags | GiB | GB sharding | GB context | GB tensor, experts | s computing | attention | s sharding | s waiting | s step | limit |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""

TAIL = """
To ask for another model: `planning.scale.best(model, config, Cluster(num_gpus, gpu_memory), num_packs=...)` or
`best_for_length(..., length=..., num_sequences=...)`, and `fsdptrain plan` for its memory.
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
