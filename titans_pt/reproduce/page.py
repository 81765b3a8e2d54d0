"""Page of a study: TARGET.md, and TARGET.html, a single file that includes the pictures."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from titans_pt.reproduce.pictures import by_row
from titans_pt.reproduce.published import published
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.runs import Run
from titans_pt.reproduce.study import Study
from titans_pt.reproduce.tables import Table, behind, cells, details, kept_of, overview, rates, tenths
from titans_pt.tools.files import write_text

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0;font-size:13px;display:block;overflow-x:auto}
td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left}th{background:#f3f3f3}img{max-width:100%}"""
READING = (
    "Ours (the published figure in brackets). The mean over seeds; perplexities are averaged as nats. The interval of "
    "95 % is that of the evaluation's samples; accuracies have one for a single seed (Wilson's). Each seed's own "
    "figure shows how far seeds differ. Cells without a measurement say why."
)


def write(study: Study, runs: Sequence[Run], records: Records, out: Path) -> list[Path]:
    """Writes the pages of a study into ``out`` and returns their paths."""
    found = cells(study, runs, records)
    source = published(study.target, study.compared)
    lines = [text for text in (READING, study.note, source and f"Published: {source.source}") if text]
    first, others = overview(study, found), []
    if apart := behind(study, found):
        words = ("Nats behind the best, on the same text and seeds (95 % interval over streams of the text and over "
                 "seeds; a tie: with 0)")  # fmt: skip
        others.append((words, apart))
    if chosen := rates(runs, records):
        after = f"1/{study.probe_share} of the tokens" if study.probe_share > 1 else "the whole training"
        words = f"Validation loss after {after}, by learning rate; the lowest is taken"
        others.append((words, chosen))
    if study.probe_share > 1 and (compared := tenths(runs, records)):
        others.append(("Whether probes order learning rates as whole runs do (validation loss, seed 0)", compared))
    others.append(("Every figure", details(found)))
    shown = by_row([(row.name, record) for row in study.rows for record in kept_of(row, runs, records).values()])
    pictures = [path for draw in study.pictures if shown for path in draw(shown, out / study.target)]
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
