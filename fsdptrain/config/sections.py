"""Configuration sections. Each field is a flag, a recipe key and a Python keyword.

Sections in `PREFIXED` prefix their flags (`fsdp.cpu_offload` is `--fsdp-cpu-offload`), others do not
(`model.hf_checkpoint` is `--hf-checkpoint`). The docstring of a field is its help text and its entry in the docs.
"""

from typing import Any, Literal

import pydantic
from pydantic import Field

from fsdptrain.config.section import Names, Section

PREFIXED = ("lora", "fsdp", "megatron", "rollout", "ref", "router", "log")


class ModelConfig(Section):
    """Model and its computation."""

    hf_checkpoint: str = ""
    """Hub id or local directory of the model to train. The only required option."""
    trust_remote_code: bool = False
    """Run Python code from the checkpoint. Only for authors whom you trust."""
    load_strategy: Literal["shard", "rank0"] = "shard"
    """`shard`: each rank reads its slice from the files. `rank0`: rank 0 reads all weights and broadcasts them."""
    attn_implementation: Literal["auto", "flash_attention_2", "flash_attention_3", "varlen", "sdpa"] = "auto"
    """Attention over packs. `auto`: flash-attn if installed, else varlen on CUDA, else per-segment sdpa."""
    layout: Literal["auto", "packed", "padded"] = "auto"
    """Layout of sequences in the model. `auto`: packed if a probe of the model proves it exact, else padded."""
    bf16: bool = True
    """Compute in bfloat16, with float32 master weights and float32 gradient reduction. `--no-bf16`: float32."""
    fp16: bool = False
    """Compute in float16 with a gradient scaler. Disables the default --bf16; setting both is an error."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_kind: Literal["full", "selective"] = "full"
    """`full`: store the input of a layer. `selective`: also store results of matrix products and attention, and
    recompute cheap operations."""
    gradient_checkpointing_every: int = Field(default=1, ge=1)
    """Recompute every n-th layer only. [layers]"""
    offload_activations: bool = False
    """Move activations of decoder layers to host memory until the backward pass. Best with --gradient-checkpointing."""
    compile: bool = False
    """Apply torch.compile to each decoder layer, except attention, once for packs of all shapes. Needs a C++
    compiler."""
    logprob_chunk_size: int = Field(default=512, ge=1)
    """Tokens whose logits are in memory at a time. [tokens]"""
    train_vision: bool = False
    """Also train the vision tower and its projector, which are frozen otherwise. Needs --image-key."""
    strict: bool = False
    """Make fallbacks (padding instead of packing, torch code instead of a kernel) errors instead of warnings."""
    deterministic_mode: bool = False
    """Use deterministic kernels only (torch.use_deterministic_algorithms)."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_compute_dtype(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("fp16") is True:
            return {"bf16": False, **values}
        return values


class LoraConfig(Section):
    """Small adapter trained instead of the weights: docs/lora.md."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapter, e.g. 32. 0: no adapter, train all weights."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapter's output: alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout before the adapter. Only for `--algorithm sft`; RL trains without dropout."""
    targets: Names = Field(default=["all-linear"], min_length=1)
    """Adapted weights: `all-linear` (except the head), `attention`, name suffixes of linear layers (q_proj), or of
    other weights such as experts.gate_up_proj experts.down_proj."""
    export: Literal["adapter", "merged", "both"] = "adapter"
    """Format of the exported model. `adapter`: a peft directory. `merged`: a full model. `both`: a full model and the
    adapter in its subdirectory `adapter`."""
    sync: Literal["merged", "adapter"] = "merged"
    """Weights that the engine receives: full weights with the adapter merged, or the adapter alone (vLLM only)."""


