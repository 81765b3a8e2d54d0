"""Tables and pages from made-up records."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.titans_pt.reproduce.records import record, text
from titans_pt.errors import UserError
from titans_pt.reproduce import page
from titans_pt.reproduce.figures import BetweenSeeds, Figure, apart, pool
from titans_pt.reproduce.order import Order, chosen, runs_of
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.studies import study
from titans_pt.reproduce.tables import behind, cells, details, kept_of, overview, rates
from titans_pt.tools.statistics import wilson


@pytest.fixture
def made(tmp_path):
    """Two seeds of swa; one failed seed of gla; mac trained but not measured; rmt not run."""
    order = Order(tmp_path, models=["swa", "gla", "mac", "rmt"])
    asked = replace(chosen(study("table1", "tiny"), order), rated=False)
    runs, records = runs_of(asked, order), Records(tmp_path / "records")
    by_name = {run.name: run for run in runs}
    for name, measured, failed in (
        ("swa-s0", {"text": text(3.0), "long": text(3.2)}, ""), ("swa-s1", {"text": text(3.2)}, ""),
        ("gla-s0", {}, "train.max_nonfinite: 10 steps"), ("mac-s0", {}, ""),
    ):  # fmt: skip
        records.write(name, record(by_name[name], measured, failed))
    return asked, runs, records


def test_a_cell_is_a_figure_or_says_why_there_is_none(made):
    asked, runs, records = made
    found = cells(asked, runs, records)
    rows = {row[0]: row[1:] for row in overview(asked, found).rows}
    # The mean of 3.0 and 3.2 nats; one seed of the second.
    assert rows["sliding window"] == ["1,000", "22.20", "24.53, 1 of 2 seeds", "-", "-"]
    failed = "failed (train.max_nonfinite: 10 steps)"
    assert rows["GLA"] == ["-", f"{failed} (28.51)", failed, failed, failed]
    assert rows["MAC"][1] == "not measured (25.43)"
    assert rows["RMT"] == ["-", *["not run"] * 4]


def test_every_figure_comes_with_what_it_rests_on(made):
    asked, runs, records = made
    table = details(cells(asked, runs, records))
    first = dict(zip(table.head, table.rows[0], strict=True))
    low, high = math.exp(3.1 - 1.9693 * 0.01), math.exp(3.1 + 1.9693 * 0.01)  # Student's t, 255 degrees of freedom
    assert first == {
        "model": "sliding window", "figure": "perplexity", "paper": "-", "ours": "22.20",
        "95 % interval": f"{low:.2f} to {high:.2f}", "n": "262,144", "seeds": "0: 20.09, 1: 24.53", "tokens": "4,096",
        "hardware": "a machine",
        "checkpoints": "c0ffeec0ffee, c0ffeec0ffee",
    }  # fmt: skip
    rmt = [row for row in table.rows if row[0] == "RMT"]
    assert rmt == [["RMT", column.title, "-", "not run", *["-"] * 6] for column in asked.columns]
    window = [row[1] for row in table.rows if row[0] == "sliding window"]
    assert window == ["perplexity", "to 16K"], "nothing of the memory that it does not have"


def test_pooled_figures():
    both = pool({0: Figure("accuracy", 0.5, 100), 1: Figure("accuracy", 0.7, 100)})
    assert (both.mean, both.n, both.by_seed) == (60.0, 200, {0: 50.0, 1: 70.0})
    assert both.interval is None, "seeds differ by more than answers do"
    assert pool({0: Figure("accuracy", 0.5, 100)}).interval == tuple(100 * bound for bound in wilson(50, 100))
    assert pool({0: Figure("number", 7.5, 3)}).interval is None
    assert pool({0: Figure("perplexity", 2.0, 3)}).interval is None, "no standard error is known"


def test_how_far_models_are_apart_is_asked_on_the_same_text(tmp_path):
    """Streams differ by nats, models by hundredths: the interval is that of the differences between models."""
    order = Order(tmp_path, models=["swa", "gla", "rmt", "mac"], seeds=(0, 1))
    asked = replace(chosen(study("table1", "tiny"), order), rated=False)
    runs, records = runs_of(asked, order), Records(tmp_path)
    streams = {"swa-s0": (2.0, 4.0, 3.0), "swa-s1": (), "gla-s0": (2.0, 4.02, 3.04), "rmt-s0": ()}
    losses = {"swa-s0": 3.0, "swa-s1": 3.2, "gla-s0": 3.02, "rmt-s0": 3.0}
    for run in runs:
        if run.name in streams:
            records.write(run.name, record(run, {"text": text(losses[run.name], by_stream=streams[run.name])}))
    table = behind(asked, cells(asked, runs, records))
    assert table.head == ["model", "perplexity"]
    # On the seed that both have GLA is 0.02 behind: 0, 0.02 and 0.04 on the streams. Seeds: 0.02 with one degree of
    # freedom, swa's two, since no more can be told from one model with two.
    over_streams, over_seeds = 0.02**2 / 3, 0.02 * 2
    error = 12.7062 * math.sqrt(over_streams + over_seeds)
    told = f"0.020 ({0.02 - error:.3f} to {0.02 + error:.3f}), a tie"
    assert table.rows == [["sliding window", "best"], ["GLA", told],
                          ["standard deviation between seeds", "0.141 (1 degrees of freedom)"]]  # fmt: skip
    records.path("swa-s1").unlink()
    alone = behind(asked, cells(asked, runs, records)).rows
    error = 4.3027 * 0.02 / math.sqrt(3)
    assert alone == [["sliding window", "best"], ["GLA", f"0.020 ({0.02 - error:.3f} to {0.02 + error:.3f}), a tie"],
                     ["standard deviation between seeds", "one seed: left out"]]  # fmt: skip
    records.path("gla-s0").unlink()
    assert behind(asked, cells(asked, runs, records)) is None, "one model is behind nobody"


@pytest.mark.parametrize(("between", "each", "both", "streams"), [
    # standard deviations: of a model's seeds, of its streams, of seed and stream; number of streams
    (0.02, 0.06, 0.03, 64), (0.02, 0.0, 0.0, 64), (0.0, 0.06, 0.0, 64), (0.02, 0.06, 0.06, 4),
])  # fmt: skip
def test_intervals_of_differences_hold_what_they_promise(between, each, both, streams):
    """Compare the first two of six models often; each has one to three seeds and known variance components.

    A seed also shifts all models, by more than their differences.
    """
    seeds, rng, samples = (3, 2, 2, 2, 3, 1), np.random.default_rng(0), 600
    widths, inside, spread = [], 0, []
    for _ in range(samples):
        shared, of_seed, models = rng.normal(0, 1, streams), rng.normal(0, 1, (3, 1)), []
        for n, count in enumerate(seeds):
            own = shared + rng.normal(0, each, streams)
            loss = 3 + n + own + rng.normal(0, between, (count, 1)) + rng.normal(0, both, (count, streams))
            loss = loss + of_seed[:count]
            models.append(pool({seed: Figure("perplexity", row.mean(), 1, by_stream=tuple(row))
                                for seed, row in enumerate(loss)}))  # fmt: skip
        found = apart(models[1], models[0], BetweenSeeds.of(models))
        inside += abs(found.nats - 1) <= found.error
        widths.append(found.error)
        spread.append(found.nats - 1)
    true = math.sqrt(between**2 + 2 * each**2 / streams + both**2 / streams)  # two seeds are the same
    assert np.std(spread) == pytest.approx(true, rel=0.1)
    # At least 0.95 less the sampling error; above it, since the part of seed and stream counts twice.
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / samples) < inside / samples <= 1.0
    assert np.median(widths) < 3.5 * true, "and is not useless"


def test_a_tie_is_called_one():
    def model(*losses):
        return pool({n: Figure("perplexity", loss, 1, by_stream=(loss, loss)) for n, loss in enumerate(losses)})

    best, near, far = model(3.0, 3.02), model(3.02), model(4.01, 4.01)
    seeds = BetweenSeeds.of([best, near, far])
    assert seeds.all == pytest.approx((0.0001, 2)) and seeds.own == pytest.approx((0.0001, 1))
    error = 12.7062 * math.sqrt(0.0001 * 2)  # the first seed alone: 3.02 and 3.0
    assert apart(near, best, seeds).told("+") == f"+0.020 ({0.02 - error:.3f} to {0.02 + error:.3f}), a tie"
    error = 12.7062 * math.sqrt(0.0001)
    assert apart(far, best, seeds).told() == f"1.000 ({1 - error:.3f} to {1 + error:.3f})"


def test_models_without_a_common_seed_are_compared_with_all_of_the_seeds_variance():
    def model(*losses, first=0):
        return pool({first + n: Figure("perplexity", loss, 1, by_stream=(loss, loss)) for n, loss in enumerate(losses)})

    one, two, other = model(3.0, 3.2), model(4.0, 4.2), model(3.5, first=7)
    seeds = BetweenSeeds.of([one, two, other])
    assert seeds.all == pytest.approx((0.02, 2)) and seeds.own == pytest.approx((0.0, 1))
    assert apart(two, one, seeds).told() == "1.000 (1.000 to 1.000)", "both seeds shift both models by as much"
    error = 4.3027 * math.sqrt(0.02 * 1.5)
    assert apart(other, one, seeds).told() == f"0.400 ({0.4 - error:.3f} to {0.4 + error:.3f}), a tie"


def test_a_short_last_stream_weighs_less():
    def model(*losses):
        mean = (100 * losses[0] + 100 * losses[1] + 10 * losses[2]) / 210
        return pool({0: Figure("perplexity", mean, 210, by_stream=losses, length=100)})

    found = apart(model(3.1, 3.2, 9.0), model(3.0, 3.0, 3.0), BetweenSeeds((0.0, 0), (0.0, 0)))
    mean = (10 + 20 + 60) / 210
    squares = (100 * (0.1 - mean)) ** 2 + (100 * (0.2 - mean)) ** 2 + (10 * (6 - mean)) ** 2
    assert found.nats == pytest.approx(mean)
    assert found.error == pytest.approx(4.3027 * math.sqrt(squares * 3 / 2) / 210, rel=1e-4)


def test_the_choice_of_learning_rates_is_shown(tmp_path):
    order = Order(tmp_path, models=["rmt"], rates=(1e-3, 2e-3, 4e-3))
    asked = chosen(study("table1", "tiny"), order)
    runs, records = runs_of(asked, order), Records(tmp_path)
    for probe, loss, failed in zip(runs[0].probes(records), (3.0, 2.5, 9.0), ("", "", "diverged"), strict=True):
        assert rates(runs, records).rows[0][-1] == "-"
        records.write(probe.name, record(probe, failed=failed, loss=loss))
    assert rates(runs, records).rows == [["RMT", "3.0000", "2.5000", "failed", "0.002"]]


def test_pages(made, tmp_path):
    asked, runs, records = made
    paths = page.write(asked, runs, records, tmp_path)
    markdown, html = (path.read_text() for path in paths)
    assert "| RMT | - | not run | not run | not run | not run |" in markdown
    assert markdown.index("![") < markdown.index("## Every figure"), "what one looks at stands first"
    assert "NeurIPS 2025" in markdown and "<td>22.20</td>" in html
    assert not re.search(r'(src|href)="(?!data:)', html), "one file, whole"
    for picture in re.findall(r"\]\(([^)]+)\)", markdown):
        assert (tmp_path / picture).stat().st_size > 1000


def test_records_are_of_the_runs_that_are_asked_for(made, tmp_path):
    _, _, records = made
    order = Order(tmp_path, models=["swa"], words=("model.window=64",))
    other = runs_of(replace(chosen(study("table1", "tiny"), order), rated=False), order)[0]
    with pytest.raises(UserError, match=r"swa-s0.json: of a run with model.window=128, asked for is 64; .*--out"):
        other.record(records)
    whole = records.path("swa-s0").read_text()
    assert '"failed": ""' in whole
    for damaged in ("{", "[]", "{}", whole.replace('"failed": ""', '"failed": "x"')):
        records.path("swa-s0").write_text(damaged)
        with pytest.raises(UserError, match="not a record, or a damaged one .*; delete it, and run again"):
            records.read("swa-s0")


def test_a_record_names_no_folder_of_the_machine(tmp_path):
    source = "data.sources=[{kind: files, path: /secret/place/texts}]"
    words = ("data.dir=/secret/place/data", source, "data.tokenizer.path=/secret/place/t.model",
             "data.validation_sources=[{kind: files, path: /secret/place/held-out}]",
             "evaluation.needle.essays=/secret/place/essays", "evaluation.perplexity.text=/secret/place/tokens",
             "evaluation.babilong.haystack={kind: files, path: /secret/place/books}")  # fmt: skip
    order = Order(tmp_path / "secret", models=["rmt"], seeds=[0], words=words)
    [run] = runs_of(replace(chosen(study("table1", "tiny"), order), rated=False), order)
    records = Records(tmp_path)
    records.write(run.name, record(run))
    assert "secret" not in records.path(run.name).read_text()
    assert run.record(records)["config"]["data"]["sources"][0]["path"] == "texts"


def test_a_page_shows_a_seed_while_another_waits_for_an_earlier_stage(tmp_path):
    order = Order(tmp_path, models=["lmm"], seeds=[0, 1])
    asked = chosen(study("ruler", "tiny"), order)
    runs, records = runs_of(asked, order), Records(tmp_path / "records")
    for run in runs:
        if run.name in ("lmm-stage-1-s0", "lmm-stage-2-s0"):
            records.write(run.name, record(run))
    assert [sorted(kept_of(row, runs, records)) for row in asked.rows] == [[0], [0], []]


@pytest.mark.parametrize("target", ["table1", "recall", "needles", "ruler", "states", "statetracking"])
def test_a_study_that_stopped_before_its_first_measure_has_a_page(target, tmp_path):
    """The same command writes it before it continues."""
    whole = study(target, "tiny")
    asked = replace(chosen(whole, Order(tmp_path, models=[whole.rows[0].model])), rated=False)
    runs, records = runs_of(asked, Order(tmp_path, seeds=[0])), Records(tmp_path / "records")
    made_up = record(runs[0])
    records.write(runs[0].name, made_up | {"trained": made_up["trained"] | {"figures": {}, "steps": 4}})
    assert all(path.is_file() for path in page.write(asked, runs, records, tmp_path))
