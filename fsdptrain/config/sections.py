"""The sections of the configuration: each field here is a flag, a recipe key and a Python keyword.

Sections in `PREFIXED` put their name before their flags (`fsdp.cpu_offload` is `--fsdp-cpu-offload`), the others do not
(`model.hf_checkpoint` is `--hf-checkpoint`). The docstring of a field is its help text and its entry in the docs.
"""

from typing import Any, Literal

import pydantic
from pydantic import Field

from fsdptrain.config.section import Names, Section

PREFIXED = ("lora", "fsdp", "megatron", "rollout", "ref", "router", "log")


class ModelConfig(Section):
    """The model, and how it computes."""

    hf_checkpoint: str = ""
    """Hub id or local folder of the model to train. The only option without a default."""
    trust_remote_code: bool = False
    """Run the Python code that the checkpoint ships. Only for authors whom you trust."""
    load_strategy: Literal["shard", "rank0"] = "shard"
    """`shard`: each rank reads its own slice from the files. `rank0`: rank 0 reads all and broadcasts."""
    attn_implementation: Literal["auto", "flash_attention_2", "flash_attention_3", "varlen", "sdpa"] = "auto"
    """Attention over packs. `auto`: flash-attn where installed, else varlen on CUDA, else per-segment sdpa."""
    layout: Literal["auto", "packed", "padded"] = "auto"
    """How sequences reach the model. `auto`: packed where a probe of the model proves it exact, else padded."""
    bf16: bool = True
    """Compute in bfloat16, with float32 master weights and float32 gradient reduction. `--no-bf16`: float32."""
    fp16: bool = False
    """Compute in float16 with a gradient scaler. It turns the default of bf16 off; both given is an error."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_kind: Literal["full", "selective"] = "full"
    """`full`: keep the input of a layer. `selective`: results of its matrix products and attention too, and recompute
    what is cheap."""
    gradient_checkpointing_every: int = Field(default=1, ge=1)
    """Recompute every n-th layer only. [layers]"""
    offload_activations: bool = False
    """What decoder layers keep for the backward pass goes to host memory. Best with --gradient-checkpointing."""
    compile: bool = False
    """torch.compile each decoder layer, attention apart, once for packs of all shapes. Needs a C++ compiler."""
    logprob_chunk_size: int = Field(default=512, ge=1)
    """Tokens for which logits exist at one time. [tokens]"""
    train_vision: bool = False
    """Train the vision tower and its projector too; else they are frozen. Needs --image-key."""
    strict: bool = False
    """A fallback (padding in place of packing, torch code in place of a kernel) is an error, not a warning."""
    deterministic_mode: bool = False
    """Only deterministic kernels (torch.use_deterministic_algorithms)."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_compute_dtype(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("fp16") is True:
            return {"bf16": False, **values}
        return values


class LoraConfig(Section):
    """A small adapter that is trained in place of the weights: docs/lora.md."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapter, e.g. 32; 0: no adapter, all weights are trained."""
    alpha: int = Field(default=32, ge=1)
    """The adapter's product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout before the adapter; only `--algorithm sft` trains with dropout at all."""
    targets: Names = Field(default=["all-linear"], min_length=1)
    """What is adapted: `all-linear` (but never the head), `attention`, ends of names of linear layers (q_proj), or of
    other weights such as experts.gate_up_proj experts.down_proj."""
    use_dora: bool = False
    """DoRA: train the length of each row of the weights too. Linear layers only."""
    export: Literal["adapter", "merged", "both"] = "adapter"
    """What is written as the trained model: `adapter`: a peft folder. `merged`: a whole model. `both`: that, and the
    adapter in its folder `adapter`."""
    sync: Literal["merged", "adapter"] = "merged"
    """What the engine gets after each step: whole weights with the adapter in them, or the adapter alone, which only
    vLLM takes."""


