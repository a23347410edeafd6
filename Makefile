# On a fresh machine with python3, venv and make: `make install`, `make test`, `make quickstart`.
PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.core
INSTALLED := .venv/.installed
# Bytes are compiled when a module is first used: compiling all of torch takes longer than installing it.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable

.PHONY: install test check format lint types quickstart bench clean

install: $(INSTALLED)

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) ".[plots,fast]"
	touch $@

$(INSTALLED): $(CORE)
	$(PIP) ".[dev]"
	touch $@

# One thread a worker: the tests are many and small.
test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

check: format lint types test

format: install
	$(BIN)/ruff format --check .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/pyright

quickstart: $(CORE)
	$(BIN)/softmoe quickstart

bench: install
	$(BIN)/softmoe bench layer
	$(BIN)/softmoe bench model

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
