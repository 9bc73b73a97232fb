# Everything runs in $(VENV), which is made and kept up to date by itself. Variables: VENV, PYTHON(S), CONSTRAINTS, JOBS, KILLS.

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
JOBS ?= auto
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
SOURCES := pyproject.toml $(wildcard constraints*.txt)

.DEFAULT_GOAL := help
.PHONY: help demo install test test-all test-newest defects faults bench lint docs dist clean

help:
	@echo 'make demo       real digits on all devices: a CNN split over 100 clients, an ensemble of networks'
	@echo 'make test       the tests of every day: some five minutes on two cores'
	@echo 'make test-all   all tests, with their coverage: for nights and releases'
	@echo 'make defects    break the package on purpose, some seventy times: does make test notice?'
	@echo 'make faults     for nights: kills, full disks and failing processes; docs/reliability.md gets the table'
	@echo 'make install    $(VENV) with everything that tests, examples, benchmarks and documentation need'
	@echo 'make bench      every benchmark in turn; benchmarks/README.md gets the figures'
	@echo 'make lint       ruff, pyright, import contract, and what type checkers say of users'\'' code'
	@echo 'make docs       the documentation, into site/, and what is wrong with it'
	@echo 'make dist       for releases: wheel and sdist, into dist/, each extra installed; PYTHONS=... for others'
	@echo 'make clean      remove $(VENV) and everything built'

demo: $(VENV)/.demo
	$(BIN)/paraxis demo

install: $(VENV)/.dev

# What tests import, and processes that they start, is compiled once. Workers take tests from each other at the end.
test test-all test-newest: export PYTHONDONTWRITEBYTECODE :=
PYTEST := pytest -n $(JOBS) --dist worksteal

test: $(VENV)/.dev
	$(BIN)/python -m $(PYTEST) -m "not slow"

test-all: $(VENV)/.dev
	rm -rf out/coverage
	$(BIN)/coverage run -m $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# What .ci/run does on the newest Python and JAX.
test-newest: $(VENV)/.dev
	$(BIN)/python -m $(PYTEST) -m "page or newest and not slow"

defects: $(VENV)/.dev
	$(BIN)/python -m tests.defects

KILLS ?= 200

faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults --kills $(KILLS)

bench: $(VENV)/.dev
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file --save || exit 1; done

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m tests.types

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# PYTHONS='python3.11 python3.12' installs for these.
dist: | $(BIN)/python
	$(BIN)/python -m tests.packaging $(addprefix --python ,$(PYTHONS))

clean:
	rm -rf $(VENV) site build dist out .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The demo needs a fraction of what development needs, so it has a stamp of its own.
$(VENV)/.demo: $(SOURCES) | $(BIN)/python
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $(VENV)/.demo $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'Paraxis needs Python 3.11 or later; write make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
