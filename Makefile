# Everything a person runs here. CI runs `make test`, the same line.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One thread per process: engine and trainer are separate processes, and spinning threads starve each other.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv quickstart test check slow gpu bench docs clean

help: ## this list
	@sed -nE 's/^([a-z ]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14

venv: $(VENV)/.dev ## .venv with everything that the tests need

quickstart: $(VENV)/.torch ## from a clean clone to a trained policy
	$(BIN)/rollwright train examples/records.toml

test: $(VENV)/.dev ## lint, format, types, tests: what CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow and not gpu" -n auto --dist loadfile

check: $(VENV)/.dev ## the quick part: lint, types, who imports whom
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_imports.py

slow gpu: $(VENV)/.dev ## the tests with that mark
	$(BIN)/pytest -m $@ || [ $$? -eq 5 ] # 5: no test has the mark yet

bench: $(VENV)/.dev ## every benchmark, in its quick form
	$(BIN)/python benchmarks/learning.py --quick
	$(BIN)/python benchmarks/learning.py --quick --control
	$(BIN)/python benchmarks/learning.py --quick --tasks atlas
	$(BIN)/python benchmarks/modes.py --quick
	$(BIN)/python benchmarks/crash.py --quick
	$(BIN)/python benchmarks/trace.py --quick
	$(BIN)/python benchmarks/engine.py --quick
	$(BIN)/python benchmarks/prefix.py --quick
	$(BIN)/python benchmarks/long_context.py --quick
	$(BIN)/python benchmarks/grammar.py --quick
	$(BIN)/python benchmarks/planner.py --quick
	$(BIN)/python benchmarks/sandbox.py --quick
	$(BIN)/python benchmarks/sandbox_abuse.py
	$(BIN)/python benchmarks/sandbox_leaks.py --quick

docs: $(VENV)/.docs ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what make made; runs/ stays
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra, each on top of the one before, so that `make -j` never runs pip twice at once.
$(VENV)/.dev: $(VENV)/.torch
$(VENV)/.docs: $(VENV)/.dev
$(VENV)/.torch $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing rollwright[$*] into $(VENV) ..."
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Rollwright needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "'$(PYTHON)' is $$($(PYTHON) -V 2>&1). Rollwright needs Python 3.11 or newer; name one with: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
