"""Pictures of a study's records."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from titans_pt.tools.plots import (
    legend,
    new_figure,
    own_style,
    plot_accuracy,
    plot_losses,
    powers_of_two,
    save_figure,
    stroke,
    styles,
)
from titans_pt.tools.statistics import wilson, without_keys

THICK = ("lmm", "mac", "mag", "mal")
"""Models whose lines stand out."""
STARTED = {"": "pretrained", "scratch": "from scratch", "memory-off": "pretrained, memory off",
           "scratch-memory-off": "from scratch, memory off"}  # fmt: skip
"""Label of the start of a labelled set's run, by the part of the variant's name after the set's name."""
AT_CHANCE = 8.0
"""Percentage points above chance below which a model's accuracy is drawn as a grey line."""
Seeds = dict[str, list[dict]]
"""Displayed name of a model or variant -> records of its seeds that did not fail, the first seed first."""
Picture = Callable[[Seeds, Path], list[Path]]
"""Function that draws records into one or several files, whose names begin with the given path's; returns the files."""


def _panels(shown: Seeds, measure: str, panel: Callable[[dict], str]) -> dict[str, Seeds]:
    """Records that have ``measure``, grouped by panel; a model's first record decides its panel."""
    panels: dict[str, Seeds] = {}
    for name, seeds in shown.items():
        if measured := [record for record in seeds if measure in record["measured"]]:
            panels.setdefault(panel(measured[0]), {})[name] = measured
    return panels


def _named(start: Path, name: str) -> Path:
    return start.with_name(f"{start.name}-{name}.png")


def _style(n: int, record: dict) -> dict:
    """Line style of the n-th model; lines of THICK are thicker."""
    return stroke(n) | {"linewidth": 2.2 if record["model"] in THICK else 1.1}


def training(shown: Seeds, start: Path) -> list[Path]:
    """Training and validation loss against tokens, for the first seed of each model."""
    first = {name: seeds[0] for name, seeds in shown.items() if seeds[0]["trained"]["curve"]}
    if not first:
        return []
    curves = {name: (record["trained"]["curve"], record["trained"]["validation"]) for name, record in first.items()}
    inks = [_style(n, record) for n, record in enumerate(first.values())]
    return [plot_losses(curves, _named(start, "training"), "nats per token", inks)]


@own_style()
def positions(shown: Seeds, start: Path, measure: str = "long") -> list[Path]:
    """Loss by position in the texts of a measure, for the first seed of each model.

    Dotted lines: the memory is never written. A second panel has the difference from the best model, which removes the
    difficulty shared by all models.
    """
    long = {name: seeds[0] for name, seeds in shown.items() if measure in seeds[0]["measured"]}
    if not long:
        return []
    figure = new_figure(13.5, 5.0)
    loss, above = figure.subplots(1, 2)
    found = {name: record["measured"][measure] for name, record in long.items()}
    best = min(found, key=lambda name: found[name]["loss"])
    least = _by_place(found[best]["positions"])
    lines, dotted = {}, False
    for n, (name, result) in enumerate(found.items()):
        style, means = _style(n, long[name]), _by_place(result["positions"])
        (lines[name],) = loss.plot(list(means), list(means.values()), **style)
        common = [place for place in means if place in least]
        above.plot(common, [means[place] - least[place] for place in common], **style)
        if (off := next((row for row in result["frozen"] if row["after"] == 0), None)) and off["positions"]:
            means = _by_place(off["positions"])
            loss.plot(list(means), list(means.values()), ":", color=style["color"])
            dotted = True
    for axes, label in ((loss, "validation loss (nats per token)"), (above, f"nats per token above {best}")):
        powers_of_two(axes)
        axes.set_xlabel("tokens before the scored one")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    if dotted:
        loss.set_title("dotted: the memory is never written", fontsize=9)
    above.set_ylim(top=min(1.0, above.get_ylim()[1]))  # models that fail are cut off, which leaves room for the others
    worst_first = sorted(found, key=lambda name: -found[name]["loss"])
    legend(figure, [lines[name] for name in worst_first], worst_first, fontsize=8, loc="outside right upper")
    return [save_figure(figure, _named(start, "positions"))]


