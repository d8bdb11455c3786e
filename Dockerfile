# fsdptrain on CUDA. CI does not build the image.
#
#     docker build -t fsdptrain .                    # trainer and vLLM in one environment
#     docker build -t fsdptrain --target trainer .   # without vLLM, and a newer transformers
#     docker build -t fsdptrain --target servers .   # that, and vLLM in /opt/vllm, for --rollout-server-python
#     docker build -t fsdptrain --target flash .     # the first one, and flash-attn
#     mkdir -p runs ~/.cache/huggingface
#     docker run --gpus all --ipc=host --user "$(id -u):$(id -g)" -v ~/.cache/huggingface:/cache/huggingface \
#         -v "$PWD/runs:/workspace/fsdptrain/runs" fsdptrain --recipe gsm8k_qwen3_4b
#
# The user is 1000 without --user. Files of the hub and compiled kernels go to /cache.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/fsdptrain && mkdir -p /cache /workspace/fsdptrain && chmod 1777 /cache /workspace/fsdptrain
ENV VIRTUAL_ENV=/opt/fsdptrain PATH=/opt/fsdptrain/bin:$PATH PIP_NO_CACHE_DIR=1
ENV HOME=/cache HF_HOME=/cache/huggingface USER=trainer
WORKDIR /workspace/fsdptrain
ENTRYPOINT ["fsdptrain"]
CMD ["--help"]

# What pip needs to install the dependencies, and no source: a change of the source does not install them again.
FROM base AS metadata
COPY pyproject.toml ./
COPY fsdptrain/__init__.py fsdptrain/
RUN touch README.md LICENSE

# The tested versions, without vLLM, which allows only older ones of transformers.
FROM metadata AS trainer
ARG EXTRAS=agents,liger,lora,qlora,tensorboard,torchao,trackio,vision,wandb
COPY constraints/tested.txt /opt/constraints.txt
RUN pip install --constraint /opt/constraints.txt torch==2.13.0
RUN pip install --constraint /opt/constraints.txt ".[${EXTRAS}]"
COPY . .
RUN pip install --no-deps --force-reinstall .
USER 1000:1000

FROM trainer AS servers
USER root
RUN python3 -m venv /opt/vllm
RUN /opt/vllm/bin/pip install vllm==0.32.0
RUN /opt/vllm/bin/pip install --no-deps .
USER 1000:1000

# vLLM pins torch, and allows a range of transformers, in which pip finds what fsdptrain allows too.
FROM metadata AS vllm
ARG EXTRAS=agents,liger,lora,qlora,tensorboard,torchao,trackio,vision,wandb
RUN pip install vllm==0.32.0
RUN pip install vllm==0.32.0 ".[vllm,${EXTRAS}]"
COPY . .
RUN pip install --no-deps --force-reinstall .
USER 1000:1000

# setup.py of flash-attn imports torch, so it is built in this environment. It downloads a wheel for these versions of
# torch, CUDA and Python if its authors have built one, and else compiles with nvcc, which takes an hour.
FROM vllm AS flash
USER root
RUN pip install ninja packaging setuptools wheel
RUN MAX_JOBS=8 pip install --no-build-isolation "flash-attn>=2.8"
USER 1000:1000

FROM vllm
