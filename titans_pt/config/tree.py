"""The settings tree, made of the sections in data.py, model.py, train.py and evaluation.py; files.py reads it.

Every section is a pydantic model that refuses unknown keys and silent type conversions. The docstring of a field
follows the field; docs.py makes docs/settings.md and the JSON schema from these docstrings. Nothing here imports the
rest of the project: config is plain data.
"""

import functools
import json
import math
from typing import Literal

from pydantic import model_validator

from titans_pt.config.data import DataConfig
from titans_pt.config.evaluation import EvaluationConfig
from titans_pt.config.fields import OpenSection, PathName, Section, Seed
from titans_pt.config.model import ModelConfig
from titans_pt.config.train import ParallelConfig, TrainConfig


class RunConfig(Section):
    dir: PathName = "runs/default"
    """Folder that holds everything about the run: resolved config, log, metrics, checkpoints, evaluation, plots."""
    spare_dir: PathName | None = None
    """A folder on another disk. If run.dir can no longer be written to (its disk is full), a last checkpoint is written
    there, in a subfolder for this run, before the run ends. Null: no extra checkpoint is written."""
    on_checkpoint: str | None = None
    """A shell command that rank 0 runs after each checkpoint, to copy or evaluate it (docs/launching.md)."""
    seed: Seed = 0
    """Seeds the initial weights and the order of the data."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, under dir; needs titans-pt[tensorboard]."""
    imports: list[str] = []
    """Python modules to import first, in which your own mixers, memory rules and tasks register themselves."""


