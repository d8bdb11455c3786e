"""The table of runs of same_numbers.py, and the models, data and plug-ins that they use.

All inputs are created from fixed seeds with transformers only, so both checkouts get the same files.
"""

import fnmatch
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

COMMON = """--num-rollout 2 --rollout-batch-size 4 --max-tokens-per-gpu 512 --lr 3e-3 --adam-eps 1e-4 --no-bf16
    --keep-last 0 --log-to"""
RL = f"""{COMMON} --prompt-data reasoning_gym:spell_backward?max_word_len=4&size=64 --system-prompt '' --eval-size 4
    --n-samples-per-prompt 4 --rollout-max-response-len 24 --reward reasoning_gym same_numbers_plugins:variety
    --global-batch-size 4 --log-num-samples 64"""
SFT = f"{COMMON} --algorithm sft --prompt-data rows.jsonl --label-key response --eval-interval 0"

ON_POLICY = "--global-batch-size 16"
OTHER = "--ref-load models/reference"
TRUNCATED = "--rollout-top-p 0.8 --rollout-top-k 50 --rollout-min-p 0.01 --rollout-temperature 0.8"
RECOMPUTED = "--gradient-checkpointing"
CONTEXT = "--context-parallel-size 2"
TENSOR = "--tensor-parallel-size 2"
EXPERT = "--expert-parallel-size 2"
MEGATRON = "--backend megatron"
PICTURES = "--prompt-data pictures.jsonl --image-key images --input-key question --label-key answer"
VISION = f"{PICTURES} --reward same_numbers_plugins:variety"
CACHE = """--rollout-kv-cache-gib 0.05 --rollout-engine-args '{"max_num_seqs": 8}' --max-tokens-per-gpu 1024"""
VLLM = f"@vllm --rollout-engine vllm {CACHE}"
SERVER = f"--rollout-engine vllm-server --rollout-num-servers 1 --rollout-server-python VLLM_PYTHON {CACHE}"

