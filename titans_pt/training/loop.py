"""The training loop: steps, validation, evaluation, checkpoints and logs."""

import logging
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titans_pt.config import Config
from titans_pt.config.checks import stop_condition
from titans_pt.data_pipeline import Loader
from titans_pt.data_pipeline.loader import collate
from titans_pt.errors import Busy, UserError
from titans_pt.evaluation import runner
from titans_pt.layers.memory_observer import memories_of
from titans_pt.runs import checkpoints
from titans_pt.runs.checkpoints import TrainerState
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.metrics import MetricsLog, read_metrics
from titans_pt.runs.tensorboard_log import TensorBoardLog
from titans_pt.runs.wandb_log import WandbLog, check_sweep
from titans_pt.tasks import Samples, Task, TaskData, task_of
from titans_pt.tools.files import check_room
from titans_pt.tools.screen import say
from titans_pt.training.epochs import epochs_text, repeated
from titans_pt.training.gauges import Gauges, lost_to
from titans_pt.training.metrics import Progress, peak_flops
from titans_pt.training.on_checkpoint import run_command
from titans_pt.training.patience import Patience
from titans_pt.training.plan import make_plan, unkept
from titans_pt.training.plots import plot_loss
from titans_pt.training.probes import memory_probe
from titans_pt.training.profiling import OutOfMemory, StepProfiler, Stopwatch
from titans_pt.training.ranks import Ranks, process_group
from titans_pt.training.resume import Start, build_engine, find_start, set_aside
from titans_pt.training.saving import Saver
from titans_pt.training.schedule import learning_rate
from titans_pt.training.signals import StopSignals
from titans_pt.training.spikes import SpikeGuard
from titans_pt.training.watchdog import Watchdog

log = logging.getLogger(__name__)
SHARING = 30.0
"""Seconds within which a file that rank 0 wrote to the run's folder must be visible on all nodes."""


