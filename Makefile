# The Python that makes the environment; everything else happens inside it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt
RUNS ?= runs/digits

.PHONY: help venv quickstart test check bench soak-short soak clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.torch  ## make the virtual environment, with torch

# One stamp file for each set of packages: made again when what it lists has changed.
$(VENV)/.torch: constraints-dev.txt
	@echo 'Installing into $(VENV); this takes a minute or two.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $@

$(VENV)/.examples $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[$*]'
	@touch $@

quickstart: $(VENV)/.examples  ## train the digits example, then say where its dashboard is
	$(BIN)/python examples/digits.py --root $(RUNS)
	@echo
	@echo 'The dashboard, with this run and earlier ones:'
	@echo '  $(BIN)/tensorboard --logdir $(RUNS)'

test: $(VENV)/.dev  ## run the tests
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

check: $(VENV)/.dev  ## lint, formatting, types, import floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.bench  ## microseconds per step, import time, memory, saving, triggers
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/triggers.py
	$(BIN)/python benchmarks/checkpoint.py

soak-short: $(VENV)/.dev  ## kill a training 100 times at random instants; 4.5 minutes, more on a busy machine
	$(BIN)/python benchmarks/soak.py --kills 100 --name soak_short

soak: $(VENV)/.dev  ## the same 1,000 times; not timed, some 45 minutes by soak-short
	$(BIN)/python benchmarks/soak.py --kills 1000

clean:  ## remove the environment and what tools have left
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
