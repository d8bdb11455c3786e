"""Mapping of slime's FSDP backend flags, for error messages and docs/coming_from_slime.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Former:
    """Flag of slime's FSDP backend."""

    here: str  # equivalent flag here; "": none
    note: str = ""
    default: str = ""  # default in slime, if any

    @property
    def advice(self) -> str:
        """Hint for the end of an error message."""
        if self.here:
            return f"it is {self.here} here" + (f" ({self.note})" if self.note else "")
        return f"there is no such flag here: {self.note}"


def _same(name: str, note: str = "", default: str = "") -> tuple[str, Former]:
    return name, Former(name, note, default)


_NOT_YET = "not built yet"

FORMER_FLAGS: dict[str, Former] = dict(
    [
        _same("--hf-checkpoint"),
        _same("--ref-load", "only with a KL term; without it the reference is --hf-checkpoint"),
        _same("--backend", "`megatron` knows a few families: docs/megatron.md"),
        _same("--optimizer", default="adam"),
        _same("--lr", default="2e-5"),
        _same("--lr-warmup-init", default="0"),
        _same("--min-lr", default="0"),
        _same("--lr-decay-style"),
        _same("--lr-decay-iters"),
        _same("--lr-warmup-iters", default="0"),
        _same("--lr-warmup-fraction"),
        _same("--lr-wsd-decay-iters"),
        _same("--lr-wsd-decay-style"),
        _same("--weight-decay", default="0"),
        _same("--adam-beta1", default="0.9"),
        _same("--adam-beta2", default="0.95"),
        _same("--adam-eps", default="1e-8"),
        _same("--clip-grad", default="1.0"),
        _same("--attn-implementation", "`auto` takes flash-attn where it is installed", "flash_attention_2"),
        _same("--gradient-checkpointing"),
        _same("--fp16", "default: bfloat16, as there"),
        _same("--fsdp-cpu-offload"),
        ("--fsdp-state-dict-cpu-offload", Former("", "state dicts are always streamed to the host", "on")),
        ("--fsdp-cpu-backend", Former("", "host tensors always travel by gloo", "gloo")),
        _same("--deterministic-mode"),
        ("--record-memory-history", Former("", _NOT_YET)),
        ("--memory-snapshot-path", Former("", _NOT_YET)),
        ("--use-pytorch-profiler", Former("", _NOT_YET)),
        ("--profile-step-start", Former("", _NOT_YET, "10")),
        ("--profile-step-end", Former("", _NOT_YET, "12")),
        ("--save", Former("--output-dir", "checkpoints go to its folder `checkpoints`")),
        ("--load", Former("--resume", "`auto`, `never`, or a checkpoint's folder")),
        _same("--save-interval", "counts rollouts"),
        _same("--max-tokens-per-gpu", "a hard limit"),
        ("--micro-batch-size", Former("--max-tokens-per-gpu", "batches are packed to a token budget")),
        _same("--global-batch-size", "default: the whole rollout, strictly on-policy"),
        _same("--rollout-batch-size"),
        _same("--n-samples-per-prompt"),
        _same("--num-rollout"),
        _same("--rollout-max-response-len"),
        _same("--rollout-temperature", default="1.0"),
        _same("--advantage-estimator", "gspo is a loss here: `--algorithm gspo`"),
        _same("--eps-clip", default="0.2"),
        _same("--eps-clip-high"),
        ("--use-kl-loss", Former("--kl-loss-coef", "above 0 turns it on")),
        _same("--kl-loss-coef", default="0"),
        _same("--kl-loss-type", default="k1"),
        _same("--use-unbiased-kl"),
        _same("--ref-update-interval", "counts rollouts"),
        _same("--entropy-coef", default="0"),
        ("--calculate-per-token-loss", Former("--loss-aggregation", "`token_mean`, the default")),
        _same("--use-rollout-logprobs"),
        _same("--use-opsm"),
        _same("--opsm-delta", default="1e-4"),
        ("--colocate", Former("", "the engine always shares the trainer's devices")),
        _same("--update-weight-buffer-size", "for servers; other engines take weights layer by layer", "512 MiB"),
        _same("--prompt-data", "JSONL, parquet, a `datasets` name, or `reasoning_gym:<task>`"),
        _same("--input-key"),
        _same("--label-key"),
        _same("--apply-chat-template", "on by default; `--no-apply-chat-template` turns it off"),
        _same("--rollout-shuffle", "on by default"),
        _same("--rollout-max-prompt-len"),
        _same("--rollout-top-p", "the trainer scores among the same tokens", "1.0"),
        _same("--rollout-top-k", "the trainer scores among the same tokens", "-1"),
        _same("--rollout-seed"),
        (
            "--dynamic-sampling-filter-path",
            Former("--dynamic-sampling", "keeps groups whose rewards differ by more than --min-group-spread"),
        ),
        (
            "--over-sampling-batch-size",
            Former("--dynamic-sampling", "it asks for more in rounds, as many as are probably missing"),
        ),
        _same("--eval-prompt-data", "without it, rows of --prompt-data are held out"),
        _same("--eval-interval", "counts rollouts"),
        _same("--n-samples-per-eval-prompt"),
        ("--custom-rm-path", Former("--reward", "`package.module:function`")),
        ("--custom-generate-function-path", Former("--environment", "`package.module:Class`, for turns and tools")),
        ("--debug-rollout-only", Former("", _NOT_YET)),
        ("--debug-train-only", Former("", "`--algorithm sft` trains without rollouts")),
    ]
)
