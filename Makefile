# The two commands of a newcomer are `make run` and `make test`; both set up what they need.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH ?= all
ROWS ?=

.PHONY: help install run test test-all lint bench lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## make .venv and install everything into it

$(VENV)/.installed: pyproject.toml requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Modak needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 install"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

run: install ## the main job: embedded Postgres, Spark, the daemon and a demo table
	$(BIN)/modak-worker run --demo

lint: install ## ruff, mypy --strict and the contract of the rooms
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## the whole gate
	$(BIN)/pytest -m "not full"

test-all: lint ## the gate plus every kill sweep and soak
	$(BIN)/pytest

bench: install ## benchmarks, each against a rival and the physical limit (BENCH=<name> for one)
	@$(BIN)/python -m bench $(BENCH) $(if $(ROWS),--rows $(ROWS))

lock: install ## compile requirements.txt (names, versions, hashes) from pyproject.toml
	$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --extra embedded --extra dev \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header --no-annotate \
		--output-file requirements.txt pyproject.toml

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
