# fsdptrain on CUDA. CI does not build the image.
#
#     docker build -t fsdptrain .                    # trainer and vLLM in one environment
#     docker build -t fsdptrain --target trainer .   # without vLLM: tensor and expert parallelism need a newer transformers
#     docker build -t fsdptrain --target servers .   # that, and vLLM in /opt/vllm, for --rollout-server-python
#     docker build -t fsdptrain --target flash .     # the first one, and flash-attn
#     docker run --gpus all --ipc=host -v ~/.cache/huggingface:/root/.cache/huggingface \
#         -v "$PWD/runs:/workspace/fsdptrain/runs" fsdptrain --recipe recipes/gsm8k_qwen3_4b.yaml
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS base

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace/fsdptrain
RUN python3 -m venv /opt/fsdptrain
ENV VIRTUAL_ENV=/opt/fsdptrain PATH=/opt/fsdptrain/bin:$PATH
ENTRYPOINT ["fsdptrain"]
CMD ["--help"]

# The tested versions, without vLLM, which allows only older ones of transformers.
FROM base AS trainer
ARG EXTRAS=agents,liger,lora,qlora,tensorboard,torchao,trackio,vision,wandb
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

FROM trainer AS servers
RUN python3 -m venv /opt/vllm
RUN /opt/vllm/bin/pip install --no-cache-dir vllm==0.32.0
RUN /opt/vllm/bin/pip install --no-cache-dir --no-deps .

# vLLM pins torch, and allows a range of transformers, in which pip finds what fsdptrain allows too.
FROM base AS vllm
ARG EXTRAS=agents,liger,lora,qlora,tensorboard,torchao,trackio,vision,wandb
RUN pip install --no-cache-dir vllm==0.32.0
COPY . .
RUN pip install --no-cache-dir vllm==0.32.0 ".[vllm,${EXTRAS}]"

# setup.py of flash-attn imports torch, so it is built in this environment. It downloads a wheel for these versions of
# torch, CUDA and Python if its authors have built one, and else compiles with nvcc, which takes an hour.
FROM vllm AS flash
RUN pip install --no-cache-dir ninja packaging setuptools wheel
RUN MAX_JOBS=8 pip install --no-cache-dir --no-build-isolation "flash-attn>=2.8"

FROM vllm
