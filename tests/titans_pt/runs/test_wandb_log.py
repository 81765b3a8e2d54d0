import builtins
import contextlib
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import wandb

from titans_pt.config import Config
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.wandb_log import FINISH_TIMEOUT, WandbLog, resolve_mode, send_results
from titans_pt.training import loop


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    """Nobody is logged in, and what wandb knows of earlier tests is forgotten."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget()
    yield
    forget()


def forget():
    wandb.sdk.lib.wbauth.unauthenticate_session(update_settings=False)
    wandb.teardown()


def log_in(folder: Path, server: str = "api.wandb.ai"):
    (folder / "netrc").write_text(f"machine {server} login user password {'x' * 40}\n")


def test_auto_is_online_only_with_a_login(tmp_path):
    assert resolve_mode("auto") == "offline"
    assert resolve_mode("online") == "online"
    log_in(tmp_path)
    assert resolve_mode("auto") == "online"


def test_a_login_may_be_an_environment_variable(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve_mode("auto") == "online"


def test_a_login_may_be_a_token_file(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    assert resolve_mode("auto") == "online"


def test_a_login_is_that_of_the_server(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.here:8080")
    log_in(tmp_path)
    assert resolve_mode("auto") == "offline"
    log_in(tmp_path, "wandb.here:8080")
    assert resolve_mode("auto") == "online"


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_auto_is_what_wandb_mode_says(monkeypatch, tmp_path, mode):
    log_in(tmp_path)
    monkeypatch.setenv("WANDB_MODE", mode)
    assert resolve_mode("auto") == mode


@pytest.mark.parametrize(("given", "mode"), [("dryrun", "offline"), ("run", "online"), ("Disabled", "disabled"),
                                             ("", "online"), (" ", "online")])  # fmt: skip
def test_other_spellings_of_wandb_mode(monkeypatch, tmp_path, given, mode):
    log_in(tmp_path)
    monkeypatch.setenv("WANDB_MODE", given)
    assert resolve_mode("auto") == mode


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["auto", "offline"])
def test_a_nonsensical_wandb_mode_is_a_warning_and_loses_nothing(monkeypatch, tmp_path, caplog, mode):
    log_in(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "onlin")
    log = WandbLog(Config.model_validate({"wandb": {"mode": mode}}), RunFolder(tmp_path), None)
    log.write(1, {"loss": 1.0})
    log.close()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "titans_pt.runs.wandb_log"]
    assert line == "WANDB_MODE: given 'onlin'; allowed: online, offline, disabled, shared, dryrun, run"
    assert list((tmp_path / "wandb").glob(f"offline-run-*{log.id}"))


@pytest.mark.parametrize(("variable", "value", "mode"), [
    ("WANDB_MODE", "disabled", "auto"), ("WANDB_DISABLED", "true", "auto"), ("WANDB_DISABLED", "1", "offline"),
    ("WANDB_DISABLED", "YES", "online"),
])  # fmt: skip
def test_disabled_by_the_environment_leaves_nothing(monkeypatch, tmp_path, variable, value, mode):
    monkeypatch.setenv(variable, value)
    log = WandbLog(Config.model_validate({"wandb": {"mode": mode}}), RunFolder(tmp_path), None)
    log.write(1, {"loss": 1.0})
    log.close()
    assert log.id is None
    assert not list(tmp_path.glob("wandb*"))


def test_a_server_that_cannot_be_reached_leaves_the_metrics_in_files(monkeypatch, tmp_path, caplog):
    with socket.socket() as closed:  # bound, but it never listens: connections are refused
        closed.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{server}")
        log_in(tmp_path, server)
        monkeypatch.setattr("titans_pt.runs.wandb_log.INIT_TIMEOUT", 2.0)
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir()
        log = WandbLog(Config(), folder, None)
        log.write(1, {"loss": 1.0})
        log.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "titans_pt.runs.wandb_log"]
    assert warning.startswith("W&B is not online (")
    assert "connection refused" in warning
    assert warning.endswith(f"metrics are kept for `wandb sync` in {folder.wandb}")
    assert list(folder.wandb.glob(f"offline-run-*{log.id}/*.wandb"))


def test_a_failure_is_one_warning(monkeypatch, tmp_path, caplog):
    real = builtins.__import__

    def broken(name, *rest, **named):
        if name == "wandb":
            raise RuntimeError("no\nwandb today")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", broken)
    log = WandbLog(Config(), RunFolder(tmp_path), None)
    log.write(1, {"loss": 1.0})
    log.close()
    assert [r.getMessage() for r in caplog.records] == [
        "W&B is off for the rest of this run (wandb.mode=disabled avoids this): no wandb today"
    ]


def test_offline_keeps_its_files_and_its_id_in_the_run_folder(tmp_path, capfd):
    folder = RunFolder(tmp_path)
    config = Config.model_validate({"wandb": {"mode": "offline"}})
    ids = []
    for _ in range(2):
        log = WandbLog(config, folder, None)
        log.write(1, {"loss": 1.0, "mfu": None})
        log.close()
        ids.append(log.id)
    assert ids[0] and ids[0] == ids[1]
    assert list(folder.wandb.glob(f"offline-run-*{ids[0]}"))
    assert capfd.readouterr().out == ""


def test_a_wandb_dir_that_cannot_be_written_to_is_a_warning_and_loses_nothing(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "file"))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    log = WandbLog(Config.model_validate({"wandb": {"mode": "offline"}}), folder, None)
    log.write(1, {"loss": 1.0})
    log.close()
    assert list(folder.wandb.glob(f"offline-run-*{log.id}/*.wandb"))
    monkeypatch.setenv("WANDB_DISABLED", "true")
    WandbLog(Config(), folder, None)
    told = [record.getMessage() for record in caplog.records if record.name == "titans_pt.runs.wandb_log"]
    assert told == [f"WANDB_DIR: {tmp_path / 'file'} cannot be written to (it is no folder); name a folder "
                    f"where you may write; W&B's files are in {folder.wandb}"]  # fmt: skip


def test_wandb_disabled_may_say_no(monkeypatch):
    monkeypatch.setenv("WANDB_DISABLED", "false")
    assert resolve_mode("offline") == "offline"


@pytest.fixture
def server(monkeypatch):
    """A stand-in for W&B's server: runs by id, each of which drops values of steps before its newest one."""
    runs, asked = {}, []

    class Run:
        def __init__(self, history):
            self.history, self.axes = history, {}
            self.step = max(history, default=-1) + 1

        def define_metric(self, name, step_metric=None, hidden=None):
            self.axes[name] = step_metric

        def log(self, values, step):
            if step >= max(self.history, default=0):
                self.history.setdefault(step, {}).update(values)

        def finish(self, exit_code):
            assert self.axes["*"] == "step"

    def init(id, **settings):
        asked.append({"id": id} | settings)
        return Run(runs.setdefault(id, {}))

    monkeypatch.setattr(wandb, "init", init)
    return runs, asked


