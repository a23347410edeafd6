# On a fresh machine with python3, venv and make: `make install`, `make test`, `make quickstart`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install test check format lint types quickstart bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
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

quickstart: install
	$(BIN)/softmoe quickstart

bench: install
	$(BIN)/softmoe bench layer
	$(BIN)/softmoe bench model

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