# name | model | ranks | flags added to RL, or to SFT with @sft. @vllm: run by the interpreter with vLLM. @slow: only
# if --only names it.
RUNS = f"""
dense                   | dense  | 1 | {ON_POLICY}
dense-2-ranks           | dense  | 2 | {ON_POLICY}
dense-4-ranks           | dense  | 4 |
dense-launched          | dense  | 1 | --nproc-per-node 2
steps                   | dense  | 1 |
epochs                  | dense  | 2 | --epochs-per-rollout 2 --lr-decay-style linear
schedule                | dense  | 1 | --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 0.1
clip                    | dense  | 1 | --eps-clip 1e-3 --eps-clip-high 2e-3 --eps-clip-c 3
opsm                    | dense  | 1 | --use-opsm --lr 1e-2 --loss-aggregation sequence_sum
entropy                 | dense  | 1 | --entropy-coef 0.01 --logprob-chunk-size 16
kl-k1                   | dense  | 1 | --kl-loss-coef 0.1 --kl-loss-type k1 {OTHER}
kl-k2                   | dense  | 1 | --kl-loss-coef 0.1 --kl-loss-type k2 {OTHER} --use-unbiased-kl
kl-k3                   | dense  | 2 | --kl-loss-coef 0.1 --kl-loss-type k3 {OTHER}
kl-low-var              | dense  | 1 | --kl-loss-coef 0.1 --kl-loss-type low_var_kl
mask-truncated          | dense  | 1 | --mask-truncated --rollout-max-response-len 96
dynamic-sampling        | dense  | 2 | --algorithm dapo
sampling                | dense  | 1 | {TRUNCATED}
evaluation              | dense  | 1 | --n-samples-per-eval-prompt 4 --eval-greedy --eval-temperature 0.7
rollout-logprobs        | dense  | 1 | --use-rollout-logprobs
environment             | dense  | 2 | --environment same_numbers_plugins:Echo --max-turns 3 --reward environment
bf16                    | dense  | 2 | --bf16
fp16                    | dense  | 1 | --fp16
padded                  | dense  | 1 | --layout padded
prefix-sharing          | dense  | 1 | --prefix-sharing
recompute               | dense  | 1 | {RECOMPUTED}
offload-activations     | dense  | 1 | {RECOMPUTED} --offload-activations
offload-parameters      | dense  | 2 | --fsdp-cpu-offload
offload-optimizer       | dense  | 2 | --offload-optimizer
replicas                | dense  | 2 | --fsdp-replicate-size 2 --no-fsdp-reshard-after-forward
compile                 | dense  | 1 | @slow --compile
gemma2                  | gemma2 | 1 |
gpt-oss                 | gptoss | 1 |
mamba2                  | mamba2 | 1 | @sft
hybrid                  | hybrid | 2 |
sft                     | dense  | 1 | @sft
sft-2-ranks             | dense  | 2 | @sft --rollout-batch-size 6
lora                    | dense  | 1 | --lora-rank 4 --lora-export both --kl-loss-coef 0.1
lora-2-ranks            | dense  | 2 | --lora-rank 4 --lora-targets q_proj k_proj v_proj o_proj
lora-merged-2-ranks     | dense  | 2 | --lora-rank 4 --lora-export merged
lora-experts            | moe    | 1 | --lora-rank 4 --lora-targets experts.gate_up_proj experts.down_proj
moe                     | moe    | 1 |
moe-replay-scoring      | moe    | 2 | --router-replay scoring
moe-replay-rollout      | moe    | 2 | --router-replay rollout {RECOMPUTED}
vision                  | vision | 1 | {VISION}
vision-train-2-ranks    | vision | 2 | {VISION} --train-vision
context-2               | dense  | 2 | {CONTEXT} --max-tokens-per-gpu 64
tensor-2                | dense  | 2 | {TENSOR}
expert-2                | moe    | 2 | {EXPERT}
tensor-2-expert-2       | moe    | 2 | {TENSOR} {EXPERT}
context-2-tensor-2      | dense  | 4 | {CONTEXT} {TENSOR} --kl-loss-coef 0.1
context-2-expert-2      | moe    | 4 | {CONTEXT} {EXPERT} --router-replay rollout
megatron                | dense  | 1 | {MEGATRON} --epochs-per-rollout 2 --kl-loss-coef 0.1
megatron-tensor-2       | dense  | 2 | {MEGATRON} --megatron-tensor-parallel 2
megatron-expert-2       | moe    | 2 | {MEGATRON} --megatron-expert-parallel 2
vllm                    | dense  | 1 | {VLLM}
vllm-2-ranks            | dense  | 2 | {VLLM}
vllm-moe                | moe    | 1 | {VLLM}
vllm-server             | dense  | 1 | {SERVER}
"""
LOSSES = {  # tight bounds, so that clipping occurs
    **dict.fromkeys(("sapo", "reinforce"), ""),
    "gspo": "--eps-clip 1e-3 --eps-clip-high 2e-3",
    "cispo": "--is-cap-high 1.1",
    "prime_rl": "--eps-clip 1e-3",
}
ADVANTAGES = ("dr_grpo", "rloo", "reinforce++_baseline")
CORRECTIONS = ("tis", "tis_sequence", "mis", "mis_sequence", "icepop")
BOUNDS = "--mismatch-low 0.7 --mismatch-high 1.4"
GENERATED = [
    *(f"loss-{name} | dense | 1 | --algorithm {name} {bounds}" for name, bounds in LOSSES.items()),
    *(f"advantage-{name} | dense | 1 | --algorithm {name}" for name in ADVANTAGES),
    *(f"correction-{name} | dense | 1 | --mismatch-correction {name} {BOUNDS}" for name in CORRECTIONS),
]

TEXT: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": [1, *range(10, 16)],  # several: responses of a random model have varied lengths
    "bos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 48,
    **EXPERTS,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
