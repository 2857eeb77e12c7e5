# A fresh clone needs Python >= 3.11, pip, git and make; everything else goes into .venv.
# Settings:  make train ARGS="trainer.steps=20 name=short"    make test PYTHON=python3.12 JOBS=4

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PART ?=
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# A stamp is newer than what it was made from, so nothing is installed twice and a changed pin is.
MADE := $(VENV)/.made
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_KSERVE := $(VENV)/.installed-kserve

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train audit test test-faults test-nodes test-sim test-slow test-slurm test-sweeps lint format bench bench-gpu clean docs gpu-check

help:  ## list these targets
	@echo "Parallax: make TARGET [ARGS=\"key=value ...\"] [PYTHON=python3]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(firstword $(MAKEFILE_LIST))

train: $(INSTALLED)  ## install into .venv, then plan and train the demo (ARGS go to parallax train)
	@$(BIN)/parallax train experiment=demo $(ARGS)

# A variable, because make runs lines that name it even under -n.
LINT = $(MAKE) --no-print-directory lint

# Lint runs beside the tests and is printed after them. The simulated accelerator is compiled beside the first tests,
# none of which needs it. Files of few but long tests, those of processes, come first by name; by their number of tests
# they would come last. Bytecode is kept, also where the environment keeps Python from writing it: some tests start
# processes, which would each compile the package, and pytest rewrites all asserts.
test: $(INSTALLED_DEV)  ## lint, and all tests that are quick (ARGS go to pytest)
	@$(LINT) >$(VENV)/.lint 2>&1 & lint=$$!; failed=0; $(BIN)/python -m tests.sim.build >/dev/null 2>&1 & \
	unset PYTHONDONTWRITEBYTECODE; $(BIN)/python -m compileall -q parallax benchmarks tests; \
	echo "== pytest"; OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	--durations=20 $(ARGS) || failed=$$?; \
	wait $$lint || failed=1; cat $(VENV)/.lint; exit $$failed

test-slow: $(INSTALLED_DEV) $(INSTALLED_KSERVE)  ## tests that take seconds each, and show more of what quicker ones show some of (ARGS go to pytest)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not thorough" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-sim: $(INSTALLED_DEV)  ## all tests on the simulated accelerator, its mutants too (ARGS go to pytest)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sim -n $(JOBS) -m "not bench" $(ARGS)

test-faults: $(INSTALLED_DEV)  ## whole runs that are killed, partitioned or damaged, and resume (ARGS go to pytest)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "faults and not thorough" -n $(JOBS) --dist loadfile -rs $(ARGS)

test-nodes: $(INSTALLED_DEV)  ## runs over two hosts, made of network namespaces, which needs root (ARGS go to pytest)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/nodes -m nodes -rs $(ARGS)

# Where there is no browser and none can be installed, the page is not opened.
test-sweeps: $(INSTALLED_DEV)  ## six runs from one command, and their page; as root, installs Debian's chromium-headless-shell
	@if ! command -v chromium-headless-shell >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "installing a headless browser"; export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && \
	apt-get -qq install --yes --no-install-recommends chromium-headless-shell >/dev/null || \
	echo "a browser cannot be installed: what needs one is skipped" >&2; fi
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults/test_sweeps.py tests/unit/test_report_scaling.py \
	-m "not bench" -rs $(ARGS)

# Slurm's daemons run as root. Where they are missing and cannot be installed, the tests say so and are skipped.
test-slurm: $(INSTALLED_DEV)  ## jobs of a real Slurm on this machine; as root, installs Debian's slurm-wlm and munge
	@for daemon in munged slurmctld slurmd; do PATH="$$PATH:/usr/sbin" command -v $$daemon >/dev/null || missing=1; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then echo "installing Slurm"; \
	export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && \
	apt-get -qq install --yes --no-install-recommends slurm-wlm munge >/dev/null || \
	echo "Slurm cannot be installed: its tests are skipped" >&2; \
	elif [ -n "$$missing" ]; then echo "Slurm is not installed: as root, apt-get install slurm-wlm munge" >&2; fi
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slurm -m slurm $(ARGS)

# Types take as long as all else together, and are checked beside it.
lint: $(INSTALLED_DEV)  ## ruff, mypy and the import contracts; changes nothing
	@$(BIN)/mypy >$(VENV)/.types 2>&1 & types=$$!; failed=0; \
	echo "== ruff check"; $(BIN)/ruff check . || failed=1; \
	echo "== ruff format --check"; $(BIN)/ruff format --check . || failed=1; \
	echo "== lint-imports"; $(BIN)/lint-imports --no-logo || failed=1; \
	echo "== mypy"; wait $$types || failed=1; cat $(VENV)/.types; exit $$failed

format: $(INSTALLED_DEV)  ## mend what ruff can mend
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

docs: $(INSTALLED)  ## write docs/configuration.md from the settings' dataclasses
	@$(BIN)/python docs/configuration.py >docs/.configuration.md && mv docs/.configuration.md docs/configuration.md

bench: $(INSTALLED)  ## measure this machine: pipeline, swap and host optimizer against their peers, and predictions
	@$(BIN)/python -m benchmarks.pipeline
	@$(BIN)/python -m benchmarks.pipeline_plans
	@$(BIN)/python -m benchmarks.swap
	@$(BIN)/python -m benchmarks.host_adam
	@$(BIN)/python -m benchmarks.prediction

gpu-check: $(INSTALLED_DEV)  ## test a CUDA device in two minutes: tests/gpu, twenty steps of the demo, peaks against the plan
	@$(BIN)/python -m benchmarks.gpu --parts tests demo --check $(ARGS)

bench-gpu: $(INSTALLED_DEV)  ## measure a CUDA device in ten minutes; PART="gpt plans": these, beside what is measured (ARGS=--dry: on the CPU)
	@$(BIN)/python -m benchmarks.gpu $(if $(PART),--parts $(PART) --resume) $(ARGS)

# In an environment of its own: what it draws in is no part of what it looks at.
audit: $(INSTALLED_DEV)  ## known security advisories for what is installed; reports when no service is reachable
	@if [ ! -x $(VENV)/audit/bin/pip-audit ]; then echo "installing pip-audit"; \
	$(BIN)/python -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip -qq --disable-pip-version-check install \
	-c constraints.txt pip-audit || { echo "audit: pip-audit cannot be installed: nothing was checked" >&2; exit 0; }; fi; \
	$(BIN)/python .ci/audit $(VENV) $(VENV)/audit

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's python3 has no ensurepip unless python3-venv is installed; its pip can fill an empty environment.
$(MADE):
	@$(PYTHON) -c 'import sys; found = sys.version.split()[0]; \
	sys.version_info >= (3, 11) or sys.exit(f"Parallax needs Python 3.11 or newer; $(PYTHON) is {found}: make PYTHON=...")'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); else \
	$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip -qq --python $(BIN)/python install pip; fi
	@touch $@

$(INSTALLED): $(MADE) pyproject.toml constraints.txt
	@echo "installing Parallax and what it needs (torch is large: a minute or two)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	@echo "installing the tools for tests and lint"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# Of a model server's public client, which needs other versions of libraries: for tests/serving/test_clients.py.
$(INSTALLED_KSERVE): $(MADE) tests/serving/kserve.txt
	@echo "installing KServe's client, in an environment of its own"
	@$(BIN)/python -m venv --clear --without-pip $(VENV)/kserve
	@$(PIP) --python $(VENV)/kserve/bin/python install --no-compile --no-deps -r tests/serving/kserve.txt
	@touch $@
