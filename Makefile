PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BUNDLE := bundles/reference
SMOLLM2 := bundles/smollm2

.PHONY: help demo pair check test frozen slow fuzz lint fix docs bench release clean

help:
	@echo "make demo    download SmolLM2-135M-Instruct (93 MB), export it with its drafter, and let it answer with drafts and without"
	@echo "make pair    the same with the small pair of this repository; downloads no model"
	@echo "make check   what takes under a minute: ruff, mypy, and the tests of imports, names and public interfaces"
	@echo "make test    the test suite (brings torch and transformers: they are the oracle)"
	@echo "make slow    the tests that take longer, such as a cluster of which a worker is killed (TESTS=tests/native: some of them)"
	@echo "make frozen  freeze the desktop example with PyInstaller and cx_Freeze, and start it twice"
	@echo "make fuzz    damaged bundles, hostile numbers, checkpoints, media, options and requests for a minute (SECONDS=60): clean errors or nothing changes"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the pages of docs/ as a site, in build/site; fails if a link leads nowhere"
	@echo "make bench   tokens per round, acceptance and speed of every drafter on the reference pair"
	@echo "make release sources and the wheels of all platforms in dist/, built twice, compared and checked"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# one stamp per set of extras, so that the demo needs no gigabytes
$(VENV)/.run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[export]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --editable export/optimum
	@touch $@ $(VENV)/.run $(VENV)/.docs

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

$(BUNDLE)/bundle.json: $(VENV)/.run $(wildcard models/reference/*/*) $(wildcard export/ondevice_export/*.py export/ondevice_export/*/*.py)
	$(BIN)/ondevice export models/reference/target --out $(BUNDLE)

$(SMOLLM2)/bundle.json: $(VENV)/.run models/published.py $(wildcard models/smollm2-drafter/*) $(wildcard export/ondevice_export/*.py export/ondevice_export/*/*.py)
	file=$$($(BIN)/python -m models.published smollm2) && $(BIN)/ondevice export "$$file" --drafter models/smollm2-drafter --out $(SMOLLM2)

# 55 % of this reply's first drafts are accepted; in the mean of 84 prompts 54 % (benchmarks/results/published-models.md).
demo: $(SMOLLM2)/bundle.json
	$(BIN)/ondevice generate $(SMOLLM2) --chat "What can I cook with rice, eggs and tomatoes?" --max-new-tokens 124 --temperature 0 --watch-drafts --compare

pair: $(BUNDLE)/bundle.json
	$(BIN)/ondevice generate $(BUNDLE) - --max-new-tokens 124 --temperature 0 --watch-drafts --compare < models/demo_prompt.txt

check: lint
	$(BIN)/python -m pytest -q tests/project/test_architecture.py tests/project/test_public_api.py tests/project/test_contributing.py

# Processes of the tests take all cores: threads of BLAS and torch would spin for cores that other processes have.
test slow: export OPENBLAS_NUM_THREADS = 1
test slow: export OMP_NUM_THREADS = 1

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

frozen: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/project/test_freezers.py

SECONDS ?= 60

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -n logical --maxprocesses 2 --dist worksteal $(TESTS)

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

bench: $(BUNDLE)/bundle.json
	$(BIN)/ondevice bench $(BUNDLE) --drafts

release: $(VENV)/.dev
	.ci/release $(PLATFORMS)

clean:
	rm -rf $(VENV) bundles build dist .pytest_cache .mypy_cache .ruff_cache
