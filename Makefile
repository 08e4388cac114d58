# `make demo` and `make test` do all the set-up they need. Variables:
#   PYTHON=python3.12      interpreter of .venv (default: python3, else the first of 3.13 to 3.10)
#   VENV=active            use the active environment and its torch and Horovod, make no .venv
#   ENGINE=torch           the demo under torchrun: no Horovod is built (default: horovod)
#   LOFT_HVD_CACHE=folder  where Horovod's wheel is kept (default ~/.cache/loft_hvd)
#   LOFT_HVD_LEVELS=...    instruction sets of the kernels: native (this machine's best and the
#                          baseline, the default), lean (the general one, the demo's
#                          default) or all (the tests' default)
#   ARGS="..."             more arguments for the demo, TESTS="..." for pytest
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-all demo test test-all lint format unit multiprocess unit-all multiprocess-all whole wheel pythons clean

export PYTHON VENV ENGINE
# Where it is set, as in many containers, every rank compiles 500 modules of torch anew: 5 s of CPU.
unexport PYTHONDONTWRITEBYTECODE
# Any Python 3.8+ can run the set-up, which then chooses the one for .venv.
BOOT := $(shell for name in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10; do \
  $$name -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2> /dev/null && echo $$name && break; done)
ifeq ($(VENV),active)
BIN := $(shell $(BOOT) -c 'import os, sys; print(os.path.dirname(os.path.abspath(sys.executable)))')
else
BIN := .venv/bin
endif
PY := $(BIN)/python
CXX_FILES := $(shell find csrc tests/testbed/tool -name generated -prune -o \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) -print 2> /dev/null)
# Several ranks share the cores: one thread each, or they wait for each other.
RANKS := OMP_NUM_THREADS=1
# Tests that start ranks run two at a time, as many wait; but these judge times closely, or have
# Horovod start anew in its processes, which Gloo does not always survive on crowded cores.
SERIAL := tests/multiprocess tests/testbed
ALONE := $(addprefix tests/multiprocess/test_,culprits.py demo.py doctor_run.py elastic.py emulated.py gpu_ranks.py \
  horovods_tests.py report_mode.py strangers.py watched.py) tests/testbed/test_testbed.py
BUILDS := tests/native
# Unit tests of one thread each, three for two cores, as some wait; a process without work takes half of
# another's.
SPREAD := -n $(shell echo $$((($$(env -u OMP_NUM_THREADS nproc || echo 2) * 3 + 1) / 2))) --maxprocesses=8 --dist worksteal
# A test beyond all its limits, deaf in a call of C: its process shows where it is and makes way.
DEAF := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

# How the demo is launched; torchrun says before each line which rank it is of.
DEMO := $(if $(filter torch,$(ENGINE)),$(BIN)/torchrun --standalone --nproc-per-node 4 --tee 3,$(BIN)/horovodrun -np 4 --gloo $(PY))

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

SET_UP = $(if $(BOOT),,echo "setup: no Python here: sudo apt-get install -y python3 python3-dev python3-venv g++ make git"; exit 1;) \
  $(BOOT) -m scripts.setup

setup:  ## make .venv, build Horovod and the extension; seconds when all is there
	@$(SET_UP)

setup-all:  # the same with the kernels of every instruction set, which the tests compare
	@export LOFT_HVD_LEVELS="$${LOFT_HVD_LEVELS:-all}"; $(SET_UP)

demo:  ## train over unequal ranks with a faulty worker: 4 ranks, a table, runs/demo/
	@$(SET_UP) demo
	@$(RANKS) $(PY) -m scripts.plain $(DEMO) examples/demo.py $(ARGS)

# setup-all comes first: lint alone is content with less, and would have it built in two goes.
test: setup-all lint unit multiprocess  ## linters, unit and multi-process tests

test-all: setup-all lint unit-all multiprocess-all  ## the same with the long tests

lint: setup  ## ruff, mypy --strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))

unit: setup-all
	$(RANKS) $(PY) -m pytest tests $(SERIAL:%=--ignore=%) -m "not long and not multiprocess" $(SPREAD) $(DEAF) $(TESTS)

multiprocess: setup-all
	$(RANKS) $(PY) -m pytest $(SERIAL) $(ALONE:%=--ignore=%) -m "not long" -n 2 --dist worksteal $(TESTS) || [ $$? -eq 5 ]
	$(RANKS) $(PY) -m pytest $(ALONE) -m "not long" $(TESTS) || [ $$? -eq 5 ]  # 5: TESTS chooses none of them

# Builds of the extension come first, each on all cores: others measure CPU time. What links, or
# checks by one thread, leaves a core to another of them.
unit-all: setup-all
	$(PY) -m pytest $(BUILDS) -m "not whole" -n 2 --dist loadfile --no-loadscope-reorder --durations=20 $(TESTS) || [ $$? -eq 5 ]  # 5: TESTS chooses none of them
	$(PY) -m pip install --quiet --no-deps --upgrade --target build/peers -r requirements/peers.txt  # beside .venv
	PYTHONPATH=build/peers $(RANKS) $(PY) -m pytest tests/property/test_byzfl.py tests/property/test_flower.py tests/property/test_ray.py $(SPREAD) $(TESTS) || [ $$? -eq 5 ]
	$(RANKS) $(PY) -m pytest tests $(SERIAL:%=--ignore=%) $(BUILDS:%=--ignore=%) -m "not multiprocess and not whole" $(SPREAD) $(TESTS)

whole: setup-all  # the claims of which test-all runs some cases
	$(RANKS) $(PY) -m pytest tests -m "whole" $(SPREAD) $(TESTS)

multiprocess-all: setup-all
	$(RANKS) $(PY) -m pytest $(SERIAL) $(ALONE:%=--ignore=%) -m "not whole" -n 2 --dist worksteal --durations=40 $(TESTS)
	$(RANKS) $(PY) -m pytest $(ALONE) -m "not whole" --durations=40 $(TESTS)

wheel: setup  ## a wheel for other machines and a source archive, in dist/; LOFT_HVD_CUDA=1: with CUDA
	$(PY) -m scripts.wheels $(ARGS)

pythons:  ## set up and unit-test with each Python from 3.10 to 3.13 that is here; ARGS="--help"
	@$(BOOT) -m scripts.pythons $(ARGS)

format: setup  ## put the code into its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

clean:  ## remove what was built; .venv, runs/ and the cache of Horovod's wheel stay
	rm -rf build dist *.egg-info csrc/networks/generated .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find loft_hvd tests scripts examples csrc -name __pycache__ -prune -exec rm -rf {} +
	find loft_hvd -name '*.so' -delete
