# A fresh machine needs Python 3.11 or later, with venv, and nothing else.
PYTHON ?= python3
BIN := .venv/bin
# Flags for `make train`, for example ARGS="--steps 20 --optimizer muon".
ARGS ?=

.PHONY: train test clean

train: .venv/runtime
	$(BIN)/torchrun --nproc-per-node 1 train_qwen3_moe.py $(ARGS)

test: .venv/development
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

.venv/runtime: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/development: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@ .venv/runtime

clean:
	rm -rf .venv out