class DataConfig(Section):
    """Prompts and how they become tokens."""

    prompt_data: str = "reasoning_gym:gsm_symbolic"
    """`reasoning_gym:<task>[?key=value&...]`, a .jsonl or .parquet file, the name or folder of a `datasets` set, or
    `environment` for what --environment brings."""
    prompt_split: str = "train"
    """Split of a `datasets` data set to train on."""
    input_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages."""
    label_key: str = "label"
    """Column of the reference answer; with `--algorithm sft`, of the response: a text, or the messages of a
    conversation."""
    image_key: str | None = None
    """Column of the images of a prompt: one, or a list; a file's path, its bytes, or what `datasets` makes of them.
    `<image>` in the prompt says where each stands; without it they come first. See docs/vision.md."""
    metadata_key: str | None = None
    """Column of a mapping that is handed to the reward."""
    apply_chat_template: bool = True
    """Wrap prompts in the tokenizer's chat template. Off: the text as it is."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default={})
    """Handed to the chat template, e.g. `enable_thinking: false`."""
    system_prompt: str = "auto"
    """System message before each prompt; "" for none. `auto`: that of the environment, else a request for <answer>
    tags with reasoning_gym data, else none."""
    eval_prompt_data: str | None = None
    """Data to evaluate on, in any form of --prompt-data. Default: rows of --prompt-data that are never trained on."""
    eval_size: int | None = Field(default=None, ge=0)
    """Prompts to hold out for evaluation; 0: none. Default: 128, but at most a tenth of the data. [prompts]"""
    data_size: int = Field(default=100_000, ge=1)
    """Rows to draw from a generator such as reasoning-gym, which has no end. [prompts]"""


class RewardConfig(Section):
    """What a good response is."""

    reward: Names = Field(default=["auto"], min_length=1)
    """One or more of auto, reasoning_gym, reasoning_gym_strict, math, exact, format, environment or
    `package.module:function`, each with an optional `=weight`."""
    max_unscored_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """Stop when more than this share of a rollout's samples could not be scored."""
    reward_timeout: float | None = Field(default=None, gt=0.0)
    """Deadline of one call of --reward; a sample that misses it is not scored. Three in a row end the run, and so do as
    many in a rollout as take half of --dist-timeout. Calls are then made in a thread. Default: 300, or what that
    allows, where they are anyway (--max-staleness with servers), else none. [s]"""
    pass_threshold: float = 1.0
    """Reward from which a response counts as right: in evaluations, for --curriculum and for --length-penalty."""


class EnvironmentConfig(Section):
    """Episodes of several turns."""

    environment: str | None = None
    """What answers the model, turn by turn: `package.module:Class` (or a function), or a plug-in's name. See
    docs/environments.md."""
    environment_kwargs: dict[str, bool | int | float | str] = Field(default={})
    """Handed to the environment when it is made."""
    max_turns: int = Field(default=8, ge=1)
    """Longest episode. [responses of the model]"""
    max_observation_len: int = Field(default=512, ge=1)
    """Longest answer of the environment; what is longer is cut short. [tokens]"""
    environment_timeout: float = Field(default=60.0, gt=0.0)
    """Deadline of one answer of the environment; an episode that misses it is not scored. [s]"""
    environment_workers: int = Field(default=32, ge=1)
    """Answers of the environment that each rank makes at one time. [threads]"""


class OptimConfig(Section):
    """The optimizer and its schedule."""

    optimizer: Literal["adam"] = "adam"
    """AdamW."""
    lr: float = Field(default=1e-6, ge=0.0)
    """Peak learning rate."""
    lr_warmup_init: float = Field(default=0.0, ge=0.0)
    """Learning rate at the start of the warm-up."""
    min_lr: float = Field(default=0.0, ge=0.0)
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape of the decay."""
    lr_decay_iters: int | None = Field(default=None, ge=1)
    """Optimizer steps until min_lr. Default: all of the run."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_warmup_fraction: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Warm-up as a share of lr_decay_iters, in place of lr_warmup_iters."""
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
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0.0)
    """Largest global gradient norm. 0: no clipping."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and nothing else, in host memory."""
    offload_optimizer_step: Literal["host", "device"] = "host"
    """With --offload-optimizer: where steps are made. `host`: gradients and weights travel. `device`: the state."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Stop after this many optimizer steps were skipped for gradients that are not finite."""


