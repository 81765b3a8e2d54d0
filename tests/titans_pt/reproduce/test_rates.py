"""The rule for learning rates: the grid, the runs that it asks for, and what pages show meanwhile."""

import math
from dataclasses import replace

import pytest

from tests.titans_pt.reproduce.records import record
from titans_pt.errors import UserError
from titans_pt.reproduce.order import Order, chosen, runs_of
from titans_pt.reproduce.rates import Grid, Progress
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.reproduce import plan, planned, show_plan
from titans_pt.reproduce.runs import Run, in_order
from titans_pt.reproduce.studies import study
from titans_pt.reproduce.tables import kept_of, rates, tenths
from titans_pt.reproduce.work import work

GROWS = Grid((2e-3, 4e-3, 8e-3), within=(1e-3, 3.2e-2))


@pytest.mark.parametrize(("losses", "state"), [
    ({}, ((2e-3, 4e-3, 8e-3), (2e-3, 4e-3, 8e-3), ())),
    ({2e-3: 3.0, 8e-3: 1.0}, ((2e-3, 4e-3, 8e-3), (4e-3,), ())),
    ({2e-3: 3.0, 4e-3: 1.0, 8e-3: 2.0}, ((2e-3, 4e-3, 8e-3), (), (4e-3,))),
    ({2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.0}, ((2e-3, 4e-3, 8e-3, 1.6e-2), (1.6e-2,), (8e-3,))),
    ({2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.0, 1.6e-2: 5.0}, ((2e-3, 4e-3, 8e-3, 1.6e-2), (), (8e-3,))),
    ({2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.0, 1.6e-2: math.inf}, ((2e-3, 4e-3, 8e-3, 1.6e-2), (), (8e-3,))),
    # Two rates have the same loss. The smaller one wins; it is inside the grid, which therefore does not grow.
    ({2e-3: 3.0, 4e-3: 1.0, 8e-3: 1.0}, ((2e-3, 4e-3, 8e-3), (), (4e-3,))),
    # The grid grows up to its bound, upwards and downwards.
    ({2e-3: 5.0, 4e-3: 4.0, 8e-3: 3.0, 1.6e-2: 2.0, 3.2e-2: 1.0},
     ((2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), (), (3.2e-2, 1.6e-2, 8e-3))),
    ({1e-3: math.inf, 2e-3: math.inf, 4e-3: math.inf, 8e-3: math.inf},
     ((1e-3, 2e-3, 4e-3, 8e-3), (), (1e-3, 2e-3))),
    # Rates that the rule did not ask for do not count: the grid stops at its first best inside.
    ({2e-3: 3.0, 4e-3: 1.0, 8e-3: 2.0, 1.6e-2: 0.5}, ((2e-3, 4e-3, 8e-3), (), (4e-3,))),
])  # fmt: skip
def test_a_grid_grows_until_its_best_is_inside(losses, state):
    assert GROWS.progress(losses) == Progress(*state)


def test_a_grid_given_by_hand_stays():
    assert Grid((8e-3, 4e-3)).progress({4e-3: 2.0, 8e-3: 1.0}) == Progress((4e-3, 8e-3), (), (8e-3,))
    assert Grid((8e-3,)).progress({}) == Progress((), (), (8e-3,)), "one rate leaves nothing to choose"


class Made:
    """Two seeds of a model, and made-up records of it."""

    def __init__(self, folder, model="rmt", **asked):
        self.order = Order(folder, models=[model], seeds=(0, 1), **asked)
        self.study = chosen(study("table1", "tiny"), self.order)
        self.runs, self.records = runs_of(self.study, self.order), Records(folder / "records")
        self.first, self.second = self.runs

    def probes(self, *losses: float | None, failed: tuple[float, ...] = ()):
        """Records of probes at 2e-3, 4e-3, ..., with these losses."""
        for n, loss in enumerate(losses):
            probe = self.first.choice.probe(2e-3 * 2**n)
            self.records.write(probe.name, record(probe, failed="diverged" if loss in failed else "", loss=loss))

    def whole(self, run, loss: float | None):
        self.records.write(run.name, record(run, loss=loss))

    def kept(self):
        """(validation losses, seeds) of the runs that a page shows."""
        found = kept_of(self.study.rows[0], self.runs, self.records)
        return {each["trained"]["validation_loss"] for each in found.values()}, sorted(found)


