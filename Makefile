# make            lists the targets
# Each target sets up what it needs first.

PYTHON ?= python3
NP ?= 1
MP ?= 1
PP ?= 1
DEVICES ?= 1
JOBS ?= 2
GPU ?= $(shell nvidia-smi -L > /dev/null 2>&1 && echo 1)

BIN := .venv/bin
CONFIG ?= examples/wmt14/embedded.yaml
RUN ?= runs/embedded
STAGES := $(if $(filter-out 1,$(PP)),--set parallel.pipeline_stage=$(PP) \
  --set parallel.micro_batch_num=$(shell expr 4 '*' $(PP)))
LAYOUT := $(if $(AUTO),--set parallel=auto,--set parallel.model_parallel=$(MP) $(STAGES))
SEVERAL := $(filter-out 1,$(NP))
CUDA := $(if $(GPU),.venv/gpu)
LAUNCH := $(if $(SEVERAL),$(BIN)/horovodrun --gloo -np $(NP))
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# uv takes a third of pip's time. It does not read pip's settings: pip itself is asked where they
# name another index, and where uv fails.
define install
{ ! $(BIN)/python -m pip config list | grep '[.]index-url=' > /dev/null \
  && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python \
    -c constraints.txt -b constraints.txt $(1); } \
  || $(BIN)/python -m pip install --quiet -c constraints.txt $(1)
endef

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup train check test test-long test-all lint format docs dist release bench bench-compiled \
  clean

help:  ## list the targets
	@echo "dtransformer: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo "Options: NP=4 trains on four ranks, MP=2 cuts every operation in two, PP=2 spreads the"
	@echo "blocks over two stages, AUTO=1 leaves that to the planner, DEVICES=2 gives each rank two"
	@echo "devices, PYTHON=python3.12 chooses the interpreter, GPU=1 installs CUDA's libraries."

setup: .venv/test $(CUDA) .venv/horovod  ## make the whole environment: for tests, and for several ranks

.venv/ready: constraints.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than Python 3.11: set PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet -c constraints.txt uv
	@$(call install,-e .)
	@touch $@

.venv/test .venv/lint .venv/docs .venv/gpu: .venv/ready
	@$(call install,-e '.[$(@F)]')
	@touch $@

# By pip itself, which has a build for CPUs where the machine's settings name one.
.venv/reference: .venv/ready
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[reference]'
	@touch $@

.venv/horovod: .venv/ready dtransformer/cli/install_horovod.py $(wildcard dtransformer/cli/horovod_sources/*.*)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/dtransformer doctor --install-horovod
	@touch $@

data/embedded/train.en: .venv/ready
	@echo "Generating the embedded corpus ..."
	@$(BIN)/dtransformer prepare --embedded --out data/embedded

train: $(CUDA) $(if $(SEVERAL),.venv/horovod) data/embedded/train.en  ## train on the embedded corpus, score, and translate
	$(LAUNCH) $(BIN)/dtransformer train --config $(CONFIG) --run $(RUN) --overwrite \
	  --set training.local_devices=$(DEVICES) $(LAYOUT)
	@echo "sacreBLEU on held-out sentences:"
	@$(BIN)/dtransformer evaluate --run $(RUN) \
	  --src data/embedded/test.en --ref data/embedded/test.fr
	@echo "Translations:"
	@$(BIN)/dtransformer translate --run $(RUN) < examples/wmt14/sentences.txt \
	  | paste -d '\n' examples/wmt14/sentences.txt - | sed 'n;s/^/    /'
	@echo "The run is in $(RUN), and $(RUN)/loss.svg shows its losses."
	@echo "To translate your own text: $(BIN)/dtransformer translate --run $(RUN) < FILE"

check: .venv/test  ## run the tests that need no TensorFlow: a minute
	$(PYTEST) --tier check

test: setup .venv/reference  ## run all but the long tests, in two processes (JOBS=1: in one)
	$(PYTEST) --tier test

test-long: setup .venv/reference  ## run the long tests alone: two hours (PART=1/4: a quarter of them)
	$(PYTEST) --tier long -m long $(if $(PART),--part $(PART))

test-all: test test-long  ## run all tests

lint: .venv/lint  ## check style, with ruff, and the types of public names, with mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/lint  ## put the code into the style, as far as ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/docs  ## build the docs site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: .venv/ready  ## build sdist and wheel, in dist/
	$(BIN)/python -m harness.dist

release: .venv/ready  ## build what is to be published, after style, docs and tests; uploads nothing
	$(BIN)/python -m harness.dist --release --out build/release
	$(MAKE) lint docs test
	$(BIN)/python -m harness.dist --release

bench: .venv/ready  ## measure one process beside PyTorch, KerasHub and transformers; prints JSON
	$(BIN)/python benchmarks/against_peers.py

# Packages by which XLA compiles for a card that is not there: 1.2 GB, apart from ours.
.venv-jax/ready:
	@$(PYTHON) -m venv .venv-jax
	@.venv-jax/bin/python -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 jax-cuda12-plugin==0.10.2 \
	  jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12
	@touch $@

bench-compiled: .venv/ready .venv-jax/ready  ## compile steps for an H100, beside JAX's; prints JSON
	$(BIN)/python benchmarks/gpu_compiled.py --recompute

clean:  ## remove what was made: the environment, data, runs
	rm -rf .venv .venv-jax data runs build dist site *.egg-info
