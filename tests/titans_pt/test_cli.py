"""The command line: the answer to each mistake. Tests run in this process unless they are about processes."""

import errno
import getpass
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import titans_pt
from tests.helpers.command_line import leaves, parsed
from titans_pt import cli
from titans_pt.__main__ import usable_home, usable_streams
from titans_pt.config.files import load_config
from titans_pt.runs import checkpoints
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import language
from titans_pt.tools.records import RecordFile
from titans_pt.training import loop

pytestmark = pytest.mark.usefixtures("one_group")


@pytest.fixture
def failing(capsys):
    """Runs a command line that must fail with exit status 2; returns its one line."""

    def run(*arguments) -> str:
        status = cli.run([str(a) for a in arguments])
        lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("titans: error")]
        assert status == 2
        assert len(lines) == 1
        return lines[0]

    return run


def process(*arguments, cwd, env=None):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | (env or {})
    return subprocess.run([sys.executable, "-m", "titans_pt", *map(str, arguments)], cwd=cwd, env=environment,
                          capture_output=True, text=True, timeout=120)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prepared, one_group):
    """A finished run of 2 steps: (its config, its folder). Copy before changing it."""
    import yaml

    from tests.conftest import TINY, merged

    folder = tmp_path_factory.mktemp("trained")
    source = {"kind": "files", "path": str(prepared.parent / "text.jsonl")}
    top = {"run": {"dir": str(folder / "run")}, "train": {"max_steps": 4, "stop_at": 2, "warmup_steps": 1},
           "data": {"dir": str(prepared), "sources": [source]}}  # fmt: skip
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(merged(TINY, top)))
    assert cli.run(["train", str(config)]) == 0
    return config, folder / "run"


@pytest.fixture
def run_copy(trained, tmp_path):
    """(config, override that names it, folder): the finished run, to be changed."""
    config, folder = trained
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return config, f"run.dir={copy}", copy


# ---- words


def test_version_and_help(capsys):
    version = f"titans {titans_pt.__version__}\n"
    for words, text in ((["--version"], version), (["--help"], "prepare"), (["train", "-h"], "CONFIG")):
        assert cli.run(words) == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    ("", "Missing command (see titans --help)"),
    ("trian", "No such command 'trian'. Did you mean 'train'? (see titans --help)"),
    ("checkpoint", "Missing command (see titans checkpoint --help)"),
    ("train", "Missing argument 'CONFIG' (see titans train --help)"),
    ("plan c.yaml --rank 2", "No such option '--rank'. Did you mean '--ranks'? (see titans plan --help)"),
    ("inspect run", "Missing option '--text' (see titans inspect --help)"),
    ("completion tcsh", "Invalid value for 'SHELL': 'tcsh' is not one of 'bash', 'zsh', 'fish' (see titans completion"),
    ("export run --out a b=1", "Got unexpected extra argument (b=1) (see titans export --help)"),
    ("generate run --prompt a b=1", "override 'b=1': only evaluation.KEY=VALUE can be set here; the rest is the run's"),
    ("data inspect c.yaml --sample 1 --step", "Option '--step' requires an argument"),
])  # fmt: skip
def test_wrong_words_are_one_line(failing, words, message):
    assert message in failing(*words.split())


def test_help_says_a_default_once():
    """Click shows an option's default; our help text names one only where the option has none."""
    said = {
        (*words, option.opts[0]): option.to_info_dict()["default"]
        for words, command in leaves()
        for option in command.params
        if "default:" in (getattr(option, "help", None) or "")
    }
    assert ("needles", "--asked-needles") in said
    assert {name: default for name, default in said.items() if default is not None} == {}


def test_overrides_may_stand_before_and_after_options():
    params = parsed("prepare", "c.yaml", "a=1", "--force", "b=2", "--shard", "0/2", "c=-3")
    assert params["overrides"] == ("a=1", "b=2", "c=-3")
    assert params["force"] and params["shard"] == (0, 2)


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["train", "--fast"]])
def test_starting_imports_neither_torch_nor_pydantic(words, tmp_path):
    code = f"import sys, titans_pt.cli as c; c.run({words}); print(sorted({{'torch', 'pydantic'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.endswith("[]\n"), result.stdout + result.stderr


