.DEFAULT_GOAL := help
# The first of these that is Python 3.11 or newer. Override with PYTHON=/path/to/python3.11
IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python,\
	$(shell $(name) $(IS_NEW_ENOUGH) && echo $(name))))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

PORT ?= 5000
SERVICE_PORT ?= 8400
# Number of pytest workers: two for each core, because tests wait for servers. Each worker needs 30 s
# to collect all tests.
WORKERS ?= 4

.PHONY: help install constraints dist release packages browser repro ui stack screens docs lint fix test check coverage exhaustive
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## Create .venv and install the project with its pinned dependencies

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "parity-gate needs Python 3.11: install it, or set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@echo 'Installing torch, CUDA libraries and the rest into .venv: about 7 GB, a few minutes'
	@$(BIN)/python pipelines/one_line.py $(VENV)/install.log \
		$(BIN)/python pipelines/install.py -e '.[dev]'
	@touch $@

constraints: $(READY)  ## Pin all dependencies again (UPGRADE=1: newest versions)
	@$(BIN)/python -m benchmarks.constraints $(if $(UPGRADE),--upgrade)

dist: $(READY)  ## Build sdist and wheel into dist
	@$(BIN)/python pipelines/one_line.py $(VENV)/dist.log $(BIN)/python -m build
	@ls -1 dist

release: $(READY)  ## Build, check and tag the version of gate/__init__.py
	@$(BIN)/python -m pipelines.release

browser: $(READY)  ## Install onnxruntime-web for the runtime browser-wasm, if npm is available
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || { echo "Chromium is not installed: the runtime browser-wasm is unavailable"; exit 0; }; \
	$(BIN)/python -m gate runtimes install browser-wasm >/dev/null || echo "onnxruntime-web could not be installed: the runtime browser-wasm is unavailable, and its tests are skipped"

repro: $(READY) browser  ## Run the example from data to promoted model with DVC (SET=section.key=value)
	@$(BIN)/python -m pipelines.repro $(if $(SET),--set '$(SET)')

ui: $(READY)  ## Start MLflow on 127.0.0.1 and print links to the run and version (PORT=5000)
	@exec $(BIN)/python -m pipelines.ui --port $(PORT)

stack: $(READY)  ## Run MLflow, its webhook and the service on 127.0.0.1 until Ctrl-C
	@exec $(BIN)/python -m pipelines.stack --port $(PORT) --service-port $(SERVICE_PORT)

screens: $(READY) packages  ## Save screenshots of reports and MLflow pages in build/screens
	@$(BIN)/python -m benchmarks.screens

docs: $(READY)  ## Build the documentation site in build/site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Docs built: build/site/index.html. The search needs a server: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

lint: $(READY)  ## Check format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-logo

fix: $(READY)  ## Format, and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

packages:  ## Install Debian's chromium and postgresql for the tests, if missing
	@missing=$$(command -v chromium >/dev/null || echo chromium); \
	{ command -v initdb || ls /usr/lib/postgresql/*/bin/initdb; } >/dev/null 2>&1 || missing="$$missing postgresql"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Debian's" $$missing; \
		apt-get -qq update >/dev/null 2>&1; \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $$missing >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "Not installed:" $$missing "- tests that need it are skipped"

# No worker restarts: after a crash xdist would give the new worker files that are already done, and
# wait forever. --instafail prints failures immediately, so that an interrupted run shows them.
PYTEST := $(BIN)/python -m pytest -q --instafail -n $(WORKERS) --max-worker-restart=0 \
	--dist loadfile --no-loadscope-reorder
# Each test file runs in a separate process.
ALONE := grep -rl 'mark\.alone' tests --include='test_*.py' | xargs -n 1 $(BIN)/python -m pytest -q -m alone
FAILED := echo "Tests failed: see 'FAILED' and 'ERROR' above. Run one test: $(BIN)/python -m pytest PATH::NAME"; exit 1
test check coverage exhaustive: export PYTHONDONTWRITEBYTECODE =  # hundreds of processes read the same modules
test: $(READY) packages browser  ## Run the tests, except proofs and slow tests
	@$(PYTEST) -m "not alone and not proof and not further" || { $(FAILED); }
	@echo "All tests passed. Not run: tests marked 'proof', 'alone' or 'further', which make check runs. Next: make repro, then make ui."

exhaustive: $(READY) packages browser  ## Run every row of every proof, and more examples of properties: an hour or more
	@GATE_EXHAUSTIVE=1 $(PYTEST) -m "proof and not alone" && $(ALONE) || { $(FAILED); }
	@echo "All proofs passed, with every row. tests/exhaustive.py lists the rows that make check leaves out."

check: lint packages browser  ## What CI runs: lint and all tests
	@$(PYTEST) -m "not alone" && $(ALONE) || { $(FAILED); }
	@echo "Lint and all tests passed. Next: make repro, then make ui."

# A third slower than the same tests without it: CI takes it once a night.
coverage: $(READY) packages browser  ## Branch coverage of the tests without slow proofs, at least 90 %
	@$(PYTEST) -m "not alone and not proof" --cov --cov-report= || { $(FAILED); }
	@$(BIN)/coverage report --fail-under=90
