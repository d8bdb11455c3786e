"""Run the trainer from Python. Keyword arguments are the flags of the command line, with underscores.

python examples/python_api.py Qwen/Qwen3-0.6B runs/python_api
"""

import sys

from fsdptrain import Config, Trainer


def main(hf_checkpoint: str, output_dir: str, **flags: object) -> None:
    config = Config(
        hf_checkpoint=hf_checkpoint,
        output_dir=output_dir,
        prompt_data="reasoning_gym:gsm_symbolic",
        **{"num_rollout": 20, "rollout_batch_size": 16, "rollout_max_response_len": 512, **flags},
    )
    summary = Trainer(config).fit()
    print({name: value for name, value in summary.items() if name.startswith("eval/")})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} MODEL OUTPUT_DIR")
    main(*sys.argv[1:])
