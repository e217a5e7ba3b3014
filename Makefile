# Each target works on a fresh machine with Python 3.11, pip and make: it creates .venv, installs, and does its whole job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# How many processes run tests at a time, each with one thread; the tests of a file stay in one of them (pyproject.toml).
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS)

.PHONY: demo test test-slow fuzz lint types format docs clean

demo: $(INSTALLED)
	$(BIN)/bsi demo

test: lint types
	$(PYTEST)

test-slow: $(INSTALLED)
	$(PYTEST) -m slow

# Thousands of damaged inputs and command lines, with a new seed each time: `make fuzz CASES=10000 SEED=3`.
CASES ?= 3000
SEED ?= $(shell date +%s)
fuzz: $(INSTALLED)
	BSI_FUZZ_CASES=$(CASES) BSI_FUZZ_SEED=$(SEED) $(PYTEST) -m "slow or not slow" tests/fuzz

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python docs/make_api.py
	$(BIN)/mkdocs build --strict

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Reinstalls only when what is to be installed has changed; the package itself is installed in place.
$(INSTALLED): pyproject.toml networks/pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" --editable ./networks
	$(BIN)/python -m pip install --quiet --no-deps azula  # without torchvision, which it does not need here
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
