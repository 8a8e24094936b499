# Needs Python 3.9 to 3.12 (with venv), a C++ compiler, make and a package registry; nothing else.
#
#   make demo    one real model through the whole pipeline
#   make test    the tests                     (TEST_ARGS="..." goes to pytest)
#   make lint    ruff and mypy
#   make bench   latency on this CPU beside ONNX Runtime, OpenVINO and TVM alone
#   make clean   removes .venv and build output
#
# `make PYTHON=/path/to/python3.12 test` chooses the Python of a new .venv.

PYTHON = python3.11 python3.12 python3.10 python3.9 python3
PATH ?= /usr/local/bin:/usr/bin:/bin
TEST_ARGS =

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 9) <= sys.version_info[:2] < (3, 13))

# A test process for each core; each gets the tests that are left when it has none.
IN_PARALLEL := --numprocesses logical --dist worksteal

export PATH

.PHONY: demo test lint bench clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(IN_PARALLEL) $(TEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/profile_cpu.py
	$(BIN)/python benchmarks/cpu_pages.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

# Each candidate is run, not just looked up: a version manager's stand-in may be there and fail.
$(VENV)/.created:
	@for python in $(PYTHON); do \
	  if "$$python" -c '$(SUITABLE)' 2>/dev/null; then \
	    echo "using $$python for $(VENV)"; \
	    "$$python" -m venv --clear $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "error: no Python 3.9 to 3.12 with venv and ensurepip among: $(PYTHON)" >&2; \
	echo "hint: install one (Debian and Ubuntu: python3-venv) or give one: make PYTHON=/path/to/python" >&2; \
	exit 1

$(VENV)/.locked: requirements.lock $(VENV)/.created
	$(PIP) install --progress-bar off --no-deps --require-hashes --only-binary :all: -r requirements.lock
	touch $@

$(VENV)/.bench: benchmarks/requirements.lock $(VENV)/.installed
	$(PIP) install --progress-bar off --no-deps --require-hashes --only-binary :all: -r benchmarks/requirements.lock
	touch $@

# New modules are found without this; a new package or a change to what is built is not.
PACKAGES := $(wildcard tvm_fuse/__init__.py tvm_fuse/*/__init__.py tvm_fuse/*/*/__init__.py schedules/__init__.py)
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard native/*) $(PACKAGES) $(VENV)/.locked
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@
