# Each target sets up what it needs in .venv, once: the stamps below remember what is installed.
# ARGS goes to the command behind a target:   make test ARGS='-k ledger'   make lock ARGS=--upgrade
# PYTHON names the interpreter to use:        make demo PYTHON=/usr/bin/python3.12
# WORKERS is how many tests run at a time:     make test WORKERS=0   (0: one after the other, in one process)

BIN := .venv/bin
RUNTIME := .venv/.installed
DEV := .venv/.installed-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --custom-compile-command 'make lock' $(ARGS) pyproject.toml --group build
GENERATE := $(BIN)/python -m kubelend.cli.generate

# Two more than there are cores: most of the time a test waits.
WORKERS ?= $(shell expr $$(nproc) + 2)

export PYTHON

# Tests start hundreds of processes: without bytecode, each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(RUNTIME) ## Show a broker, four agents and a reservation's whole life
	@$(BIN)/kubelend dev demo $(ARGS)

# Once in a new clone: else each worker would compile all tests and sources for itself.
COMPILED := tests/__pycache__
$(COMPILED): | $(DEV)
	@$(BIN)/pytest --collect-only -qq > /dev/null || true

.PHONY: test
test: $(DEV) $(COMPILED) ## Run all tests, several modules at a time (WORKERS=0: one after the other)
	$(BIN)/pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: coverage
coverage: $(DEV) $(COMPILED) ## Run all tests and say which lines and branches they reach (htmlcov/index.html)
	$(BIN)/pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		--cov --cov-report term:skip-covered --cov-report html $(ARGS)

.PHONY: kube-assets
kube-assets: ## Find or build the API server and etcd that tests run on
	@hack/kube-assets

.PHONY: liqo-assets
liqo-assets: ## Find or build Liqo, and the controllers of Kubernetes, that tests and the clusters to try run
	@hack/liqo-assets

# LIQO=0: without Liqo.
LIQO ?= 1
WITH_LIQO := $(if $(KIND),,$(filter-out 0,$(LIQO)))

.PHONY: clusters
clusters: $(RUNTIME) $(if $(KIND),,kube-assets) $(if $(WITH_LIQO),liqo-assets) ## Start three clusters, a broker and two agents, to try (LIQO=0, KIND=1)
	@$(BIN)/kubelend dev lab up $(if $(KIND),--kind) $(if $(WITH_LIQO),--liqo,--no-liqo) $(ARGS)

.PHONY: clusters-test
clusters-test: $(RUNTIME) ## Borrow 500m and 256Mi there, and show each step with its time
	@$(BIN)/kubelend dev lab test $(ARGS)

.PHONY: clusters-status
clusters-status: $(RUNTIME) ## Show what runs there, and whether all is well
	@$(BIN)/kubelend dev lab status $(ARGS)

.PHONY: clusters-down
clusters-down: $(RUNTIME) ## End all of it
	@$(BIN)/kubelend dev lab down $(ARGS)

.PHONY: helm
helm: ## Find or build the helm that renders the charts
	@hack/get-helm

.PHONY: rotation
rotation: $(DEV) ## Prove that certificates of a minute rotate for ten under load
	PYTHONPATH=tests $(BIN)/python -m proofs.rotation $(ARGS)

.PHONY: liqo-proofs
liqo-proofs: $(DEV) kube-assets liqo-assets ## Kill every part of clusters with Liqo after every step; run demo and benchmarks there (an hour)
	KUBELEND_KUBE_TESTS=required $(BIN)/pytest tests/kube/liqo_fault_matrix.py tests/kube/liqo_tools.py $(ARGS)

.PHONY: properties
properties: $(DEV) ## Try every property of the pure parts with fifty times as many examples, others each time
	$(BIN)/pytest --numprocesses $(WORKERS) --timeout 3600 --hypothesis-profile long -m hypothesis tests/unit $(ARGS)

.PHONY: mutants
mutants: $(DEV) ## Break 48 things one at a time, and check that the tests notice (five minutes)
	$(BIN)/python hack/mutants $(ARGS)

.PHONY: check
check: $(DEV) ## Check format, lint, types, layers and generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(GENERATE) --check
	hack/deploy-manifests --check
	$(BIN)/python hack/check-sources

.PHONY: bench
bench: $(RUNTIME) ## Measure, and print the table
	@$(BIN)/kubelend dev bench all $(ARGS)

.PHONY: format
format: $(DEV) ## Format, and fix what can be fixed safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: generate
generate: $(DEV) ## Write the files that are made from the code
	$(GENERATE)

.PHONY: manifests
manifests: generate ## Write the CustomResourceDefinitions, and all else that is made from the code
	hack/deploy-manifests --copy

.PHONY: deploy-manifests
deploy-manifests: generate ## Write what under deploy/ is made from the charts and the definitions
	hack/deploy-manifests

.PHONY: lock
lock: $(DEV) ## Pin the dependencies anew after a change of pyproject.toml
	$(COMPILE) --output-file requirements.lock
	$(COMPILE) --group dev --constraints requirements.lock --output-file requirements-dev.lock

.PHONY: setup
setup: $(DEV) ## Install everything for development into .venv

.PHONY: clean
clean: ## Remove all that these targets made, .venv too
	rm -rf .venv build dist src/kubelend.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache \
		.coverage htmlcov
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): requirements.lock pyproject.toml hack/venv
	@echo 'Installing Kubelend into .venv (once)'
	@hack/venv .venv
	@$(PIP) --require-hashes --requirement requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): requirements-dev.lock $(RUNTIME)
	@echo 'Installing the development tools into .venv (once)'
	@$(PIP) --require-hashes --requirement requirements-dev.lock
	@touch $@