# ---- what a run leaves


def test_a_run_folder_has_everything(trained):
    _, folder = trained
    for name in ("config.yaml", "versions.json", "metrics.jsonl", "log.txt", "tokenizer.model", "plots/loss.png"):
        assert (folder / name).stat().st_size > 0
    kinds = [(r["kind"], r["step"]) for r in read_metrics(folder / "metrics.jsonl")]
    assert kinds == [("train", 1), ("train", 2), ("validation", 2)]
    record = read_metrics(folder / "metrics.jsonl")[0]
    assert record["tokens"] == 64
    assert record["mfu"] is None
    assert all(0 < record[gate] < 1 for gate in ("theta", "eta", "alpha"))
    assert record["memory_norm"] > 0 and record["surprise"] > 0
    assert all(record[f"{part}_seconds"] >= 0 for part in ("data", "forward", "backward", "update"))


def test_a_finished_run_has_nothing_left_to_do(run_copy, capsys):
    config, folder, path = run_copy
    assert cli.run(["train", str(config), folder]) == 0
    assert "step 2 of 4" in capsys.readouterr().out
    assert len(read_metrics(path / "metrics.jsonl")) == 3


# ---- mistakes


@pytest.mark.parametrize(("change", "message"), [
    ("train.max_step=3", "train.max_step: unknown key (given 3); nearest known key: train.max_steps"),
    ("train.max_steps=three", "train.max_steps: given 'three'; allowed:"),
    ("train.max_steps", "Given 'train.max_steps': settings are KEY=VALUE, such as run.seed=1"),
    ("data.dir=/nowhere/at/all", "no token files; run: titans prepare"),
    ("train.batch_tokens=80 train.micro_batch=2", "train.micro_batch: given 2; must divide the 5 samples"),
])  # fmt: skip
def test_settings(tiny, failing, change, message):
    assert message in failing("train", tiny(), *change.split())


def test_no_config_file(failing, tmp_path):
    assert "name a YAML file" in failing("train", tmp_path / "none.yaml")


@pytest.mark.parametrize(("change", "message"), [
    ("train.resume=never", "holds checkpoints up to step-00000002; set train.resume=auto"),
    ("model.n_layers=2", "model.n_layers: given 2, but"),
    ("model.memory.depth=2", "model.memory.depth: given 2, but"),
    ("run.seed=1", "run.seed: given 1, but"),
    ("data.seq_len=32", "data.seq_len: given 32, but"),
    ("train.stop_at=1", "train.stop_at: given 1, but"),
    ("train.stop_at=null train.max_steps=1 train.warmup_steps=0", "train.max_steps: given 1, but"),
])  # fmt: skip
def test_a_resume_with_other_settings_is_refused(run_copy, failing, change, message):
    config, folder, _ = run_copy
    line = failing("train", config, folder, *change.split())
    assert message in line
    assert "run.dir" in line


def test_a_resume_may_change_how_it_trains(run_copy):
    config, folder, path = run_copy
    more = ["train.stop_at=3", "train.lr=2e-2", "train.batch_tokens=32"]
    more += ["parallel.zero_stage=3", "train.precision=bf16"]
    assert cli.run(["train", str(config), folder, *more]) == 0
    assert checkpoints.read_state(path / "checkpoints" / "step-00000003").samples == 4 + 4 + 2
    log = (path / "log.txt").read_text()
    assert "resumed at step 2 with another train.lr: 0.02, was 0.01" in log
    assert (
        "WARNING another schedule (train.lr 0.02, was 0.01): the learning rate of step 3 is 0.0065, with the "
        "former settings it would be 0.00325"
    ) in log


