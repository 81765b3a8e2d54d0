"""Table 4: runs that start from other runs' weights, and their rows on the page."""

from pathlib import Path

from titans_pt.config.files import load_config
from titans_pt.reproduce.order import Order
from titans_pt.reproduce.records import Records, decisive
from titans_pt.reproduce.reproduce import by_data, planned
from titans_pt.reproduce.studies import study
from titans_pt.reproduce.tables import cells
from titans_pt.runs.loaded import differences


def recorded(run, **measured) -> dict:
    return run.begin({"parameters": 1, "steps": 9, "tokens": 9, "hardware": "", "checkpoint": ""}, "") | {
        "measured": measured
    }


def test_runs_begin_with_pretrained_weights_and_wait_for_them(tmp_path):
    records = Records(tmp_path)
    _, runs = planned(study("table4", "tiny"), Order(Path("out"), models=["lmm"]))
    by_name = {run.name: run for run in runs}
    assert [run.name for run in runs[:4]] == ["lmm-pretrain-s0", "lmm-coding-s0", "lmm-coding-scratch-s0",
                                              "lmm-coding-memory-off-s0"]  # fmt: skip
    first, tuned, scratch = (by_name[name] for name in ("lmm-pretrain-s0", "lmm-coding-s2", "lmm-coding-scratch-s2"))
    assert tuned.config.train.init_from == first.config.run.dir and scratch.config.train.init_from is None
    assert tuned.config.run.seed == 2 and by_name["lmm-splice-memory-off-s1"].config.model.memory.writes is False
    assert tuned.settled(records) is None and scratch.settled(records) is not None
    records.write(first.name, recorded(first, text={}))
    assert tuned.settled(records) == tuned
    assert [m.name for m in first.measures] == ["text"] and [m.name for m in tuned.measures] == ["classes"]
    assert [len(group) for group in by_data(runs)] == [1, 12, 12], "what reads the same data is compared"


def test_the_config_of_one_set_is_that_of_the_study():
    _, runs = planned(study("table4", "tiny"), Order(Path("out"), models=["lmm"], seeds=[0]))
    (run,) = (run for run in runs if run.name == "lmm-coding-scratch-s0")
    given = load_config("dna-tiny/coding")
    assert not list(differences(decisive(run.config.model_dump(mode="json")), decisive(given.model_dump(mode="json"))))
    assert (given.data.dir, given.data.validation_fraction) == (
        run.config.data.dir,
        run.config.data.validation_fraction,
    )


def test_a_folder_is_no_part_of_a_record(tmp_path):
    """The paths of a genome and of the pretrained run may differ between machines."""
    order = Order(Path("here"), models=["lmm"], seeds=[0])
    (run,) = (run for run in planned(study("table4", "paper"), order)[1] if run.name == "lmm-cohn-s0")
    records = Records(tmp_path)
    records.write(run.name, recorded(run))
    there = Order(Path("there"), models=["lmm"], seeds=[0], words=("classify_dna.reference=/fast/GRCh38.fa",))
    (other,) = (run for run in planned(study("table4", "paper"), there)[1] if run.name == "lmm-cohn-s0")
    assert records.of(run.name, other.config)["trained"]["steps"] == 9
    kept = records.read(run.name)["config"]
    assert (kept["train"]["init_from"], kept["classify_dna"]["path"]) == ("lmm-pretrain-s0", "human_enhancers_cohn")


def test_figures_stand_beside_baselines_and_published_ones(tmp_path):
    asked, runs = planned(study("table4", "paper"), Order(Path("out"), models=["lmm"], seeds=[0]))
    records = Records(tmp_path)
    by_name = {run.name: run for run in runs}
    records.write("lmm-pretrain-s0", recorded(by_name["lmm-pretrain-s0"]))
    row = {"mean": 0.75, "low": 0.7, "high": 0.8, "n": 400, "mcc": 0.5}
    result = {"columns": {"test": row}, "baselines": {"length": {"test": {"accuracy": 0.6, "n": 400}}}}
    records.write("lmm-cohn-s0", recorded(by_name["lmm-cohn-s0"], classes=result | {"words": []}))
    found = {cell.column.title: cell for cell in cells(asked, runs, records) if cell.row.variant == "cohn"}
    assert (found["accuracy (%)"].ours.mean, found["accuracy (%)"].paper) == (75.0, 75.2)
    assert found["MCC"].ours.mean == 0.5 and found["length (%)"].ours.mean == 60.0
    assert found["without copies (%)"].why == "-" and found["majority (%)"].why == "-"
    assert found["steps"].ours.mean == 9
    assert found["MCC"].row.name == "LMM, enhancers (Cohn), pretrained"
