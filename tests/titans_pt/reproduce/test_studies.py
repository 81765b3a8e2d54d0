"""Plans: the runs of each study, their order, their settings, their cost; and the numbers beside them."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import titans_pt
from tests.titans_pt.reproduce.records import record
from titans_pt import cli
from titans_pt.benchmarks.training import Case, Measurement, case_config
from titans_pt.commands.reproduce import reproduce as command
from titans_pt.config.files import validated
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.reproduce import timing
from titans_pt.reproduce.measures import TRAINING
from titans_pt.reproduce.order import Order, chosen, runs_of
from titans_pt.reproduce.published import FILE, published
from titans_pt.reproduce.records import Records, decisive
from titans_pt.reproduce.reproduce import plan, show_plan, submit, with_others
from titans_pt.reproduce.ruler import STAGES
from titans_pt.reproduce.runs import in_order
from titans_pt.reproduce.studies import LARGER_RATED, LEADING, OF_THEIR_OWN, SIZES, SMALL, TARGETS, study
from titans_pt.reproduce.study import MODELS, VARIANTS, Row
from titans_pt.reproduce.tables import cells
from titans_pt.runs.loaded import differences

OUT = Path("out")
RESULTS = Path(__file__).parents[3] / "docs/results"


def runs(target="table1", size="tiny", **asked):
    order = Order(OUT, **asked)
    return runs_of(chosen(study(target, size), order), order)


def measure_of(run, *words):
    """(settings of the evaluation, config) of a run with these overrides."""
    config = validated(run.config.model_dump(mode="json"), words)
    return run.measures[0].evaluation(config), config


PLANNED = [(target, size) for target in TARGETS for size in ("tiny", "paper" if target in OF_THEIR_OWN else "400m")
           if size == "tiny" or target not in SMALL]  # fmt: skip


@pytest.mark.parametrize(("target", "size"), PLANNED)
def test_every_study_can_be_planned(target, size):
    found = runs(target, size, models=None if target in ("table5", "figure7", "chunks") else ["lmm"])
    assert len({run.name for run in found}) == len(found) > 0
    assert len({run.config.run.dir for run in found}) == len(found)
    asked = study(target, size)
    taken = {measure.name for measure in asked.measures} | ({"speed"} if asked.timed else {TRAINING})
    assert {column.measure for column in asked.columns} <= taken
    if size != "tiny" and (beside := published(target, asked.compared)):
        names = {name for values in beside.values.values() for name in values}
        assert names <= {column.published for column in asked.columns}, "nothing published is left out"


@pytest.mark.parametrize("tokens, steps", [(3072, 1), (102_400, 33)])
def test_a_decay_fits_into_a_short_run(tokens, steps):
    trains = [run.config.train for run in runs("table3", models=["lmm"], tokens=tokens)]
    assert (trains[0].max_steps, trains[0].decay_steps) == (steps, steps - trains[0].warmup_steps)
    assert all(0 < train.decay_steps <= train.max_steps - train.warmup_steps for train in trains)


@pytest.mark.parametrize("option", ["--seeds 1", "--tokens 9", "--rates 1e-3", "--ranks 2", "--memory 80 --dry-run"])
def test_an_option_that_a_timing_does_not_read_is_refused(option, tmp_path, capsys):
    words = ["reproduce", "figure8", "--size", "tiny", "--out", str(tmp_path / "out"), *option.split()]
    assert cli.run(words) == 2
    name = option.partition(" ")[0]
    assert f"{name}: given, but figure8 times a few steps of one process; leave it out" in capsys.readouterr().err


def test_one_of_several_processes_is_refused(tmp_path, monkeypatch, capsys):
    """As under torchrun: each process would train runs of its own in a group with the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.run(["reproduce", "recall", "--size", "tiny", "--out", str(tmp_path / "out")]) == 2
    assert "starts the processes of its trainings itself: start it once, with --ranks 2, or" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_submitted_is_there(tmp_path, monkeypatch):
    """The script lies beside the package, also in an installation."""
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/words"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    submit(["table1", "--size", "tiny"], 3, ["--partition", "a b"])
    *options, script, target, _, size = (tmp_path / "words").read_text().splitlines()
    assert (options, target, size) == (["--array", "0-2", "--partition", "a b"], "table1", "tiny")
    assert Path(script).name == "slurm_reproduce.sh" and "titans_pt reproduce" in Path(script).read_text()
    assert Path(script).parents[1] == Path(titans_pt.__file__).parent


