# `make` lists what there is. A fresh machine needs Python 3.11 or newer (with venv) and make; the browser tests
# need Chromium. Everything else comes from requirements.lock into .venv/ and stays there.

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
READY := .venv/.ready
TPU := .venv-tpu
SITE := _build/html/index.html
# The site is one print of all of these. A change in any of them prints it again, whole: it takes seconds, and Sphinx
# alone overlooks a changed style sheet and leaves old titles in the sidebars of pages that it does not rewrite.
PAGES := _config.yml _toc.yml $(shell find book lib -type f ! -name '*.pyc' ! -path '*/.*' 2>/dev/null)

# On a machine with a GPU, JAX would warn on every start that it cannot use it, and outputs would differ.
export JAX_PLATFORMS ?= cpu

.DELETE_ON_ERROR:
.PHONY: help book test serve lab refresh bench models referee lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# An environment is made anew where making it was interrupted, or its Python has since been removed.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "The book needs Python 3.11 or newer, and '$(PYTHON)' is not: try 'make PYTHON=python3.12 ...'." >&2; exit 1; }
	$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(2)
endef

# A stamp, so that nothing is installed twice. It also depends on pyproject.toml, which `-e .` reads.
$(READY): requirements.lock pyproject.toml
	$(call environment,.venv,requirements.lock)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(SITE): $(READY) $(PAGES)
	rm -rf _build
	$(BIN)/jupyter-book build . -W -n --keep-going --quiet
	@touch $@

book: $(SITE) ## build the site into _build/html
	@echo "The book is built. Open $(abspath $(SITE))"

# The site comes first because test_site.py reads it. nbval runs once and by itself: it re-runs every notebook.
test: $(SITE) ## check style, tests, the site in a browser, and every output in every notebook
	$(BIN)/ruff check .
	$(BIN)/pytest tests
	$(BIN)/pytest --nbval --nbval-current-env --nbval-cell-timeout 120 --nbval-sanitize-with tests/sanitize.cfg book

serve: $(SITE) ## show the site at a local address
	@echo "The book is at http://127.0.0.1:$(PORT)/ (Ctrl-C stops it)"
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

lab: $(READY) ## open the notebooks in JupyterLab, installing it on the first call
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-lab.lock
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) book

refresh: $(READY) ## run every notebook and store its outputs; TIMINGS=1 measures the timings anew
	$(BIN)/python book/refresh.py

bench: $(READY) ## time the cost model
	$(BIN)/pytest benchmarks -s

models: $(READY) ## train the two small language models of the demos anew (a quarter of an hour); their weights are stored
	$(BIN)/python -m lib.demos.trained.train

$(TPU)/.ready: requirements-tpu.lock
	$(call environment,$(TPU),requirements-tpu.lock)
	@touch $@

ROWS ?= 10
referee: $(TPU)/.ready ## compile recorded rows again with the TPU compiler (1.3 GB): ROWS=10 of them, or ROW=name; RECORD=1
	$(TPU)/bin/python -m lib.demos.cases $(if $(filter 1,$(RECORD)),--record,$(if $(ROW),'$(ROW)',--rows $(ROWS)))

# Universal: one lock for Linux, macOS and every supported Python; "fewest": with the same versions, so the same digits.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes --no-header
lock: ## derive the lock files from the requirements (needs uv; UPGRADE=--upgrade takes newer versions)
	@command -v uv >/dev/null || { echo "make lock needs uv: python3 -m pip install uv" >&2; exit 1; }
	$(LOCK) $(UPGRADE) requirements.txt --no-emit-package inference-rooflines -o requirements.lock
	$(LOCK) $(UPGRADE) requirements-lab.txt --constraint requirements.lock -o requirements-lab.lock
	$(LOCK) $(UPGRADE) requirements-tpu.txt --constraint requirements.lock -o requirements-tpu.lock

clean: ## remove all that make made, the virtual environment too
	rm -rf _build .venv $(TPU) .pytest_cache .ruff_cache .hypothesis .benchmarks *.egg-info
	find book lib tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
