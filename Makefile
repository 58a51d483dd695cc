# The Python that makes the environment; everything else happens inside it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt
RUNS ?= runs/digits
# Two workers more than cores, since many tests wait. Programs that tests start load sooner where bytecode may be kept.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $$(($$(getconf _NPROCESSORS_ONLN) + 2)) --maxprocesses 4 \
	--dist worksteal --durations 100 --durations-min 1
# Of make fuzz and make model: the inputs are made of the seed alone; READERS names some readers, by default all.
SEED ?= 0
COUNT ?= 1000
READERS ?=
# Of make gpu: which rows run, where (a rehearsal on the CPU uses the environment of `make test`), a folder of pure-Python
# wheels for packages that PYTHON lacks, and where the answers go.
PART ?= all
DEVICE ?= cuda
WHEELS ?=
OUT ?=
GPU_PYTHON = $(if $(filter cpu,$(DEVICE)),$(BIN)/python,$(PYTHON))
# torch_xla fits a torch of its own, so it has an environment of its own.
XLA_VENV ?= .venv-xla
# The trackers bring 250 packages, some of them older than those of the other tests.
TRACKERS_VENV ?= .venv-trackers
NEWEST_VENV ?= .venv-newest
NEWEST_PYTHON ?= python3.13
OLDEST_VENV ?= .venv-oldest
OLDEST_PYTHON ?= python3.10
XLA_PIP := $(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
TRACKERS_PIP := $(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TRACKERS_VENV)/constraints.txt

.PHONY: help venv quickstart test test-all check fuzz model test-xla venv-xla test-trackers venv-trackers test-oldest test-newest docs release-check bench bench-quick gpu soak-short soak longhaul clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.torch  ## make the virtual environment, with torch

# One stamp file for each set of packages: made again when what it lists has changed.
$(VENV)/.torch: constraints-dev.txt
	@echo 'Installing into $(VENV); this takes a minute or two.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $@

$(VENV)/.examples $(VENV)/.test $(VENV)/.docs $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[$*]'
# timm and litdata want torchvision, whose wheels fit a torch with CUDA only; tests/helpers/no_torchvision.py stands in
# for it in timm, and litdata does without.
	$(if $(filter %.dev,$@),$(PIP) --no-deps timm litdata)
	@touch $@

quickstart: $(VENV)/.examples  ## train the digits example, then say where its dashboard is
	$(BIN)/python examples/digits.py --root $(RUNS)
	@echo
	@echo 'The dashboard, with this run and earlier ones:'
	@echo '  $(BIN)/tensorboard --logdir $(RUNS)'

test: $(VENV)/.test  ## run the tests, but for those of the benchmarks, campaigns of kills, large packages, of SLURM, MPI and a browser
	$(PYTEST) -m 'not extras'
	@echo 'Left out: the benchmarks in miniature, the rehearsal of make gpu, very long runs, campaigns of kills, further cases of long tests on several processes, the blocks of the guides in docs/scale and docs/command, comparisons with Accelerate, and what needs deepspeed, Hydra, ray, transformers, bitsandbytes, datasets, litdata, a C++ compiler, the packages of the recipes, SLURM, MPI, a browser or a notebook kernel (make test-all), torch_xla (make test-xla), and trackers (make test-trackers).'

test-all: $(VENV)/.dev  ## run what make test leaves out
	$(PYTEST) -m extras tests

docs: $(VENV)/.docs  ## build the site into docs/_build/html: a warning or a dead link is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

release-check: $(VENV)/.dev  ## build sdist and wheel, and try them in fresh environments of three Pythons; 15 minutes, GBs
	$(PIP) build twine
	$(BIN)/python scripts/release_check.py

check: $(VENV)/.dev  ## lint, formatting, types, import floors, budgets
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python scripts/budgets.py

fuzz: $(VENV)/.dev  ## damaged and hostile inputs for every reader: make fuzz SEED=7 COUNT=1000
	$(BIN)/python -m tests.fuzz $(READERS) --seed $(SEED) --count $(COUNT)

model: $(VENV)/.test  ## random runs against the model of a run: make model SEED=7 COUNT=10000
	$(BIN)/python -m tests.model_runs --seed $(SEED) --count $(COUNT)

test-xla: $(XLA_VENV)/.ready  ## run the tests that need torch_xla, on the CPU
	PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest -q tests/strategies/test_xla.py

venv-xla: $(XLA_VENV)/.ready  ## make the environment of test-xla: a download of 1 GB, 2.3 GB on disk

# What torch and torch_xla need beside CUDA is listed here, since they are installed without their dependencies.
$(XLA_VENV)/.ready: constraints-xla.txt scripts/cuda_stand_ins.py
	@echo 'Installing into $(XLA_VENV); this takes a minute or two.'
	test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_PIP) --no-deps -r constraints-xla.txt
	$(XLA_PIP) --no-deps -e .
	$(XLA_PIP) -c constraints-dev.txt numpy rich safetensors xxhash hypothesis pytest pytest-timeout \
		absl-py filelock fsspec jinja2 networkx pyyaml requests sympy typing_extensions
	$(XLA_VENV)/bin/python scripts/cuda_stand_ins.py
	@touch $@

