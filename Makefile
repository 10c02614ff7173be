# Everything a person or a machine does with this project; `make help` lists it.
# A fresh clone needs Python 3.11 or later with venv and pip, make and a C compiler; `make test`
# installs the other tools by name (Debian packages, PyPI, npm), as root or with nothing missing.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules

# The first interpreter that is new enough; `make PYTHON=...` names another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# One set-up at a time, also when two makes run in one tree.
LOCK := $(if $(shell command -v flock),flock .venv.lock,)
# Build scripts beside the package are checked like the package, where they exist.
SOURCES = qgpu_exporter tests $(patsubst %/,%,$(sort $(dir $(wildcard alerts/*.py dashboards/*.py deploy/*.py))))
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup
# The pure core, in which every line and branch is reached by a golden or property test.
CORE := qgpu_exporter/model.py,qgpu_exporter/snapshot.py,qgpu_exporter/usage.py,qgpu_exporter/usage/*,qgpu_exporter/allocation/*,qgpu_exporter/metrics/*,qgpu_exporter/totals.py,qgpu_exporter/inventory.py

# ---------------------------------------------------------------------------- for people

.PHONY: help
help: ## Say what each target does
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
		while IFS=$$'\t' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

.PHONY: demo
demo: $(VENV)/.runtime ## Serve a simulated node (DEMO_FLAGS='--web.listen-address :9000')
	exec $(BIN)/python -m qgpu_exporter demo $(DEMO_FLAGS)

.PHONY: demo-stack
demo-stack: $(VENV)/.dev tools ## Serve the demo beside a Prometheus and an Alertmanager with the rules
	exec $(BIN)/python -m tests.stack

# ---------------------------------------------------------------------------- checks

.PHONY: test
test: ## Set everything up and run every check (under 15 minutes on two cores)
	@$(MAKE) --no-print-directory $(VENV)/.dev tools
	@rm -f build/pytest.txt
	@status=0; $(MAKE) --no-print-directory --keep-going checks || status=$$?; \
		tail -qn 1 build/pytest.txt || true; exit $$status

# One after the other: the quick ones first.  All run, so that one failure hides no other.
.PHONY: checks
checks: lint types imports core-branches

.PHONY: test-fast
test-fast: lint types imports ## The inner loop: gates, unit, golden and property tests (under 2 minutes)
	$(PYTEST) $(wildcard tests/unit tests/golden tests/property)

.PHONY: lint
lint: $(VENV)/.dev ## Check style and format (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: $(VENV)/.dev ## Format the sources and mend what ruff can mend safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: types
types: $(VENV)/.dev ## Check types (mypy --strict)
	$(BIN)/mypy $(SOURCES)

.PHONY: imports
imports: $(VENV)/.dev ## Check that imports run one way and foreign libraries stay in their place
	$(BIN)/lint-imports

.PHONY: bench
bench: $(VENV)/.dev ## Print what a scrape of a full node costs, beside prometheus_client's renderer
	$(BIN)/python -m tests.bench

.PHONY: pytest
pytest: $(VENV)/.dev tools ## Run every test, with coverage
	@mkdir -p build && rm -f .coverage .coverage.*
	$(PYTEST) --cov --cov-context=test --cov-report= tests | tee build/pytest.txt

# Contexts name the test that reached a line; the empty one is what runs at import.
.PHONY: core-branches
core-branches: pytest ## Check that golden and property tests alone reach every branch of the core
	@$(BIN)/coverage report --skip-covered --format=total
	@$(BIN)/coverage report --contexts='^$$,^tests/golden/,^tests/property/' \
		--include='$(CORE)' --fail-under=100

# ---------------------------------------------------------------------------- generated files

# Each is committed, and a test compares it with what would be generated.
.PHONY: docs
docs: $(VENV)/.dev ## Generate the docs that are made from code (metrics.md, configuration.md)
	mkdir -p build docs
	for page in metrics configuration; do \
		$(BIN)/python -m qgpu_exporter.reference $$page > build/$$page.md; \
		mv build/$$page.md docs/$$page.md; done

.PHONY: rules
rules: $(VENV)/.dev ## Generate the rule files from alerts/templates and alerts/values.yaml
	$(BIN)/python alerts/build.py

.PHONY: dashboards
dashboards: $(VENV)/.dev ## Generate the dashboards' JSON from their Python sources
	$(BIN)/python -m dashboards.build

.PHONY: chart
chart: $(VENV)/.dev tools ## Generate what follows from the chart (its copies and schema, deploy/manifests)
	PYTHONPATH=. $(BIN)/python deploy/build.py --helm "$$($(BIN)/python -c 'from tests import tools; print(tools.find("helm"))')"

# ---------------------------------------------------------------------------- image and release

# Needs root on Debian; without either: docker build -f deploy/Dockerfile .
.PHONY: image
image: $(VENV)/.dev tools ## Build the image without a daemon and print where its files are
	$(BIN)/python deploy/image.py

.PHONY: release
release: $(VENV)/.dev tools ## Make dist/: sdist, wheel, chart, manifests, bill of materials, checksums
	PYTHONPATH=. $(BIN)/python deploy/release.py

.PHONY: requirements
requirements: ## Pin the image's dependencies with hashes (deploy/requirements*.txt)
	rm -rf build/requirements && mkdir -p build/requirements
	$(PYTHON) -m venv build/requirements/venv
	build/requirements/venv/bin/python -m pip install -q --disable-pip-version-check pip-tools
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
		put = lambda name, lines: open(f"build/requirements/{name}.in", "w").write("\n".join(lines) + "\n"); \
		put("requirements", project["project"]["dependencies"]); \
		put("requirements-build", project["build-system"]["requires"])'
	for name in requirements requirements-build; do \
		{ echo "# Exact versions and hashes for the image; made by make requirements."; \
		  build/requirements/venv/bin/pip-compile -q --generate-hashes --no-emit-options \
			--no-header --no-annotate --strip-extras \
			-c constraints.txt -o - build/requirements/$$name.in; } > build/requirements/$$name.txt; done
	mv build/requirements/*.txt deploy/ && rm -rf build/requirements

# ---------------------------------------------------------------------------- set-up

# pip's -c does not reach a build environment, so the build's own packages are installed first.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed" >&2; exit 1; }
	$(LOCK) sh -c 'test -e $@ || { $(PYTHON) -m venv $(VENV) && touch $@; }'

$(VENV)/.runtime: $(VENV)/.python pyproject.toml constraints.txt
	$(LOCK) sh -c '$(PIP) install -q -c constraints.txt hatchling editables && \
		$(PIP) install -q -c constraints.txt --no-build-isolation -e . && touch $@'

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	$(LOCK) sh -c '$(PIP) install -q -c constraints.txt hatchling editables && \
		$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev]" && \
		touch $(VENV)/.runtime $@'

.PHONY: tools
tools: $(VENV)/.dev ## Install the tests' tools into .tools or by apt-get, and check each
	$(BIN)/python -m tests.tools

.PHONY: constraints
constraints: ## Pin anew what a fresh installation resolves to (constraints.txt)
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	{ echo "# Exact versions of everything installed for running and testing; made by make constraints."; \
	  build/constraints/bin/python -m pip freeze --all --exclude-editable --exclude pip; } > constraints.txt
	rm -rf build/constraints

.PHONY: clean
clean: ## Remove what make has made, the environment and tools included
	rm -rf $(VENV) .venv.lock .tools build dist .coverage .coverage.* htmlcov \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