class BatchConfig(Section):
    """How much is trained at one time."""

    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Largest pack: no forward or backward pass of a rank holds more tokens. With --context-parallel-size a pack, and
    a sequence, may be as many times longer. [tokens]"""
    overlong: Literal["error", "drop"] = "error"
    """A sample longer than max_tokens_per_gpu stops the run, or is dropped and counted."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples in one optimizer step. Default: the whole rollout, strictly on-policy. [samples]"""
    steps_per_rollout: int | None = Field(default=None, ge=1)
    """Optimizer steps on each rollout, all its epochs together: another way to say --global-batch-size. Samples are
    dealt to them at random, the samples of one prompt one by one."""
    prefix_sharing: Literal["auto", "on", "off"] = "auto"
    """Compute the prompt of a group once for all its samples in a pack. `auto`: where a probe of the model proves it
    exact and the step gets cheaper, but not on GPUs, where it has not run yet. `on`: wherever prompts are equal; an
    error where the model does not allow it."""
    epochs_per_rollout: int = Field(default=1, ge=1)
    """Times that each rollout is trained on, in another order each time. Old and reference logprobs are scored once."""


class FsdpConfig(Section):
    """Sharding."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    replicate_size: int = Field(default=1, ge=1)
    """Replicas of the sharded model (HSDP): world size = replicas x shards."""
    reshard_after_forward: bool = True
    """Free each layer's gathered parameters after its forward pass. Off: faster, more memory."""
    prefetch: bool = True
    """Gather the next layer's parameters while this one computes."""


class ParallelConfig(Section):
    """Who computes the model; layers and experts that are split over processes, beside the sharding."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """`fsdp`: transformers' model under PyTorch's FSDP2. `megatron`: megatron-core's, for a few families:
    docs/megatron.md."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share the work of every layer, by transformers' plan for the model: neighbours, within a node."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Processes over which the experts are dealt; tokens travel to them."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Processes over which the tokens of every pack are dealt: sequences may be as many times longer."""
    context_parallel_recurrent: Literal["refuse", "gather"] = "refuse"
    """With --context-parallel-size, what becomes of mixers with a state (Mamba, Gated DeltaNet, convolutions).
    `gather`: each process of a group computes them for all of its tokens."""

    @property
    def splits(self) -> bool:
        return self.tensor_parallel_size > 1 or self.expert_parallel_size > 1


