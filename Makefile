# `make` lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
# A torch other than that of constraints.txt, with the sympy that it asks for, in a new .venv:
# `make clean; make tests TORCH=2.6.0`.
TORCH ?=
# pytest processes; 0 is none besides the main one.
WORKERS ?= 2
N ?= 10000
ARGS ?=

BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# One stamp for each set of extras in .venv. A larger set contains the smaller ones and stands for
# them once it is there, so that an edit of the C code is compiled once.
DOCS_READY := .venv/.installed-dev,docs
DIST_READY := .venv/.installed-dist
READY := $(firstword $(wildcard $(DOCS_READY)) .venv/.installed-dev)
BENCH_READY := $(firstword $(wildcard $(READY)) .venv/.installed-bench)
RUN_READY := $(firstword $(wildcard $(BENCH_READY)) .venv/.installed-cli)
# One thread per pytest process, so that workers do not compete for cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help venv test lint types tests other portable oldest slow compilers cross sanitize format demo xor \
	fuzz bench variants docs dist clean

help: ## 1 s | list the targets
	@echo "The times are of two cores, without the installation that a first call begins with."
	@awk -F ':.*## | [|] ' '/^[a-z]+:.*## / {printf "  make %-9s %-9s %s\n", $$1, $$2, $$3}' $(MAKEFILE_LIST)

# Installs again only when the requirements or the C code change.
$(sort $(RUN_READY) $(BENCH_READY) $(READY) $(DOCS_READY) $(DIST_READY)): .venv/.installed-%: pyproject.toml constraints.txt setup.py $(wildcard src/taut/backends/csrc/*)
	@echo "== install .[$*] into .venv: $(if $(wildcard $@),half a minute,one to three minutes and what torch takes to download)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/; /^sympy==/d',cat) constraints.txt > .venv/constraints.txt
	@$(BIN)/python -m pip install $(if $(wildcard $@),--quiet) --disable-pip-version-check \
		--constraint .venv/constraints.txt --editable '.[$*]'
	@touch $@

venv: $(READY) ## 2 min | create or refresh .venv for development

test: $(READY) ## 2 min | lint, types, tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory tests

lint: $(READY) ## 1 s | ruff: rules and formatting; the workflows against GitHub's schema
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

types: $(READY) ## 20 s | pyright on src, and on what users see of it
	@echo "== pyright"
	@$(BIN)/pyright
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright --verifytypes taut --ignoreexternal > .venv/types.txt \
		|| { cat .venv/types.txt; exit 1; }
	@grep "completeness" .venv/types.txt

tests: $(READY) ## 2 min | pytest: tests, docstrings and README (ARGS="-k name")
	@echo "== pytest"
	@$(PYTEST) $(ARGS)

other: $(READY) ## 2 min | the tests as another processor would run them, without the kernel
	@$(BIN)/python tests/machines.py --only "another one" -- -n $(WORKERS)

portable: $(READY) ## 25 min | the tests as twelve other machines would run them
	@$(BIN)/python tests/machines.py -- -n $(WORKERS)

oldest: ## 15 min | the tests with the oldest torch, from Debian 13; needs root and debootstrap
	@WORKERS=$(WORKERS) sh tests/oldest.sh ARGS='$(ARGS)'

slow: $(READY) ## 2 min | the tests that take longer: the fuzzer, conformance from every start
	@$(PYTEST) -m slow $(ARGS)

compilers: $(READY) ## 2 min | the kernel by gcc and by clang: stored problems and its tests
	@$(BIN)/python tests/portable/run.py compilers

cross: $(READY) ## 30 s | the kernel for aarch64, emulated: stored problems
	@$(BIN)/python tests/portable/run.py cross

sanitize: $(READY) ## 4 min | the kernel watched: addresses, arithmetic, races, memory never written
	@$(BIN)/python tests/portable/run.py sanitize

format: $(READY) ## 1 s | let ruff fix and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

demo: $(RUN_READY) ## 10 s | a plain network, the same projected, and one trained through the layer
	@$(BIN)/python examples/demo.py

xor: $(RUN_READY) ## 1 min | the paper's XOR experiment (ARGS="...")
	@$(BIN)/taut xor $(ARGS)

fuzz: $(BENCH_READY) ## 30 s | random hard problems (N=10000 samples)
	@$(BIN)/python benchmarks/fuzz.py --samples $(N)

bench: $(BENCH_READY) ## 1 hour | side by side with peers (ARGS="--budget 0.8")
	@$(BIN)/python benchmarks/run.py $(ARGS)

variants: $(BENCH_READY) ## 3 min | each variant of the kernel beside torch
	@$(BIN)/python benchmarks/variants.py $(ARGS)

docs: $(DOCS_READY) ## 10 s | build the site into site/ and look for what comes out wrong
	@$(BIN)/python -m doctest website/docstrings.py
	@$(BIN)/zensical build --strict --clean
	@$(BIN)/python website/defects.py site

dist: $(DIST_READY) ## 3 min | sdist and wheels into dist/, checked in empty environments
	@$(BIN)/python release/dist.py

clean: ## 1 s | remove environments, caches and built files; results stay
	rm -rf .venv benchmarks/.envs site dist build src/*.egg-info src/taut/_kernel*.so .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