class DataConfig(Section):
    """Prompts and their tokenization."""

    prompt_data: str = "reasoning_gym:gsm_symbolic"
    """`reasoning_gym:<task>[?key=value&...]`, a .jsonl or .parquet file, the name or directory of a `datasets` set, or
    `environment` for the rows of --environment."""
    prompt_split: str = "train"
    """Training split of a `datasets` data set."""
    input_key: str = "prompt"
    """Column of the prompt: a string or a list of chat messages."""
    label_key: str = "label"
    """Column of the reference answer; with `--algorithm sft`, of the response: a string or the messages of a
    conversation."""
    image_key: str | None = None
    """Column of the images of a prompt: one or a list of file paths, bytes, or images opened by `datasets`. `<image>`
    in the prompt marks each position; without marks, images come first. See docs/vision.md."""
    metadata_key: str | None = None
    """Column of a mapping that is passed to the reward."""
    apply_chat_template: bool = True
    """Apply the tokenizer's chat template to prompts. Off: use the text unchanged."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default={})
    """Arguments of the chat template, e.g. `enable_thinking: false`."""
    system_prompt: str = "auto"
    """System message before each prompt; "" for none. `auto`: that of the environment; for reasoning_gym data, an
    instruction to use <answer> tags; else none."""
    eval_prompt_data: str | None = None
    """Evaluation data, in any form of --prompt-data. Default: rows held out from --prompt-data."""
    eval_size: int | None = Field(default=None, ge=0)
    """Prompts to hold out for evaluation; 0: none. Default: 128, but at most a tenth of the data. [prompts]"""
    data_size: int = Field(default=100_000, ge=1)
    """Rows to draw from an infinite generator such as reasoning-gym. [prompts]"""


class RewardConfig(Section):
    """Reward functions."""

    reward: Names = Field(default=["auto"], min_length=1)
    """One or more of auto, reasoning_gym, reasoning_gym_strict, math, exact, format, environment or
    `package.module:function`, each with an optional `=weight`."""
    max_unscored_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """Stop if more than this fraction of a rollout's samples could not be scored."""
    reward_timeout: float | None = Field(default=None, gt=0.0)
    """Deadline of one --reward call; a sample that misses it is unscored. Three timeouts in a row end the run, as do
    timeouts in one rollout that add up to half of --dist-timeout. If set, calls run in a thread. Default: none; if
    calls run in threads anyway (--max-staleness with servers), 300 or what --dist-timeout allows. [s]"""
    pass_threshold: float = 1.0
    """Minimum reward of a correct response, in evaluations, for --curriculum and for --length-penalty."""


class EnvironmentConfig(Section):
    """Multi-turn episodes."""

    environment: str | None = None
    """Environment that replies to the model: `package.module:Class` (or a function), or a plug-in name. See
    docs/environments.md."""
    environment_kwargs: dict[str, bool | int | float | str] = Field(default={})
    """Arguments of the environment's constructor."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum turns per episode. [model responses]"""
    max_observation_len: int = Field(default=512, ge=1)
    """Maximum length of an observation; longer ones are truncated. [tokens]"""
    environment_timeout: float = Field(default=60.0, gt=0.0)
    """Deadline of one environment reply; an episode that misses it is unscored. [s]"""
    environment_workers: int = Field(default=32, ge=1)
    """Concurrent environment calls per rank. [threads]"""


class OptimConfig(Section):
    """Optimizer and learning rate schedule."""

    optimizer: Literal["adam"] = "adam"
    """AdamW."""
    lr: float = Field(default=1e-6, ge=0.0)
    """Peak learning rate."""
    lr_warmup_init: float = Field(default=0.0, ge=0.0)
    """Learning rate at the start of the warm-up."""
    min_lr: float = Field(default=0.0, ge=0.0)
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape of the learning rate decay."""
    lr_decay_iters: int | None = Field(default=None, ge=1)
    """Optimizer steps until min_lr. Default: all steps of the run."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_warmup_fraction: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Warm-up as a fraction of lr_decay_iters, instead of lr_warmup_iters."""
    lr_wsd_decay_iters: int | None = Field(default=None, ge=1)
    """WSD: optimizer steps of the final decay."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """WSD: shape of the final decay."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0.0)
    """Term added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0.0)
    """Maximum global gradient norm. 0: no clipping."""
    offload_optimizer: bool = False
    """Keep only the optimizer state in host memory."""
    offload_optimizer_step: Literal["host", "device"] = "host"
    """Where --offload-optimizer runs steps. `host`: transfers gradients and weights. `device`: transfers the state."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Stop after this many optimizer steps were skipped because of non-finite gradients."""


