# make            lists the targets
# Each target sets up what it needs first.

PYTHON ?= python3
NP ?= 1
MP ?= 1
PP ?= 1
DEVICES ?= 1
JOBS ?= 2

BIN := .venv/bin
CONFIG ?= examples/wmt14/embedded.yaml
RUN ?= runs/embedded
STAGES := $(if $(filter-out 1,$(PP)),--set parallel.pipeline_stage=$(PP) \
  --set parallel.micro_batch_num=$(shell expr 4 '*' $(PP)))
LAUNCH := $(if $(filter-out 1,$(NP)),$(BIN)/horovodrun --gloo -np $(NP))

.DEFAULT_GOAL := help
.PHONY: help setup train test bench clean

help:  ## list the targets
	@echo "dtransformer: make TARGET"
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo "Options: NP=4 trains on four ranks, MP=2 cuts every operation in two, PP=2 spreads the"
	@echo "blocks over two stages, DEVICES=2 gives each rank two devices, PYTHON=python3.12"
	@echo "chooses the interpreter."

setup: .venv/ready  ## make the virtual environment, with Horovod where it can be built

.venv/ready: constraints.txt setup.cfg pyproject.toml tools/build_horovod.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than Python 3.11: set PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[plot,test]'
	@$(BIN)/python tools/build_horovod.py || test $$? -eq 3
	@touch $@

data/embedded/train.en.sgm: .venv/ready
	@echo "Generating the embedded corpus ..."
	@$(BIN)/dtransformer prepare --embedded --out data/embedded

train: data/embedded/train.en.sgm  ## train on the embedded corpus, score, and translate
	$(LAUNCH) $(BIN)/dtransformer train --config $(CONFIG) --run $(RUN) --overwrite \
	  --set parallel.model_parallel=$(MP) --set training.local_devices=$(DEVICES) \
	  $(STAGES)
	@echo "sacreBLEU on held-out sentences:"
	@$(BIN)/dtransformer evaluate --run $(RUN) \
	  --src data/embedded/test.en.sgm --ref data/embedded/test.fr.sgm
	@echo "Translations:"
	@$(BIN)/dtransformer translate --run $(RUN) < examples/wmt14/sentences.txt \
	  | paste -d '\n' examples/wmt14/sentences.txt - | sed 'n;s/^/    /'

test: .venv/ready  ## run the tests, in two processes (JOBS=1: in one)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

bench: .venv/ready  ## measure training on one process; prints JSON
	$(BIN)/python benchmarks/single_process.py

clean:  ## remove what was made: the environment, data, runs
	rm -rf .venv data runs build *.egg-info
