# `make demo` and `make test` do everything on a fresh Debian or Ubuntu with Python 3.11 or 3.12; no GPU is needed.
# Each target makes what it lacks, and made things are kept: a second run costs nothing.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
PIP_FLAGS := --disable-pip-version-check

SUITABLE := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
            if $$python -c '$(SUITABLE)' 2>/dev/null; then echo $$python; break; fi; done)

SERVER := .venv
CLIENT := .venv-client
OPENAI2 := .cache/openai-2

.PHONY: help demo test lint format types check notebooks env lock clean python

help: ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/\1 \2/p' $(MAKEFILE_LIST) | while read -r name text; do \
	  printf 'make %-10s %s\n' "$$name" "$$text"; done

demo: $(SERVER)/.ready ## replay an agent's history three ways on a real server and show what was saved
	$(SERVER)/bin/leyline demo $(ARGS)

test: env ## run all tests; the main suite comes last, with the real SGLang server on the CPU
	$(CLIENT)/bin/pytest -m client || [ $$? -eq 5 ] # 5: none of the tests is marked so
	PYTHONPATH=$(OPENAI2) $(SERVER)/bin/pytest -m client tests/integrations/openai --deselect=tests/integrations/openai/test_sessions.py
	$(SERVER)/bin/pytest $(ARGS)

lint: $(SERVER)/.ready ## check style and format
	$(SERVER)/bin/ruff check .
	$(SERVER)/bin/ruff format --check .

format: $(SERVER)/.ready ## format the code, and fix what ruff can fix
	$(SERVER)/bin/ruff format .
	$(SERVER)/bin/ruff check --fix .

types: $(SERVER)/.ready ## check types
	$(SERVER)/bin/mypy

check: lint types test ## lint, types and tests: what CI runs

notebooks: $(SERVER)/.ready ## run the notebooks that need no GPU
	@for notebook in notebooks/*.ipynb; do \
	  [ -e "$$notebook" ] || continue; \
	  echo "== $$notebook"; $(SERVER)/bin/jupyter execute "$$notebook" || exit 1; done

env: $(SERVER)/.ready $(CLIENT)/.ready $(OPENAI2)/.ready ## make both virtual environments

# A stamp is newer than everything its environment was made from.
$(SERVER)/.ready: requirements/server.txt requirements/server-nodeps.txt pyproject.toml | python
	@echo "== $(SERVER): SGLang for the CPU, torch, tests (once, a few minutes)"
	$(PYTHON) -m venv $(SERVER)
	$(SERVER)/bin/pip install $(PIP_FLAGS) -r requirements/server.txt
	$(SERVER)/bin/pip install $(PIP_FLAGS) --no-deps -r requirements/server-nodeps.txt
	$(SERVER)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	@touch $@

$(CLIENT)/.ready: requirements/client.txt pyproject.toml | python
	@echo "== $(CLIENT): the newest openai and LangChain (once, a minute)"
	$(PYTHON) -m venv $(CLIENT)
	$(CLIENT)/bin/pip install $(PIP_FLAGS) -r requirements/client.txt
	$(CLIENT)/bin/pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	@touch $@

$(OPENAI2)/.ready: requirements/openai-2.txt $(SERVER)/.ready
	$(SERVER)/bin/pip install $(PIP_FLAGS) --no-deps --upgrade --target $(OPENAI2) -r requirements/openai-2.txt
	@touch $@

python:
	@$(or $(PYTHON),false) -c '$(SUITABLE)' 2>/dev/null || { \
	  echo "Leyline needs Python 3.11 or 3.12 with venv, and found $$($(or $(PYTHON),python3) --version 2>&1): install" \
	       "python3.11 and python3.11-venv (or 3.12), or pass PYTHON=/path/to/python" >&2; exit 2; }

lock: ## pin what requirements/*.in ask for, from environments made anew
	@for name in server client; do \
	  $(PYTHON) -m venv --clear .cache/lock && \
	  .cache/lock/bin/pip install $(PIP_FLAGS) -r requirements/$$name.in && \
	  { echo "# Made by \`make lock\` from $$name.in."; \
	    .cache/lock/bin/pip freeze --all | grep -v '^pip==' | sed 's/+cpu$$//'; } > requirements/$$name.txt || exit 1; done
	@rm -r .cache/lock

clean: ## remove the environments and everything else that was made
	rm -rf $(SERVER) $(CLIENT) .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
