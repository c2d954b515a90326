# `make` lists the targets. Each target installs its requirements first.

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

# uv takes a third of pip's time but ignores pip's settings. Use pip if they name another index, or if
# uv fails.
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
	@echo "Options: NP=4 trains on four ranks, MP=2 shards operations over two devices, PP=2 divides the"
	@echo "blocks into two pipeline stages, AUTO=1 lets the planner choose the layout, DEVICES=2 gives each"
	@echo "rank two devices, PYTHON=python3.12 selects the interpreter, GPU=1 installs CUDA libraries."

setup: .venv/test $(CUDA) .venv/horovod  ## install everything for tests and multi-rank jobs

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

# pip's settings may name an index with a CPU build of PyTorch, which uv would ignore.
.venv/reference: .venv/ready
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[reference]'
	@touch $@

.venv/horovod: .venv/ready dtransformer/cli/install_horovod.py $(wildcard dtransformer/cli/horovod_sources/*.*)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/dtransformer doctor --install-horovod
	@touch $@

data/embedded/train.en: .venv/ready
	@echo "Generating the embedded corpus ..."
	@$(BIN)/dtransformer prepare --embedded --out data/embedded

train: $(CUDA) $(if $(SEVERAL),.venv/horovod) data/embedded/train.en  ## train on the embedded corpus, evaluate and translate
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

check: .venv/test  ## run the tests that need no TensorFlow (one minute)
	$(PYTEST) --tier check

test: setup .venv/reference  ## run all tests except long ones, in two processes (JOBS=1: in one)
	$(PYTEST) --tier test

test-long: setup .venv/reference  ## run only the long tests, about 2.5 hours (PART=1/4: one quarter)
	$(PYTEST) --tier long -m long $(if $(PART),--part $(PART))

test-all: test test-long  ## run all tests

lint: .venv/lint  ## check style with ruff, and types of public names with mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/lint  ## format the code and fix style errors with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/docs  ## build the docs site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: .venv/ready  ## build sdist and wheel in dist/
	$(BIN)/python -m harness.dist

release: .venv/ready  ## run all checks and build a release (does not upload it)
	$(BIN)/python -m harness.dist --release --out build/release
	$(MAKE) lint docs test
	$(BIN)/python -m harness.dist --release

bench: .venv/ready  ## compare one process with PyTorch, KerasHub and transformers; print JSON
	$(BIN)/python benchmarks/against_peers.py

# JAX packages (1.2 GB) whose XLA compiles for GPUs that the machine does not have.
.venv-jax/ready:
	@$(PYTHON) -m venv .venv-jax
	@.venv-jax/bin/python -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 jax-cuda12-plugin==0.10.2 \
	  jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12
	@touch $@

bench-compiled: .venv/ready .venv-jax/ready  ## compile steps for an H100 and compare with JAX; print JSON
	$(BIN)/python benchmarks/gpu_compiled.py --recompute

clean:  ## remove environments, data, runs and build outputs
	rm -rf .venv .venv-jax data runs build dist site *.egg-info
