"""What Titans are for: needles shown once in noise, asked for far outside the attention window and the training length.

Small models learn it at short lengths, the shortest first, and are asked at lengths up to thousands of times longer, in
constant memory. A sliding-window Transformer of equal size is the control: it cannot see a needle once it is further
back than its layers' windows reach together.

What ``run.dir`` holds, for each model and seed:

- ``MODEL-seedN.jsonl``: a line when the model is trained, then one line for each sample that it was asked;
- ``MODEL-seedN-HASH.safetensors``: its weights. Training and asking are separate: whatever is asked later, at other
  lengths, with more needles, in other noise, is asked of these weights;
- while it trains, or reads a long sample, how far it has come: a killed command continues there when it runs again.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig
from titans_pt.config_check import completed, mixers_of
from titans_pt.errors import UserError
from titans_pt.evaluation.long_context import read
from titans_pt.experiments.needles_in_noise import Curriculum, NeedlesInNoise
from titans_pt.experiments.study import (
    EVALUATION_SEED,
    REPORT_EVERY,
    answers,
    fit,
    has_memory,
    spanned,
)
from titans_pt.models import build_model
from titans_pt.models.mixers import MIXERS
from titans_pt.run import load_weights
from titans_pt.tasks.base import backbone_of
from titans_pt.tools.files import write_atomically, write_text
from titans_pt.tools.plots import plot_accuracy
from titans_pt.tools.records import RecordFile, digest, read_records
from titans_pt.tools.statistics import wilson

ROWS = 8
"""Samples read at once."""


@dataclass(frozen=True)
class Questions:
    """What is asked of every model: each length with each number of needles."""

    lengths: Sequence[int]
    needles: Sequence[int]
    answers: int = 256
    """At least so many for each, in whole samples."""
    unseen: bool = False
    """In noise that training never drew."""


def train_and_ask(
    config: Config, models: Sequence[str], task: NeedlesInNoise, curriculum: Curriculum, questions: Questions,
    write_cost: float = 0.0,
):  # fmt: skip
    """Trains and asks what is not there yet, then writes needles.md and the pictures of all in ``run.dir``.

    Args:
        models: by name, as in :func:`titans_pt.config_check.mixers_of`.
        task: of training; its length is not used.
        curriculum: of training.
        write_cost: of :func:`titans_pt.experiments.study.fit`.

    Raises:
        UserError: an unknown model, a batch that does not hold one sample, a question that is longer than its sample,
            or weights that are not those of their record.
    """
    for model in models:
        mixers_of(model)
    longest = max(curriculum.lengths)
    if config.train.batch_tokens < longest:
        raise UserError(f"train.batch_tokens: given {config.train.batch_tokens}; a sample has {longest} tokens")
    asked = [
        replace(task, length=length, needles=needles, unseen=questions.unseen)
        for needles in questions.needles
        for length in sorted(questions.lengths)
    ]
    folder = Path(config.run.dir)
    for model in models:
        path = folder / f"{model}-seed{config.run.seed}.jsonl"
        with RecordFile(path) as file:
            trained = find(path, config, model, task, curriculum, write_cost)
            if trained is None:
                trained = train(folder, file, config, model, task, curriculum, write_cost)
            else:
                print(f"{named(trained)}: trained already ({path})", flush=True)
            ask(path, file, trained, asked, questions.answers, config)
    summarise(folder)


def named(record: dict) -> str:
    return f"{record['model'].upper()}, seed {record['seed']}"


# ---- training


def sized(base: ModelConfig, model: str) -> ModelConfig:
    """``base`` with these mixers. A model without a memory, unless ``base`` sets model.mlp_hidden, gets MLPs so wide
    that none with a memory has more parameters."""
    settings = ModelConfig(**(base.model_dump() | {"mixers": mixers_of(model)}))
    if base.mlp_hidden or has_memory(model):
        return settings
    others = filter(has_memory, MIXERS.names())
    missing = max(parameters(sized(base, other)) for other in others) - parameters(settings)
    wider = settings.hidden + max(0, -(-missing // (3 * settings.d_model * settings.n_layers)))
    return settings.model_copy(update={"mlp_hidden": wider})


def parameters(settings: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(settings).parameters())


def find(
    path: Path, config: Config, model: str, task: NeedlesInNoise, curriculum: Curriculum, write_cost: float
) -> dict | None:
    """The record in ``path`` of a model that was trained just so; settings that came later count as what was done then.

    Raises:
        UserError: a line of the file is not a record.
    """
    wanted = _training(config, model, task, curriculum, write_cost)
    for record in read_records([path]).values():
        if record["kind"] == "trained" and _comparable(record) == _comparable(wanted):
            return record
    return None


def _training(config: Config, model: str, task: NeedlesInNoise, curriculum: Curriculum, write_cost: float) -> dict:
    """What the weights depend on."""
    tree = config.model_dump(mode="json") | {"model": sized(config.model, model).model_dump(mode="json")}
    told = {"vocabulary": task.vocabulary, "needles": task.needles, "held_out": task.held_out}
    said = {"model": model, "seed": config.run.seed, "task": told, "lengths": curriculum.text}
    return said | {"write_cost": write_cost, "config": tree}


def _comparable(record: dict) -> tuple:
    tree = completed(record["config"])
    said = (record[name] for name in ("model", "seed", "task", "lengths", "write_cost"))
    return *said, tree["model"], tree["train"]


def train(
    folder: Path, file: RecordFile, config: Config, model: str, task: NeedlesInNoise, curriculum: Curriculum,
    write_cost: float,
) -> dict:  # fmt: skip
    """Trains one model, keeps its weights in ``folder``, and appends its record to ``file``; returns it."""
    said = _training(config, model, task, curriculum, write_cost)
    key = digest("trained", *_comparable(said))
    torch.manual_seed(config.run.seed)
    built, steps = build_model(sized(config.model, model)), config.train.max_steps

    def batch(i: int) -> tuple[Tensor, Tensor]:
        length = curriculum.length(i, steps)
        rows = config.train.batch_tokens // length
        return replace(task, length=length).batch(config.run.seed, i * rows, rows)

    name = f"{model}-seed{config.run.seed}-{key[:8]}"
    kept, least = folder / f"{name}.training", curriculum.last_begins(steps) + REPORT_EVERY
    fitted = fit(built, config.train, batch, named(said), least, kept, write_cost)
    content = save({name: p.detach() for name, p in built.named_parameters()})
    weights = folder / f"{name}.safetensors"
    write_atomically(weights, lambda temporary: temporary.write_bytes(content), durable=True)
    record = {
        "key": key, "kind": "trained", **said, **fitted, "weights": weights.name,
        "sha256": hashlib.sha256(content).hexdigest(), "parameters": sum(p.numel() for p in built.parameters()),
    }  # fmt: skip
    file.append(record)
    kept.unlink(missing_ok=True)
    return record


def restored(folder: Path, record: dict) -> nn.Module:
    """The model of a ``trained`` record.

    Raises:
        UserError: its weights are not in ``folder``, or are others.
    """
    path = folder / record["weights"]
    content = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise UserError(
            f"{path}: not the weights of {named(record)}, or not there; put them back, or delete its .jsonl to train "
            "it again"
        )
    model = build_model(ModelConfig(**completed(record["config"])["model"]))
    load_weights(model, load(content))
    backbone_of(model).set_progress(record["steps"] / record["config"]["train"]["max_steps"])
    return model.eval()


# ---- asking


def ask(path: Path, file: RecordFile, trained: dict, asked: list[NeedlesInNoise], count: int, config: Config):
    """Adds a line to ``file``, which is ``path``, for each sample of ``asked`` that has none, for ``count`` answers."""
    done, model = read_records([path]), None
    for task in asked:
        samples = -(-count // task.needles)
        keys = [digest("asked", trained["sha256"], asdict(task), index) for index in range(samples)]
        found = [done[key] for key in keys if key in done]
        while len(found) < samples:  # samples are asked in order: those that are there come first
            model = model or restored(path.parent, trained)
            first = len(found)
            batch = keys[first : first + ROWS]
            kept = path.with_name(f"reading-{digest(batch)[:16]}.safetensors")
            rows = answer(model, task, first, len(batch), config, kept, named(trained))
            for key, row in zip(batch, rows, strict=True):
                record = {"key": key, "kind": "asked", "sha256": trained["sha256"], **row}
                file.append(record)
                found.append(record)
        right, seconds = sum(row["right"] for row in found), sum(row["seconds"] for row in found)
        total = samples * task.needles
        print(
            f"{named(trained)}: {task.needles} needles in {task.length:,} tokens of {noise(task.unseen)} noise: "
            f"{100 * right / total:.1f} % of {total}, {seconds:.0f} s",
            flush=True,
        )


def noise(unseen: bool) -> str:
    return "unseen" if unseen else "seen"


@torch.no_grad()
def answer(
    model: nn.Module, task: NeedlesInNoise, first: int, rows: int, config: Config, kept: Path, name: str
) -> list[dict]:
    """Samples first .. first + rows - 1, which training does not see, read together in constant memory.

    Args:
        kept: file for the state of a long reading, which continues from there after a kill.
        name: whose progress is shown.

    Returns:
        of each sample: what it was, right answers, and its share of the seconds.
    """
    ids, places = task.batch(EVALUATION_SEED, first, rows)
    end = task.length - task.tail
    evaluation, began = config.evaluation, time.perf_counter()

    def show(stretch: dict):
        if stretch["tokens"] < end:
            rate = rows * stretch["tokens_per_s"]
            print(f"{name}: {stretch['tokens']:,} of {task.length:,} tokens, {rate:,.0f} tokens/s", flush=True)

    state = read(model, ids[:, :end], evaluation.prefill_tokens, evaluation.save_every, kept, show).state
    right = answers(model, ids[:, end:], places - end, state)[1].sum(1).tolist()
    seconds = (time.perf_counter() - began) / rows
    told = {"length": task.length, "needles": task.needles, "noise": noise(task.unseen)}
    return [told | {"index": first + row, "right": n, "seconds": seconds} for row, n in enumerate(right)]


# ---- for the reader


def summarise(folder: Path):
    """needles.md and a picture for each number of needles and kind of noise, of all models that finished in ``folder``.

    Of several trainings of one model with one seed, under other settings, the last counts.
    """
    trained, asked = {}, []
    for path in sorted(folder.glob("*-seed*.jsonl")):
        for record in read_records([path]).values():
            if record["kind"] == "trained":
                trained[record["model"], record["seed"]] = record
            else:
                asked.append(record)
    names = {record["sha256"]: record for record in trained.values()}
    asked = [names[row["sha256"]] | row for row in asked if row["sha256"] in names]

    def condition(row: dict) -> tuple[str, int]:
        return row["noise"], row["needles"]

    text, pictures = [], []
    for (kind, needles), rows in groupby(sorted(asked, key=condition), condition):
        lines = by_model(list(rows))
        title = f"{needles} needles in {kind} noise"
        text.append(f"{title}, percent right:\n\n{table(lines)}")
        pictures.append(folder / f"needles-{needles}-{kind}.png")
        plot_accuracy({line["name"]: line["by_length"] for line in lines}, pictures[-1], title)
    path = folder / "needles.md"
    write_text(path, "\n".join(text))
    print("\n".join(text), end="")
    print(", ".join(map(str, [path, *pictures])))


def by_model(rows: list[dict]) -> list[dict]:
    """Of each model: name, parameters, seeds, and by_length: length, right, n, mean and Wilson's 95 % interval over the
    answers of all seeds, and ``each``, the means of the seeds."""
    lines = []
    for model, of_model in _grouped(rows, "model"):
        by_length = []
        for length, part in _grouped(of_model, "length"):
            right, n = (sum(row[name] for row in part) for name in ("right", "needles"))
            low, high = wilson(right, n)
            each = [sum(r["right"] for r in of_seed) / sum(r["needles"] for r in of_seed)
                    for _, of_seed in _grouped(part, "seed")]  # fmt: skip
            by_length.append({"length": length, "mean": right / n, "low": low, "high": high, "n": n, "each": each})
        seeds = sorted({row["seed"] for row in of_model})
        lines.append({"name": model.upper(), "parameters": of_model[0]["parameters"], "seeds": seeds,
                      "by_length": by_length})  # fmt: skip
    return lines


def _grouped(rows: list[dict], name: str):
    """(value, rows) for each value of ``name``, ascending."""
    ordered = sorted(rows, key=lambda row: row[name])
    return [(value, list(part)) for value, part in groupby(ordered, lambda row: row[name])]


def table(lines: list[dict]) -> str:
    """Markdown, one line per model: the mean over its seeds and, where they differ, the lowest and the highest."""
    lengths = sorted({row["length"] for line in lines for row in line["by_length"]})
    text = [
        "| model | parameters | seeds | " + " | ".join(f"{n:,}" for n in lengths) + " |",
        "|---" * (3 + len(lengths)) + "|",
    ]
    for line in lines:
        cells = {row["length"]: _cell(row) for row in line["by_length"]}
        seeds = ", ".join(map(str, line["seeds"]))
        shown = [line["name"], f"{line['parameters']:,}", seeds, *(cells.get(n, "-") for n in lengths)]
        text.append(f"| {' | '.join(shown)} |")
    return "\n".join(text) + "\n"


def _cell(row: dict) -> str:
    return spanned(100 * row["mean"], [100 * mean for mean in row["each"]])