def test_what_cannot_be_submitted_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = ["reproduce", "recall", "--size", "tiny", "--out", str(tmp_path / "out"), "--submit", "2"]
    assert cli.run(asked) == 2
    assert "--submit: there is no sbatch here; run it where SLURM is, or leave --submit away" in capsys.readouterr().err
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert cli.run([*asked, "--seeds", "0,1", "--sbatch", "--partition 'a b'"]) == 2
    told = capsys.readouterr().err
    assert "--submit: sbatch --array 0-1 --partition 'a b' " in told and " ended with 3; its message is above" in told
    assert f" recall --size tiny --out {tmp_path}/out --seeds 0,1 ended" in told


@pytest.mark.parametrize("target", ["figure8", "figure9"])
def test_every_timing_is_of_the_model_that_the_row_names(target):
    for run in runs(target):
        timed = case_config(Case(run.model, 512), run.file, list(run.words), run.tokens)
        assert timed.model == run.config.model


def test_a_timing_that_fails_at_every_length_says_why(tmp_path, monkeypatch):
    def timed(works):
        def in_a_process(case, *_):
            return Measurement(case.model, case.length, None, None, failure="" if case.length == works else "no memory")

        monkeypatch.setattr(timing, "in_a_process", in_a_process)
        assert run.complete(records, 1, 0) == 0
        return [cell.why for cell in cells(asked, [run], records)]

    asked = chosen(study("figure9", "tiny"), Order(OUT, ["samba"]))
    (run,), records = runs("figure9", models=["samba"]), Records(tmp_path)
    assert timed(512) == ["", "-", "-", "-"]
    assert timed(None) == ["failed (no memory)"] * 4


def test_a_run_comes_after_the_choice_of_its_rate_and_first_seeds_come_first():
    asked = runs(models=["swa", "rmt"], rates=(1e-3, 2e-3))
    names = [run.name for run in in_order(asked, Records(OUT))]
    assert names == ["swa-lr0.001", "swa-lr0.002", "swa-s0", "rmt-lr0.001", "rmt-lr0.002", "rmt-s0", "swa-s1",
                     "rmt-s1"]  # fmt: skip


def test_seeds():
    by_model = {model: [run.config.run.seed for run in runs(models=[model])] for model in ("lmm", "rmt")}
    assert by_model == {"lmm": [0, 1, 2], "rmt": [0, 1]} and set(LEADING) < set(MODELS) and len(LEADING) == 10
    assert [run.config.run.seed for run in runs(models=["rmt"], seeds=[3, 4])] == [3, 4]
    assert [run.config.run.seed for run in runs(size="340m", models=["lmm"])] == [0]
    for target, seeds in ("table5", {0, 1, 2}), ("figure7", {0, 1, 2}), ("chunks", {0}):
        found = {run.name.rpartition("-")[0]: run for run in runs(target)}
        assert {run.config.run.seed for run in runs(target)} == seeds and len(found) * len(seeds) >= len(runs(target))


def test_four_times_the_tokens_and_four_times_the_size():
    found = {(run.model, run.variant): run for run in runs("scaling", seeds=[0])}
    models = {model for model, _ in found}
    assert len(models) == 7 and len(found) == 21
    without_embedding = {}
    for (model, variant), run in found.items():
        of_base, asked = found[model, ""].config, run.config
        times = 4 if variant == "tokens-4x" else 1
        assert asked.train.max_steps == times * of_base.train.max_steps
        own = variant == "size-4x" and model in LARGER_RATED
        assert run.choice.row.variant == ("size-4x" if own else "")
        assert asked.model.head_width == of_base.model.head_width
        embedding = asked.model.vocab_size * asked.model.d_model
        without_embedding.setdefault(variant, []).append(run.cost.parameters - embedding)
    for variant, sizes in without_embedding.items():
        assert max(sizes) < 1.012 * min(sizes)
        assert sizes[0] / without_embedding[""][0] == pytest.approx(4 if variant == "size-4x" else 1, rel=0.01)


@pytest.mark.parametrize("target", ["needles", "recall", "babilong"])
def test_a_study_trains_the_seeds_that_its_page_shows(target):
    """The studies whose records no other study shares."""
    planned = {run.name for run in runs(target)}
    recorded = {path.stem for path in (RESULTS / target).glob("*-s?.json")}
    assert recorded and not recorded - planned


