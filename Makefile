# Needs make and a Python of 3.11 or newer; everything else goes into .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types format deviceless clean

# The first of these that is new enough. 3.11 gets jax 0.10.1, 3.12 and newer get jax 0.12.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# At most eight: every process holds eight virtual devices.
PARALLEL := -n auto --maxprocesses=8 --dist=worksteal

help:
	@echo "make demo        train a small GPT, planned for 8 virtual CPU devices, and compare it with plain jax.jit"
	@echo "make test        the tests          make test-all    the whole matrix"
	@echo "make lint        format, style, import order          make types       pyright"
	@echo "make deviceless  install XLA's GPU compiler (1.1 GB)  make clean       remove .venv and caches"

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "no python3 of 3.11 or newer found; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of packages: newer than pyproject.toml means installed.
$(VENV)/.stamp: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/.stamp

$(VENV)/.stamp-deviceless: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e '.[deviceless]'
	@touch $@ $(VENV)/.stamp

demo: $(VENV)/.stamp
	$(BIN)/python -m autoshard.demo

# Whole programs: a check of every call at run time would make planning them several times slower.
PROGRAMS := tests/test_zoo.py tests/test_cases.py tests/test_demo.py tests/test_numerics.py tests/test_dispatch.py \
	tests/test_memory_limit.py tests/test_microbatches.py tests/test_pipeline.py tests/test_simulator_speed.py \
	tests/test_one_program.py tests/test_processes.py tests/test_checkpoints.py tests/test_stage_search.py \
	tests/test_slow_network.py tests/test_pipeline_network.py tests/test_pipeline_memory.py tests/test_pipeline_custom_calls.py tests/test_sums_apart.py \
	tests/costmodel/test_memory.py tests/search/test_collective_bytes.py tests/zoo
PROGRAMS := $(wildcard $(PROGRAMS))
# jaxtyping and beartype check every function and dataclass of autoshard (STYLE 9).
CHECKED := --jaxtyping-packages=autoshard,tools.typecheck.checked $(PROGRAMS:%=--ignore=%)

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(PARALLEL) $(CHECKED) tests
	$(BIN)/python -m pytest $(PARALLEL) $(PROGRAMS)

test-all: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(PARALLEL) --full $(CHECKED) tests
	$(BIN)/python -m pytest $(PARALLEL) --full $(PROGRAMS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/import_order.py

types: $(VENV)/.stamp-dev
	$(BIN)/pyright

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

deviceless: $(VENV)/.stamp-deviceless

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .benchmarks build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
