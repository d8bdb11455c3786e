# fsdptrain on CUDA. Build: docker build -t fsdptrain .   Run: docker run --gpus all --ipc=host fsdptrain --help
# Not built in CI: it has run only where somebody ran it.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/fsdptrain PATH=/opt/fsdptrain/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV

WORKDIR /workspace/fsdptrain
COPY constraints.txt pyproject.toml README.md ./
COPY fsdptrain ./fsdptrain
# torch first: everything else is resolved against it. vLLM brings its own pins, so it comes last and may be left out.
ARG EXTRAS=lora,wandb,trackio,plot
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0 \
    && pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
COPY recipes ./recipes
COPY examples ./examples

ENTRYPOINT ["fsdptrain"]
CMD ["--help"]
