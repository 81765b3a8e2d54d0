"""What a study hands to a reader: TARGET.md, and TARGET.html, one file with the curves in it."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from titans_pt.reproduce.published import published
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.runs import PROBE_SHARE, Run
from titans_pt.reproduce.studies import TITANS, Row, Study
from titans_pt.reproduce.tables import Table, behind, cells, details, overview, rates
from titans_pt.tools.files import write_text
from titans_pt.tools.plots import legend, new_figure, own_style, save_figure

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0;font-size:13px;display:block;overflow-x:auto}
td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left}th{background:#f3f3f3}img{max-width:100%}"""
READING = (
    "Ours (the paper's in brackets). The mean over seeds; perplexities are averaged as nats. The interval of 95 % is "
    "that of the evaluation's samples; how far seeds differ, each seed's own figure shows. What has not been run says "
    "so."
)


def write(study: Study, runs: Sequence[Run], records: Records, out: Path) -> list[Path]:
    """Writes the pages of a study into ``out`` and returns their paths."""
    found = cells(study, runs, records)
    source = published(study.target, study.compared)
    lines = [text for text in (READING, study.note, source and f"Published: {source.source}") if text]
    first, others = overview(study, found), []
    if apart := behind(study, found):
        others.append(("Nats behind the best, on the same text (95 % interval over its streams)", apart))
    if chosen := rates(runs, records):
        words = f"Validation loss after one {PROBE_SHARE}th of the tokens, by learning rate; the lowest is taken"
        others.append((words, chosen))
    others.append(("Every figure", details(found)))
    pictures = _pictures(runs, records, out, study.target)
    title = f"{study.title} ({study.target}, {study.size})"
    page, document = out / f"{study.target}.md", out / f"{study.target}.html"
    write_text(page, _markdown(title, lines, first, pictures, others))
    write_text(document, _html(title, lines, first, pictures, others))
    return [page, document]


def _markdown(title: str, lines: list[str], first: Table, pictures: list[Path], others: list[tuple[str, Table]]) -> str:
    text = [f"# {title}", *lines, first.markdown().rstrip()]
    text += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    for head, table in others:
        text += [f"## {head}", table.markdown().rstrip()]
    return "\n\n".join(text) + "\n"


def _html(title: str, lines: list[str], first: Table, pictures: list[Path], others: list[tuple[str, Table]]) -> str:
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in lines), first.html()]
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        body.append(f'<img alt="{picture.stem}" src="data:image/png;base64,{data}">')
    for head, table in others:
        body += [f"<h2>{html.escape(head)}</h2>", table.html()]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>{''.join(body)}</html>\n"
    )


# ---- curves


def _pictures(runs: Sequence[Run], records: Records, out: Path, target: str) -> list[Path]:
    """Of the first seed of each model that there is: the loss in training, and against the position in a long text."""
    shown: dict[str, dict] = {}
    for run in runs:
        if not run.is_probe and (record := run.record(records)) and not record["failed"]:
            shown.setdefault(Row(run.model, run.variant).name, record)
    shown = {name: record for name, record in shown.items() if record["trained"]["curve"]}
    if not shown:
        return []
    pictures = [_training(shown, out / f"{target}-training.png")]
    if long := {name: record for name, record in shown.items() if "long" in record["measured"]}:
        pictures.append(_positions(long, out / f"{target}-positions.png"))
    return pictures


def _style(n: int, record: dict) -> dict:
    """Of the n-th model; Titans stand out. Dots are for memories that are off."""
    width = 2.2 if record["model"] in TITANS else 1.1
    return {"color": f"C{n % 10}", "linestyle": ("-", "--", "-.")[n // 10 % 3], "linewidth": width}


@own_style()
def _training(shown: dict[str, dict], path: Path) -> Path:
    figure = new_figure(12.5, 4.6)
    loss, validation = figure.subplots(1, 2)
    drawn = []
    for n, record in enumerate(shown.values()):
        for axes, points in ((loss, record["trained"]["curve"]), (validation, record["trained"]["validation"])):
            (line,) = axes.plot([point[0] for point in points], [point[1] for point in points], **_style(n, record))
        drawn.append(line)
    for axes, label in ((loss, "training loss (nats per token)"), (validation, "validation loss (nats per token)")):
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    legend(figure, drawn, list(shown), fontsize=8, loc="outside right upper")
    return save_figure(figure, path)


@own_style()
def _positions(long: dict[str, dict], path: Path) -> Path:
    """Loss by position; dotted with the memory never written. Beside it how far each model is from the best one: what
    all of them find hard in this text is not in the difference."""
    figure = new_figure(13.5, 5.0)
    loss, above = figure.subplots(1, 2)
    found = {name: record["measured"]["long"] for name, record in long.items()}
    best = min(found, key=lambda name: found[name]["loss"])
    least = _by_place(found[best]["positions"])
    lines = {}
    for n, (name, result) in enumerate(found.items()):
        style, means = _style(n, long[name]), _by_place(result["positions"])
        (lines[name],) = loss.plot(list(means), list(means.values()), **style)
        common = [place for place in means if place in least]
        above.plot(common, [means[place] - least[place] for place in common], **style)
        if (off := next((row for row in result["frozen"] if row["after"] == 0), None)) and off["positions"]:
            means = _by_place(off["positions"])
            loss.plot(list(means), list(means.values()), ":", color=style["color"])
    for axes, label in ((loss, "validation loss (nats per token)"), (above, f"nats per token above {best}")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens before the scored one")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    loss.set_title("dotted: the memory is never written", fontsize=9)
    above.set_ylim(top=min(1.0, above.get_ylim()[1]))  # what fails leaves the picture, and the others room
    worst_first = sorted(found, key=lambda name: -found[name]["loss"])
    legend(figure, [lines[name] for name in worst_first], worst_first, fontsize=8, loc="outside right upper")
    return save_figure(figure, path)


def _by_place(rows: list[dict]) -> dict[float, float]:
    """Mean losses by position, without the first thousandth of the text: few tokens, and hard ones for all."""
    longest = max(row["last"] for row in rows)
    return {(row["first"] * row["last"]) ** 0.5: row["mean"] for row in rows if 1000 * row["first"] >= longest}