def train(config: Config) -> int:
    """Trains the model of ``config``, from its newest checkpoint if it has one.

    Runs in every process of a torchrun, or alone. Returns the exit status: 0, or 128 + the signal that stopped it.

    Raises:
        UserError: settings, files and run folder do not fit together.
        Diverged: too many non-finite steps in a row.
        OSError: a checkpoint or log could not be written; earlier checkpoints are intact.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group(config.train.timeout))
        signals = stack.enter_context(StopSignals())
        watch = stack.enter_context(Watchdog(ranks, config.train.timeout))
        task = task_of(config)
        ranks.on_first(lambda: _announce(task, ranks))  # before anything is written
        if config.run.spare_dir:
            spare = Path(config.run.spare_dir)
            ranks.on_first(lambda: check_room(spare, "run.spare_dir", folder=True))
        folder = RunFolder(config.run.dir)
        data = task.open()
        _check_alike(data, config, ranks)
        ranks.on_first(lambda: stack.enter_context(folder.opened()) and None)
        _check_shared(folder, ranks)
        ranks.on_first(lambda: check_sweep(folder))
        ranks.on_first(lambda: _announce_epochs(config, data))
        stack.enter_context(watch.stacks_in(folder.stacks))
        trainer = Trainer(task, data, folder, ranks, signals, watch)
        stack.callback(trainer.close)
        stack.callback(watch.end)  # before W&B sends the rest, which may take minutes
        trainer.status = trainer.run()
        return trainer.status


def _check_alike(data: TaskData, config: Config, ranks: Ranks):
    """
    Raises:
        UserError: on all ranks: a rank's data differs from rank 0's, as after a copy to only some nodes' disks.
    """
    of_ranks = ranks.gather_objects((data.identity, platform.node()))
    for rank, (identity, node) in enumerate(of_ranks):
        if identity != of_ranks[0][0]:
            raise UserError(f"data.dir: {config.data.dir} on {node} (rank {rank}) holds other data than on "
                            f"{of_ranks[0][1]} (rank 0); copy the same files to all nodes")  # fmt: skip


def _check_shared(folder: RunFolder, ranks: Ranks):
    """
    Raises:
        UserError: on all ranks: a rank sees another folder than rank 0, which has just locked it. Without this check
            the run could not be resumed, and would wait forever for the shards of a checkpoint.
    """
    holder = ranks.on_first(folder.holder)

    def check():
        end = time.monotonic() + SHARING
        while folder.holder() != holder:
            if time.monotonic() > end:
                raise UserError(f"run.dir: {folder.path.absolute()} on {platform.node()} (rank {ranks.rank}) is not "
                                "the folder of rank 0; name one on a file system that all nodes share")  # fmt: skip
            time.sleep(0.5)

    ranks.together(check)


_BEFORE_STEP_1 = TrainerState(step=0, samples=0, adam_step=0, nonfinite=0, nonfinite_in_a_row=0, config={}, identity={})


@dataclass
class _Step:
    """A step in progress.

    began: time.perf_counter() at its start.
    logged: whether it is written to the metrics.
    limit: a loss above it is a spike.
    memory: figures of memory_probe, on logged steps.
    """

    began: float
    lr: float
    logged: bool
    limit: float
    stopwatch: Stopwatch
    memory: dict[str, float] = field(default_factory=dict)


class Trainer:
    """A run in progress. Everything that changes from step to step is in its plain attributes."""

    def __init__(
        self, task: Task, data: TaskData, folder: RunFolder, ranks: Ranks, signals: StopSignals, watch: Watchdog
    ):
        start = ranks.on_first(lambda: find_start(task, folder, data.identity))
        state, task.config = start.state or _BEFORE_STEP_1, start.config
        self.task, self.data, self.folder, self.ranks = task, data, folder, ranks
        self.config = config = task.config
        self.signals, self.watch = signals, watch
        train, seq_len = config.train, config.data.seq_len

        self.step, self.samples = state.step, state.samples
        self.first_step = self.step + 1
        task.begins = (self.samples, self.step)
        self.nonfinite, self.nonfinite_in_a_row = state.nonfinite, state.nonfinite_in_a_row
        self.first_loss = state.first_loss
        self.spikes = SpikeGuard(train, state.spikes)
        self.patience = Patience(train.patience, state.best)
        self.origin = start.weights.origin if start.weights else state.origin
        self.status = 1  # until run() returns another one
        self.loss: float | None = None
        self.validation: dict[str, float] = {}
        self.validated_step: int | None = None
        self.evaluated_step: int | None = None
        self.last_step = train.stop_at or train.max_steps
        if config.evaluation.every:
            ranks.on_first(lambda: runner.check(task))
        self._unlogged_tokens, self._unlogged_seconds = 0, 0.0
        self.gauges = Gauges(ranks)

        self.engine = build_engine(task, start, ranks)
        if self.step:  # a stop may have left this step's validation undone
            self.engine.backbone.set_progress(self.step / train.max_steps)
        self.saver = Saver(folder, config, self.engine, ranks, watch, start.state, self._state, self._after_checkpoint)
        self.batch_samples = train.batch_tokens // seq_len
        grid = self.engine.topology
        self.loader = Loader(data.train, self.engine.micro_batch, grid.data.rank, grid.data.size, self.batch_samples)
        with torch.device("meta"):
            model: Any = task.build_model()  # a module with flops
            self.flops_per_token = model.flops(seq_len).total
        peak = peak_flops(ranks.device)
        self.peak_flops = peak and peak * ranks.world_size
        self.wandb: WandbLog | None = None
        self.tensorboard: TensorBoardLog | None = None
        self.metrics: MetricsLog | None = None
        self._catch_up(ranks.on_first(lambda: self._open_logs(start)))
        self.progress = Progress(self.step, max(self.step, self.last_step), shown=ranks.first)
        self.profiler = StepProfiler(folder.profile, train.profile_at if ranks.first else None, train.profile_steps)
        self.out_of_memory = OutOfMemory(
            folder.path, ranks.device,
            f"set train.activation_checkpointing=true, or lower train.micro_batch={train.micro_batch}", ranks.rank,
        )  # fmt: skip

    def _open_logs(self, start: Start) -> list[dict]:
        """Opens the logs of rank 0; returns the last record of each kind of the steps already done."""
        self.folder.write_settings(self.config)
        self.task.keep(self.folder)
        self.metrics = MetricsLog(self.folder.metrics, self.step, start.branch)  # keeps the curves that a branch leaves
        records = read_metrics(self.folder.metrics)
        run_id = start.state.wandb_id if start.state else None
        self.wandb = WandbLog(self.config, self.folder, run_id, start.branch)
        if self.wandb.begins:  # send the records of earlier steps first
            for record in records:
                self.wandb.write(record["step"], _curves(record["kind"], record))
        self.tensorboard = TensorBoardLog(self.config.run.tensorboard, self.folder, self.step)
        if start.branch:  # last: if anything above fails, the run is unchanged
            set_aside(self.folder, self.step)
        log.info(
            "%s step %d: %s parameters, %s ranks on %s, ZeRO %d, %s, %d micro-batches of %d samples",
            "resuming at" if start.state else "starting at", self.step, f"{self.engine.parameters:,}",
            self.engine.topology, self.ranks.device.type,
            self.config.parallel.zero_stage,
            self.config.train.precision, self.engine.accumulation, self.engine.micro_batch,
        )  # fmt: skip
        repeated = {"validation": self.step} if start.revalidate else {}
        last = {record["kind"]: record for record in records if repeated.get(record["kind"]) != record["step"]}
        return list(last.values())  # for all ranks: a long run has hundreds of thousands of records

    def _catch_up(self, records: list[dict]):
        """Takes the loss and the validation of the steps already done from their last records."""
        for record in records:
            if record["kind"] == "train":
                self.loss = record["loss"]
            elif record["kind"] == "evaluation":
                self.evaluated_step = record["step"]
            elif record["kind"] == "validation":
                self._note_validation(record, record["step"])
                if record["step"] == self.step and self._due:  # validated after this step's checkpoint, at a stop
                    self.patience.note(self.step, _or_nan(record["validation_loss"]))

    # ---- the run

    def run(self) -> int:
        """Trains to the last step, or until a signal; returns the exit status."""
        train = self.config.train
        if self.step:  # a stop may have left these undone
            if self._due:
                self._validate()
            self._evaluate()
        while self.step < self.last_step and not self._ended():
            signal = self._train_step()
            if signal:
                self._save()
                self.saver.wait()
                then = "starts again" if self.saver.step is None else "continues"
                self._say(
                    f"stopped by signal {signal} at step {self.step}; {self._saved_at()}; the same command {then}"
                )
                return 128 + signal
            if self.nonfinite_in_a_row >= train.max_nonfinite:
                self.saver.give_up()
            if self.step == self.last_step:
                break
            saves = self.step % train.checkpoint_every == 0 or self.saver.postponed
            if saves and not train.patience:  # whose checkpoint says whether this validation is the best
                self._save()  # first: if the validation fails, the steps up to it are not lost
            if self._due:
                self._validate()
            if saves or self._is_best():
                self._save()
            self._evaluate()
        self._finish()
        return 0

    def _train_step(self) -> int:
        """One optimiser step, or a skipped one. Returns the number of a signal to stop for, or 0."""
        step = self._begin()
        losses = self._micro_steps(step)
        loss, failed, *flags = self._agree(losses)
        speed = self._record(step, loss)
        if failed:
            self.saver.wait()
        self.profiler.after(self.step)
        self.progress.update(loss, speed)
        return self.signals.decide(flags)

    def _begin(self) -> _Step:
        """Starts the next step: sets its learning rate and random seed."""
        train, began = self.config.train, time.perf_counter()
        self.step += 1
        lr = self.task.learning_rate(self.step, learning_rate(self.step, train))
        self.engine.set_lr(lr)
        self.engine.backbone.set_progress(self.step / train.max_steps)
        # The seed is a function of the step, so that checkpoints need no random state.
        # Data ranks read different samples and draw different numbers; tensor and context ranks draw the same.
        drawn = self.config.run.seed * 1_000_003 + self.step + (self.engine.topology.data.rank << 40)
        torch.manual_seed(drawn % 2**63)
        logged = self.step == 1 or self.step % train.log_every == 0 or self.step == self.last_step
        return _Step(began, lr, logged, self.spikes.limit, Stopwatch(self.ranks.device))

    def _micro_steps(self, step: _Step) -> list[Tensor]:
        """Runs this rank's micro-batches, the last with the update; returns their losses."""
        losses: list[Tensor] = []
        compiling = self.engine.compiled and self.step == self.first_step
        self.profiler.before(self.step)
        with self.out_of_memory:
            self.watch.at(f"step {self.step}, reading its samples")
            for n, loaded in enumerate(self.loader.batches(self.samples)):
                self.watch.at(f"step {self.step}, micro-batch {n}", slow=compiling)
                batch = self._own(loaded)
                step.stopwatch.mark("data")
                if step.logged and n == 0:
                    step.memory = self._look(batch)
                    step.stopwatch.mark("probe")
                guarded = step.limit < math.inf and n == self.engine.accumulation - 1  # all losses are known then
                refuse = partial(self._is_spike, losses, step.limit) if guarded else None
                losses.append(self.engine.micro_step(batch, step.stopwatch.mark, refuse))
        return losses

    def _agree(self, losses: list[Tensor]) -> list[float]:
        """(mean loss, number of ranks on which saving failed, flags of signals), summed over ranks.

        This is the only exchange of a step, after which all ranks take the same decisions.
        """
        local_loss = self._local(losses)
        self.watch.at(f"step {self.step}, the sum of the losses")
        return self.ranks.sum([local_loss, float(self.saver.failed), *self.signals.flags()])

    def _record(self, step: _Step, loss: float) -> float:
        """Updates counters after the step, and logs it if due. Returns the tokens per second."""
        applied = self.engine.update_applied() and math.isfinite(loss)
        if math.isfinite(loss):
            self.spikes.note(loss)
        first_sample, self.samples = self.samples, self.samples + self.batch_samples
        self._unlogged_tokens += self.config.train.batch_tokens
        self._unlogged_seconds += time.perf_counter() - step.began
        speed = self._unlogged_tokens / self._unlogged_seconds
        if applied:
            self.nonfinite_in_a_row = 0
            self.loss = loss
            self.gauges.step(loss)
            self.first_loss = loss if self.first_loss is None else self.first_loss
            if step.logged:
                parts = step.stopwatch.seconds()
                self._log(
                    "train",
                    loss=loss,
                    grad_norm=self.engine.gradient_norm(),
                    lr=step.lr,
                    tokens=self.samples * self.config.data.seq_len,
                    tokens_per_second=speed,
                    mfu=self.peak_flops and speed * self.flops_per_token / self.peak_flops,
                    **{f"{part}_seconds": spent for part, spent in parts.items()},
                    **self.gauges.read(parts, speed),
                    **step.memory,
                    skipped=self.skipped,
                )
        else:
            self._note_skipped(loss, first_sample, step.limit if step.limit < loss < math.inf else None)
        if step.logged or self.step == self.first_step:  # a process's first step compiles, and measures no speed
            self._unlogged_tokens, self._unlogged_seconds = 0, 0.0
        return speed

    def _local(self, losses: list[Tensor]) -> float:
        """This rank's part of the step's mean loss."""
        return float(torch.stack(losses).mean()) / self.ranks.world_size

    def _is_spike(self, losses: list[Tensor], limit: float, last: Tensor) -> bool:
        (loss,) = self.ranks.sum([self._local([*losses, last])])
        return loss > limit

    def _look(self, batch: tuple[Tensor | None, ...]) -> dict[str, float]:
        """Means of memory_probe over a micro-batch's first sample, from an extra forward pass.

        The training pass cannot be used: hooks do not fire inside a compiled block. All ranks take part, since a
        forward pass may be collective.
        """
        if not memories_of(self.engine.model):
            return {}
        first = tuple(None if part is None else part[:1] for part in batch)
        grid = self.engine.topology
        probe = memory_probe(self.engine.model, grid.tensor, grid.context)
        with probe as means, torch.compiler.set_stance("force_eager"):
            self.engine.validate([(first, torch.ones(1, device=self.ranks.device))])
            return means()

    @property
    def skipped(self) -> int:
        """Steps without an update so far: spikes and non-finite steps."""
        return self.nonfinite + self.spikes.skipped

    def _note_skipped(self, loss: float, first_sample: int, limit: float | None):
        """Records a skipped step: weights and moments stay as they were, the data position advances.

        limit: the spike limit that a finite loss exceeded; None: loss or gradient is not finite.
        """
        kind, why = "spike", f"is above {limit} (train.spike_deviations)"
        if limit is None:
            kind, why = "nonfinite", "or gradient is not finite"
            self.nonfinite += 1
            self.nonfinite_in_a_row += 1
        if self.ranks.first:
            positions = range(first_sample, first_sample + self.batch_samples)
            log.warning("step %d was skipped: its loss (%s) %s; samples %d to %d",
                        self.step, loss, why, positions[0], positions[-1])  # fmt: skip
            self._log(kind, loss=loss, skipped=self.skipped, in_a_row=self.nonfinite_in_a_row, limit=limit,
                      positions=[positions[0], positions[-1]],
                      samples=[self.data.train.describe(p) for p in positions])  # fmt: skip

    # ---- around the steps

    @lost_to("validation")
    def _validate(self):
        """Validates on a fixed set of samples, divided among ranks; at most once per step."""
        if self.validated_step == self.step:
            return
        samples = self.data.validation
        batches = self._validation_batches(samples, min(self.config.train.eval_samples, len(samples)))
        totals, count = self.engine.validate(batches)
        *sums, count = self.ranks.sum([*totals.values(), count])
        means = {name: total / count for name, total in zip(totals, sums, strict=True)}
        self.watch.at(f"after_validation of task={self.task.name}, step {self.step}")
        with self.engine.reading() as model:
            own = self.task.after_validation(model, self.step, dict(means))
        means |= self.ranks.on_first(lambda: own)
        figures = {f"validation_{name}": mean for name, mean in means.items()}
        self._note_validation(figures, self.step)
        if self._due and not self.nonfinite_in_a_row:  # a non-finite step has no checkpoint that could be the best
            self.patience.note(self.step, figures["validation_loss"])
        self._log("validation", **figures)
        log.info("step %d: validation loss %.4f", self.step, figures["validation_loss"])

    @property
    def _due(self) -> bool:
        """Whether a validation is due after this step, which may end the training.

        train.stop_at does not count: a run in two parts ends at the same step as an uninterrupted one.
        """
        train = self.config.train
        return self.step == train.max_steps or (train.eval_every > 0 and self.step % train.eval_every == 0)

    def _note_validation(self, figures: dict[str, float], step: int):
        self.validation, self.validated_step = figures, step

    def _is_best(self) -> bool:
        """Whether this step's validation is the best so far; only with train.patience."""
        return self.patience.best is not None and self.patience.best.step == self.step

    def _ended(self) -> str:
        """The setting that ends the training before train.max_steps, "" while none does."""
        train, best = self.config.train, self.patience.best
        if self._reached():
            return f"train.stop_when={train.stop_when!r}"
        if best and self.patience.exhausted:
            return f"train.patience={train.patience}; the best validation loss is {best.loss:.4f}, of step {best.step}"
        return ""

    def _reached(self) -> bool:
        """Whether this step's validation meets train.stop_when."""
        if self.config.train.stop_when is None or self.validated_step != self.step or not self._due:
            return False
        figure, sign, value = stop_condition(self.config.train.stop_when)
        found = self.validation[f"validation_{figure}"]
        if found is None:  # NaN, which metrics.jsonl stores as null
            return False
        return found >= value if sign == ">=" else found <= value

    def _validation_batches(self, samples: Samples, count: int) -> Iterator[tuple[tuple[Tensor | None, ...], Tensor]]:
        """This rank's (batch, weight) pairs: the same number on every rank, padded with samples of weight 0."""
        micro, grid = self.engine.micro_batch, self.engine.topology
        for first in range(0, count, micro * grid.data.size):
            positions = range(first + grid.data.rank * micro, first + (grid.data.rank + 1) * micro)
            batch = collate([samples.sample(min(p, count - 1)) for p in positions])
            self.watch.at(f"validation after step {self.step}, sample {positions[0]}")
            weight = torch.tensor([float(p < count) for p in positions], device=self.ranks.device)
            yield self._own(batch), weight

    def _own(self, batch: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """This rank's piece of the loader's batch, on the device."""
        context = self.engine.topology.context
        if context.size > 1:
            batch = self.task.cut(batch, context.rank, context.size)
        return self.task.to_device(batch, self.ranks.device)

    @lost_to("evaluation")
    def _evaluate(self):
        """Runs the suites once, on a new checkpoint, every evaluation.every steps; a restart repeats no sample.

        A signal to stop waits until the evaluation ends; the checkpoint already exists.
        """
        settings = self.config.evaluation
        if not settings.every or self.step % settings.every or self.evaluated_step == self.step:
            return
        self._save()
        with self.gauges.during("checkpoint"):
            self.saver.wait()
        if self.saver.step != self.step:
            if self.ranks.first:
                log.warning("step %d is not evaluated: it has no checkpoint, since it was not finite", self.step)
            return
        found: dict[str, Any] = {}
        for suite in settings.suites:
            found |= self._evaluate_suite(suite)
        self.evaluated_step = self.step
        if found:
            self._log("evaluation", **runner.figures(found))

    def _evaluate_suite(self, suite: str) -> dict[str, Any]:
        """Runs a suite, whose samples all ranks share; returns its summary on every rank.

        The summary is empty if an evaluation beside the training is at work on the suite.
        """

        def finish(summary: Callable[[], dict | None], busy: str = "") -> dict | None:
            self.watch.at(f"{suite} after step {self.step}, the samples of other ranks")
            busy = next(filter(None, self.ranks.gather_objects(busy)), "")
            if not busy:
                return self.ranks.on_first(summary)
            if self.ranks.first:
                log.warning("step %d is not evaluated by %s: %s", self.step, suite, busy)
            return {}

        try:
            found = runner.evaluate(self.folder.path, step=self.step, suite=suite, at=self.watch.at,
                                    send=self._send_results, finish=finish)  # fmt: skip
        except Busy as error:
            found = finish(dict, str(error).partition(";")[0])
        assert found is not None  # no sample is left
        return found

    def _send_results(self, name: str, kind: str, folder: Path):
        if self.wandb:  # on rank 0, which collects all results
            self.wandb.send(name, kind, folder)

    @lost_to("checkpoint")
    def _save(self):
        """Takes a checkpoint, if the last step was finite (see :class:`Saver`)."""
        self.saver.save()

    def _state(self) -> TrainerState:
        config = self.config
        return TrainerState(
            step=self.step, samples=self.samples, adam_step=self.engine.masters.updates, nonfinite=self.nonfinite,
            nonfinite_in_a_row=self.nonfinite_in_a_row, first_loss=self.first_loss,
            wandb_id=self.wandb.id if self.wandb else None, origin=self.origin,
            spikes=self.spikes.numbers(), best=self.patience.numbers(),
            config=config.model_dump(mode="json"), identity=self.data.identity,
            topology={"ranks": self.ranks.world_size, "tensor": config.parallel.tensor,
                      "context": config.parallel.context,
                      "zero_stage": config.parallel.zero_stage, "precision": config.train.precision,
                      "device": self.ranks.device.type},
        )  # fmt: skip

    def _after_checkpoint(self, path: Path):
        if self.config.wandb.checkpoints:
            assert self.wandb
            self.wandb.send("checkpoint", "model", path)
        if command := self.config.run.on_checkpoint:
            run_command(command, self.folder, path)

    def _finish(self):
        if self.patience.limit and not self.nonfinite_in_a_row:
            self._validate()  # the last checkpoint says which one is the best
        self._save()
        if self.saver.step != self.step:
            self.saver.give_up()
        self._validate()
        self._evaluate()
        self.saver.wait()
        self.ranks.on_first(self._summarise)

    def _summarise(self):
        baseline, name = self.data.baseline, self.task.baseline_name
        plot = self.folder.plots / "loss.png"
        try:
            plot_loss(
                read_metrics(self.folder.metrics), plot, self.task.unit, name, baseline, self.folder.path.resolve().name
            )
        except OSError as error:  # the run is complete without the plot
            log.warning("%s: the curve could not be drawn (%s)", plot, error.strerror or error)

        def number(value: float | None) -> str:
            return "-" if value is None else f"{value:.4f}"

        known = "" if baseline is None else f", {name} {number(baseline)}"
        validation = number(self.validation.get("validation_loss"))
        self.progress.close()
        self._say(
            f"step {self.step} of {self.config.train.max_steps}: training loss {number(self.first_loss)} -> "
            f"{number(self.loss)}, validation {validation}{known} ({self.task.unit}); "
            f"{self.skipped} steps skipped"
        )
        if ended := self._ended():
            self._say(f"ended by {ended}")
        self._say(f"{self._saved_at()}; loss curve {plot}; metrics {self.folder.metrics}; log {self.folder.log}")

    def _saved_at(self) -> str:
        if (step := self.saver.step) is None:
            return "no checkpoint, since no step was finite"
        since = "" if step == self.step else f" (step {self.step} was not finite and is not saved)"
        return f"checkpoint {checkpoints.checkpoint_path(self.folder.checkpoints, step)}{since}"

    def _log(self, kind: str, **values):
        if self.ranks.first:
            assert self.metrics and self.wandb and self.tensorboard
            numbers = _curves(kind, values)
            try:
                self.metrics.write(kind, self.step, **values)
                self.tensorboard.write(self.step, numbers)
            except OSError as error:
                self.saver.report(error)
            self.wandb.write(self.step, numbers)

    def _say(self, text: str):
        if self.ranks.first:
            log.info(text)
            say(text)

    def close(self):
        """Closes logs and bars; the engine ends with the process."""
        self.profiler.close()
        self.saver.close()
        self.progress.close()
        if self.metrics:
            self.metrics.close()
        if self.wandb:
            self.wandb.close(self.status)
        if self.tensorboard:
            self.tensorboard.close()


def _curves(kind: str, record: dict[str, Any]) -> dict[str, float]:
    """Figures of a record by curve, kind/name."""
    return {f"{kind}/{k}": v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}


def _or_nan(value: float | None) -> float:
    """A figure of metrics.jsonl, which has null for a non-finite one."""
    return math.nan if value is None else value


def _announce(task: Task, ranks: Ranks):
    """Prints the plan of the run.

    Raises:
        UserError: ranks or batch do not divide, or the plan cannot fit the GPU.
    """
    plan = make_plan(task, ranks.world_size)
    print(plan.text(), flush=True)
    plan.check()


def _announce_epochs(config: Config, data: TaskData):
    """Prints how often the run reads its data; warns if a step repeats samples, or train.keep_every keeps too few."""
    print(epochs_text(config, data), flush=True)
    for warning in [*repeated(config, data), *unkept(config)]:
        log.warning("%s", warning)