def curve(history: dict[int, dict]) -> list[tuple]:
    return [(row["step"], row["loss"]) for _, row in sorted(history.items())]


def steps(folder: RunFolder, values: dict[int, float], **how) -> WandbLog:
    log = WandbLog(Config.model_validate({"wandb": {"mode": "offline"}}), folder, None, **how)
    for step, loss in values.items():
        log.write(step, {"loss": loss})
        log.write(step, {"more": loss})  # joins the row of its step
    log.close()
    return log


def test_a_resume_continues_the_curve_and_repeated_steps_arrive(tmp_path, server):
    runs, _ = server
    folder = RunFolder(tmp_path)
    first = steps(folder, {1: 1.0, 2: 2.0, 4: 4.0})
    again = steps(folder, {5: 5.0, 6: 6.0})
    assert (first.begins, again.begins, first.id) == (True, False, again.id)
    assert curve(runs[first.id]) == [(1, 1.0), (2, 2.0), (4, 4.0), (5, 5.0), (6, 6.0)]
    assert sorted(runs[first.id]) == [1, 2, 4, 5, 6]  # W&B's own steps agree
    steps(folder, {3: 3.5, 4: 4.5, 7: 7.5})  # after a crash, perhaps with another setting
    assert curve(runs[first.id])[-3:] == [(3, 3.5), (4, 4.5), (7, 7.5)]


def test_a_branch_is_another_run_that_its_restarts_continue(tmp_path, server):
    runs, _ = server
    folder = RunFolder(tmp_path)
    trunk = steps(folder, {1: 1.0, 2: 2.0, 3: 3.0})
    branch = steps(folder, {2: 2.5}, branch=True)
    again = steps(folder, {3: 3.5})
    assert branch.begins and branch.id != trunk.id and again.id == branch.id and not again.begins
    assert curve(runs[trunk.id]) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert curve(runs[branch.id]) == [(2, 2.5), (3, 3.5)]


