# One command does everything: each target first makes the environment it needs.
#
#   make demo [STORE=local|s3] [MODEL=tiny|smollm2]   train, kill a group, kill everything, resume, compare
#   make test                                        the tests
#   make check                                       linters, types, import contract
#   make stress                                      the long random repetitions
#   make fuzz [FOR=60]                               damage for every decoder, so many seconds in all
#   make bench-save [ARGS=--quick]                   what a save costs, beside others and the machine's limits
#   make bench-restore [ARGS=--quick]                what a restore costs, likewise

PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS ?= 2
STORE ?= local
MODEL ?= tiny
FOR ?= 60
# More arguments for the program that a target runs: make test ARGS="-k lineage"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test stress fuzz bench-save bench-restore check format wheel pins clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no python3 on PATH; set PYTHON=/path/to/python (3.11 or newer)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than Python 3.11; set PYTHON=/path/to/a/newer/one"; exit 1; }
	@test -x $(BIN)/python || { echo "make: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "make: installing ftckpt and its tools into $(VENV) (the first time takes some minutes)"
	@$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[dev,demo]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m ftckpt.chaos.demo --store $(STORE) --model $(MODEL) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

stress: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) -m stress $(ARGS)

# atheris has no wheel for every Python: hypothesis alone then.
fuzz: $(READY)
	@$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[fuzz]' || echo "make: going on without atheris"
	$(BIN)/python -m tests.fuzz --seconds $(FOR) $(ARGS)

bench-save: $(READY)
	@$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.save $(ARGS)

bench-restore: $(READY)
	@$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.restore $(ARGS)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(READY)
	$(BIN)/python -m pip wheel --no-deps -w dist .

# Keeps the comment at the top; versions lose their local suffix (+cpu), which only some indexes know.
pins: $(READY)
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable \
	  | sed -E 's/\+[a-z0-9.]+$$//' | grep -v -E '^(pip|ftckpt)==' | LC_ALL=C sort -f; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
