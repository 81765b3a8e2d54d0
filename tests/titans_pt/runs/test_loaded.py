import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
import torch

from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config import config_hash
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.evaluation import evaluate
from titans_pt.inspection import inspect
from titans_pt.models import build_model
from titans_pt.runs import checkpoints
from titans_pt.runs.checkpoints import TrainerState
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import differences, load_run
from titans_pt.tasks.language import Language, keep_tokenizer
from titans_pt.training.resume import find_start


@pytest.fixture
def run(tiny, prepared, tmp_path):
    """A run folder with one checkpoint, at step 3, and the weights in it."""
    from titans_pt.data_pipeline import load_tokenizer

    config = load_config(tiny())
    folder = RunFolder(config.run.dir)
    tokenizer = load_tokenizer(prepared / "tokenizer.model")
    with folder.lock():
        folder.write_settings(config)
        keep_tokenizer(tokenizer.path, config, folder)
    weights = {name: p.detach().clone() for name, p in build_model(config.model).named_parameters()}
    state = TrainerState(
        step=3, samples=12, adam_step=3, nonfinite=0, nonfinite_in_a_row=0,
        config=config.model_dump(mode="json"),
        identity={"tokenizer": tokenizer.sha256, "data": "d"},
    )  # fmt: skip
    checkpoints.save(folder.checkpoints, weights, {}, state)
    return folder, weights


def test_what_is_written_can_be_read_back(run):
    folder, _ = run
    config = load_config(folder.config)
    assert folder.config.read_text().startswith(f"# sha256 of the settings: {config_hash(config)}\n")
    assert {"titans_pt", "python", "torch", "deepspeed"} <= json.loads(folder.versions.read_text()).keys()


def test_a_run_that_trains_can_be_loaded(run, monkeypatch):
    """The training deletes a checkpoint between its verification and the reading of its weights."""
    folder, weights = run
    read, first = checkpoints.read_weights, folder.checkpoints / "step-00000003"

    def read_weights(path):
        if path == first:
            checkpoints.save(folder.checkpoints, weights, {}, replace(checkpoints.read_state(path), step=4))
            checkpoints.delete(checkpoints.outdated(folder.checkpoints, 1))
        return read(path)

    monkeypatch.setattr(checkpoints, "read_weights", read_weights)
    assert load_run(folder.path).step == 4
    assert not first.exists()


def test_the_settings_are_written_whole_or_not_at_all(run, tiny, monkeypatch):
    folder, _ = run
    before = folder.config.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("titans_pt.tools.files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.write_settings(load_config(tiny(), ["train.lr=0.5"]))
    assert folder.config.read_text() == before


def test_load_run(run):
    folder, weights = run
    loaded = load_run(folder.path)
    assert loaded.step == 3
    assert loaded.checkpoint_hash == checkpoints.checkpoint_hash(folder.checkpoints / "step-00000003")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a b")) == "a b"
    assert not loaded.model.training
    for name, p in loaded.model.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, weights[name])
    assert load_run(folder.path, step=3).step == 3


def test_progress_is_that_of_the_training_that_wrote_the_checkpoint(run, tiny, monkeypatch):
    folder, _ = run
    seen = []
    monkeypatch.setattr("titans_pt.models.backbone.Backbone.set_progress", lambda self, done: seen.append(done))
    steps = load_config(tiny()).train.max_steps
    load_run(folder.path)
    with folder.lock():
        folder.write_settings(load_config(tiny(), [f"train.max_steps={steps * 2}"]))
    load_run(folder.path)
    assert seen == [3 / steps, 3 / steps]


def test_precision_is_part_of_what_results_belong_to(run):
    whole, half = load_run(run[0].path), load_run(run[0].path, overrides=["evaluation.precision=bf16"])
    assert (whole.precision, whole.identity) == ("fp32", whole.checkpoint_hash)
    assert (half.precision, half.identity) == ("bf16", f"{whole.checkpoint_hash}-bf16")
    assert {p.dtype for p in whole.model.parameters()} == {torch.float32}
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert load_run(run[0].path, overrides=["evaluation.precision=bf16"], precision="fp32").identity == whole.identity


