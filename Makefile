# `make demo` and `make test` are all a newcomer needs; both set up a virtual environment in .venv first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-vllm test-ray lint audit bench results results-quick docs lock clean
BIN := .venv/bin

help:   ## list the targets
	@grep -E '^[a-z-]+: .*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

setup: ## make .venv and install everything; seconds when nothing changed
	@scripts/setup.sh

demo: setup ## answer three questions from 10,033 Wikipedia summaries (181 MB fetched once)
	@$(BIN)/python scripts/demo.py

test: setup ## fetch the test model, then run the tests
	@scripts/test.sh $(ARGS)

test-fast: setup ## what to run while working: the tests that need no model, server or training
	@scripts/test.sh --fast $(ARGS)

test-vllm: setup ## the tests inside a real vLLM, in an environment of its own (build/vllm)
	@scripts/test_vllm.sh $(ARGS)

test-ray: setup ## the tests on a Ray cluster of three nodes on this machine, in an environment of its own (build/ray)
	@scripts/test_ray.sh $(ARGS)

lint: setup ## ruff and strict mypy
	@scripts/lint.sh

audit: ## look up known vulnerabilities of the pinned packages in PyPI's database
	@python3 -m venv build/audit && build/audit/bin/pip install --quiet pip-audit
	@build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

bench: setup ## a one-minute measurement of the engine on this machine
	@$(BIN)/specrag bench engine --quick

results: setup ## measure anew what docs/results says: hours, resumable; DATA names the folder of data sets
	@test -n "$(DATA)" || { echo "DATA=FOLDER is missing: the folder of the data sets"; exit 2; }
	@$(BIN)/python -m benchmarks.results build/results --data "$(DATA)"

results-quick: setup ## minutes: whether the engine's page of docs/results holds on this machine; DATA as above
	@test -n "$(DATA)" || { echo "DATA=FOLDER is missing: the folder of the data sets"; exit 2; }
	@$(BIN)/python -m benchmarks.results build/results-quick --data "$(DATA)" --quick

docs: setup ## build the documentation into site/, strictly
	@$(BIN)/mkdocs build --strict --quiet && echo "open site/index.html"

lock: ## write requirements.lock, the image's packages by hash, at the versions of constraints.txt; needs uv
	@scripts/lock.sh

clean: ## remove the environment and everything built
	@rm -rf .venv site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