def test_a_copy_of_a_run_folder_is_another_run_and_a_moved_one_is_not(tmp_path, server):
    runs, _ = server
    original, copy, moved = (RunFolder(tmp_path / name) for name in ("a", "copy", "moved"))
    original.path.mkdir()
    first = steps(original, {1: 1.0, 2: 2.0})
    shutil.copytree(original.path, copy.path)
    (tmp_path / "alias").symlink_to(original.path)
    assert steps(RunFolder(tmp_path / "alias"), {3: 3.0}).id == first.id
    second = steps(copy, {3: 9.0})
    assert second.begins and second.id != first.id
    assert steps(copy, {4: 9.0}).id == second.id
    original.path.rename(moved.path)
    third = steps(moved, {4: 4.0})
    assert third.id == first.id and not third.begins
    assert curve(runs[first.id]) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_the_environment_goes_before_our_defaults(monkeypatch, tmp_path, server):
    _, asked = server
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    variables = {"WANDB_RUN_ID": "theirs", "WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_DIR": str(tmp_path / "w")}
    steps(folder, {1: 1.0})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for branch in (False, True):
        steps(folder, {2: 1.0}, branch=branch)
    given = {"mode": "offline", "project": "mine", "name": "my"}
    WandbLog(Config.model_validate({"wandb": given}), folder, None).close()
    ids, *rest = ([each[key] for each in asked] for key in ("id", "project", "name", "dir"))
    assert ids[0] != "theirs" and ids[1:] == ["theirs"] * 3
    assert rest == [["titans-pt", "p", "p", "mine"], ["run", "n", "n", "my"],
                    [str(folder.path), *[str(tmp_path / "w")] * 3]]  # fmt: skip


@pytest.fixture
def offline(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    return folder, WandbLog(Config.model_validate({"wandb": {"mode": "offline"}}), folder, None)


def test_an_artifact_is_kept_offline(offline, tmp_path):
    folder, log = offline
    sent = tmp_path / "checkpoint"
    sent.mkdir()
    (sent / "model.safetensors").write_text("weights")
    log.send("checkpoint", "model", sent)
    log.close()
    (record,) = folder.wandb.glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # W&B's own process writes it, later on a busy machine
    while f"{log.id}-checkpoint".encode() not in record.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("given", [None, "", "theirs"])
def test_copies_of_an_artifact_are_not_in_the_home_folder(offline, monkeypatch, tmp_path, given):
    """It is small on many clusters; offline, every checkpoint waits there for `wandb sync`."""
    folder, log = offline
    monkeypatch.chdir(tmp_path)
    if given is not None:
        monkeypatch.setenv("WANDB_DATA_DIR", given and str(tmp_path / given))
    before = dict(os.environ)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").write_text("weights")
    log.send("checkpoint", "model", tmp_path / "checkpoint")
    assert dict(os.environ) == before
    log.close()
    copies = [path for path in tmp_path.rglob("artifacts/staging/*") if path.read_text() == "weights"]
    assert [path.parent for path in copies] == [(tmp_path / given if given else folder.wandb) / "artifacts" / "staging"]


def test_an_artifact_that_fails_is_one_warning(offline, tmp_path, caplog):
    _, log = offline
    for _ in range(2):
        log.send("checkpoint", "model", tmp_path / "missing")
    assert len([r for r in caplog.records if "W&B is off" in r.getMessage()]) == 1


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_service_that_breaks_down_is_one_warning(monkeypatch, tmp_path, caplog, fails):
    class Run:
        step = 0

        def define_metric(self, *_, **__): ...

        def log(self, *_, **__):
            if fails == "log":
                raise BrokenPipeError("wandb's process\nis gone")

        def finish(self, exit_code):
            if fails == "finish":
                raise BrokenPipeError("wandb's process\nis gone")

    monkeypatch.setattr(wandb, "init", lambda **_: Run())
    log = WandbLog(Config.model_validate({"wandb": {"mode": "offline"}}), RunFolder(tmp_path), None)
    for step in (1, 2):
        log.write(step, {"loss": 1.0})
    log.close()
    assert caplog.messages == [
        "W&B is off for the rest of this run (wandb.mode=disabled avoids this): wandb's process is gone"
    ]


@pytest.mark.parametrize("given", [{}, {"WANDB_FINISH_TIMEOUT": "5"}])
def test_a_network_that_dies_does_not_keep_a_run_from_ending(monkeypatch, tmp_path, caplog, given):
    """All ranks wait for rank 0, and W&B tries for hours."""
    settings = []

    class Run:
        def define_metric(self, *_, **__): ...

        def finish(self, exit_code):
            raise TimeoutError("Timed out finishing run.")

    def init(**named):
        settings.append(named["settings"])
        return Run()

    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb, "init", init)
    folder = RunFolder(tmp_path)
    WandbLog(Config.model_validate({"wandb": {"mode": "offline"}}), folder, None).close()
    resolved = wandb.Settings()
    resolved.update_from_env_vars(os.environ)
    resolved.update_from_settings(settings[0])
    assert (resolved.finish_timeout, resolved.finish_timeout_raises) == (5.0 if given else FINISH_TIMEOUT, True)
    (warning,) = caplog.messages
    assert warning.endswith(f"`wandb sync` sends them from {folder.wandb}")