test-trackers: $(TRACKERS_VENV)/.ready  ## run the tests of each tracker: stopped, resumed and read back
	PYTHONDONTWRITEBYTECODE= $(TRACKERS_VENV)/bin/python -m pytest -q -n 2 --dist worksteal -m trackers tests/loggers

venv-trackers: $(TRACKERS_VENV)/.ready  ## make the environment of test-trackers, 1.5 minutes

$(TRACKERS_VENV)/.ready: pyproject.toml constraints-dev.txt
	@echo 'Installing into $(TRACKERS_VENV); this takes a minute or two.'
	test -x $(TRACKERS_VENV)/bin/python || $(PYTHON) -m venv $(TRACKERS_VENV)
	grep -v '^pyarrow=' constraints-dev.txt > $(TRACKERS_VENV)/constraints.txt  # mlflow 3.17 takes none of 26
	$(TRACKERS_PIP) torch
	$(TRACKERS_PIP) -e '.[trackers,examples]' hypothesis playwright pytest pytest-timeout pytest-xdist
	@touch $@

test-oldest: $(OLDEST_VENV)/.ready  ## run the tests with the oldest versions that pyproject.toml allows, on Python 3.10
	PYTHONDONTWRITEBYTECODE= $(OLDEST_VENV)/bin/python -m pytest -q -n 3 --dist worksteal -m 'not extras'

# PyPI's torch wants 3 GB of CUDA packages; cuda_stand_ins.py makes it run without them.
$(OLDEST_VENV)/.ready: constraints-oldest.txt pyproject.toml scripts/cuda_stand_ins.py
	@echo 'Installing into $(OLDEST_VENV); this takes some minutes.'
	test -x $(OLDEST_VENV)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt --no-deps torch
	$(OLDEST_VENV)/bin/python scripts/cuda_stand_ins.py
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[test]'
	$(OLDEST_VENV)/bin/python -m pip uninstall --quiet --yes torchao  # needs torch 2.10
	@touch $@

test-newest: $(NEWEST_VENV)/.ready  ## run the tests with the newest versions that there are, on the newest Python
	PYTHONDONTWRITEBYTECODE= $(NEWEST_VENV)/bin/python -m pytest -q -n 3 --dist worksteal -m 'not extras'

# Without the CUDA packages, as above.
$(NEWEST_VENV)/.ready: pyproject.toml scripts/cuda_stand_ins.py
	@echo 'Installing into $(NEWEST_VENV); this takes some minutes.'
	test -x $(NEWEST_VENV)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torch
	$(NEWEST_VENV)/bin/python scripts/cuda_stand_ins.py
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

bench: $(VENV)/.bench  ## all benchmarks, for hours, and docs/reference/benchmarks.md made of their results
	$(BIN)/python benchmarks/suite.py

bench-quick: $(VENV)/.bench  ## whether all benchmarks run; some minutes, the figures mean nothing
	$(BIN)/python benchmarks/suite.py --quick

gpu: $(if $(filter cpu,$(DEVICE)),$(VENV)/.test)  ## rows on one GPU, 8 minutes a part: make gpu PART=tests|speed|memory|precision|saves|faults|all; DEVICE=cpu rehearses
	$(GPU_PYTHON) benchmarks/gpu/suite.py $(PART) --device $(DEVICE) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT))

soak-short: $(VENV)/.dev  ## kill a training 100 times at random instants; 4.5 minutes, more on a busy machine
	$(BIN)/python benchmarks/soak.py --kills 100 --name soak_short

soak: $(VENV)/.dev  ## the same 1,000 times; 19 to 60 minutes, by how busy the machine is
	$(BIN)/python benchmarks/soak.py --kills 1000

longhaul: $(VENV)/.dev  ## run long, save, kill and log often: nothing may grow; 20 minutes on 2 cores
	$(BIN)/python benchmarks/studies/longhaul.py

clean:  ## remove the environments and what tools have left
	rm -rf $(VENV) .venv-test $(XLA_VENV) $(TRACKERS_VENV) $(OLDEST_VENV) $(NEWEST_VENV) build dist docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
