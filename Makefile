# The two commands a newcomer needs are `make demo` and `make test`.
# Every target sets up .venv by itself and says what it does.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
LOADED := $(VENV)/.loaded
ARGS   ?=
# As many processes as there are cores: each more imports and collects the whole suite once more.
PARALLEL = -n $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)') --dist worksteal
# Each with a control plane of its own; what a module has started serves all its tests.
PARALLEL_REAL = -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-real test-gpu control-plane check format bench pictures reference images sbom release-dry-run clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml uv.lock
	@PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/setup.sh
	@touch $@

setup: $(READY) ## Create or refresh .venv from uv.lock

# The packages, but not all of them compiled, of which the demo loads a tenth: that is most of the set-up.
$(LOADED): pyproject.toml uv.lock
	@PYTHON=$(PYTHON) VENV=$(VENV) COMPILE= sh scripts/setup.sh
	@touch $@

demo: $(if $(wildcard $(READY)),$(READY),$(LOADED)) ## Simulate a cluster for a month, from GPU to bill and weight  (ARGS="--once --days 3")
	@$(BIN)/gputally demo $(ARGS)

test: $(READY) ## The tests that need Python, pip and PyPI only
	@$(BIN)/pytest $(PARALLEL) $(ARGS)

test-real: $(READY) ## The suites that need a real browser, Kubernetes API server, Prometheus, Spark, … (provided here)
	@VENV=$(VENV) sh scripts/setup-real.sh
	@sh scripts/control-plane.sh >/dev/null
	@sh scripts/clients.sh >/dev/null
	@sh scripts/prometheus.sh >/dev/null
	@sh scripts/object-store.sh >/dev/null
	@sh scripts/query-engines.sh >/dev/null
	@sh scripts/grafana-types.sh >/dev/null
	@sh scripts/grafana-preview.sh >/dev/null
	@VENV=$(VENV) sh scripts/focus.sh >/dev/null
	@BIN=$(BIN) REAL="$(PARALLEL_REAL)" THOROUGH="$(PARALLEL)" sh scripts/real-suites.sh $(ARGS)

test-gpu: $(READY) ## The agent beside known loads, on a machine with one idle NVIDIA GPU
	@$(BIN)/pytest tests/hardware/nvml/gpu_suite.py $(ARGS)

control-plane: ## Build Kubernetes, etcd, kubectl, helm and Prometheus from their Go modules into the cache (once, ~18 minutes)
	@sh scripts/control-plane.sh
	@sh scripts/clients.sh
	@sh scripts/prometheus.sh

check: $(READY) ## Formatting, lint, types, import contracts, dependencies
	@BIN=$(BIN) sh scripts/check.sh

format: $(READY) ## Apply the formatter and the safe lint fixes
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(READY) ## Measure; prints figures and ratios, asserts nothing
	@$(BIN)/python -m tests.bench $(ARGS)

pictures: $(READY) ## Redraw the pictures in docs/
	@VENV=$(VENV) sh scripts/setup-real.sh
	@$(BIN)/python -m scripts.doc_figures docs/img
	@$(BIN)/python -m tests.browser.pictures $(ARGS)

reference: $(READY) ## Write contracts and tables in docs/, and the reference of API, metrics, commands and chart values into dist/reference/
	@$(BIN)/python -m scripts.reference_pages

images: $(READY) ## Build the three images without a container engine (as root on Debian; ARGS=agent for one)
	@VENV=$(VENV) sh scripts/images.sh $(ARGS)

sbom: $(READY) ## Bills of materials of the images, CycloneDX, into dist/
	@VENV=$(VENV) sh scripts/sbom.sh dist $(ARGS)

release-dry-run: $(READY) ## Build and check all that a release publishes, into dist/ (ARGS="--without images")
	@$(BIN)/python -m scripts.release $(ARGS)

clean: ## Remove everything the targets made
	rm -rf $(VENV) dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
