# make test   every check that a change must pass (what .ci/run runs)
# make demo   a tour: emulated datacenters, a plan, a simulation, a short training run
# make lint   the checks without the tests: style, types, module floors
# make format fix in place what can be fixed
# Needs Python 3.11 or 3.12, make and gcc; no root. PYTHON=/path/to/python chooses the interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := hybridep planner runtime simulator tests experiments

.PHONY: help venv test lint format demo clean

help:
	@sed -n 's/^# //p' Makefile | head -4

venv: $(STAMP)

# Each candidate is executed: a name on PATH may be a version-manager shim without that version behind it.
# ensurepip is asked for because some distributions split it (and so venv) into a package of their own.
$(STAMP): pyproject.toml
	@if ! $(BIN)/python -c 'import pip' >/dev/null 2>&1; then \
	  found=; \
	  for candidate in $(PYTHON) python3.12 python3.11 python3 /usr/bin/python3.12 /usr/bin/python3.11 /usr/bin/python3; do \
	    if "$$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; then \
	      found=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'make: no Python 3.11 or 3.12 with venv found: install one (Debian: python3-venv), or PYTHON=/path/to/python make' >&2; \
	    exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo 'installing hybridep and its development tools (minutes on the first run)'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

test: lint
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

demo: $(STAMP)
	@$(BIN)/hybridep demo

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