def test_a_resume_of_another_versions_run_compares_no_schedules(run_copy, monkeypatch):
    config, folder, path = run_copy
    read = checkpoints.read_state

    def other(path):
        state = read(path)
        return replace(state, config=state.config | {"train": state.config["train"] | {"of_another_version": 1}})

    monkeypatch.setattr(checkpoints, "read_state", other)
    assert cli.run(["train", str(config), folder, "train.stop_at=3", "train.lr=2e-2"]) == 0
    assert "another schedule" not in (path / "log.txt").read_text()


@pytest.mark.parametrize("key", ["tokenizer", "data"])
def test_a_resume_on_other_data_is_refused(run_copy, failing, monkeypatch, key):
    config, folder, _ = run_copy
    read = checkpoints.read_state

    def other(path):
        state = read(path)
        return replace(state, identity=state.identity | {key: "0" * 64})

    monkeypatch.setattr(checkpoints, "read_state", other)
    assert "data.dir: " in failing("train", config, folder)


def test_damaged_checkpoints_are_never_a_silent_restart(run_copy, failing):
    config, folder, path = run_copy
    os.remove(path / "checkpoints" / "step-00000002" / "manifest.json")
    assert "none of its 1 checkpoints is complete" in failing("train", config, folder)


def test_a_folder_in_use(trained, failing):
    from titans_pt.runs.folder import RunFolder

    config, folder = trained
    with RunFolder(folder).lock():
        assert "in use by another run" in failing("train", config)


def test_a_file_in_the_way(tiny, failing, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        line = failing("train", tiny(run={"dir": str(path)}))
        assert str(path) in line
        assert "set run.dir" in line


def test_a_link_to_a_disk_that_is_not_mounted(tiny, failing, tmp_path):
    for name in ("linked", "run/checkpoints", "run/stacks"):
        link = tmp_path / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "scratch")
        line = failing("train", tiny(run={"dir": str(tmp_path / name.partition("/")[0])}))
        assert f"{link}: " in line and "does not exist here" in line
        link.unlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tiny, failing, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "Permission denied; set run.dir" in failing("train", tiny(run={"dir": str(tmp_path / "locked" / "run")}))