class WandbConfig(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: follow WANDB_MODE or ``wandb offline``; otherwise online if you are logged in to W&B, else offline (files
    under run.dir, for ``wandb sync``). If the server cannot be reached, the run warns and goes offline.
    WANDB_DISABLED=true disables every mode, and WANDB_RUN_ID sets the run's id."""
    project: str = "titans-pt"
    """Project of Weights & Biases; WANDB_PROJECT if this is the default."""
    entity: str | None = None
    """W&B user or team. Null: the default of the API key."""
    name: str | None = None
    """Name of the W&B run. Null: WANDB_NAME, or the name of run.dir's folder."""
    checkpoints: bool = False
    """Also send every checkpoint, as an artifact."""
    evaluation: bool = False
    """Also send the results of ``titans evaluate``, as an artifact of the training run."""


class Config(OpenSection):
    """The whole settings tree, built by :func:`titans_pt.config.files.load_config`; ``Config()`` alone is valid.

    A task's own settings are in a section with its name, which the task itself validates.
    """

    task: str = "language"
    """The task by name: data, the two ends of the model, loss and evaluation (titans_pt/tasks/)."""
    run: RunConfig = RunConfig()
    """The run's folder and its seed."""
    data: DataConfig = DataConfig()
    """Text, tokenizer, token files and samples."""
    model: ModelConfig = ModelConfig()
    """The blocks and their mixers."""
    train: TrainConfig = TrainConfig()
    """Steps, batch, optimiser, checkpoints."""
    parallel: ParallelConfig = ParallelConfig()
    """Split of the model and the batch over ranks."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Settings of ``titans evaluate`` and of evaluations during training."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""

    @model_validator(mode="after")
    def _combinations(self):
        self._check_training()
        self._check_write_cost()
        self._check_parallel()
        return self

    def _check_training(self):
        need, t = self._need, self.train
        need(
            t.batch_tokens % self.data.seq_len == 0, "train.batch_tokens",
            f"must be a multiple of data.seq_len={self.data.seq_len}",
        )  # fmt: skip
        need(t.init_from is not None or not t.init_fresh, "train.init_fresh", "only with train.init_from; leave it out")
        need(t.warmup_steps < t.max_steps, "train.warmup_steps", f"must be below train.max_steps={t.max_steps}")
        need(
            t.decay_steps is None or t.schedule in ("wsd", "halving"), "train.decay_steps",
            f"only with train.schedule=wsd or halving, not with {t.schedule}",
        )  # fmt: skip
        most = t.max_steps - t.warmup_steps
        need(
            (t.decay_steps or 0) <= most, "train.decay_steps", f"at most train.max_steps - train.warmup_steps = {most}"
        )
        for setting in ("patience", "stop_when"):
            need(
                getattr(t, setting) is None or t.eval_every > 0, f"train.{setting}",
                "only with train.eval_every above 0, the steps between two validations",
            )  # fmt: skip
        # Every loss at the limit multiplies the running variance by (1 - 1/W)(1 + d^2 / W), which must be above 1.
        least = math.sqrt(t.spike_window / (t.spike_window - 1))
        need(
            t.spike_deviations is None or t.spike_deviations > least, "train.spike_deviations",
            f"must be above {least:.4g} with train.spike_window={t.spike_window}, else a loss that stays higher would "
            "be skipped for ever",
        )  # fmt: skip
        for setting in ("stop_at", "profile_at"):
            need(
                (getattr(t, setting) or 0) <= t.max_steps, f"train.{setting}", f"at most train.max_steps={t.max_steps}"
            )

    def _check_write_cost(self):
        need, cost = self._need, self.model.memory.write_cost
        need(
            not (self.train.compile and cost), "train.compile",
            "not with model.memory.write_cost, whose gates are read between a block's kernels; leave it at null",
        )  # fmt: skip
        need(
            self.model.memory.theta == "bounded" or not cost, "model.memory.write_cost",
            "only with model.memory.theta=bounded; leave it out",
        )  # fmt: skip

    def _check_parallel(self):
        need, t, p, length = self._need, self.train, self.parallel, self.data.seq_len
        need(
            p.node_ranks is None or (p.zero_stage == 3 and p.tensor == 1), "parallel.node_ranks",
            "only with parallel.zero_stage=3 and parallel.tensor=1",
        )  # fmt: skip
        need(
            p.gather_bucket is None or p.zero_stage < 3, "parallel.gather_bucket",
            "ZeRO 3 has no such exchange; leave it out",
        )  # fmt: skip
        need(
            t.optimizer != "muon" or p.zero_stage < 3, "parallel.zero_stage",
            "at most 2 with train.optimizer=muon: ZeRO 3 cuts every matrix over all ranks",
        )  # fmt: skip
        need(
            length % p.context == 0, "parallel.context",
            f"must divide data.seq_len={length}, of which each rank has a piece; set it to "
            f"{math.gcd(length, p.context)}",
        )  # fmt: skip
        if p.context > 1:
            self._check_context()
        if t.wavefront is not None:
            self._check_wavefront()
        need(
            not (t.compile and p.zero_stage == 3), "train.compile",
            "ZeRO 3 gathers parameters in the middle of a block, which cannot be compiled; set parallel.zero_stage=2, "
            "or leave train.compile at null",
        )  # fmt: skip

    def _check_context(self):
        need, p = self._need, self.parallel
        need(
            p.zero_stage < 3, "parallel.zero_stage",
            f"at most 2 with parallel.context={p.context}: its ranks are at different layers, and ZeRO 3 gathers a "
            "layer's parameters from all of them",
        )  # fmt: skip
        need(
            p.reduce_bucket is None, "parallel.reduce_bucket",
            f"must be null with parallel.context={p.context}: its ranks are at different layers, and can exchange "
            "gradients at the end alone",
        )  # fmt: skip
        need(
            not self.train.compile, "train.compile",
            f"not with parallel.context={p.context}, where states go from rank to rank between blocks; leave it at "
            "null",
        )  # fmt: skip

    def _check_wavefront(self):
        need, t, p = self._need, self.train, self.parallel
        need(
            p.context == 1, "train.wavefront",
            f"must be null with parallel.context={p.context}, whose ranks are at different layers anyway",
        )  # fmt: skip
        need(
            p.tensor == 1 or not p.sequence, "train.wavefront",
            "must be null with parallel.sequence, under which a piece of a rank's tokens is no piece of the sequence",
        )  # fmt: skip
        need(
            p.zero_stage < 3, "train.wavefront",
            "must be null with parallel.zero_stage=3, which gathers parameters layer after layer",
        )  # fmt: skip
        need(
            p.reduce_bucket is None or bool(p.overlap), "parallel.reduce_bucket",
            "must be null with train.wavefront, whose layers hand over gradients from several streams; or set "
            "parallel.overlap=true, with which an exchange waits for all of them",
        )  # fmt: skip
        need(not t.compile, "train.compile", "not with train.wavefront, whose pieces have states; leave it at null")

    def _need(self, ok: bool, path: str, allowed: str):
        """Raises ValueError, which validation makes the error of one line, unless ``ok``."""
        if not ok:
            given = functools.reduce(getattr, path.split("."), self)
            raise ValueError(f"{path}: given {given!r}; {allowed}")


def config_hash(section: Section) -> str:
    """SHA-256 (hex) of a tree or of one section, independent of key order and formatting."""
    import hashlib  # not at the top: loading OpenSSL takes 3 ms, and reading settings does not need it

    text = json.dumps(section.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