class RolloutConfig(Section):
    """Generation."""

    engine: str = "auto"
    """`hf`: embedded, on the trainer's device. `vllm`: in the trainer's process. `vllm-server`: over HTTP. Or
    `package.module:function`. `auto`: vllm where it is installed and there is a GPU, else hf."""
    engine_args: dict[str, Any] = Field(default={})
    """vllm: options of vLLM's own, as key=value or as one JSON object, e.g. max_num_seqs=512."""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """vllm: memory for its key-value cache. Default: on a GPU as vLLM decides, on a CPU 1. [GiB]"""
    timeout: float = Field(default=7200.0, gt=0.0)
    """Longest time of one request (vllm-server), or of one call with all prompts of a rank or one weight sync (vllm). A
    longer one ends the run. [s]"""
    urls: Names = Field(default=[])
    """vllm-server: running servers, e.g. http://127.0.0.1:8000. [vllm_servers]"""
    num_servers: int | None = Field(default=None, ge=1)
    """vllm-server: start so many on this machine, in place of --rollout-urls; they end with the run."""
    server_python: str | None = None
    """vllm-server: Python of an environment with vLLM, to start servers with. Default: the trainer's own."""
    api_key_env: str | None = None
    """vllm-server: environment variable that holds the API key of the servers."""
    allow_public_servers: bool = False
    """vllm-server: allow servers with a public address. Anyone who can reach such a server can change its weights."""
    batch_size: int = Field(default=32, ge=1)
    """Prompts in one rollout. [prompts]"""
    max_prompt_len: int | None = Field(default=None, ge=1)
    """Longer prompts are left out and counted (progress/too_long_prompts). Default: what max_tokens_per_gpu leaves
    beside a response. [tokens]"""
    max_response_len: int = Field(default=2048, ge=1)
    """Longest response. [tokens]"""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature; the trainer scores at the same one."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the fewest of the most likely tokens whose probability reaches this. The trainer scores among them
    too."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from the k most likely tokens; the trainer scores among them too. Default: off. [tokens]"""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample from tokens that are at least so likely as this times the likeliest; the trainer scores among them too."""
    max_batch_tokens: int = Field(default=262_144, ge=1)
    """Embedded engine: tokens that its key-value cache may hold at one time. [tokens]"""
    shuffle: bool = True
    """Shuffle the prompts, anew in each epoch."""
    seed: int = 42
    """Seed of sampling and of the order of prompts."""


class RefConfig(Section):
    """The reference model of the KL term."""

    load: str | None = None
    """Checkpoint of the reference. Default: --hf-checkpoint. It must have the same shapes."""
    update_interval: int | None = Field(default=None, ge=1)
    """Make the policy the reference after so many rollouts, again and again. Default: never. [rollouts]"""


class RouterConfig(Section):
    """Mixture-of-experts models: which experts a token takes."""

    aux_loss_coef: float | Literal["config"] = 0.0
    """Coefficient of the load-balancing loss over each optimizer step; `config`: what the model's config says. 0: off.
    Without --router-replay it costs one more forward pass."""
    bias_update_rate: float = Field(default=0.0, ge=0.0)
    """Balance experts without a loss: after each optimizer step the router's bias goes up by this for experts with less
    than the mean load of the step, down for those with more (DeepSeek-V3: 0.001). 0: it stays as it was loaded."""
    replay: Literal["off", "scoring", "rollout"] = "off"
    """Train with the experts that a token took before. `scoring`: when its old logprob was scored (R2). `rollout`: in
    the engine (R3), for scoring too."""


class RunConfig(Section):
    """Length, evaluation, checkpoints."""

    output_dir: str = "runs/default"
    """Folder of the run: config.yaml, metrics.jsonl, checkpoints, the exported model."""
    num_rollout: int = Field(default=200, ge=0)
    """Rollouts of the run; with `--algorithm sft`, optimizer steps."""
    seed: int = 0
    """Seed of everything but sampling."""
    resume: str = "auto"
    """`auto`: go on from the newest checkpoint in output_dir if there is one. `never`: an output_dir in use is an
    error. Or a checkpoint's folder."""
    save_interval: int = Field(default=50, ge=0)
    """Rollouts between checkpoints; 0: only the last, none if --keep-last is 0."""
    keep_last: int = Field(default=2, ge=0)
    """Checkpoints to keep; 0: write none."""
    async_save: bool = False
    """Train on while a checkpoint is written, from a copy of weights and optimizer state in host memory."""
    export: bool = True
    """Write the trained model to output_dir/hf at the end, as from_pretrained reads it."""
    eval_interval: int = Field(default=20, ge=0)
    """Rollouts between evaluations, also before the first and after the last; 0: never."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1)
    """Completions for each evaluation prompt; pass@k is reported for each power of two up to it."""
    eval_temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature of the evaluation."""
    eval_greedy: bool = False
    """Evaluate greedy decoding too, as eval/heldout_greedy."""
    verify_weight_sync: Literal["every", "first", "off"] | None = None
    """Check after every weight sync, or the first one, that the engine holds the trainer's weights and computes the
    same logprobs; stop the run if not. Default: every, if the engine supports it. [weight_sync]"""


class LogConfig(Section):
    """Where metrics go."""

    to: Names = Field(default=["console"])
    """Loggers beside metrics.jsonl, which is always written: any of console, wandb, trackio, or a plug-in's."""
    project: str = "fsdptrain"
    """Project name for wandb and trackio."""
    run_name: str | None = None
    """Run name for wandb and trackio. Default: the last part of output_dir."""
    num_samples: int = Field(default=4, ge=0)
    """Completions to write to samples.jsonl after each rollout."""


class LaunchConfig(Section):
    """Processes on this machine. Several machines: torchrun, see docs/launch.md."""

    nproc_per_node: int | None = Field(default=None, ge=1)
    """Processes on this machine. Default: one per visible GPU, else one."""
    dist_timeout: int = Field(default=1800, ge=1)
    """Deadline of every wait between ranks. [s]"""
    max_restarts: int = Field(default=0, ge=0)
    """Restart all ranks up to this many times after one has died, from the newest checkpoint."""
    log_dir: str | None = None
    """Folder for the output of each rank. The console then shows rank 0 only."""
    probe: bool = False
    """With --dry-run: build a small random copy of the model from its config.json and say how it will be computed."""
    dry_run: bool = False
    """Print the resolved configuration with the source of each value, and stop."""
