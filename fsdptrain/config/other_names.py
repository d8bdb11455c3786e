"""Names of options elsewhere, for the advice after an unknown flag. docs/coming_from_slime.md lists those of slime."""

# Flags of TRL, transformers and slime -> equivalent flags here.
OTHER_NAMES = {
    "--learning-rate": "--lr",
    "--model": "--hf-checkpoint",
    "--model-name-or-path": "--hf-checkpoint",
    "--dataset": "--prompt-data",
    "--dataset-name": "--prompt-data",
    "--num-generations": "--n-samples-per-prompt",
    "--max-completion-length": "--rollout-max-response-len",
    "--max-prompt-length": "--rollout-max-prompt-len",
    "--max-steps": "--num-rollout",
    "--beta": "--kl-loss-coef",
    "--lmbda": "--opd-on-policy-fraction",
    "--use-kl-loss": "--kl-loss-coef",
    "--temperature": "--rollout-temperature",
    "--save": "--output-dir",
    "--load": "--resume",
    "--save-steps": "--save-interval",
    "--eval-steps": "--eval-interval",
    "--report-to": "--log-to",
    "--micro-batch-size": "--max-tokens-per-gpu",
    "--per-device-train-batch-size": "--max-tokens-per-gpu",
    "--overlong": "--overlong-samples",
    "--custom-rm-path": "--reward",
    "--custom-generate-function-path": "--environment",
}

_TORCHRUN = (
    "torchrun starts several machines: torchrun --nnodes N --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
    "HOST:29500 -m fsdptrain ..."
)
_TORCHRUN_FLAGS = "nnodes node-rank rdzv-backend rdzv-endpoint rdzv-id master-addr master-port node-timeout"
ADVICE = {f"--{name}": _TORCHRUN for name in _TORCHRUN_FLAGS.split()} | {
    "--network-interface": "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the environment",
    "--megatron-bridge": "it was removed, weights are always converted by the built-in table: leave it out",
}
