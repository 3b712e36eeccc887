# make serve    set up, and serve the demo model on http://127.0.0.1:8000
# make quick    set up, and check what was touched
# make test     set up, and run all checks and tests
# make help     the other targets; CONTRIBUTING.md says what is run as `python -m tests.NAME`

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --no-color --no-input install --progress-bar off
SHOWN := $(PYTHON) configs/setup/progress.py
LOCKS := configs/locks
RESOLVE := uv pip compile pyproject.toml --universal --generate-hashes --extra build \
  --no-emit-index-url --no-header --no-annotate -q
MODEL ?= demo
PORT ?= 8000
# What continuous integration runs on a Mac, and the darwin rung under its rules. What a Mac charges
# for shared memory that nobody has mapped, which the tests of self-tests ask for, is not known here.
MAC_TESTS := tests/kvcache tests/metal_ext --ignore=tests/kvcache/selftest
# Tests of the gates' own tools, and what a gate does at length: make nightly runs them. Clients are
# a gate themselves.
TOOL_TESTS := tests/bench tests/docker tests/fuzz tests/install tests/metal \
  tests/abuse/test_programs.py
GATE_TESTS := tests/clients
COVERED := build/coverage
OUTPUT_SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
LEAST_COVERED := $(if $(filter Linux,$(shell uname -s)),100,0)
# One more than processors: many tests wait.
WORKERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
NATIVE := $(shell find metal_ext -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cmake' \
  -o -name '*.metal' -o -name CMakeLists.txt)

# Tests start hundreds of interpreters: each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup serve quick test test-mac test-tools check lint types-darwin types-linux imports \
  budget coverage nightly native metal clients page soak simulate schedules parity bench quality \
  boards lock clean

help:
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.built  ## create .venv and build the extension

serve: setup  ## serve the demo model; MODEL=... and PORT=... choose others
	$(BIN)/quire serve $(MODEL) --port $(PORT)

quick: lint imports  ## checks and tests of what was touched since main; ROOM=kvcache: of that room
	$(BIN)/mypy --platform linux
	$(BIN)/python -m tests.quick $(ROOM)

test: check coverage  ## checks, then all tests with coverage of the pure code

# mypy runs on one processor.
check: $(VENV)/.dev  ## formatting, lint, types, layers, budgets
	$(MAKE) --jobs=2 $(OUTPUT_SYNC) types-linux types-darwin lint imports budget

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# What a Mac runs: the product, and what MAC_TESTS names.
types-darwin: $(VENV)/.dev
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin \
	  server engine kvcache metal_ext tests/kvcache tests/metal_ext

types-linux: $(VENV)/.dev
	$(BIN)/mypy --platform linux
	MYPYPATH=configs/demo $(BIN)/mypy configs/demo/*.py
	MYPYPATH=configs/setup $(BIN)/mypy configs/setup/*.py
	MYPYPATH=docker/grafana $(BIN)/mypy docker/grafana/*.py

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

budget: $(VENV)/.dev
	$(BIN)/python -m tests.budget

# What only other systems run is not covered: Linux has the whole, and asks for it.
coverage: $(VENV)/.dev
	rm -rf $(COVERED) && mkdir -p $(COVERED)
	$(BIN)/python -m slipcover --json --out $(COVERED)/tests.json -m pytest \
	  -n $(WORKERS) --dist worksteal $(patsubst %,--ignore=%,$(GATE_TESTS) $(TOOL_TESTS))
	$(BIN)/python -m slipcover --merge $(COVERED)/*.json --out $(COVERED)/whole.json \
	  --fail-under $(LEAST_COVERED)

test-mac: check  ## the checks and tests that are known to be for a Mac, too
	$(BIN)/python -m pytest $(MAC_TESTS)

test-tools: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TOOL_TESTS)

nightly:  ## all that .ci/run leaves out: wheels, clusters, benches, all planted mistakes (hours)
	$(PYTHON) -m tests.gates nightly

native:  ## C++ tests: plain, ASan+UBSan, TSan
	$(MAKE) -C tests/native native

metal: $(VENV)/.dev  ## all that is known of Metal without a Mac; its rungs stand in tests/metal/Makefile
	$(MAKE) -C tests/metal lint mac-wheels kernels core graph darwin cross

clients: $(VENV)/.dev  ## SDKs, agents' traces and bodies from the schema against the server
	$(BIN)/python -m pytest -q tests/clients
	$(BIN)/python -m tests.clients $(CLIENTS)
	$(BIN)/python -m tests.clients.fuzz $(BODIES)
	$(BIN)/python -m tests.clients.traces $(AGENTS)

page: $(VENV)/.dev  ## the page in a real Chromium (installs it with apt); screenshots in build/page
	$(BIN)/python -m tests.page $(PAGE)

soak: $(VENV)/.dev  ## 1000 requests with random aborts through the real server
	$(BIN)/python -m tests.abuse.soak --requests 1000 $(SOAK)

simulate: $(VENV)/.dev  ## 10 000 seeded lives of the engine, switches at random; SIM=--states: one on for all
	$(BIN)/python -m tests.simulation $(SIM)

schedules: $(VENV)/.dev  ## 200 random schedules of each of three small models, compared bit by bit
	$(BIN)/python -m tests.engine.hybrid_schedules $(SCHEDULES)

parity: $(VENV)/.dev  ## greedy answers of random mixtures and hybrids against mlx-lm's, one table (minutes)
	$(BIN)/python -m tests.engine.models.parity $(PARITY)

bench: $(VENV)/.dev  ## quire beside its peer, one table
	$(BIN)/python -m tests.bench $(BENCH)

quality: $(VENV)/.dev  ## what rounded activations cost: divergence from float64 logits, one table (minutes)
	$(BIN)/python -m tests.bench.quality $(QUALITY)

boards: $(VENV)/.dev  ## write the boards' JSON again
	$(BIN)/python docker/grafana/dashboards.py

lock: $(VENV)/.dev  ## resolve the locks again; needs uv on the path
	$(RESOLVE) --upgrade -o $(LOCKS)/requirements.lock
	$(RESOLVE) --extra dev -c $(LOCKS)/requirements.lock -o $(LOCKS)/requirements-dev.lock
	$(RESOLVE) --extra cluster -c $(LOCKS)/requirements-dev.lock -o $(LOCKS)/requirements-cluster.lock
	$(MAKE) -C tests/metal/cross lock
	$(MAKE) -C tests/install lock

clean:  ## remove everything that was built
	rm -rf $(VENV) build

# --- how .venv comes to be ----------------------------------------------------------------------
# The locks carry versions and hashes. Hashes cannot cover the checkout itself, so it is installed
# after them, without dependencies, with the build tools that they brought.

$(VENV)/.locked: $(LOCKS)/requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("quire needs Python 3.11 or newer, \
	and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@echo "setup: fetches packages, then compiles quire: two to eight minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(SHOWN) --log $(VENV)/packages.log --lock $(LOCKS)/requirements.lock "packages, 0.5 GB on disk" -- \
	  $(PIP) --require-hashes -r $(LOCKS)/requirements.lock
	@touch $@

$(VENV)/.built: $(VENV)/.locked pyproject.toml $(NATIVE)
	@$(SHOWN) --log $(VENV)/compile.log "quire's own extension, one to four minutes" -- \
	  $(PIP) --verbose --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.cluster: $(VENV)/.dev $(LOCKS)/requirements-cluster.lock
	@$(SHOWN) --log $(VENV)/cluster.log --lock $(LOCKS)/requirements-cluster.lock "Ray, 0.3 GB on disk" -- \
	  $(PIP) --require-hashes -r $(LOCKS)/requirements-cluster.lock
	@touch $@

$(VENV)/.dev: $(VENV)/.built $(LOCKS)/requirements-dev.lock
	@$(SHOWN) --log $(VENV)/dev.log --lock $(LOCKS)/requirements-dev.lock "packages of checks and tests" -- \
	  $(PIP) --require-hashes -r $(LOCKS)/requirements-dev.lock
	@touch $@
