"""Train on a GPU of Modal (https://modal.com): in the root of the repository,

    pip install modal && modal setup
    modal run --detach examples/modal/train.py [--options "--lr 2e-6"]

The volume `fsdptrain-runs` keeps checkpoints and the exported model: the same command resumes the run.
`modal volume get fsdptrain-runs /gsm8k_qwen3_4b/hf my-model` downloads the model.
"""

import shlex
import subprocess

import modal

COMMAND = "fsdptrain --recipe gsm8k_qwen3_4b --output-dir /runs/gsm8k_qwen3_4b"
GPU = "H100"  # "H100:8" for eight

image = (
    modal.Image.from_registry("nvidia/cuda:13.0.2-devel-ubuntu24.04", add_python="3.12")
    .run_commands("pip install vllm==0.32.0")
    .add_local_dir(".", "/workspace/fsdptrain", copy=True, ignore=[".git", ".venv*", "runs"])
    .run_commands("cd /workspace/fsdptrain && pip install vllm==0.32.0 '.[vllm]'")
)
app = modal.App("fsdptrain", image=image)
runs = modal.Volume.from_name("fsdptrain-runs", create_if_missing=True)
hub = modal.Volume.from_name("huggingface", create_if_missing=True)


@app.function(gpu=GPU, timeout=24 * 60 * 60, volumes={"/runs": runs, "/root/.cache/huggingface": hub})
def train(options: str) -> None:
    subprocess.run([*shlex.split(COMMAND), *shlex.split(options)], cwd="/workspace/fsdptrain", check=True)


@app.local_entrypoint()
def main(options: str = "") -> None:
    train.remote(options)