def _by_place(rows: list[dict]) -> dict[float, float]:
    """Mean losses by position, without the first thousandth of the text, whose few tokens are hard for all models."""
    longest = max(row["last"] for row in rows)
    return {(row["first"] * row["last"]) ** 0.5: row["mean"] for row in rows if 1000 * row["first"] >= longest}


@own_style()
def recall(shown: Seeds, start: Path) -> list[Path]:
    """Accuracy against tokens of training, a line per seed; against pairs and distance, means and a dot per seed.

    The panels of pairs and distance have only unchanged models and models with the memory off.
    """
    figure = new_figure(15.0, 4.6)
    learning, *others = figure.subplots(1, 3, sharey=True)
    models = sorted({seeds[0]["model"] for seeds in shown.values()})
    variants = sorted({seeds[0]["variant"] for seeds in shown.values()})
    inks = dict(zip(models, styles(len(models)), strict=True))
    dashes = ("-", ":", "--", "-.", (0, (5, 1)), (0, (1, 3)), (0, (3, 1, 1, 1)))
    drawn = {}
    for name, seeds in shown.items():
        model, variant = seeds[0]["model"], seeds[0]["variant"]
        dash = dashes[variants.index(variant) % len(dashes)]
        style = inks[model] | {"linestyle": dash, "markersize": 4}
        for record in seeds:
            points = record["trained"]["figures"].get("accuracy", [])
            (drawn[name],) = learning.plot([x for x, _ in points], [100 * y for _, y in points], **style)
        measured = [record["measured"]["recall"] for record in seeds if "recall" in record["measured"]]
        if variant not in ("", "memory-off") or not measured:
            continue
        for axes, by in zip(others, ("pairs", "distance"), strict=True):
            each: dict[int, list[float]] = {}  # seeds may have been asked different questions
            for result in measured:
                for row in result[f"by_{by}"]:
                    each.setdefault(row[by], []).append(100 * row["mean"])
            axes.plot(sorted(each), [sum(each[place]) / len(each[place]) for place in sorted(each)], **style)
            if len(measured) > 1:
                dots = [(place, mean) for place, means in each.items() for mean in means]
                axes.plot(*zip(*dots, strict=True), ".", color=inks[model]["color"], alpha=0.5)
    learning.set_xlabel("tokens of training")
    learning.set_ylabel("accuracy (%)")
    trained: dict[str, Any] = next((seeds[0]["config"]["recall"] for seeds in shown.values()), {})
    if pairs := trained.get("pairs"):
        asked = sorted({row["pairs"] for seeds in shown.values() for record in seeds
                        for row in record["measured"].get("recall", {}).get("by_pairs", ())})  # fmt: skip
        if asked:  # a log axis without a number cannot be drawn
            others[0].plot(asked, [100 * without_keys(count) for count in asked], ":", color="grey")
        for axes in (learning, others[1]):
            drawn["values, no keys"] = axes.axhline(100 * without_keys(pairs), linestyle=":", color="grey")
    legend(figure, list(drawn.values()), list(drawn), fontsize=7, loc="outside right upper")
    others[0].set_xlabel(f"pairs (trained with {trained.get('pairs')})")
    powers_of_two(others[0])
    others[1].set_xlabel(f"least tokens from pairs to queries (trained with {trained.get('distance')})")
    for axes in (learning, *others):
        axes.grid(alpha=0.3)
        axes.set_ylim(-3, 103)
    return [save_figure(figure, _named(start, "accuracy"))]


def needles(shown: Seeds, start: Path) -> list[Path]:
    """Accuracy against length, one picture for each number of needles and kind of noise."""
    cells: dict[tuple[str, int], dict[str, dict[int, list[dict]]]] = {}
    for name, seeds in shown.items():
        for record in seeds:
            for row in needles_asked(record):
                lengths = cells.setdefault((row["noise"], row["needles"]), {}).setdefault(name, {})
                for cell in row["by_length"]:
                    lengths.setdefault(cell["length"], []).append(cell)
    written = []
    for (noise, count), models in sorted(cells.items()):
        lines = {name: [_over_seeds(n, cells) for n, cells in sorted(of.items())] for name, of in models.items()}
        path, levels = _named(start, f"{count}-{noise}"), {"values, no keys": without_keys(count)}
        bands = "bands: range of seeds; of one, Wilson 95 %"
        written.append(plot_accuracy(lines, path, f"{count} needles in {noise} noise", levels, bands))
    return written


