# The two commands of a newcomer are `make run` and `make test`; both set up what they need.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH ?= all
ROWS ?=

.PHONY: help install tools run test test-all lint browser stores bench lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## make .venv with what `make run` needs

$(VENV)/.installed: pyproject.toml requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Modak needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 install"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@printf '[bdist_wheel]\ncompression = stored\n' > $(VENV)/build.cfg
	DIST_EXTRA_CONFIG=$(CURDIR)/$(VENV)/build.cfg $(BIN)/python -m pip install --quiet --require-hashes -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q src
	@touch $@

# What only development needs; a newcomer's first start does not wait for it.
tools: $(VENV)/.tools

$(VENV)/.tools: $(VENV)/.installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-dev.txt
	@touch $@

run: install ## the main job: embedded Postgres, Spark, the daemon and a demo table
	$(BIN)/modak-worker run --demo

lint: tools ## ruff, mypy --strict and the contract of the rooms
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

# The console's pages are tested in Chromium. Where tests run unattended it is installed; elsewhere it is asked for.
browser:
	@for one in chromium chromium-browser google-chrome; do command -v $$one > /dev/null && exit 0; done; \
	if [ "$$CI" = true ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } > /dev/null 2>&1 && exit 0; fi; \
	echo "There is no Chromium here: the tests of the console's pages will be skipped."

# Google Cloud Storage and Azure are played by these programs; what needs one that is not here is skipped.
FAKE_GCS := v1.56.1
AZURITE := 3.35.0

stores: ## servers that play Google Cloud Storage and Azure, into build/stores
	@mkdir -p build/stores; \
	[ -x build/stores/fake-gcs-server ] || \
		GOBIN=$(CURDIR)/build/stores go install github.com/fsouza/fake-gcs-server@$(FAKE_GCS) > build/stores/go.log 2>&1 || \
		echo "There is no Go here that makes fake-gcs-server (build/stores/go.log): the tests of gs:// will be skipped."; \
	[ -x build/stores/node_modules/.bin/azurite-blob ] || \
		npm install --prefix build/stores --no-save --no-package-lock --no-audit --no-fund --ignore-scripts \
			azurite@$(AZURITE) > build/stores/npm.log 2>&1 || \
		echo "There is no npm here that brings azurite (build/stores/npm.log): the tests of abfs:// will be skipped."

# Three processes for two cores, since a good part of a test is waiting: one has the Spark session of the run, the others
# what needs none, without and with the flows of tables.
FLOWS := tests/tables tests/mirror tests/maintenance tests/catalog
PLAIN := $(BIN)/pytest -m "not full and not spark"

test: lint browser ## the whole gate
	@mkdir -p build; \
	$(PLAIN) $(FLOWS) > build/pytest-flows.log 2>&1 & flows=$$!; \
	$(PLAIN) $(addprefix --ignore=,$(FLOWS)) > build/pytest-plain.log 2>&1 & plain=$$!; \
	$(BIN)/pytest -m "not full and spark"; spark=$$?; \
	wait $$flows; of_flows=$$?; wait $$plain; of_plain=$$?; cat build/pytest-flows.log build/pytest-plain.log; \
	[ $$spark -eq 0 ] && [ $$of_flows -eq 0 ] && [ $$of_plain -eq 0 ]

# Long tests have long limits of their own. Stacks are printed after the longest of them only: printing those of running
# threads has ended the interpreter.
test-all: lint browser stores ## the gate plus every kill sweep and soak
	$(BIN)/pytest -o faulthandler_timeout=3900

bench: tools ## benchmarks, each against a rival and the physical limit (BENCH=<name> for one)
	@$(BIN)/python -m bench $(BENCH) $(if $(ROWS),--rows $(ROWS))

PIP_COMPILE = $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --extra embedded --extra tracing \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header --no-annotate

lock: tools ## compile both requirements files (names, versions, hashes) from pyproject.toml
	$(PIP_COMPILE) --build-deps-for editable --output-file requirements.txt pyproject.toml
	$(PIP_COMPILE) --extra dev --constraint requirements.txt --output-file requirements-dev.txt pyproject.toml

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
