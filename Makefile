# One virtual environment, made on demand. Every target sets up what it needs and can be repeated.
#
#   make demo    a real language model, eager and with backend="bcg", compared token by token
#   make test    the tests (those marked gpu only where there is a GPU), JOBS processes at a time
#   make check   formatting, lint, types
#   make clean   remove the environment and everything built
#
# Variables: PYTHON (3.10 or newer), VENV, TORCH (the requirement to install), ARGS (for demo or pytest), JOBS.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# A test process takes about 2 GB. One at a time on a GPU, which they would share.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -gt 4 ] && n=4; echo $$n)
BIN := $(VENV)/bin

# Without a GPU the version is exact: a range can resolve to a CUDA build of several gigabytes. It is installed
# before the package, whose own range is then satisfied already.
ifeq ($(shell nvidia-smi -L >/dev/null 2>&1 && echo yes),yes)
TORCH ?= torch>=2.11,<2.15
MARKS :=
JOBS := 1
else
TORCH ?= torch==2.13.0
MARKS := -m "not gpu"
endif

# The demo and the tests use local files only; nothing may wait for a model hub.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format clean

help:
	@sed -n '3,8p' Makefile | cut -c 3-

$(VENV)/.torch: Makefile
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install -e ".[demo,test,dev]"
	@touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/python -m torch_graph_backend demo $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(MARKS) $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	tools/typecheck $(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
