# On a fresh machine with python3, venv and make: `make install`, `make test`, `make quickstart`.
PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.core
INSTALLED := .venv/.installed
# Bytes are compiled when a module is first used: compiling all of torch takes longer than installing it.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable

.PHONY: install test test-slow test-plain check format lint types fuzz fuzz-short quickstart bench docs gpu-smoke clean

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

# What takes half a minute and more each, most of it starting processes: about ten minutes.
test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -m slow

# The same numbers without anything of softmoe.accelerate: what has a plain and a fast form, in a few minutes.
test-plain: install
	SOFTMOE_ACCELERATE=off OMP_NUM_THREADS=1 $(BIN)/pytest -n auto tests/moe tests/accelerate/test_techniques.py \
		tests/inference/test_prepare.py tests/train/test_loop.py

check: format lint types docs test test-plain fuzz-short

format: install
	$(BIN)/ruff format --check .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/pyright

# Damaged and hostile inputs, two minutes of them; `make fuzz` tries 100,000 and can be stopped and started again.
fuzz-short: install
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py --inputs 100000 --seconds 120

fuzz: install
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py --inputs 100000 --seconds 14400 --resume fuzz.json

# The site, in build/docs. A warning is an error, and every link must lead somewhere.
docs: install
	rm -rf build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees docs build/docs
	$(BIN)/python tools/check_site.py build/docs

# About two minutes on the GPU of this machine, or on its processor; writes selftest.md.
gpu-smoke: $(CORE)
	$(BIN)/softmoe selftest

quickstart: $(CORE)
	$(BIN)/softmoe quickstart

# About ten minutes. `softmoe bench peers` takes as long again, and 16 GB.
bench: install
	mkdir -p runs/bench
	for what in layer model train infer routers data scaling; do \
		$(BIN)/softmoe bench $$what --seconds 5 --json runs/bench/$$what.json --plot runs/bench/$$what.png || exit 1; \
	done

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
