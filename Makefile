# `make` lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
# pytest processes; 0 is none besides the main one.
WORKERS ?= 2
N ?= 10000
ARGS ?=

BIN := .venv/bin
# Installs again only when the requirements or the C code change.
READY := .venv/.installed
DOCS_READY := .venv/.installed-docs
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread per pytest process, so that workers do not compete for cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help venv test lint types tests plain slow format demo xor fuzz bench variants docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/taut/csrc/*)
	@echo "== install: .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --editable '.[dev]'
	@touch $@

$(DOCS_READY): $(READY)
	@echo "== install: docs"
	@$(PIP) --editable '.[dev,docs]'
	@touch $@

venv: $(READY) ## create or refresh .venv

test: $(READY) ## everything CI runs: lint, types, tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory tests
	@$(MAKE) --no-print-directory plain

lint: $(READY) ## ruff: rules and formatting
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY) ## pyright on src
	@echo "== pyright"
	@$(BIN)/pyright

tests: $(READY) ## pytest: tests, docstrings and README (ARGS="-k name")
	@echo "== pytest"
	@$(PYTEST) $(ARGS)

plain: $(READY) ## the tests of the solver without the compiled kernel
	@echo "== pytest without the kernel"
	@TAUT_KERNEL=0 $(PYTEST) tests/test_solvers.py tests/test_gradients.py tests/test_stress.py tests/test_oracle.py

slow: $(READY) ## the tests that take minutes
	@$(PYTEST) -m slow $(ARGS)

format: $(READY) ## let ruff fix and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

demo: $(READY) ## the library in a minute
	@$(BIN)/python examples/demo.py

xor: $(READY) ## the paper's XOR experiment (ARGS="...")
	@$(BIN)/taut xor $(ARGS)

fuzz: $(READY) ## random hard problems (N=10000 rows)
	@$(BIN)/python benchmarks/fuzz.py --rows $(N)

bench: $(READY) ## side by side with peers (ARGS="--budget 0.8")
	@$(BIN)/python benchmarks/run.py $(ARGS)

variants: $(READY) ## each variant of the kernel beside torch (about 3 minutes)
	@$(BIN)/python benchmarks/variants.py $(ARGS)

docs: $(DOCS_READY) ## build the site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove .venv, caches and built files
	rm -rf .venv site dist build src/*.egg-info src/taut/_kernel*.so .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
