# make quickstart: install, prepare text, train a small Titans, resume it, evaluate it, draw the plots
# make test:       install, run the tests
PYTHON ?= python3
# The CPU build; on a GPU node name your own, e.g. make install TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
RUN ?= runs/quickstart

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# DeepSpeed compiles nothing here and must not look for a GPU compiler while it installs.
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

.PHONY: install quickstart test lint clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/titans prepare configs/quickstart.yaml
	$(BIN)/titans train configs/quickstart.yaml run.dir=$(RUN) train.stop_at=180
	$(BIN)/titans train configs/quickstart.yaml run.dir=$(RUN)
	$(BIN)/titans evaluate $(RUN)
	$(BIN)/titans generate $(RUN) --prompt "The function returns" --max-new-tokens 60 --temperature 0.7

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build *.egg-info