def test_weights_must_fit_by_name(run):
    folder, weights = run
    state = checkpoints.read_state(folder.checkpoints / "step-00000003")
    weights.pop(next(iter(weights)))
    checkpoints.save(folder.checkpoints, weights, {}, state)
    with pytest.raises(UserError, match=r"another version .* 2 parameters differ, such as embedding\.weight"):
        load_run(folder.path)


SMALL = ["evaluation.perplexity.tokens=64", "evaluation.perplexity.length=16", "evaluation.prefill_tokens=16"]


@pytest.fixture
def read_only(run, monkeypatch):
    """The run in a folder that cannot be written to, such as another user's."""
    real = tempfile.TemporaryFile

    def refused(dir):
        if dir.is_relative_to(run[0].path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(dir=dir)

    monkeypatch.setattr("titans_pt.tools.files.tempfile.TemporaryFile", refused)
    return run[0]


def test_what_is_found_of_a_run_that_may_only_be_read_goes_elsewhere(read_only, tmp_path):
    refusal = "RUN: .* cannot be written to .Permission denied.; give --out DIR, a folder"
    with pytest.raises(UserError, match=refusal):
        evaluate(read_only.path, SMALL, suite="perplexity")
    before = sorted(read_only.path.rglob("*"))
    out = tmp_path / "mine"
    summary = evaluate(read_only.path, SMALL, suite="perplexity", out=out)
    written = json.loads((out / "evaluation/step-00000003/summary.json").read_text())
    assert written == written | summary
    assert list((out / "plots").iterdir())
    (tmp_path / "text.txt").write_text("a b c d e f g h")
    with pytest.raises(UserError, match=refusal):
        inspect(read_only.path, tmp_path / "text.txt")
    inspect(read_only.path, tmp_path / "text.txt", out=out)
    assert (out / "text.txt.npz").is_file()
    assert sorted(read_only.path.rglob("*")) == before


def test_token_files_may_be_named_where_they_now_are(run, prepared, tmp_path, monkeypatch):
    """A run's relative paths start at the folder it was started in; given paths start at the current folder."""
    folder, _ = run
    text = folder.config.read_text()
    folder.config.write_text(text.replace(str(prepared), "data/small"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data.dir=data/small: "):
        evaluate(folder.path, SMALL, suite="perplexity")
    monkeypatch.chdir(prepared.parent)
    given = evaluate(folder.path, [*SMALL, f"data.dir={prepared.name}"], suite="perplexity")
    shutil.copytree(prepared, tmp_path / "data/small")  # the run was started in tmp_path as "run"
    folder.config.write_text(folder.config.read_text().replace(f"dir: {tmp_path}/run", "dir: run"))
    shutil.rmtree(folder.evaluation)
    found = evaluate(folder.path, SMALL, suite="perplexity")
    assert found["perplexity"]["loss"] == given["perplexity"]["loss"]
    for override in ("data.seq_len=8", "run.seed=3", "model.window=4"):
        with pytest.raises(UserError, match=r"only evaluation\.KEY=VALUE and data\.dir=FOLDER can be set here"):
            evaluate(folder.path, [override])


def test_two_runs_on_one_folder_are_refused(tmp_path):
    with (
        RunFolder(tmp_path).lock(),
        pytest.raises(UserError, match=rf"in use by another run \(process {os.getpid()} on .*, since .*\); wait"),
        RunFolder(tmp_path).lock(),
    ):
        pass
    with RunFolder(tmp_path).lock():
        pass


@pytest.mark.thorough
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = "import sys, time; from titans_pt.runs.folder import RunFolder\nwith RunFolder(sys.argv[1]).lock(): "
    code += "print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on"), RunFolder(tmp_path).lock():
        pass
    holder.kill()
    holder.wait()
    with RunFolder(tmp_path).lock():
        pass


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("titans_pt.tools.locks.fcntl.flock", none)
    with RunFolder(tmp_path).lock():
        assert "a second run here would not be noticed" in caplog.text


@pytest.mark.parametrize("call", ["fcntl.flock", "os.mkdir"])
def test_a_failing_disk_is_no_wrong_setting(tmp_path, monkeypatch, call):
    """A launcher starts the run again, which it does not after a UserError."""

    def fail(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), *([str(tmp_path / "run")] if call == "os.mkdir" else ()))

    monkeypatch.setattr(call, fail)
    with (
        pytest.raises(OSError, match="Stale") as error,
        RunFolder(tmp_path / "run" if call == "os.mkdir" else tmp_path).lock(),
    ):
        pass
    assert str(error.value.filename).startswith(str(tmp_path))


def test_not_a_run_folder(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        load_run(tmp_path)


@pytest.mark.parametrize("words", [["evaluate"], ["inspect", "--text", "config.yaml"], ["generate", "--prompt", "a"]])
def test_a_file_is_no_run(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model: {}")
    assert cli.run([words[0], "config.yaml", *words[1:]]) == 2
    assert "config.yaml: not a run folder" in capsys.readouterr().err


def test_no_checkpoint_yet(run):
    folder, _ = run
    for path in checkpoints.list_checkpoints(folder.checkpoints):
        checkpoints.shutil.rmtree(path)
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        load_run(folder.path)


def test_a_run_of_before_a_setting_existed(run, tiny, monkeypatch):
    """The run is read and continued with the former behaviour, whatever the default is today."""
    folder, weights = run
    path = folder.checkpoints / "step-00000003"
    state = checkpoints.read_state(path)
    state.config["model"]["memory"].pop("writes")
    kinds = ("exp_avg", "exp_avg_sq")
    moments = {f"{kind}.{name}": torch.zeros_like(w) for kind in kinds for name, w in weights.items()}
    checkpoints.save(folder.checkpoints, weights, moments, state)
    folder.config.write_text(folder.config.read_text().replace("    writes: true\n", ""))
    monkeypatch.setattr("titans_pt.config.history.FORMER_DEFAULTS", {"model.memory.writes": False})
    assert load_run(folder.path).config.model.memory.writes is False
    config = find_start(Language(load_config(tiny())), folder, state.identity).config
    assert config.model.memory.writes is False
    with pytest.raises(UserError, match="model.memory.writes: given True, but .* was trained with False"):
        given = load_config(tiny(), ["model.memory.writes=true"])
        find_start(Language(given), folder, state.identity)


def test_another_tokenizer_is_refused(run):
    folder, _ = run
    folder.tokenizer.write_bytes(folder.tokenizer.read_bytes() + b"\0")
    with pytest.raises(UserError, match="not the tokenizer of this model"):
        load_run(folder.path)
    folder.tokenizer.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.model: missing"):
        load_run(folder.path)


def test_another_model_is_refused(run):
    folder, _ = run
    folder.config.write_text(folder.config.read_text().replace("n_layers: 1", "n_layers: 2"))
    with pytest.raises(UserError, match="model.n_layers: given 2, but .*step-00000003 was trained with 1"):
        load_run(folder.path)


def test_differences():
    old = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": 0}
    new = {"a": 1, "b": {"c": 3, "d": [1, 2]}, "here": 0}
    assert list(differences(old, new)) == [("b.c", 2, 3), ("b.d", [1], [1, 2]), ("gone", 0, None), ("here", None, 0)]


def test_a_setting_that_is_newer_than_the_checkpoint_has_its_default(run, monkeypatch):
    read = checkpoints.read_state

    def without(path):
        state = read(path)
        del state.config["model"]["rope_base"]
        return state

    monkeypatch.setattr(checkpoints, "read_state", without)
    assert load_run(run[0].path).step == 3


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    """safetensors cannot open files in such a folder."""
    with pytest.raises(UserError, match="the name is not UTF-8; rename the folder"):
        load_run(tmp_path / "caf\udce9")


def test_a_config_that_is_not_as_training_wrote_it_is_told(tmp_path, prepared, caplog):
    folder = RunFolder(untrained_run(tmp_path / "run", prepared))
    load_run(folder.path)
    assert not caplog.text
    whole = folder.config.read_text()
    folder.config.write_text(whole[: whole.index("\nevaluation:") + 1])  # half of it is also YAML
    load_run(folder.path)
    assert "config.yaml: damaged, or changed since training wrote it; what it says now is used" in caplog.text
    caplog.clear()
    folder.config.write_text("".join(whole.splitlines(keepends=True)[2:]))  # as an earlier version wrote it
    load_run(folder.path)
    assert not caplog.text