def test_results_of_a_trainings_evaluations_go_to_its_own_run(tiny, ranks, monkeypatch):
    """A second run of the same id would end the first one, and the rest of its curves would be lost."""
    events = []

    class Run:
        step = 0

        def define_metric(self, *_, **__): ...

        def log(self, values, step):
            events.extend({key for key in values if key == "train/loss"})

        def log_artifact(self, artifact):
            events.append(artifact.type)

        def finish(self, exit_code):
            events.append(f"finish {exit_code}")

    monkeypatch.setattr(wandb, "init", lambda **_: Run())
    monkeypatch.setattr(loop, "process_group", lambda timeout: contextlib.nullcontext(ranks))
    evaluation = {"every": 1, "suites": ["perplexity"], "perplexity": {"tokens": 64, "length": 32}}
    path = tiny(train={"max_steps": 2, "warmup_steps": 0, "log_every": 1}, evaluation=evaluation,
                wandb={"mode": "offline", "evaluation": True})  # fmt: skip
    assert loop.train(load_config(path)) == 0
    assert events == ["train/loss", "evaluation", "train/loss", "evaluation", "finish 0"]


@pytest.mark.parametrize("at_work", [True, False])
def test_results_of_an_evaluation_job_do_not_end_the_trainings_run(tmp_path, server, monkeypatch, at_work):
    """W&B showed a training as finished, while it went on, once a job beside it had sent its results."""
    _, asked = server
    sent = []
    monkeypatch.setattr(WandbLog, "send", lambda log, *what: sent.append((log.id, *what)))
    config = Config.model_validate({"wandb": {"mode": "offline"}})
    trained, out = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "out")
    out.path.mkdir()
    with trained.lock() if at_work else contextlib.nullcontext():
        trained.path.mkdir(exist_ok=True)
        training = WandbLog(config, trained, None)
        for results in (trained, out):
            send_results(config, trained, results, "evaluation", "evaluation", tmp_path)
    training.close()
    assert sent == [(training.id, "evaluation", "evaluation", tmp_path)] * 2
    first, *jobs = asked
    assert first["config"] and first["settings"].x_update_finish_state
    for job in jobs:
        assert (job["id"], job["settings"].x_update_finish_state) == (training.id, not at_work)
        assert bool(job["config"]) is not at_work


@pytest.mark.usefixtures("one_group")
@pytest.mark.parametrize(("how", "ends"), [
    ("to the end", ["finish 0"]), ("a signal", ["preempting", "finish 143"]), ("an error", ["finish 1"]),
])  # fmt: skip
def test_wandb_knows_how_a_run_ended(tiny, monkeypatch, how, ends):
    """Without a status W&B calls every run finished: a sweep would not start the rest of a preempted run."""
    events = []

    class Run:
        step = 0

        def define_metric(self, *_, **__): ...

        def log(self, values, step):
            if how == "a signal":
                signal.raise_signal(signal.SIGTERM)
            if how == "an error":
                raise KeyboardInterrupt

        def mark_preempting(self):
            events.append("preempting")

        def finish(self, exit_code):
            events.append(f"finish {exit_code}")

    monkeypatch.setattr(wandb, "init", lambda **_: Run())
    path = tiny(train={"max_steps": 2, "warmup_steps": 0, "log_every": 1}, wandb={"mode": "offline"})
    with pytest.raises(KeyboardInterrupt) if how == "an error" else contextlib.nullcontext():
        loop.train(load_config(path))
    assert events == ends


@pytest.mark.usefixtures("one_group")
def test_a_run_of_a_sweep_does_not_continue_another(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "a-sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "first")
    path = tiny(run={"dir": str(tmp_path / "run")}, train={"max_steps": 3})
    assert loop.train(load_config(path, ["train.stop_at=1", "wandb.mode=offline"])) == 0
    monkeypatch.setenv("WANDB_RUN_ID", "second")
    with pytest.raises(UserError, match="run.dir: .* W&B run first, and this is the run second of a sweep; give each"):
        loop.train(load_config(path, ["train.lr=0.001"]))
    monkeypatch.setenv("WANDB_RUN_ID", "first")
    assert loop.train(load_config(path, ["train.stop_at=2"])) == 0, "an agent that was started again"
    path = tiny(run={"dir": str(tmp_path / "$WANDB_RUN_ID")})
    assert load_config(path).run.dir == str(tmp_path / "first"), "the documented command"