class BatchConfig(Section):
    """Batch sizes and packing."""

    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Pack size: maximum tokens in a forward or backward pass of a rank. With --context-parallel-size, packs and
    sequences may be that many times longer. [tokens]"""
    overlong: Literal["error", "drop"] = "error"
    """Samples longer than the pack size: stop the run, or drop and count them."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step. Default: the whole rollout, strictly on-policy. [samples]"""
    steps_per_rollout: int | None = Field(default=None, ge=1)
    """Optimizer steps per rollout, over all its epochs: an alternative to --global-batch-size. Samples are assigned to
    steps at random, individually rather than by group."""
    prefix_sharing: Literal["auto", "on", "off"] = "auto"
    """Compute the shared prompt of a group once per pack. `auto`: if a probe of the model proves it exact and the step
    gets cheaper, but not on GPUs, where it has not been tested. `on`: wherever prompts are equal; an error if the model
    does not support it."""
    epochs_per_rollout: int = Field(default=1, ge=1)
    """Training passes over each rollout, each in a different order. Old and reference logprobs are computed once."""


class FsdpConfig(Section):
    """FSDP sharding."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    replicate_size: int = Field(default=1, ge=1)
    """Replicas of the sharded model (HSDP): world size = replicas x shards."""
    reshard_after_forward: bool = True
    """Free each layer's gathered parameters after its forward pass. Off: faster, more memory."""
    prefetch: bool = True
    """Gather the next layer's parameters while the current layer computes."""


class ParallelConfig(Section):
    """Training backend, and tensor, expert and context parallelism."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """`fsdp`: the transformers model under PyTorch FSDP2. `megatron`: the megatron-core model, for a few families:
    docs/megatron.md."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share the work of every layer, by the transformers plan of the model: neighbors, within a node."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Processes over which experts are distributed; tokens are sent to them."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Processes over which the tokens of every pack are distributed: sequences may be that many times longer."""
    context_parallel_recurrent: Literal["refuse", "gather"] = "refuse"
    """With --context-parallel-size: handling of stateful mixers (Mamba, Gated DeltaNet, convolutions). `refuse`: an
    error. `gather`: each process of a group computes them for all tokens of the group."""

    @property
    def splits(self) -> bool:
        return self.tensor_parallel_size > 1 or self.expert_parallel_size > 1


