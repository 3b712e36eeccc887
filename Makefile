# make serve    set up, and serve the demo model on http://127.0.0.1:8000
# make quick    set up, and check what was touched
# make test     set up, and run all checks and tests
# make help     everything else

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --no-color --no-input install --progress-bar off
SHOWN := $(PYTHON) configs/setup/progress.py
MODEL ?= demo
PORT ?= 8000
# What continuous integration runs on a Mac, and make metal-darwin under its rules. What a Mac charges
# for shared memory that nobody has mapped, which the canary's tests ask, is not known here.
MAC_TESTS := tests/kvcache tests/metal_ext --ignore=tests/kvcache/canary
# Clients that are also tried behind the front of several models.
SEVERAL ?= anthropic_npm ollama_python openai_npm
# Half of the time of all tests, with those that are not traced: they would take three times as long,
# and run no line that others do not.
HALF := tests/server tests/property tests/metal
UNTRACED := tests/cluster tests/structured tests/fuzz
OUTPUT_SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
LEAST_COVERED := $(if $(filter Linux,$(shell uname -s)),100,0)
NATIVE := $(shell find metal_ext -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cmake' \
  -o -name '*.metal' -o -name CMakeLists.txt)

.PHONY: help setup serve quick test test-mac check lint types types-darwin types-linux imports coverage covered-half \
  covered-rest untraced bench llama-server quality parity soak cluster cluster-growth cluster-prompt swaps \
  abuse threats costs fuzz conversations schedules simulate \
  repeat structured clients page page-libraries page-picture native arm64 arm64-costs roofline prediction \
  mapping-points \
  metal metal-lint metal-kernels metal-core metal-graph \
  metal-darwin metal-cross metal-occupancy mac-wheels wheels headers wheel-root wheel-arm64 sdist docker docker-root \
  docker-cluster boards lock demo clean

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
check: $(VENV)/.dev  ## formatting, lint, types, layers
	$(MAKE) --jobs=2 $(OUTPUT_SYNC) types-linux types-darwin lint imports

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: types-linux types-darwin

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

# Two processes at a time, with about as much to do. A Mac's make mixes what they say.
# What only other systems run is not covered: Linux has the whole, and asks for it.
coverage: $(VENV)/.dev
	rm -f .coverage .coverage.*
	$(MAKE) --jobs=2 $(OUTPUT_SYNC) covered-half covered-rest untraced
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=$(LEAST_COVERED) --include='kvcache/*,engine/*,server/*'

covered-half:
	$(BIN)/coverage run --parallel-mode -m pytest $(HALF)

covered-rest:
	$(BIN)/coverage run --parallel-mode -m pytest --ignore=tests/clients \
	  $(patsubst %,--ignore=%,$(HALF) $(UNTRACED))

untraced:
	$(BIN)/python -m pytest $(UNTRACED)

test-mac: check  ## the checks and tests that are known to be for a Mac, too
	$(BIN)/python -m pytest $(MAC_TESTS)

bench: $(VENV)/.dev  ## quire beside its peer, one table
	$(BIN)/python -m tests.bench $(BENCH)

llama-server: $(VENV)/.dev  ## build bench's peer for every instruction set of this processor (minutes)
	$(BIN)/python -m tests.bench.llama $(LLAMA)

quality: $(VENV)/.dev  ## what rounded activations cost: divergence from float64 logits, one table (minutes)
	$(BIN)/python -m tests.bench.quality $(QUALITY)

parity: $(VENV)/.dev  ## greedy answers of random mixtures and hybrids against mlx-lm's, one table (minutes)
	$(BIN)/python -m tests.engine.models.parity $(PARITY)

abuse: $(VENV)/.dev  ## rude and honest clients for half an hour, a crowd of 1000, SIGTERM under load
	$(BIN)/python -m tests.abuse.crowd
	$(BIN)/python -m tests.abuse.shutdown
	$(BIN)/python -m tests.abuse.soak $(ABUSE)

threats: $(VENV)/.dev  ## threats, faults and former defects, each with the tests that hold it
	$(BIN)/python -m tests.abuse $(THREATS)

costs: $(VENV)/.dev  ## time and memory of bodies at half of every limit and at all of it
	$(BIN)/python -m tests.abuse.costs $(COSTS)

fuzz: $(VENV)/.dev  ## bodies of doubling sizes to a server that is watched; about a minute
	$(BIN)/python -m tests.fuzz $(FUZZ)

cluster: $(VENV)/.cluster  ## replicas on a real Ray, killed, stopped, full, cut off; CLUSTER="--only services"
	$(BIN)/python -m tests.cluster $(CLUSTER)

swaps: $(VENV)/.dev  ## three models in memory for one and a half, 100 loads, processes that are killed
	$(BIN)/python -m tests.abuse.swaps $(SWAPS)

soak: $(VENV)/.dev  ## 1000 requests with random aborts through the real server
	$(BIN)/python -m tests.soak $(SOAK)

conversations: $(VENV)/.dev  ## what agents' conversations compute again of a hybrid, in a table
	$(BIN)/python -m tests.bench.conversations $(CONVERSATIONS)

schedules: $(VENV)/.dev  ## 200 random schedules of a small hybrid, compared bit by bit
	$(BIN)/python -m tests.engine.hybrid_schedules $(SCHEDULES)

simulate: $(VENV)/.dev  ## 10 000 seeded lives of the engine on a machine of faults; SIM=--states: of a hybrid
	$(BIN)/python -m tests.simulation $(SIM)

repeat: $(VENV)/.dev  ## parts of these gates again and again, the second half beside a load
	$(BIN)/python -m tests.repeat $(REPEAT)

structured: $(VENV)/.dev  ## 1500 answers of random models that must satisfy schemas and tools
	$(BIN)/python -m tests.structured $(STRUCTURED)

clients: $(VENV)/.dev  ## SDKs, agents' traces and bodies from the schema against the server
	$(BIN)/python -m pytest -q tests/clients
	$(BIN)/python -m tests.clients $(CLIENTS)
	$(BIN)/python -m tests.clients --several $(SEVERAL)
	$(BIN)/python -m tests.clients.fuzz
	$(BIN)/python -m tests.clients.traces

page: $(VENV)/.dev  ## the page in a real Chromium (installs it with apt); screenshots in build/page
	$(BIN)/python -m tests.page $(PAGE)

page-libraries: $(VENV)/.dev  ## fetch the page's libraries as their lock says (needs npm)
	$(BIN)/python -m tests.page.libraries

page-picture: $(VENV)/.dev  ## take the README's picture of the page again
	$(BIN)/python -m tests.page.picture

native:  ## C++ tests: plain, ASan+UBSan, TSan
	$(MAKE) -C tests/native native

arm64:  ## the kernels on arm64, under an emulator (installs a cross compiler with apt)
	$(MAKE) -C tests/native arm64

arm64-costs:  ## instructions that arm64's products take, counted under an emulator (minutes)
	$(MAKE) -C tests/native arm64-costs

roofline: $(VENV)/.dev  ## write METAL.md's table of what Macs' memory and arithmetic allow
	$(BIN)/python -m tests.metal.roofline

mapping-points: $(VENV)/.dev  ## what mapping at points costs on a Mac, by the planner's arithmetic
	$(BIN)/python -m tests.metal.mapping_points $(POINTS)

cluster-growth: $(VENV)/.dev  ## 1 to 1000 simulated replicas behind the router of prefixes, in tables (minutes)
	$(BIN)/python -m tests.cluster.growth $(GROWTH)

cluster-prompt: $(VENV)/.dev  ## what a prompt of 100,000 tokens costs where it comes in
	$(BIN)/python -m tests.cluster.prompt_costs $(PROMPT)

prediction: $(VENV)/.dev  ## write METAL.md's tables of quire's speed on a Mac beside mlx-lm's
	$(BIN)/python -m tests.metal.prediction

metal: metal-lint metal-kernels metal-core metal-graph metal-darwin metal-cross  ## all that is known of Metal without a Mac

metal-lint: $(VENV)/.dev  ## the Metal kernels' address spaces (installs a compiler with apt)
	$(MAKE) -C tests/metal lint

metal-kernels: $(VENV)/.dev  ## the Metal kernels' texts, executed on the CPU
	$(MAKE) -C tests/metal kernels

metal-core: mac-wheels  ## heaps, mappings and epochs on a fake Metal; planted faults
	$(MAKE) -C tests/metal core

metal-graph: $(VENV)/.dev mac-wheels  ## the Metal operations in MLX's graph, and the engine over them
	$(MAKE) -C tests/metal graph

metal-darwin: $(VENV)/.dev mac-wheels  ## serve and tests under a Mac's rules, on Linux
	$(MAKE) -C tests/metal darwin ARGUMENTS="$(DARWIN)"

metal-cross: $(VENV)/.dev  ## the wheels for macOS, built and checked here; PYTHONS="3.12 3.13" want make headers
	$(MAKE) -C tests/metal cross

metal-occupancy: $(VENV)/.dev  ## no rung: METAL.md's table of threads per core, by Mesa's compiler (apt, minutes)
	$(MAKE) -C tests/metal occupancy ARGUMENTS="$(KERNEL)"

mac-wheels: $(VENV)/.dev  ## MLX's wheels for macOS, unpacked below build/metal
	$(MAKE) -C tests/metal mac-wheels

docker: $(VENV)/.dev  ## boards, rules and alerts against a real Prometheus and a loaded quire
	$(MAKE) -C tests/docker boards

docker-root: $(VENV)/.dev  ## the Dockerfile's steps, in clean roots (as root, minutes)
	$(MAKE) -C tests/docker root

docker-cluster: $(VENV)/.cluster  ## the services of compose.cluster.yaml, in namespaces (as root)
	$(MAKE) -C tests/docker cluster

wheels: $(VENV)/.dev  ## the wheels for Linux into build/wheels; PYTHONS=3.11, MACHINES=x86_64 (as root, minutes)
	$(MAKE) -C tests/install wheels

headers: $(VENV)/.dev  ## the headers of PYTHONS, for make metal-cross (as root, minutes)
	$(MAKE) -C tests/install headers

wheel-root: $(VENV)/.dev  ## the wheel in clean roots without a compiler; ROOTS="bookworm noble" (as root, minutes)
	$(MAKE) -C tests/install roots

wheel-arm64: $(VENV)/.dev  ## the wheel for Linux on arm64, loaded under an emulator (as root, minutes)
	$(MAKE) -C tests/install emulated

sdist: $(VENV)/.dev  ## the sources as one archive into build/wheels, checked
	$(MAKE) -C tests/install sdist

boards: $(VENV)/.dev  ## write the boards' JSON again
	$(BIN)/python docker/grafana/dashboards.py

demo: $(VENV)/.dev  ## train the demo model again (about an hour)
	$(BIN)/python configs/demo/train.py

lock: $(VENV)/.dev  ## resolve the locks again; needs uv on the path
	uv pip compile pyproject.toml --universal --generate-hashes --extra build \
	  --no-emit-index-url --no-header --no-annotate -q --upgrade -o requirements.lock
	uv pip compile pyproject.toml --universal --generate-hashes --extra build --extra dev \
	  --no-emit-index-url --no-header --no-annotate -q -c requirements.lock -o requirements-dev.lock
	uv pip compile pyproject.toml --universal --generate-hashes --extra build --extra cluster \
	  --no-emit-index-url --no-header --no-annotate -q -c requirements-dev.lock \
	  -o requirements-cluster.lock
	$(MAKE) -C tests/metal/cross lock
	$(MAKE) -C tests/install lock

clean:  ## remove everything that was built
	rm -rf $(VENV) build

# --- how .venv comes to be ----------------------------------------------------------------------
# The locks carry versions and hashes. Hashes cannot cover the checkout itself, so it is installed
# after them, without dependencies, with the build tools that they brought.

$(VENV)/.locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("quire needs Python 3.11 or newer, \
	and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@echo "setup: fetches packages, then compiles quire: two to eight minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(SHOWN) --log $(VENV)/packages.log --lock requirements.lock "packages, 0.5 GB on disk" -- \
	  $(PIP) --require-hashes -r requirements.lock
	@touch $@

$(VENV)/.built: $(VENV)/.locked pyproject.toml $(NATIVE)
	@$(SHOWN) --log $(VENV)/compile.log "quire's own extension, one to four minutes" -- \
	  $(PIP) --verbose --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.cluster: $(VENV)/.dev requirements-cluster.lock
	@$(SHOWN) --log $(VENV)/cluster.log --lock requirements-cluster.lock "Ray, 0.3 GB on disk" -- \
	  $(PIP) --require-hashes -r requirements-cluster.lock
	@touch $@

$(VENV)/.dev: $(VENV)/.built requirements-dev.lock
	@$(SHOWN) --log $(VENV)/dev.log --lock requirements-dev.lock "packages of checks and tests" -- \
	  $(PIP) --require-hashes -r requirements-dev.lock
	@touch $@