def test_a_full_disk(run_copy, failing, monkeypatch):
    config, folder, path = run_copy

    def full(_tensors, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoints, "save_tensors", full)
    line = failing("train", config, folder, "train.stop_at=3")
    assert "No space left on device; free some space" in line
    assert str(path) in line
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(("words", "action", "place"), [
    ("config c.yaml", "titans_pt.config.files.explained", None),
    ("prepare c.yaml", "titans_pt.config.files.load_config", "data.dir"),
    ("recall c.yaml", "titans_pt.reproduce.shorthand.load_config", "run.dir"),
    ("evaluate run", "titans_pt.evaluation.evaluate", "--out"),
    ("checkpoint list run", "titans_pt.runs.tools.list_run", None),
    ("benchmark memory --out {}/out", "titans_pt.benchmarks.memory.benchmark_memory", "--out"),
    ("generate run --prompt a", "titans_pt.evaluation.generate", "--save-state"),
])  # fmt: skip
@pytest.mark.parametrize("code", [
    errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EEXIST,
])  # fmt: skip
def test_the_remedy_is_one_that_the_command_has(words, action, place, code, failing, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError(code, os.strerror(code), "/the/file")

    monkeypatch.setattr(action, broken)
    line = failing(*words.format(tmp_path).split())
    assert f"/the/file: {os.strerror(code)}; " in line
    assert (f", or set {place} to a" in line) if place else "or set" not in line


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
    MemoryError(),
])  # fmt: skip
def test_out_of_memory_says_what_to_lower(tiny, failing, monkeypatch, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(language, "build_model", broken)
    line = failing("train", tiny())
    for key in ("train.micro_batch", "data.seq_len", "train.activation_checkpointing=true", "parallel.zero_stage"):
        assert key in line


def test_our_own_faults_keep_their_traceback(tiny, monkeypatch):
    monkeypatch.setattr(language, "build_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["train", str(tiny())])


def test_too_many_nonfinite_steps_stop_without_a_checkpoint(tiny, failing, monkeypatch):
    build = language.build_model

    def spoilt(*given):
        model = build(*given)
        model.register_forward_hook(lambda _m, _a, output: (output[0] * float("inf"), output[1]))
        return model

    monkeypatch.setattr(language, "build_model", spoilt)
    path = tiny(train={"max_nonfinite": 2})
    line = failing("train", path)
    assert "the last 2 steps (to 2) had a loss or gradient that is not finite" in line
    assert "steps with a checkpoint: none. Lower train.lr=0.01" in line
    folder = Path(load_config(path).run.dir)
    assert checkpoints.list_checkpoints(folder / "checkpoints") == []
    assert [r["kind"] for r in read_metrics(folder / "metrics.jsonl")] == ["nonfinite"] * 2


def test_a_stop_before_any_finite_step_has_no_checkpoint(tiny, monkeypatch, capsys, caplog):
    build, passes = language.build_model, itertools.count()

    def spoilt(*given):
        model = build(*given)

        def hook(_module, _arguments, output):
            if next(passes) == 6:  # in the second step
                signal.raise_signal(signal.SIGTERM)
            return output[0] * float("inf"), output[1]

        model.register_forward_hook(hook)
        return model

    monkeypatch.setattr(language, "build_model", spoilt)
    assert cli.run(["train", str(tiny()), "evaluation.every=1", "evaluation.suites=[perplexity]"]) == 128 + 15
    assert (
        "stopped by signal 15 at step 2; no checkpoint, since no step was finite; the same command starts again"
        in capsys.readouterr().out
    )
    assert "step 1 is not evaluated: it has no checkpoint, since it was not finite" in caplog.text


def test_an_evaluation_beside_a_training_does_not_end_it(tiny, tmp_path, caplog):
    run, words = tmp_path / "run", ("evaluation.every=1", "evaluation.suites=[perplexity]")
    train = ["train", str(tiny(run={"dir": str(run)}, train={"max_steps": 2, "warmup_steps": 0})), *words]
    with RecordFile(run / "evaluation" / "step-00000001" / "perplexity.jsonl"):
        assert cli.run(train) == 0
    assert re.search(r"step 1 is not evaluated by perplexity: \S+jsonl: another evaluation writes it\n", caplog.text)
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "evaluation"] == [2]


def test_a_curve_that_cannot_be_drawn_is_a_warning(tiny, monkeypatch, caplog):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loop, "plot_loss", full_disk)
    assert cli.run(["train", str(tiny(train={"max_steps": 1, "warmup_steps": 0}))]) == 0
    assert "plots/loss.png: the curve could not be drawn (No space left on device)" in caplog.text


# ---- processes


