# Everything runs in $(VENV), which is made and kept up to date by itself, with the newest Python found.
# Variables: VENV, PYTHON(S), VERSIONS, CONSTRAINTS, JOBS, TESTS, KILLS.

VENV ?= .venv
JOBS ?= auto
# The first of these versions that is on PATH or under pyenv, or else whatever Python is there.
VERSIONS ?= 3.13 3.12 3.11
FOUND := $(foreach v,$(VERSIONS),python$(v) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(v).*/bin/python) python3 python
PYTHON ?= $(shell for p in $(FOUND); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

BIN := $(VENV)/bin
# The newest JAX needs Python 3.12.
CONSTRAINTS ?= constraints$(shell $(BIN)/python -c 'import sys; print("-floor" * (sys.version_info < (3, 12)))').txt
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
SOURCES := pyproject.toml $(wildcard constraints*.txt)

.DEFAULT_GOAL := help
.PHONY: help demo install test test-all defects faults bench lint types docs dist clean

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
	@echo 'make clean      remove $(VENV), .venv-floor and everything built'

demo: $(VENV)/.demo
	$(BIN)/paraxis demo

install: $(VENV)/.dev

# What tests import, and processes that they start, is compiled once. Workers take tests from each other at the end.
test test-all: export PYTHONDONTWRITEBYTECODE :=
PYTEST := pytest -n $(JOBS) --dist worksteal

TESTS ?= not slow

test: $(VENV)/.dev
	$(BIN)/python -m $(PYTEST) -m "$(TESTS)"

test-all: $(VENV)/.dev
	rm -rf out/coverage
	$(BIN)/coverage run -m $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

defects: $(VENV)/.dev
	$(BIN)/python -m tests.defects

KILLS ?= 200

faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults --kills $(KILLS)

# What benchmarks/bench_libraries.py looks at beside the libraries that tests need.
MORE := brax==0.14.2 dm-haiku==0.0.17 evosax==0.3.2 flowjax==19.1.2 mujoco-mjx==3.17.0 netket==3.23.0 tinygp==0.3.1

bench: $(VENV)/.dev
	$(PIP) $(MORE)
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file --save || exit 1; done

lint: $(VENV)/.dev floor-types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --no-cache

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m tests.types

# The same with the oldest JAX that is supported, as make floor-test; the types that pyright checks are that one's.
floor-%:
	@$(MAKE) --no-print-directory $* VENV=.venv-floor VERSIONS='3.11 3.12 3.13' CONSTRAINTS=constraints-floor.txt

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# PYTHONS='python3.11 python3.12' installs for these.
dist: | $(BIN)/python
	$(BIN)/python -m tests.packaging $(addprefix --python ,$(PYTHONS))

clean:
	rm -rf $(VENV) .venv-floor site build dist out .pytest_cache .ruff_cache .mypy_cache .hypothesis

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
