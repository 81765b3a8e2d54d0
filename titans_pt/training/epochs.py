"""Epochs of a run's data for the plan, and a warning if one step reads a sample several times."""

from dataclasses import dataclass

from titans_pt.config import Config
from titans_pt.tasks import TaskData


@dataclass(frozen=True)
class SourceReading:
    """How often a run reads its training data, or one source of a mixture.

    samples: samples in one epoch. per_step, in_all: samples read in one step and in the whole run.
    """

    name: str
    samples: int
    per_step: float
    in_all: float

    @property
    def epochs(self) -> float:
        return self.in_all / self.samples


def readings(config: Config, data: TaskData) -> list[SourceReading]:
    """One reading of all training data up to train.max_steps; for a mixture, one per source."""
    batch = config.train.batch_tokens // config.data.seq_len
    parts = data.sources or {"the training data": (len(data.train), 1.0)}
    return [
        SourceReading(name, samples, share * batch, share * batch * config.train.max_steps)
        for name, (samples, share) in parts.items()
    ]


def epochs_text(config: Config, data: TaskData) -> str:
    """The plan's lines about epochs and validation samples."""
    found, wanted, there = readings(config, data), config.train.eval_samples, len(data.validation)
    lines = [
        f"plan: {r.name}: {r.samples:,} samples of {config.data.seq_len:,} tokens; {config.train.max_steps:,} steps "
        f"read {r.in_all:,.0f}, each {r.epochs:,.2f} times (epochs)"
        for r in found
    ]  # fmt: skip
    if config.train.eval_every:
        lines += [f"plan: validation reads {wanted} of {there:,} samples" if wanted <= there else
                  f"plan: validation reads all {there:,} samples there are (train.eval_samples={wanted})"]  # fmt: skip
    return "\n".join(lines)


def repeated(config: Config, data: TaskData) -> list[str]:
    """Warnings: one for each source (or for all data) that has fewer samples than one step reads."""
    seq_len, tokens = config.data.seq_len, config.train.batch_tokens
    remedy = "lower its weight, lower train.batch_tokens, or add text to it"
    if not data.sources:
        most = len(data.train) * seq_len
        remedy = f"lower train.batch_tokens to at most {most} (data.seq_len={seq_len}), or add text in data.sources"
    return [
        f"train.batch_tokens={tokens}: a step reads {r.per_step:,.5g} samples of {r.name}, and an epoch has "
        f"{r.samples}: every step repeats each of them {r.per_step / r.samples:,.1f} times; {remedy}"
        for r in readings(config, data)
        if r.per_step > r.samples
    ]  # fmt: skip
