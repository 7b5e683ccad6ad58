# Two commands matter: `make demo` and `make test`. Everything else is a part of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On a machine with a GPU, the Python that has torch's CUDA build is used if `make setup` has made no .venv there.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu unit check bench bench-costs bench-gpu bench-recovery clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(BIN)/raytrain: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "raytrain_plus needs Python 3.10 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 ...)")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python cannot make virtual environments: install the package python3-venv"; exit 1; }
	@command -v g++ >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null || { echo "no C++ compiler: install the package g++ (Debian, Ubuntu) or gcc-c++ (Fedora)"; exit 1; }
	@command -v cmake >/dev/null || { echo "no cmake: install the package cmake"; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" || { echo "no Python.h: install the package python3-dev"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt "setuptools>=68,<81" wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.horovod: $(BIN)/raytrain $(wildcard raytrain_plus/install/*.py)
	$(BIN)/raytrain install-horovod
	@touch $@

setup: $(VENV)/.horovod  ## make .venv with everything in it, Horovod built

demo: setup  ## train a byte-level GPT, kill one of its workers half-way, and show what that cost
	$(BIN)/python -m examples.demo

unit: $(BIN)/raytrain  ## the pure tests, three minutes on two cores
	@# Without bytecode each process takes seconds to rewrite the assertions of all tests again.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests/unit -m "not slow" --numprocesses auto --dist worksteal

check: $(BIN)/raytrain  ## ruff, mypy, import-linter
	$(BIN)/ruff check raytrain_plus tests examples
	$(BIN)/ruff format --check raytrain_plus tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup check unit  ## set up, check, and run every test but the slow ones
	$(BIN)/python -m pytest tests/integration -m "not slow" --durations=15

test-slow: setup  ## the large counts
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=many --durations=15

# `make test-gpu GPU_TESTS=gpu` runs the large counts, too.
GPU_TESTS ?= gpu and not slow

test-gpu:  ## the tests that need a GPU; without one they are skipped
	$(GPU_PYTHON) -m pytest tests/unit/training/test_gpu.py -m "$(GPU_TESTS)" -rs -W default --durations=5
	@if $(GPU_PYTHON) -c 'import ray' 2>/dev/null; then \
	  RAY_AUTH_MODE=disabled $(GPU_PYTHON) -m pytest tests/integration/test_gpu_worlds.py tests/integration/test_gpu.py \
	    -m "$(GPU_TESTS)" -rs -s -W default --durations=5; \
	else echo "ray is not installed: the runs on a GPU are left out"; fi

bench: setup  ## steps per second beside torch DDP, a bare Horovod loop and a plain loop (20 minutes)
	RAY_AUTH_MODE=disabled $(BIN)/python -m tests.benchmarks.steps

bench-costs: setup  ## what Ray and the controller, exact sums, ledger, checkpoints and stages cost
	RAY_AUTH_MODE=disabled $(BIN)/python -m tests.benchmarks.costs
	$(BIN)/python -m tests.benchmarks.proof
	RAY_AUTH_MODE=disabled $(BIN)/python -m tests.benchmarks.checkpoints
	$(BIN)/python -m tests.benchmarks.pipeline

bench-gpu:  ## a step on one GPU beside a plain loop (8 minutes), and sums of two ranks; without a GPU it says so
	$(GPU_PYTHON) -m tests.benchmarks.gpu
	$(GPU_PYTHON) -m tests.benchmarks.gpu_sums

bench-recovery: setup  ## what the death of a worker costs, here and with the peers (an hour)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[peers]' --no-build-isolation
	RAY_AUTH_MODE=disabled $(BIN)/python -m tests.benchmarks.recovery
	RAY_AUTH_MODE=disabled $(BIN)/python -m tests.benchmarks.recovery --model 25m --kills 10 --peers 4

clean:  ## remove what was made here
	rm -rf $(VENV) runs data build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