def test_smaller_and_larger_states_at_equal_parameters():
    def memory(run):
        """Numbers of a layer's memory, without the convolutions' inputs, the momentum and M_0."""
        _, state = build_model(run.config.model)(torch.zeros(1, 16, dtype=torch.int64))
        first = state.blocks[0].memory
        return sum(w.numel() for w in first.weights) if run.model == "lmm" else first.numel()

    found = {(run.model, run.variant): run for run in runs("states", seeds=[0])}
    times = {("lmm", "state-quarter"): 0.25, ("mamba2", "state-4x"): 4, ("gated_deltanet", "state-4x"): 4,
             ("gated_deltanet", "state-8x"): 8}  # fmt: skip
    assert found.keys() == times.keys() | {(model, "") for model, _ in times}
    for (model, variant), ratio in times.items():
        base, run = found[model, ""], found[model, variant]
        assert memory(run) == ratio * memory(base) and run.choice == base.choice
        assert run.cost.parameters == pytest.approx(base.cost.parameters, rel=0.005)


def test_each_stage_of_rulers_needles_starts_from_the_one_before():
    found = {(run.model, run.variant): run for run in runs("ruler")}
    assert {variant for _, variant in found} == set(STAGES)
    for model in {model for model, _ in found}:
        first, second, third = stages = [found[model, stage] for stage in STAGES]
        assert [run.before for run in stages] == [(), (first,), (second,)]
        starts = [run.config.train.init_from for run in stages]
        assert starts == [None, first.config.run.dir, second.config.run.dir]
        assert first.config.model == second.config.model == third.config.model
        assert first.config.data != second.config.data == third.config.data
        assert first.cost.parameters == pytest.approx(found["lmm", "stage-1"].cost.parameters, rel=0.002)
        far = [] if model == "transformer" else ["long", "far"]
        assert [measure.name for measure in third.measures] == ["near", *far]


def test_a_run_starts_from_its_own_seed_or_from_the_only_one_there_is():
    own = {run.name: run.before for run in runs("ruler", models=["lmm"], seeds=[0, 1])}
    starts = {name: [run.name for run in before] for name, before in own.items()}
    assert starts == {
        f"lmm-{stage}-s{seed}": [f"lmm-{before}-s{seed}"] if before else []
        for stage, before in zip(STAGES, ("", *STAGES), strict=False) for seed in (0, 1)
    }  # fmt: skip
    genomes = {run.name: run for run in runs("table4", models=["lmm"])}
    assert "lmm-pretrain-s1" not in genomes
    assert [run.name for run in genomes["lmm-coding-s1"].before] == ["lmm-pretrain-s0"]


def test_a_probe_has_a_tenth_of_the_tokens_and_its_own_schedule():
    [whole] = runs(models=["rmt"], seeds=[0])
    probe = whole.choice.probe(1e-3)
    assert (whole.config.train.max_steps, whole.config.train.batch_tokens) == (1024, 4096)
    assert (probe.config.train.max_steps, probe.config.train.lr, probe.config.train.warmup_steps) == (102, 1e-3, 20)
    [short] = runs(models=["rmt"], tokens=4096 * 7, seeds=[0])
    assert (short.config.train.max_steps, short.config.train.warmup_steps) == (7, 1)


def test_variants_change_a_few_settings_of_the_model_alone():
    def trees(variant):
        studies = ("recall", "table5", "figure7", "chunks", "filters", "optimizer")
        every = [run for t in studies for run in runs(t, seeds=[0])]
        run = next(run for run in every if run.variant == variant)
        [base] = [r for t in ("recall", "table1") for r in runs(t, models=[run.model], seeds=[0])
                  if r.config.task == run.config.task and r.variant == ""]  # fmt: skip
        return [decisive(each.config.model_dump(mode="json")) for each in (base, run)]

    for variant, words in VARIANTS.items():
        if variant:
            changed = {key: now for key, _, now in differences(*trees(variant))}
            assert changed == {word.partition("=")[0]: yaml.safe_load(word.partition("=")[2]) for word in words}