IMAGE = {f"{name}_token_id": 6 + i for i, name in enumerate(("vision_start", "vision_end", "image", "video"))}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
VISION_MODEL = {
    "text_config": {**TEXT, "rope_parameters": MROPE},
    "vision_config": {
        **TOWER,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
    "tie_word_embeddings": False,
    **IMAGE,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> model_type, differences from TEXT
    "dense": ("qwen3", {"tie_word_embeddings": True}),
    "reference": ("qwen3", {"tie_word_embeddings": True}),
    "moe": ("qwen3_moe", EXPERTS),
    "bias": ("deepseek_v3", {**LATENT, **GROUPS, "num_key_value_heads": 4, "moe_intermediate_size": 48, "head_dim": 8}),
    "hybrid": ("qwen3_next", HYBRID),
    "mamba2": ("mamba2", {"num_heads": 8, "n_groups": 1, "head_dim": 16, "state_size": 16, "expand": 2}),
    "gemma2": ("gemma2", {**TWO_KINDS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gptoss": ("gpt_oss", {**TWO_KINDS, "rope_parameters": ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "vision": ("qwen3_vl", VISION_MODEL),
}
SPECIAL = ("pad", "end", "user", "assistant", "system", "tool", "vision_start", "vision_end", "image_pad", "video_pad")
SPECIAL += tuple(map(str, range(6)))  # 16, and 96 characters: the vocabulary of TEXT
TEMPLATE = """{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}
{%- for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}
{{- part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
PLUGINS = """
from fsdptrain.types import Turn

def variety(prompt, response):
    return len(set(response)) / 8

class Echo:
    def reset(self, prompt, seed):
        return seed

    def step(self, state, response):
        return Turn(f"{len(response)} characters", done=len(response) % 4 == 0, reward=float(len(set(response)) % 3))
"""


class Run(NamedTuple):
    name: str
    model: str
    num_ranks: int
    flags: list[str]
    marks: set[str]  # of sft, vllm, slow

    @property
    def needs_vllm(self) -> bool:
        return "vllm" in self.marks or "VLLM_PYTHON" in self.flags


def select_runs(patterns: Sequence[str]) -> list[Run]:
    """Return the runs whose name matches one of `patterns`; without patterns all but the slow ones."""
    runs = [_parse(line) for line in [*RUNS.strip().splitlines(), *GENERATED]]
    if not patterns:
        return [run for run in runs if "slow" not in run.marks]
    return [run for run in runs if any(fnmatch.fnmatch(run.name, pattern) for pattern in patterns)]


def _parse(line: str) -> Run:
    name, model, num_ranks, text = (part.strip() for part in line.split("|", 3))
    words = shlex.split(text)
    marks = {word[1:] for word in words if word.startswith("@")}
    options: dict[str, list[str]] = {}  # later flags replace earlier ones
    key = ""
    for word in shlex.split(SFT if "sft" in marks else RL) + [word for word in words if not word.startswith("@")]:
        if word.startswith("--"):
            key = word.replace("--no-", "--", 1)
            options[key] = [word]
        else:
            options[key].append(word)
    return Run(name, model, int(num_ranks), [word for option in options.values() for word in option], marks)


def write_inputs(folder: Path) -> None:
    """Write models, data and plug-ins for all runs."""
    transformers.logging.disable_progress_bar()
    tokenizer = _tokenizer()
    for seed, (name, (kind, changes)) in enumerate(MODELS.items()):
        _random_model(kind, changes, seed).save_pretrained(folder / "models" / name)
        tokenizer.save_pretrained(folder / "models" / name)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
    )
    processor.save_pretrained(folder / "models" / "vision")
    (folder / "same_numbers_plugins.py").write_text(PLUGINS)
    _write_rows(folder / "rows.jsonl", [{"prompt": f"say {i}", "response": str(i * i)} for i in range(64)])
    _write_pictures(folder, count=32)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token per printable character: a text in samples.jsonl shows every token."""
    special = [f"<|{name}|>" for name in SPECIAL]
    vocab = {token: i for i, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "<|pad|>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=special[0],
        eos_token=special[1],
        additional_special_tokens=special[2:],
        chat_template=TEMPLATE,
    )


@torch.no_grad()
def _random_model(kind: str, changes: dict[str, Any], seed: int) -> transformers.PreTrainedModel:
    """Build a float32 model of which every parameter and router bias is random, norms too."""
    torch.manual_seed(seed)
    sees = "vision_config" in changes
    config = transformers.CONFIG_MAPPING[kind](**changes if sees else TEXT | changes)
    factory = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.add_((0.2 if parameter.dim() == 1 else 0.05) * torch.randn(parameter.shape))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape))
    return model


def _write_pictures(folder: Path, count: int) -> None:
    (folder / "pictures").mkdir()
    rows = []
    for i in range(count):
        size = (16, 16 + 8 * (i % 3), 3)
        pixels = torch.randint(256, size, generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / "pictures" / f"{i}.png")
        rows.append({"question": f"<image>Which {i}?", "answer": "red", "images": [f"pictures/{i}.png"]})
    _write_rows(folder / "pictures.jsonl", rows)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