def test_probes_are_asked_for_as_records_arrive_and_whole_runs_wait(tmp_path, capsys):
    made = Made(tmp_path)
    names = ["rmt-lr0.002", "rmt-lr0.004", "rmt-lr0.008"]
    assert [run.name for run in in_order(made.runs, made.records)] == [*names, "rmt-s0", "rmt-s1"]
    made.probes(3.0, 2.0, 1.0)
    names.append("rmt-lr0.016")
    assert [run.name for run in in_order(made.runs, made.records)] == [*names, "rmt-s0", "rmt-s1"]
    assert made.first.settled(made.records) is None
    show_plan(study("table1", "tiny"), made.order)
    assert "half or twice that is tried next, from 0.00025 to 0.064." in capsys.readouterr().out
    made.probes(3.0, 2.0, 1.0, 1.5)
    ready = made.first.settled(made.records)
    assert (ready.name, ready.config.train.lr) == ("rmt-s0", 8e-3), "the best is inside: as it was before"
    assert ready.rates == ((2e-3, 3.0), (4e-3, 2.0), (8e-3, 1.0), (1.6e-2, 1.5))
    assert ready.config.run.dir == made.first.config.run.dir and ready.settled(made.records) == ready
    show_plan(study("table1", "tiny"), made.order)
    assert "half or twice" not in capsys.readouterr().out


def test_work_tries_rates_until_the_best_is_inside_and_then_trains(tmp_path, monkeypatch):
    losses = {2e-3: 4.0, 4e-3: 3.0, 8e-3: 2.0, 1.6e-2: 1.0, 3.2e-2: 1.5}
    made, log = Made(tmp_path), []

    def complete(run, records, ranks, claim):
        log.append(run.name)
        measured = {measure.name: {} for measure in run.measures}
        records.write(run.name, record(run, measured, loss=losses[run.config.train.lr]))
        return 0

    monkeypatch.setattr(Run, "complete", complete)
    assert work(made.runs, tmp_path, made.records, 1, lambda: None) == 0
    probes = ["rmt-lr0.002", "rmt-lr0.004", "rmt-lr0.008", "rmt-lr0.016", "rmt-lr0.032"]
    assert log == [*probes, "rmt-s0-lr0.016", "rmt-s1-lr0.016"]
    kept = made.records.read("rmt-s1-lr0.016")
    assert kept["rates"] == [list(pair) for pair in losses.items()] and kept["trained"]["validation_loss"] == 1.0
    assert work(made.runs, tmp_path, made.records, 1, lambda: None) == 0 and len(log) == 7


def test_a_rate_beyond_the_first_grid_is_in_the_name_and_the_record_says_what_was_tried(tmp_path):
    made = Made(tmp_path)
    made.probes(4.0, 3.0, 2.0, 1.0, 9.0, failed=(9.0,))
    ready = made.second.settled(made.records)
    assert (ready.name, ready.config.train.lr) == ("rmt-s1-lr0.016", 1.6e-2)
    assert ready.config.run.dir == str(tmp_path / "runs" / "rmt-s1-lr0.016")
    assert ready.begin({}, "")["rates"] == [[2e-3, 4.0], [4e-3, 3.0], [8e-3, 2.0], [1.6e-2, 1.0], [3.2e-2, None]]
    assert ready.begin({}, "")["name"] == "rmt-s1-lr0.016"