@pytest.mark.parametrize("word", [
    "train.schedule=linear", "train.z_loss=1e-4", "train.precision=bf16", "train.spike_deviations=4.0",
    "train.trainable=[head]", "train.weight_decay=0.0",
])  # fmt: skip
def test_what_changes_a_result_is_another_run(word):
    [base], [other] = runs(models=["rmt"], seeds=[0]), runs(models=["rmt"], seeds=[0], words=[word])
    trees = [decisive(each.config.model_dump(mode="json")) for each in (base, other)]
    assert [key for key, _, _ in differences(*trees)] == [word.partition("=")[0]]


@pytest.mark.parametrize("word", ["train.micro_batch=4", "train.checkpoint_every=7", "train.eval_every=50"])
def test_speed_and_files_are_the_machines(word):
    [base], [other] = runs(models=["rmt"], seeds=[0]), runs(models=["rmt"], seeds=[0], words=[word])
    assert decisive(base.config.model_dump(mode="json")) == decisive(other.config.model_dump(mode="json"))


def test_an_evaluation_with_other_settings_is_another_measurement():
    [run] = runs("recall", models=["swa"], seeds=[0])
    [other] = runs("recall", models=["swa"], seeds=[0], words=["evaluation.recall.sequences=64"])
    [half] = runs("recall", models=["swa"], seeds=[0], words=["evaluation.precision=bf16"])
    (measure,) = run.measures
    found = {"words": [], "evaluation": measure.evaluation(run.config)}
    assert measure.done(found, run.config)
    assert not measure.done(found, other.config) and not measure.done(found, half.config)
    before = {"words": [], "settings": {"sequences": 512}}  # of a version that knew one setting
    assert measure.done(before, run.config) and not measure.done(before, other.config)
    assert measure.done({"words": []}, run.config), "of an earlier version"
    [cached] = runs("recall", models=["swa"], seeds=[0], words=["evaluation.caching={shares: sum}"])
    found = {"words": measure.settings(cached.config.model), "evaluation": measure.evaluation(cached.config)}
    found["evaluation"]["caching"]["drop"] = "oldest"  # of a version that had one more setting
    assert measure.done(found, cached.config)
    [tiny] = runs("table1", models=["swa"], seeds=[0])
    [elsewhere] = runs("table1", models=["swa"], seeds=[0], words=["evaluation.perplexity.text=other"])
    text = tiny.measures[0]
    older = {"words": text.settings(tiny.config.model), "evaluation": text.evaluation(tiny.config)}
    del older["evaluation"]["perplexity"]["text"]  # of a version that knew one text
    assert text.done(older, tiny.config) and not text.done(older, elsewhere.config)
    [text] = runs("babilong", models=["rmt"], seeds=[0])
    moved = measure_of(text, "evaluation.babilong.haystack={kind: files, path: /a/pg19}")
    again = measure_of(text, "evaluation.babilong.haystack={kind: files, path: /b/pg19}")
    assert text.measures[0].done(
        {"words": text.measures[0].settings(text.config.model), "evaluation": moved[0]}, again[1]
    )


def test_the_order_of_seeds_means_nothing():
    for seeds in ([1, 0], [0, 1, 1]):
        found = runs("table4", models=["lmm"], seeds=seeds)
        names = [run.name for run in found]
        assert len(names) == len(set(names))
        assert all(run.before for run in found if run.config.train.init_from)


def test_a_record_counts_as_long_as_the_settings_of_its_own_model_stay(tmp_path, monkeypatch):
    """A record from before a memory setting existed still counts for a model without a memory."""
    monkeypatch.setattr("titans_pt.config.history.FORMER_DEFAULTS", {"model.memory.writes": False})
    records = Records(tmp_path)
    for model, counts in (("transformer", True), ("lmm", False)):
        run = runs(models=[model])[0].choice.probe(1e-3)
        old = record(run, loss=3.0)
        old["config"]["model"]["memory"].pop("writes")
        records.write(run.name, old)
        if counts:
            assert records.of(run.name, run.config)["trained"] == old["trained"]
        else:
            with pytest.raises(UserError, match="model.memory.writes=False, asked for is True"):
                records.of(run.name, run.config)