@own_style()
def classes(shown: Seeds, start: Path) -> list[Path]:
    """Accuracy of each run, a panel per labelled set: bars are means over seeds, dots seeds, lines baselines."""
    sets = _panels(shown, "classes", lambda record: record["variant"].partition("-")[0])
    if not sets:
        return []
    figure = new_figure(1.0 + 6.2 * len(sets), 4.6)
    for axes, rows in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets.values(), strict=True):
        names = [name.split(", ") for name in rows]
        starts = [STARTED[records[0]["variant"].partition("-")[2]] for records in rows.values()]
        labels = [f"{name[0]}, {start}" for name, start in zip(names, starts, strict=True)]
        each = [
            [100 * r["measured"]["classes"]["columns"]["test"]["mean"] for r in records] for records in rows.values()
        ]
        colors = [f"C{list(dict.fromkeys(n[0] for n in names)).index(name[0])}" for name in names]
        axes.barh(range(len(each)), [sum(found) / len(found) for found in each], color=colors, alpha=0.6)
        for place, found in enumerate(each):
            axes.plot(found, [place] * len(found), "k.", markersize=4)
        baselines = next(iter(rows.values()))[0]["measured"]["classes"]["baselines"]
        for n, (name, columns) in enumerate(baselines.items()):
            axes.axvline(100 * columns["test"]["accuracy"], color="grey", linestyle=(":", "-.", "--", "-")[n % 4],
                         linewidth=1, label=name)  # fmt: skip
        axes.set_yticks(range(len(each)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("accuracy of the test (%; dots: seeds)")
        axes.set_title(", ".join(names[0][1:-1]), fontsize=9)
        axes.legend(fontsize=7, loc="lower left")
    return [save_figure(figure, _named(start, "classes"))]


@own_style()
def forecasts(shown: Seeds, start: Path) -> list[Path]:
    """One picture per series, with errors divided by those of ridge regression on the same windows.

    Left: error by rows ahead, for the models at the first lookback and horizon. Right: error of every row of the study;
    bars are means over seeds, dots are seeds.
    """
    by_series = _panels(shown, "forecast", lambda record: record["measured"]["forecast"]["series"])
    written = []
    for series, rows in by_series.items():
        figure = new_figure(13.0, 2.6 + 0.26 * max(8, len(rows)))
        steps, bars = figure.subplots(1, 2, width_ratios=(3, 4))
        first = next(iter(rows.values()))[0]["variant"]
        models = list(dict.fromkeys(records[0]["model"] for records in rows.values()))
        for name, records in rows.items():
            if records[0]["variant"] == first:
                each = [_over_ridge(record)[1] for record in records]
                mean = [sum(column) / len(column) for column in zip(*each, strict=True)]
                style = _style(models.index(records[0]["model"]), records[0])
                steps.plot(range(1, len(mean) + 1), mean, label=name, **style)
        totals = [[_over_ridge(record)[0] for record in records] for records in rows.values()]
        colors = [f"C{models.index(records[0]['model']) % 10}" for records in rows.values()]
        bars.barh(range(len(rows)), [sum(each) / len(each) - 1 for each in totals], left=1, color=colors, alpha=0.6)
        for place, total in enumerate(totals):
            bars.plot(total, [place] * len(total), "k.", markersize=4)
        bars.set_yticks(range(len(rows)), list(rows), fontsize=7)
        bars.invert_yaxis()
        bars.set_xlim(0.98 * min(1.0, *map(min, totals)), 1.02 * max(map(max, totals)))
        bars.set_xlabel("MSE of the test over ridge's on the same windows (bars: from ridge's; dots: seeds)")
        steps.set_yscale("log", base=2)
        steps.yaxis.set_major_formatter("{x:g}")
        steps.set_xlabel("rows ahead")
        steps.set_ylabel("MSE over ridge's")
        steps.legend(fontsize=7)
        steps.axhline(1.0, color="black", linewidth=1)
        bars.axvline(1.0, color="black", linewidth=1)
        steps.grid(alpha=0.3)
        figure.suptitle(series, fontsize=9)
        written.append(save_figure(figure, _named(start, series)))
    return written


def _over_ridge(record: dict) -> tuple[float, list[float]]:
    """MSE of the test divided by ridge's on the same windows: for all rows ahead together, and for each."""
    found, ridge = record["measured"]["forecast"], "ridge on the lookback"
    pairs = zip(found["steps"]["model"], found["steps"][ridge], strict=True)
    whole = found["rows"]["model"]["mse"] / found["rows"][ridge]["mse"]
    return whole, [own / other for (own, _), (other, _) in pairs]


@own_style()
def states(shown: Seeds, start: Path) -> list[Path]:
    """Accuracy of the last answer against the length, a panel per problem: lines are means over a model's seeds, dots
    are seeds."""
    problems = _panels(shown, "states", lambda record: record["config"]["state_tracking"]["problem"])
    if not problems:
        return []
    figure = new_figure(1.5 + 6.0 * len(problems), 7.2)
    for axes, (problem, rows) in zip(
        figure.subplots(1, len(problems), squeeze=False)[0], problems.items(), strict=True
    ):
        chance = 100 * next(iter(rows.values()))[0]["measured"]["states"]["chance"]
        lines: list[Any] = []
        names, left = [], 0
        for name, records in rows.items():
            found = [record["measured"]["states"]["by_length"] for record in records]
            lengths = [row["length"] for row in found[0]]
            each = [[100 * row["mean"] for row in of_seed] for of_seed in found]
            means = [sum(column) / len(column) for column in zip(*each, strict=True)]
            if max(means[1:]) < chance + AT_CHANCE:
                axes.plot(lengths, means, color="lightgrey", linewidth=0.8, zorder=1)
                left += 1
                continue
            color, dash = f"C{len(lines) % 10}", "-" if len(lines) < 10 else "--"
            width = 2.2 if records[0]["model"] in THICK else 1.2
            lines += axes.plot(lengths, means, color=color, linestyle=dash, linewidth=width)
            names.append(name.replace(f", {problem}", ""))
            for of_seed in each if len(each) > 1 else ():
                axes.plot(lengths, of_seed, ".", color=color, markersize=5)
        if left:
            lines += axes.plot([], [], color="lightgrey", linewidth=0.8)
            names.append(f"{left} more, at chance beyond the first length")
        axes.axhline(chance, color="grey", linewidth=0.8)
        powers_of_two(axes)
        axes.set_xlabel("elements read")
        axes.set_ylabel("last answer right (%; dots: seeds; grey: chance)")
        axes.set_ylim(-3, 103)
        axes.grid(alpha=0.3)
        axes.set_title(problem, fontsize=10)
        legend(axes, lines, names, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    return [save_figure(figure, _named(start, "lengths"))]


def needles_asked(record: dict) -> list[dict]:
    """Results about needles from all measures of a record: rows with the keys needles, noise and by_length."""
    return [row for result in record["measured"].values() for row in result.get("asked", ())]


def _over_seeds(length: int, cells: Sequence[dict]) -> dict:
    """A row for plot_accuracy: mean, minimum and maximum of the seeds; for a single seed, Wilson's interval."""
    each = [cell["mean"] for cell in cells]
    mean, low, high = sum(each) / len(each), min(each), max(each)
    if len(each) == 1:
        low, high = wilson(mean * cells[0]["n"], cells[0]["n"])
    return {"length": length, "mean": mean, "low": low, "high": high, "each": each}


def by_row(records: Sequence[tuple[str, dict]]) -> Seeds:
    """Group (name, record) pairs by name and drop failed records; pairs with the same name must be adjacent."""
    found = {name: [record for _, record in pairs if not record["failed"]]
             for name, pairs in groupby(records, lambda pair: pair[0])}  # fmt: skip
    return {name: seeds for name, seeds in found.items() if seeds}