class RolloutConfig(Section):
    """Rollout generation."""

    engine: str = "auto"
    """`hf`: embedded, on the trainer's device. `vllm`: in the trainer's process. `vllm-server`: over HTTP. Or
    `package.module:function`. `auto`: vllm if installed and there is a GPU, else hf."""
    engine_args: dict[str, Any] = Field(default={})
    """vllm: vLLM engine options, as key=value or as one JSON object, e.g. max_num_seqs=512."""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """vllm: memory of the key-value cache. Default: on a GPU as vLLM decides, on a CPU 1. [GiB]"""
    timeout: float = Field(default=7200.0, gt=0.0)
    """Longest time of one request (vllm-server), or of one call with all prompts of a rank or one weight sync (vllm). A
    longer one ends the run. [s]"""
    urls: Names = Field(default=[])
    """vllm-server: running servers, e.g. http://127.0.0.1:8000. See docs/vllm_servers.md."""
    num_servers: int | None = Field(default=None, ge=1)
    """vllm-server: number of servers to start on this machine, instead of --rollout-urls; they stop with the run."""
    server_python: str | None = None
    """vllm-server: Python interpreter with vLLM, to start servers with. Default: the trainer's interpreter."""
    api_key_env: str | None = None
    """vllm-server: environment variable that holds the API key of the servers."""
    allow_public_servers: bool = False
    """vllm-server: allow servers with a public address. Anyone who can reach such a server can change its weights."""
    batch_size: int = Field(default=32, ge=1)
    """Prompts per rollout. [prompts]"""
    max_prompt_len: int | None = Field(default=None, ge=1)
    """Maximum prompt length; longer prompts are skipped and counted (progress/too_long_prompts). Default: the room that
    a response leaves in --max-tokens-per-gpu. [tokens]"""
    max_response_len: int = Field(default=2048, ge=1)
    """Maximum response length. [tokens]"""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature, also used for the trainer's logprobs."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens whose total probability reaches this. The trainer's logprobs
    use the same set."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from the k most likely tokens. The trainer's logprobs use the same set. Default: off. [tokens]"""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Keep tokens whose probability is at least min_p times that of the most likely token. The trainer's logprobs use
    the same set."""
    max_batch_tokens: int = Field(default=262_144, ge=1)
    """Embedded engine: capacity of the key-value cache. [tokens]"""
    shuffle: bool = True
    """Shuffle prompts, differently in each epoch."""
    seed: int = 42
    """Seed of sampling and of the prompt order."""


class RefConfig(Section):
    """Reference model of the KL term."""

    load: str | None = None
    """Checkpoint of the reference model, with the same shapes. Default: --hf-checkpoint."""
    update_interval: int | None = Field(default=None, ge=1)
    """Update the reference to the current policy every this many rollouts. Default: never. [rollouts]"""


class RouterConfig(Section):
    """Expert routing of mixture-of-experts models."""

    aux_loss_coef: float | Literal["config"] = 0.0
    """Coefficient of the load-balancing loss over each optimizer step; `config`: from the model's config. 0: off.
    Without --router-replay, it costs one more forward pass."""
    bias_update_rate: float = Field(default=0.0, ge=0.0)
    """Balance experts without a loss: after each optimizer step, increase the router's bias by this for experts below
    the mean load of the step and decrease it for those above (DeepSeek-V3: 0.001). 0: keep the loaded bias."""
    replay: Literal["off", "scoring", "rollout"] = "off"
    """Replay recorded expert choices in training. `scoring`: from the computation of old logprobs (R2). `rollout`: from
    the engine (R3), for old logprobs too."""


class RunConfig(Section):
    """Run length, evaluation and checkpoints."""

    output_dir: str = "runs/default"
    """Output directory: config.yaml, metrics.jsonl, checkpoints and the exported model."""
    num_rollout: int = Field(default=200, ge=0)
    """Number of rollouts; with `--algorithm sft`, of optimizer steps."""
    seed: int = 0
    """Seed of everything except sampling."""
    resume: str = "auto"
    """`auto`: resume from the newest checkpoint in output_dir, if any. `never`: an output_dir in use is an error. Or a
    checkpoint directory."""
    save_interval: int = Field(default=50, ge=0)
    """Rollouts between checkpoints. 0: only the last one; none if --keep-last is 0."""
    keep_last: int = Field(default=2, ge=0)
    """Number of checkpoints to keep; 0: write none."""
    async_save: bool = False
    """Continue training while a checkpoint is written from a copy of weights and optimizer state in host memory."""
    export: bool = True
    """Export the trained model to output_dir/hf at the end, for from_pretrained."""
    eval_interval: int = Field(default=20, ge=0)
    """Rollouts between evaluations; also runs before the first and after the last rollout. 0: never."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1)
    """Completions per evaluation prompt; reports pass@k for each power of two up to this number."""
    eval_temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature of evaluations."""
    eval_greedy: bool = False
    """Evaluate greedy decoding too, as eval/heldout_greedy."""
    verify_weight_sync: Literal["every", "first", "off"] | None = None
    """Check after every weight sync, or the first one, that the engine holds the trainer's weights and computes the
    same logprobs; stop the run if not. Default: every, if the engine supports it."""


class LogConfig(Section):
    """Metric loggers."""

    to: Names = Field(default=["console"])
    """Loggers in addition to metrics.jsonl, which is always written: any of console, wandb, trackio, or a plug-in."""
    project: str = "fsdptrain"
    """Project name for wandb and trackio."""
    run_name: str | None = None
    """Run name for wandb and trackio. Default: the last component of output_dir."""
    num_samples: int = Field(default=4, ge=0)
    """Completions written to samples.jsonl after each rollout."""


class LaunchConfig(Section):
    """Processes on this machine. For several machines, use torchrun: see docs/launch.md."""

    nproc_per_node: int | None = Field(default=None, ge=1)
    """Processes on this machine. Default: one per visible GPU, or one without GPUs."""
    dist_timeout: int = Field(default=1800, ge=1)
    """Timeout of every wait between ranks. [s]"""
    max_restarts: int = Field(default=0, ge=0)
    """After a rank has died, restart all ranks from the newest checkpoint, up to this many times."""
    log_dir: str | None = None
    """Directory for the output of each rank. The console then shows rank 0 only."""
    probe: bool = False
    """With --dry-run: build a small random copy of the model from its config.json and report how it is computed."""
    dry_run: bool = False
    """Print the resolved configuration with the source of each value, and exit."""