def test_the_plan_says_what_is_left(tmp_path):
    planned, records = runs(models=["rmt"], rates=(1e-3, 2e-3), seeds=[0]), Records(tmp_path)
    (whole,) = planned
    assert [row[-1] for row in plan(planned, records).rows] == ["training", "training", "training, text, long", ""]
    for probe, loss in zip(whole.probes(records), (3.0, 2.0), strict=True):
        records.write(probe.name, record(probe, loss=loss))
    assert whole.settled(records).config.train.lr == 2e-3
    rows = plan(planned, records).rows
    assert [row[-1] for row in rows] == ["nothing", "nothing", "training, text, long", ""]
    assert rows[-1][2] == f"{whole.cost.tokens:,}" == f"{1024 * 4096:,}"
    cost = whole.cost
    assert math.isclose(cost.gpu_hours(0.5), cost.flops / 0.5 / 989e12 / 3600)
    assert cost.disk == 2 * 12 * cost.parameters


@pytest.mark.parametrize(("asked", "words"), [
    (dict(target="table6"), "TARGET: given 'table6'"),
    (dict(target="table4", size="340m"), "--size: given '340m'; table4 has tiny or paper"),
    (dict(target="table2", size="paper"), "--size: given 'paper'; table2 has one of tiny, 170m"),
    (dict(models=["lm"]), "--models: given 'lm'"),
    (dict(words=("model.window=0",)), "model.window"),
])  # fmt: skip
def test_what_does_not_exist_is_told(asked, words):
    with pytest.raises(UserError, match=words):
        runs(**asked)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Folder with the config of an own model, from which the command is started."""
    monkeypatch.chdir(tmp_path)
    Path("huber.yaml").write_text("inherit: tiny/lmm.yaml\nmodel: {memory: {rule: yaad}}\n")
    return tmp_path


def test_an_own_model_is_planned_as_the_studys_models_are(own):
    mine, theirs = runs(models=["huber.yaml", "lmm"])[0], runs(models=["lmm"])[0]
    assert (mine.name, mine.model, mine.measures) == ("huber-s0", "huber", theirs.measures)
    assert mine.choice.probe(4e-3).name == "huber-lr0.004"
    for run in (mine, mine.choice.probe(4e-3)):
        assert run.config.model.memory.rule == "yaad" and theirs.config.model.memory.rule == "titans"
    alike = {"memory": theirs.config.model.memory}
    assert mine.config.model.model_copy(update=alike) == theirs.config.model
    assert [run.name for run in runs(models=["lmm", "huber.yaml"], seeds=[0])] == ["lmm-s0", "huber-s0"]
    assert Row("huber").name == "huber"


def test_an_own_model_has_the_rows_that_all_models_share(own):
    assert [run.name for run in runs("table5", models=["huber.yaml"])] == ["huber-s0"]
    figure7 = [run.name for run in runs("figure7", models=["huber.yaml"])]
    assert figure7 == ["huber-depth-1-s0", "huber-s0", "huber-depth-3-s0", "huber-depth-4-s0"]
    Path("reader.yaml").write_text("inherit: dna-tiny/lmm.yaml\nmodel: {memory: {rule: yaad}}\n")
    dna = {run.name: run for run in runs("table4", models=["reader.yaml"])}
    assert list(dna) == [f"reader-{row}-s0" for row in ("pretrain", "coding", "coding-scratch", "splice",
                                                        "splice-scratch")]  # fmt: skip
    assert [run.name for run in dna["reader-coding-s0"].before] == ["reader-pretrain-s0"]


def test_an_own_models_timing_is_of_its_config(own):
    [run] = runs("figure9", models=["huber.yaml"])
    assert case_config(Case(run.model, 512), run.file, list(run.words), run.tokens).model == run.config.model


def test_an_own_model_joins_the_page_of_the_studys_models(own):
    records, whole = Records(own / "records"), study("table1", "tiny")
    [lmm] = runs(models=["lmm"], seeds=[0])
    records.write(lmm.name, record(lmm))
    shown = with_others(Order(own, models=["huber.yaml"]), whole, records)
    assert shown.models == ["lmm", "huber.yaml"]


@pytest.mark.parametrize(("file", "text", "words"), [
    ("lmm.yaml", "inherit: tiny/lmm.yaml", "--models: given 'lmm.yaml', but there is another model named 'lmm'"),
    ("my lmm.yaml", "inherit: tiny/lmm.yaml", "--models: given 'my lmm.yaml', whose name becomes that of its runs"),
    ("mine.yaml", "inherit: recall/lmm.yaml", "mine.yaml: task is 'recall', and that of the models of table1 is "
     "'language'; begin the file with inherit: tiny/transformer.yaml, or leave the setting out of it"),
    ("mine.yaml", "inherit: tiny/lmm.yaml\ndata: {seq_len: 256}", "mine.yaml: data.seq_len is 256, and that of"),
    ("none.yaml", "", "none.yaml"),
])  # fmt: skip
def test_an_own_model_that_does_not_compare_is_refused(own, file, text, words):
    if text:
        Path(file).write_text(text + "\n")
    with pytest.raises(UserError, match=re.escape(words)):
        runs(models=[file])


def test_a_study_without_shared_rows_says_so(own):
    with pytest.raises(UserError, match="the models of statetracking share no row"):
        runs("statetracking", models=["huber.yaml"])


def test_published_numbers():
    table = yaml.safe_load(FILE.read_text())
    rows = {row for name, tables in table.items() if name != "works" for size, values in tables.items()
            if isinstance(values, dict) for row in values}  # fmt: skip
    for row in rows:
        model, _, variant = row.partition("/")
        own = {row.variant for row in study("table4", "paper").rows}
        assert model in MODELS and variant in VARIANTS.keys() | own, row
    assert published("table1", "340m").value("mac", "wikitext") == 25.43
    assert published("table1", "760m").value("gated_deltanet_h2", "boolq") == 61.11
    assert published("table2", "170m").value("mag", "S3 16K") == 88.2
    assert published("table5", "400m").value(Row("lmm", "no-momentum").key, "needles") == 87.12
    assert published("table1", "1.3b") is None and "tiny" in SIZES
    assert "NeurIPS" in published("table5", "400m").source


@pytest.mark.parametrize("word, more, remedy", [
    ("run.seed=3", {}, "give --seeds N,..."), ("run={dir: runs/mine}", {}, "give --out DIR"),
    ("model.mixers=[mac]", {}, "give --models NAMES"), ("train.lr=1e-3", {}, "give --rates LR,..."),
    ("train.max_steps=9", {"tokens": 10**6}, "give --tokens alone"),
    ("evaluation.perplexity.tokens=512", {}, "ask a trained run by titans evaluate"),
    ("evaluation.perplexity.freeze_after=[9]", {}, "ask a trained run by titans evaluate"),
    ("train.micro_batch=2", {"target": "figure9"}, "time other lengths and batches by titans benchmark training"),
])  # fmt: skip
def test_a_setting_that_the_study_sets_is_refused(word, more, remedy):
    key = "run.dir" if word.startswith("run={") else word.partition("=")[0]
    with pytest.raises(UserError) as error:
        runs(words=[word], **more)
    assert str(error.value) == f"{key}: given, but this command sets it; leave it out and {remedy}"


def test_without_a_choice_of_rates_train_lr_is_everybodys():
    assert {run.config.train.lr for run in runs(size="340m", models=["lmm"], words=["train.lr=3e-4"])} == {3e-4}


def test_a_study_that_does_not_fit_is_refused_before_its_first_training(tmp_path, capsys):
    words = ("data.dir=/nowhere",)
    order = Order(tmp_path, models=["lmm", "mac", "transformer"], words=words)
    show_plan(study("table1", "340m"), order, ranks=8, memory=200.0)
    with pytest.raises(UserError) as refused:
        show_plan(study("table1", "340m"), order, ranks=8, memory=50.0)
    message = str(refused.value)
    assert message.startswith("lmm-s0 (likewise mac-s0): the plan needs about")
    assert "of 50.0 GiB; set train.activation_checkpointing=true" in message
    assert "| mac-s0 |" in capsys.readouterr().out, "the plan was printed first"
    fits = replace(order, words=(*words, "train.activation_checkpointing=true"))
    show_plan(study("table1", "340m"), fits, ranks=8, memory=50.0)


def test_the_commands_help_names_every_target():
    [target] = [each for each in command.params if each.name == "target"]
    assert sorted(re.split(", | or ", target.help)) == sorted(TARGETS)


def test_lengths_far_beyond_training_are_not_asked_of_full_attention():
    """Its time per token grows with the length: a million tokens take a core an hour, of models of 0.2M parameters."""
    for target, size, near in (("needles", "tiny", "needles"), ("babilong", "340m", "babilong")):
        measured = {model: [m.name for m in runs(target, size, models=[model], seeds=[0])[0].measures]
                    for model in ("transformer", "lmm", "mac", "gated_deltanet")}  # fmt: skip
        assert measured.pop("transformer") == [near]
        assert all(names == [near, "far"] for names in measured.values())
