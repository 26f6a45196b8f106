# Everything sets itself up: Python 3.11 and make are all that a machine needs.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8080
JOBS ?= 2
ARGS ?=
BIN := .venv/bin
# Where it is set, each start would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s%s\n", $$1, $$2 }' Makefile

# The development lock contains the other one: whoever has it needs no second installation.
.venv/run: requirements.lock
	@test -f .venv/dev && test ! requirements.lock -nt .venv/dev || $(MAKE) --no-print-directory .venv/fresh LOCK=requirements.lock
	@touch $@
.venv/dev: requirements-dev.lock
	@$(MAKE) --no-print-directory .venv/fresh LOCK=requirements-dev.lock
	@touch $@
.PHONY: .venv/fresh
.venv/fresh:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 …'; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo 'Installing $(LOCK) …'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(LOCK)

.PHONY: run
run: .venv/run ## Serve on 127.0.0.1:8080, with a PostgreSQL of our own unless TOWPATH_DATABASE_URL is set
ifdef TOWPATH_DATABASE_URL
	@$(BIN)/python -m app migrate
	@exec $(BIN)/python -m app serve --host $(HOST) --port $(PORT) $(ARGS)
else
	@exec $(BIN)/python -m app serve --host $(HOST) --port $(PORT) --embedded $(ARGS)
endif

.PHONY: migrate
migrate: .venv/run ## Bring the database of TOWPATH_DATABASE_URL up to date
	@$(BIN)/python -m app migrate

.PHONY: test
test: .venv/dev ## The whole suite, against a PostgreSQL of our own or TOWPATH_TEST_DATABASE_URL
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

.PHONY: chaos
chaos: .venv/dev ## Kill processes and the database for minutes, then check every promise
	$(BIN)/python -m pytest -n 0 -m chaos --timeout 3600 -s tests/faults $(ARGS)

.PHONY: demo
demo: .venv/run ## Real work, shared by workers in Python, Node and shell
	@$(BIN)/python examples/demo.py $(ARGS)

.PHONY: bench
bench: .venv/dev ## Measure the service on this machine; needs wrk
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: bench-check
bench-check: .venv/dev ## Each workload at a small size: that it runs, and loses nothing
	$(BIN)/python -m pytest -n $(JOBS) -m benchmark tests/benchmarks $(ARGS)

.PHONY: bench-peers
bench-peers: .venv/dev ## The same beside AWA, Procrastinate, pg-boss and graphile-worker; needs wrk, Node and npm
	@$(BIN)/python -m benchmarks --peers $(ARGS)

.PHONY: lock
lock: ## Lock the requirements of pyproject.toml by hash, at their newest versions
	@$(PYTHON) -m venv --clear .venv-lock && .venv-lock/bin/pip install --quiet uv
	@.venv-lock/bin/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-header \
	  pyproject.toml --extra embedded -o requirements.lock
	@.venv-lock/bin/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-header \
	  pyproject.toml --extra embedded --group dev -c requirements.lock -o requirements-dev.lock
	@rm -rf .venv-lock

.PHONY: lint
lint: .venv/dev ## Style, format, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

.PHONY: types
types: .venv/dev ## Types, strictly
	$(BIN)/mypy app

.PHONY: openapi
openapi: .venv/run ## Write openapi/openapi.json
	$(BIN)/python -m app openapi

.PHONY: openapi-check
openapi-check: .venv/run ## Fail when openapi/openapi.json is not current
	$(BIN)/python -m app openapi --check

.PHONY: docs
docs: .venv/run ## Write the generated parts of the documentation
	$(BIN)/python docs/generate.py

.PHONY: migrations-check
migrations-check: .venv/dev ## Migrations up and down, and their result against the table definitions
	$(BIN)/python -m pytest -n 0 tests/migrations

.PHONY: check
check: lint types openapi-check test ## All of the above that must pass

.PHONY: clean
clean: ## Remove what was installed and cached; the data stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
