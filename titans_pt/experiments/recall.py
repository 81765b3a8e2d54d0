"""Which models recall what lies outside their attention window: training on MQAR, a table, a picture.

One process trains one variant after the other. A finished variant is, for each seed, one file of one record in
``run.dir``: it is skipped when the command runs again, and several processes may share a folder as long as they train
different variants or seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

from titans_pt.config import Config, ModelConfig, config_hash
from titans_pt.config_check import mixers_of
from titans_pt.errors import UserError
from titans_pt.experiments.mqar import MQAR
from titans_pt.experiments.study import (
    EVALUATION_SEED,
    answers,
    fit,
    has_memory,
    newest,
    once,
    spanned,
)
from titans_pt.models import build_model
from titans_pt.tools.files import write_text
from titans_pt.tools.plots import legend, new_figure, own_style, save_figure, styles
from titans_pt.tools.records import digest

CHANGES: dict[str, dict] = {
    "": {},
    "memory off": {"memory": {"writes": False}},
    "no momentum": {"memory": {"momentum": False}},
    "no forgetting": {"memory": {"forgetting": False}},
    "linear memory": {"memory": {"depth": 1}},
    "no conv": {"conv_width": 1},
    "no LN": {"memory": {"norm": False, "init_std": None}},  # that of M_0 is chosen for what is under a LayerNorm
}
"""What is taken from a model, by name: changes to its settings. "" is the model as it is."""
CONTROLS = ("", "memory off")
NAMES = {change.replace(" ", "-").lower() or "plain": change for change in CHANGES}
"""CHANGES as they are written on the command line."""
EVALUATION_ROWS, EVALUATION_BATCHES = 64, 8
PAIRS = (2, 4, 8, 16)
DISTANCES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Variant:
    """A model and what is taken from it."""

    model: str
    change: str = ""

    @property
    def name(self) -> str:
        return f"{self.model.upper()}, {self.change}" if self.change else self.model.upper()

    def file(self, seed: int) -> str:
        return f"{self.name.replace(', ', '-').replace(' ', '-').lower()}-seed{seed}.jsonl"

    def config(self, base: ModelConfig) -> ModelConfig:
        tree = base.model_dump()
        change = CHANGES[self.change]
        memory = tree["memory"] | change.get("memory", {})
        return ModelConfig(**(tree | change | {"mixers": mixers_of(self.model), "memory": memory}))


def chosen(models: list[str], changes: list[str] | None = None) -> list[Variant]:
    """Every model with every one of the changes (names of NAMES), one change after the other.

    Without ``changes``: as it is and, if it has a Titan's memory, with that off.

    Raises:
        UserError: an unknown model or change, or a change of the memory of a model that has none.
    """
    without = [model for model in models if not has_memory(model)]
    for name in changes or []:
        if name not in NAMES:
            raise UserError(f"--changes: given {name!r}; allowed: {', '.join(NAMES)}")
    if not changes:
        return [Variant(model, change) for change in CONTROLS for model in models if not (change and model in without)]
    for name in changes:
        if without and "memory" in CHANGES[NAMES[name]]:
            raise UserError(f"--changes: given {name!r}, but {without[0]} has none of a Titan's memory; give it plain")
    return [Variant(model, NAMES[name]) for name in changes for model in models]


def recall(config: Config, variants: list[Variant], task: MQAR):
    """Trains and measures what is not there yet, then writes recall.md and recall.png of all in ``run.dir``."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    finished(folder)  # what cannot be read is said before hours of training
    for variant in variants:
        path, made = folder / variant.file(config.run.seed), partial(train, config, variant, task)
        once(path, _key(config, variant, task), said(variant, config.run.seed), made)
    summarise(folder)


def _key(config: Config, variant: Variant, task: MQAR) -> str:
    model, train = config_hash(variant.config(config.model)), config_hash(config.train)
    return digest(model, train, config.data.seq_len, config.run.seed, task.pairs, task.distance)


def said(variant: Variant, seed: int) -> str:
    return f"{variant.name}, seed {seed}"


