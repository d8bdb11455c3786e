# fsdptrain on CUDA. CI does not build it.
#
#     docker build -t fsdptrain .
#     docker run --gpus all --ipc=host -v ~/.cache/huggingface:/root/.cache/huggingface \
#         -v "$PWD/runs:/workspace/fsdptrain/runs" fsdptrain --hf-checkpoint Qwen/Qwen3-4B
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/fsdptrain PATH=/opt/fsdptrain/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV

WORKDIR /workspace/fsdptrain
COPY constraints.txt pyproject.toml README.md ./
COPY recipes ./recipes
COPY fsdptrain ./fsdptrain
# torch first: everything else is resolved against it. vLLM brings its own pins, so it comes last and may be left out.
ARG EXTRAS=liger,lora,wandb,trackio,plot
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0 \
    && pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
COPY examples ./examples

ENTRYPOINT ["fsdptrain"]
CMD ["--help"]
