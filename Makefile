PYTHON ?= python3
BIN := .venv/bin

.PHONY: install check test quick gpu demo clean

install: .venv/.installed  ## make .venv with the tested set of versions

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

check: install  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test: install  ## everything that runs without a GPU
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not gpu' --durations=15

quick: install  ## the fast part
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not gpu and not slow' --durations=5

gpu: install  ## what needs a GPU
	$(BIN)/pytest -m gpu

demo: install  ## warm up a small model, train it with GRPO, plot what happened: three minutes on two cores
	$(BIN)/python examples/quickstart/demo.py

clean:
	rm -rf .venv runs build dist *.egg-info