def test_pages_show_what_there_is_at_one_rate(tmp_path):
    """Two whole runs at the end of the first grid; then the rate moves; then a whole run at the new rate."""
    made = Made(tmp_path)
    made.probes(3.0, 2.0, 1.0)
    for run in made.runs:
        made.whole(run.at(8e-3, named=False), 3.5)
    assert made.kept() == ({3.5}, [0, 1]) and made.first.record(made.records) is None
    line = rates(made.runs, made.records).rows[0]
    assert line == ["RMT", "3.0000", "2.0000", "1.0000", "not run", "-"]
    assert [row[-1] for row in plan(made.runs, made.records).rows][3:] == [
        "training", *["training, if its learning rate changes"] * 2, "",
    ]  # fmt: skip
    made.probes(3.0, 2.0, 1.0, 0.5)
    assert made.kept() == ({3.5}, [0, 1]), "the next probe is open, and nothing was trained at 1.6e-2"
    made.probes(3.0, 2.0, 1.0, 0.5, 0.7)
    made.whole(made.first.settled(made.records), 3.4)
    assert made.kept() == ({3.4}, [0]), "never the means of two rates"
    assert made.first.record(made.records)["trained"]["validation_loss"] == 3.4
    assert made.second.record(made.records) is None
    table = tenths(made.runs, made.records)
    assert table.rows == [["RMT", "0.008, 0.016", "1.0000, 0.5000", "3.5000, 3.4000", "yes", "yes"]]
    made.whole(made.first.at(4e-3, named=True), 3.3)
    table = tenths(made.runs, made.records)
    losses = ["0.004, 0.008, 0.016", "2.0000, 1.0000, 0.5000", "3.3000, 3.5000, 3.4000"]
    assert table.rows == [["RMT", *losses, "no", "no"]]


def test_rates_by_hand_are_exactly_these_and_stand_beside_the_rule(tmp_path):
    by_rule, by_hand = Made(tmp_path), Made(tmp_path, rates=(8e-3,))
    by_rule.probes(3.0, 1.0, 2.0)
    assert by_rule.first.settled(by_rule.records).name == "rmt-s0"
    ready = by_hand.first.settled(by_hand.records)
    assert (ready.name, ready.config.train.lr) == ("rmt-s0-lr0.008", 8e-3)
    assert by_rule.records.names("rmt-s0") == []
    by_hand.whole(ready, 3.0)
    assert by_rule.records.names("rmt-s0") == ["rmt-s0-lr0.008"] and by_rule.kept() == (set(), [])
    for target, size in (("table1", "340m"), ("needles", "tiny")):  # no rule: beside the configured rate
        _, planned_here = planned(study(target, size), Order(tmp_path, models=["rmt"], rates=(1e-3,)))
        assert planned_here[0].settled(Records(tmp_path / "none")).name == "rmt-s0-lr0.001"


def test_variants_have_the_rate_of_their_model(tmp_path):
    order = Order(tmp_path, models=["lmm"], seeds=(0,))
    runs, records = runs_of(chosen(study("figure7", "tiny"), order), order), Records(tmp_path)
    for rate, loss in ((2e-3, 2.0), (4e-3, 1.0), (8e-3, 3.0)):
        probe = runs[0].choice.probe(rate)
        records.write(probe.name, record(probe, loss=loss))
    assert {run.settled(records).config.train.lr for run in runs} == {4e-3}
    assert [run.settled(records).name for run in runs] == ["lmm-depth-1-s0", "lmm-s0", "lmm-depth-3-s0",
                                                           "lmm-depth-4-s0"]  # fmt: skip


def test_a_record_of_another_rate_inside_the_grid_is_refused(tmp_path):
    made = Made(tmp_path)
    made.probes(3.0, 1.0, 2.0)
    made.whole(made.first.at(8e-3, named=False), 3.0)
    with pytest.raises(UserError, match=r"rmt-s0.json: of a run with train.lr=0.008, asked for is 0.004"):
        made.first.record(made.records)


def test_without_a_rule_the_configured_rate_is_taken(tmp_path):
    asked = replace(study("table1", "tiny"), rated=False)
    run = runs_of(asked, Order(tmp_path, models=["rmt"]))[0]
    assert run.settled(Records(tmp_path)) == run and not run.probes(Records(tmp_path))