def test_a_user_error_of_a_process_is_one_line(tiny, tmp_path):
    result = process("train", tiny(), "train.max_step=3", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("titans: error: train.max_step: unknown key")
    assert result.stderr.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_is_no_error(unbuffered, tmp_path):
    """``titans config 170m/mac | head -1``."""
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    words = [sys.executable, "-m", "titans_pt", "config", "170m/mac"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        one.stdout.close()
        assert one.stderr.read() == b""
    assert one.returncode == 128 + signal.SIGPIPE


def test_errors_that_nobody_reads_are_no_error(tmp_path):
    """``titans plan nothing 2>&1 >/dev/null | true``."""
    program = (
        "import sys\nfrom titans_pt import cli\n"
        "def lost(*_):\n    while True: print('x' * 9999, file=sys.stderr, flush=True)\n"
        "cli.program.invoke = lost\nsys.exit(cli.run(['plan', 'x']))"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        one.stderr.close()
        assert one.stdout.read() == b""
    assert one.returncode == 128 + signal.SIGPIPE


CLOSED = """
import os, sys
from titans_pt.__main__ import usable_streams
usable_streams()
with open("found", "w") as file:
    file.write(" ".join([str(file.fileno()), *(os.readlink(f"/proc/self/fd/{n}") for n in range(3))]))
print("\\u4e2d", sys.stdin.read(), file=sys.stdout)
print("\\u4e2d", file=sys.stderr)
"""


def test_streams_that_a_shell_has_closed(tmp_path):
    """A file opened later must not get the closed streams' numbers: messages would be written into it."""
    shell = f'exec {sys.executable} -c "$PROGRAM" <&- >&- 2>&-'
    environment = os.environ | {"PROGRAM": CLOSED}
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=environment)
    assert done.returncode == 0
    number, *streams = (tmp_path / "found").read_text().split()
    assert int(number) > 2 and streams == ["/dev/null"] * 3


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the locale C
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_any_encoding(encoding, errors, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding, errors=errors))
    usable_streams()
    print("caf\u00e9 \u4e2d \udce9", flush=True)  # the last: a byte of a file name that is not UTF-8
    shown = {"ascii": "caf\\xe9 \\u4e2d", "latin-1": "caf\u00e9 \\u4e2d", "utf-8": "caf\u00e9 \u4e2d"}[encoding]
    assert written.getvalue().decode(encoding) == shown + " \\udce9\n"


def test_a_user_without_a_passwd_entry(tmp_path, monkeypatch):
    """As in a container that was started with --user."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "x")  # lets monkeypatch undo what is set below
        monkeypatch.delenv(name)
    usable_home()
    assert Path.home() == tmp_path / f"titans-{os.getuid()}" and getpass.getuser() == str(os.getuid())
    assert Path.home().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", str(tmp_path))
    usable_home()
    assert Path.home() == tmp_path  # a home that is known stays


def test_another_pipe_that_breaks_is_our_fault(monkeypatch, capfd):
    def broken(*_):
        raise BrokenPipeError(errno.EPIPE, "a socket's")

    monkeypatch.setattr("titans_pt.config.files.explained", broken)
    with pytest.raises(BrokenPipeError):
        cli.run(["config", "170m/mac"])


@pytest.mark.thorough
def test_a_foreign_package_called_kernels_is_passed_over(tiny, tmp_path):
    """Hugging Face publishes such a package; here it is first on the path, and the working folder is another one."""
    foreign = tmp_path / "foreign" / "kernels"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("raise SystemExit('the wrong kernels')\n")
    result = process("train", tiny(), "train.stop_at=1", cwd=tmp_path, env={"PYTHONPATH": str(foreign.parent)})
    assert result.returncode == 0, result.stderr


def test_interruption_before_training(tiny, monkeypatch, capsys):
    def interrupted(_config):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupted)
    assert cli.run(["train", str(tiny())]) == 130
    assert capsys.readouterr().err == "titans: error: interrupted\n"


def test_only_one_of_many_ranks_speaks_at_once(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in ("0", "1", "3"):
        monkeypatch.setenv("RANK", rank)
        assert cli._fail("no\nluck") == 2
    assert waited == pytest.approx([10.3, 10.9])
    assert capsys.readouterr().err == "titans: error: no luck\n" * 3


def test_a_lost_peer_is_not_a_traceback(monkeypatch):
    monkeypatch.setattr(cli.time, "sleep", lambda _seconds: None)
    gloo = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
    nccl = torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error")
    for error in (gloo, nccl):
        with pytest.raises(RuntimeError):
            cli._runtime_error(error)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [cli._runtime_error(error) for error in (gloo, nccl)] == [1, 1]
    with pytest.raises(RuntimeError, match="no socket interface found"):
        cli._runtime_error(torch.distributed.DistBackendError("NCCL error: Bootstrap : no socket interface found"))


def test_a_port_that_another_program_took_is_not_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(cli.time, "sleep", lambda _seconds: None)
    assert cli._runtime_error(RuntimeError("The server socket has failed to bind [::]:1 (errno: 98 EADDRINUSE)")) == 1
    assert "another program took the port that torchrun chose for this start" in capsys.readouterr().err
