# Everything a new machine needs: `make demo` and `make test` set themselves up. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# MindSpore has an environment of its own, which nothing but `make test-mindspore` uses.
MS_VENV := .venv-mindspore
# More arguments for pip, e.g. PIP_ARGS="--index-url URL"
PIP_ARGS ?=
# More options for pytest (no paths), e.g. PYTEST_ARGS="-x -k engine"
PYTEST_ARGS ?=
# More arguments for the soak, e.g. SOAK_ARGS="--faults 50 --layout tp2dp2"
SOAK_ARGS ?=
# 3.11 first: there the pinned torch is offered for CPU alone. Running each candidate skips those that are only a name.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && command -v "$$p" && break; done)

# Simulations only compute: a process for each core. All other tests start processes and watch the clock: one at a time.
# That PYTEST_ARGS selects none of them is no failure (5).
SIMULATIONS = simulate() { $(BIN)/pytest -q -n auto tests/simulation $(PYTEST_ARGS) "$$@" || [ $$? = 5 ]; }; simulate

.PHONY: help venv demo soak test test-full test-mindspore lint types docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

venv:  ## build .venv: torch for CPU, megatron-core, this package (seconds when it is up to date)
ifeq ($(strip $(PYTHON)),)
	@echo "error: no Python 3.11 or newer (with venv) found. Install one, or name it: make venv PYTHON=/path/to/python3.11" >&2; exit 1
else
	@"$(PYTHON)" scripts/setup_venv.py --venv $(VENV) --pip-args="$(PIP_ARGS)"
endif

demo: venv  ## kill a rank of a real Megatron job and show that no completed step is lost
	@$(BIN)/tftctl demo

soak: venv  ## break one job 200 times: it ends exact, and nothing adds up (minutes)
	@$(BIN)/tftctl soak $(SOAK_ARGS)

test: venv  ## run the tests, without the slow ones
	@$(SIMULATIONS)
	@$(BIN)/pytest --ignore tests/simulation $(PYTEST_ARGS)

test-full: venv  ## run all tests
	@$(SIMULATIONS) -m ""
	@$(BIN)/pytest --ignore tests/simulation -m "" $(PYTEST_ARGS)

test-mindspore: venv $(MS_VENV)/ready  ## break real jobs of MindSpore on CPU (installs it into .venv-mindspore; minutes)
	@TFT_MINDSPORE_PYTHON="$(CURDIR)/$(MS_VENV)/bin/python" $(BIN)/pytest tests/mindspore $(PYTEST_ARGS)

$(MS_VENV)/ready: requirements/mindspore.txt pyproject.toml setup.cfg
	@"$(PYTHON)" -m venv $(MS_VENV)
	@$(MS_VENV)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/mindspore.txt -e .
	@touch $@

lint: venv  ## ruff: style and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: venv  ## mypy --strict on the package (patches and configs included)
	@$(BIN)/python scripts/check_types.py

docs: venv  ## build the documentation site into site/ (open site/index.html)
	@set -o pipefail; NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1 | { grep -v ^INFO || true; } && echo site/index.html

clean:  ## remove .venv, caches and build folders
	rm -rf $(VENV) $(MS_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