def train(config: Config, variant: Variant, task: MQAR) -> dict:
    """One variant's record: its settings, its curve, its accuracies. In fp32, on the CPU, in this process."""
    settings, rows = config.train, config.train.batch_tokens // config.data.seq_len
    torch.manual_seed(config.run.seed)
    model = build_model(variant.config(config.model))
    fitted = fit(model, settings, lambda i: task.batch(config.run.seed, i * rows, rows),
                 said(variant, config.run.seed))  # fmt: skip
    return {
        "model": variant.model, "change": variant.change, "seed": config.run.seed, **fitted,
        "accuracy": accuracy(model, task), "chance": task.chance, "task": vars(task),
        "parameters": sum(p.numel() for p in model.parameters()),
        "by_pairs": [[n, accuracy(model, _resized(task, pairs=n), 2)] for n in PAIRS if n < task.vocabulary // 2],
        "by_distance": [[n, accuracy(model, _resized(task, distance=n), 2)] for n in DISTANCES],
        "settings": variant.config(config.model).model_dump(), "lr": settings.lr, "max_steps": settings.max_steps,
    }  # fmt: skip


def _resized(task: MQAR, **changes: int) -> MQAR:
    """The task with more pairs or more distance, and as many places between its queries as before, for each."""
    other = replace(task, length=10**9, **changes)
    room = (task.length - task.shortest) * other.pairs // task.pairs
    return replace(other, length=other.shortest + room)


@torch.no_grad()
def accuracy(model: nn.Module, task: MQAR, batches: int = EVALUATION_BATCHES) -> float:
    """Share of right answers on samples that training does not see."""
    rows = EVALUATION_ROWS
    right = [answers(model, *task.batch(EVALUATION_SEED, i * rows, rows))[1].float().mean() for i in range(batches)]
    return float(torch.stack(right).mean())


# ---- for the reader


def finished(folder: Path) -> list[dict]:
    """The newest record of each variant and seed in ``folder``.

    Raises:
        UserError: a record of before seeds were kept apart.
    """
    records = newest(folder)
    for path, record in records.items():
        if "seed" not in record:
            raise UserError(f"{path}: written before records had seeds; move it away, or give another run.dir")
    return list(records.values())


def summarise(folder: Path):
    """recall.md and recall.png in ``folder``, of all that has finished there."""
    records = finished(folder)
    records.sort(key=lambda r: (*_place(r), r["seed"]))
    variants = [list(seeds) for _, seeds in groupby(records, _place)]
    text = table(variants)
    write_text(folder / "recall.md", text)
    plot(variants, folder / "recall.png")
    print(text, end="")
    print(f"{folder / 'recall.md'}, {folder / 'recall.png'}")


def _place(record: dict) -> tuple:
    """By which variants are ordered: the change, then the model."""
    return list(CHANGES).index(record["change"]), record["model"]


def table(variants: Sequence[Sequence[dict]]) -> str:
    """Markdown, one line a variant, whose records are those of its seeds. Accuracy is the mean over the seeds and, of
    several, the lowest and the highest; steps are those of each seed."""
    lines = ["| model | seeds | accuracy (%) | first at 95 % (step) | steps | parameters |", "|---" * 6 + "|"]
    for seeds in variants:
        each = [100 * r["accuracy"] for r in seeds]
        cells = [
            Variant(seeds[0]["model"], seeds[0]["change"]).name,
            ", ".join(str(r["seed"]) for r in seeds),
            spanned(sum(each) / len(each), each),
            ", ".join(_first(r) for r in seeds),
            ", ".join(f"{r['steps']:,}" for r in seeds) + f" of {seeds[0]['max_steps']:,}",
            f"{seeds[0]['parameters']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _first(record: dict) -> str:
    return next((f"{step:,}" for step, _, right, _ in record["curve"] if right >= 0.95), "-")


@own_style()
def plot(variants: Sequence[Sequence[dict]], path: Path):
    """Accuracy against steps, a line for each seed; against pairs and against distance, the mean over the seeds and a
    dot for each; ablations in the first alone."""
    figure = new_figure(15.0, 4.6)
    learning, pairs, distance = figure.subplots(1, 3, sharey=True)
    models = sorted({seeds[0]["model"] for seeds in variants})
    inks = dict(zip(models, styles(len(models)), strict=True))
    dashes = dict(zip(CHANGES, ("-", ":", "--", "-.", (0, (5, 1)), (0, (1, 3)), (0, (3, 1, 1, 1))), strict=True))
    drawn = {}
    for seeds in variants:
        model, change = seeds[0]["model"], seeds[0]["change"]
        style = inks[model] | {"linestyle": dashes[change], "markersize": 4}
        for r in seeds:
            (line,) = learning.plot([c[0] for c in r["curve"]], [100 * c[2] for c in r["curve"]], **style)
        drawn[Variant(model, change).name] = line
        if change in CONTROLS:
            for axes, name in ((pairs, "by_pairs"), (distance, "by_distance")):
                places = [n for n, _ in seeds[0][name]]
                each = [[100 * a for _, a in r[name]] for r in seeds]
                axes.plot(places, [sum(column) / len(seeds) for column in zip(*each, strict=True)], **style)
                if len(seeds) > 1:
                    axes.plot(places, list(zip(*each, strict=True)), ".", color=inks[model]["color"], alpha=0.5)
    task = variants[0][0]["task"]
    learning.set_xlabel("training steps")
    learning.set_ylabel("accuracy (%)")
    legend(figure, list(drawn.values()), list(drawn), fontsize=7, loc="outside right upper")
    pairs.set_xlabel(f"pairs (trained with {task['pairs']})")
    pairs.set_xscale("log", base=2)
    pairs.xaxis.set_major_formatter("{x:,.0f}")
    distance.set_xlabel(f"least tokens from pairs to queries (trained with {task['distance']})")
    for axes in (learning, pairs, distance):
        axes.grid(alpha=0.3)
        axes.set_ylim(-3, 103)
    save_figure(figure, path)
