# make demo | test | lint set themselves up; PYTHON=/path/to/python3.12 names the Python that .venv is made with.
VENV := .venv
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PYTEST_ARGS ?= tests
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu demo test test-core test-long test-hosts soak docs pages lint format lock clean

help:
	@echo "make demo    train a small model on this machine's CPU, a few minutes"
	@echo "make test    run the tests (PYTEST_ARGS=tests/config for a part, WORKERS=4 on more cores)"
	@echo "make test-long  the tests that take minutes each: every model, every layout, kills"
	@echo "make test-core  the core alone: without capabilities and other systems' configurations it trains the demo"
	@echo "make test-hosts  runs over several hosts made of network namespaces (root; elsewhere skipped)"
	@echo "make soak    kill runs at random moments and resume them, for an hour"
	@echo "make lint    ruff, mypy, codespell and the prose lint"
	@echo "make docs    build the pages of docs/ as a site in docs/site"
	@echo "make pages   regenerate the pages of docs/ that come from the code"
	@echo "make setup   only install what the demo needs into .venv; make setup-gpu: everything for a host with GPUs"

setup: $(VENV)/.cpu-installed

$(VENV)/.cpu-installed: requirements/cpu.lock requirements/uv.txt requirements/install pyproject.toml
	@PYTHON="$(PYTHON)" requirements/install cpu && touch $@

$(VENV)/.dev-installed: $(VENV)/.cpu-installed requirements/dev.lock
	@requirements/install dev && touch $@

$(VENV)/.docs-installed: $(VENV)/.cpu-installed requirements/docs.lock
	@requirements/install docs && touch $@

setup-gpu: $(VENV)/.gpu-installed

$(VENV)/.gpu-installed: $(VENV)/.cpu-installed requirements/gpu.txt
	@requirements/install gpu && touch $@

demo: setup
	@$(RUN) python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml $(ARGS)

test: $(VENV)/.dev-installed $(VENV)/.docs-installed
	@$(RUN) $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not long' $(PYTEST_ARGS)

test-long: $(VENV)/.dev-installed $(VENV)/.docs-installed
	@$(RUN) $(PYTEST) -m long $(PYTEST_ARGS)

test-core: $(VENV)/.dev-installed
	@$(RUN) $(PYTEST) -m long tests/setup/test_core_alone.py

test-hosts: $(VENV)/.dev-installed
	@$(RUN) $(PYTEST) -m hosts $(or $(filter-out tests,$(PYTEST_ARGS)),tests/hosts)

soak: $(VENV)/.dev-installed
	@$(RUN) PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 python benchmarks/soak.py $(ARGS)

docs: $(VENV)/.docs-installed
	@$(RUN) sphinx-build -q -W --keep-going docs docs/site
	@echo "docs/site/index.html"

pages: $(VENV)/.dev-installed
	@for page in docs/generate/*.py; do $(RUN) PYTHONPATH=$(CURDIR) python $$page || exit 1; done

lint: $(VENV)/.dev-installed
	@failed=0; for tool in 'ruff check' 'ruff format --check' mypy codespell 'python tests/prose.py'; do $(RUN) $$tool || failed=1; done; exit $$failed

format: $(VENV)/.dev-installed
	@$(RUN) ruff check --fix
	@$(RUN) ruff format

# Pins to pins with hashes: resolves nothing. Then what the pinned libraries take, against which configurations are checked.
lock: $(VENV)/.cpu-installed
	@for set in cpu dev docs; do $(RUN) python -m uv pip compile -q --generate-hashes --no-deps --no-annotate --no-header \
		--python-version 3.12 requirements/$$set.txt -o requirements/$$set.lock; done
	@$(MAKE) -s setup && $(RUN) python -W ignore requirements/option_tables.py && \
		$(RUN) python -W ignore requirements/bridge_registry.py

clean:
	rm -rf $(VENV) docs/site .pytest_cache .hypothesis .mypy_cache .ruff_cache
