# Everything runs from a virtual environment that the first target sets up.
#   make tune GPU=H100    tune for a GPU: on it, or statically where there is none
#   make test             lint and the test suite
#   make setup | lint | format | generate | docs | clean    see CONTRIBUTING.md
# Variables: PYTHON (>= 3.10), VENV_FLAGS, TORCH, PIP_FLAGS, GPU, ARGS, PYTEST_FLAGS. To use the torch of
# an existing Python:  make tune PYTHON=/path/to/python3 VENV_FLAGS=--system-site-packages

PYTHON ?= python3
VENV_FLAGS ?=
# Whichever build of it pip is configured to find; installed first, so that nothing else decides.
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
GPU ?=
ARGS ?=
PYTEST_FLAGS ?= -n auto --maxprocesses 8 --dist loadgroup

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup lint format test tune generate docs clean $(VENV)

help:
	@sed -n 's/^#   //p' Makefile

setup $(VENV): $(STAMP)

$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "'$(PYTHON)' is not Python >= 3.10: name one, e.g. make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV_FLAGS) $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed: install the venv module of that Python (Debian: python3-venv)" >&2; exit 1; }
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(PIP_FLAGS) '$(TORCH)'
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

lint: $(STAMP)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

test: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(ARGS)

tune: $(STAMP)
	$(BIN)/replayssm-tune $(if $(GPU),--gpu '$(GPU)') $(ARGS)

generate: $(STAMP)
	$(BIN)/replayssm-tune generate --output generated $(ARGS)

# What documents say of records and code: figures, tables, the command line.
docs: $(STAMP)
	$(BIN)/python benchmarks/summary.py
	$(BIN)/python benchmarks/documents.py
	$(BIN)/python benchmarks/figure.py
	$(BIN)/python -m replayssm_tune.tuner.cli.reference docs/cli.md
	$(BIN)/python -m replayssm_tune.codegen.catalogue docs/*.md

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