def test_whole_trainings_are_the_probes_where_a_short_one_says_nothing(tmp_path, capsys):
    """The runs of the first seed; the config's own rate needs no name, which keeps its record."""
    order = Order(tmp_path, models=["mamba2", "lmm"], seeds=(0, 1), rates=(1.5e-3, 3e-3, 6e-3))
    whole, records = study("needles", "tiny"), Records(tmp_path / "records")
    _, runs = planned(whole, order)
    names = [run.name for run in in_order(runs, records)]
    assert names[:4] == ["mamba2-s0-lr0.0015", "mamba2-s0", "mamba2-s0-lr0.006", "mamba2-s0"]
    show_plan(whole, order)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| mamba2")]
    assert [row[-2].strip() for row in rows] == [*["training"] * 3, "needles, far", "training, needles, far"]
    first, second = runs[0], next(run for run in runs if run.name == "mamba2-s1")
    for rate, loss in ((1.5e-3, 3.0), (3e-3, 2.0), (6e-3, 1.0)):
        probe = first.choice.probe(rate)
        assert probe.config.train.max_steps == first.config.train.max_steps
        records.write(probe.name, record(probe, loss=loss))
    ready = first.settled(records)
    assert (ready.name, ready.config.train.lr) == ("mamba2-s0-lr0.006", 6e-3)
    assert ready.missing(ready.record(records)) == ["needles", "far"], "trained as a probe"
    assert second.settled(records).name == "mamba2-s1-lr0.006"
    line = rates(runs, records).rows[0]
    assert line == ["Mamba2", "3.0000", "2.0000", "1.0000", "0.006"]


def test_a_loss_that_is_not_finite_is_shown_as_failed(tmp_path):
    """A training can end with finite weights whose validation loss is infinite; its record holds null."""
    made = Made(tmp_path)
    made.probes(3.0, 2.0, None)
    assert rates(made.runs, made.records).rows[0] == ["RMT", "3.0000", "2.0000", "failed", "0.004"]
    made.whole(made.first.settled(made.records), None)
    made.whole(made.first.at(2e-3, named=True), 2.5)
    assert tenths(made.runs, made.records) is None, "one rate with both losses orders nothing"


def test_a_model_of_another_size_tries_rates_itself(tmp_path):
    order = Order(tmp_path, models=["mamba2"], seeds=(0,))
    asked, records = chosen(study("scaling", "tiny"), order), Records(tmp_path / "records")
    plain, longer, larger = runs_of(asked, order)
    assert (longer.variant, larger.variant) == ("tokens-4x", "size-4x")
    assert longer.probes(records) == plain.probes(records)
    own = larger.probes(records)
    assert [probe.name for probe in own] == [f"mamba2-size-4x-lr{rate}" for rate in (0.002, 0.004, 0.008)]
    for probe in own:
        assert probe.config.model == larger.config.model
        assert probe.config.train.max_steps == larger.config.train.max_steps // 10
    for probe, loss in zip(plain.probes(records), (3.0, 1.5, 2.0), strict=True):
        records.write(probe.name, record(probe, loss=loss))
    assert plain.settled(records) and longer.settled(records) and not larger.settled(records)
    for probe, loss in zip(own, (1.1, 1.2, 1.3), strict=True):
        records.write(probe.name, record(probe, loss=loss))
    lowest = larger.probes(records)[0]
    assert lowest.name == "mamba2-size-4x-lr0.001"
    records.write(lowest.name, record(lowest, loss=1.4))
    assert (larger.settled(records).name, larger.settled(records).config.train.lr) == ("mamba2-size-4x-s0", 2e-3)
    assert longer.settled(records).config.train.lr == 4e-3
    assert rates([plain, longer, larger], records).rows == [
        ["Mamba2", "-", "3.0000", "1.5000", "2.0000", "0.004"],
        ["Mamba2, four times the size", "1.4000", "1.1000", "1.2000", "1.3000", "0.002"],
    ]
