"""The commands: each has help and a section, checks its numbers first, and one file is enough to add one."""

import os
import shutil
import subprocess
import sys

import click
import pytest

from tests.helpers.command_line import leaves, parsed
from titans_pt import cli, commands
from titans_pt.commands._arguments import NAMES, WORDS, Checked, Output, PathName
from titans_pt.config.words import known_paths

LEAVES = dict(leaves())


def test_the_help_shows_every_command_in_its_section(capsys):
    assert cli.run(["--help"]) == 0
    _, *blocks = capsys.readouterr().out.split("\n\n")
    shown = {}
    for block in blocks:
        heading, *lines = block.rstrip("\n").split("\n")
        if heading.removesuffix(":") in commands.SECTIONS:
            names = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
            shown |= dict.fromkeys(names, heading.removesuffix(":"))
    assert shown == {name: cli.program.commands.section(name) for name in cli.program.commands}
    assert list(dict.fromkeys(shown.values())) == list(commands.SECTIONS)


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_says_what_it_and_its_arguments_are(words, capsys):
    assert cli.run([*words, "--help"]) == 0
    assert f"Usage: titans {' '.join(words)} " in capsys.readouterr().out
    assert LEAVES[words].help.split("\n")[0].endswith(".")
    assert [p.name for p in LEAVES[words].params if not p.help] == []


@pytest.mark.parametrize("words", [[], ["benchmark"], ["checkpoint"], ["data"]], ids=" ".join)
def test_no_line_of_a_list_of_commands_is_cut_short(words, capsys):
    assert cli.run([*words, "--help"]) == 0
    _, *listed = capsys.readouterr().out.splitlines()  # the usage ends with [ARGS]...
    assert [line for line in listed if line.endswith("...")] == []


@pytest.mark.parametrize(("words", "user"), [
    ("data inspect quickstart --count 2", "--sample"), ("generate run --prompt a --batch 2", "--prompts"),
    ("reproduce recall --size tiny --dry-run --sbatch --exclusive", "--submit"),
    ("reproduce recall --size tiny --memory 80", "--dry-run"),
])  # fmt: skip
def test_an_option_of_another_that_is_not_given_is_refused(words, user, capsys):
    assert cli.run(words.split()) == 2
    assert user in capsys.readouterr().err


def test_samples_that_are_drawn_need_no_preparation(capsys):
    assert cli.run(["prepare", "recall"]) == 0
    assert "task=recall: its samples are drawn, nothing to prepare" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "option", "bad"), [
    ("reproduce recall --size tiny --submit 1", "--sbatch", "'"),
    ("prepare c.yaml", "--workers", "0"), ("prepare c.yaml", "--shard", "2/2"), ("prepare c.yaml", "--shard", "1"),
    ("data inspect c.yaml", "--documents", "-1"), ("data inspect c.yaml", "--sample", "-1"),
    ("data inspect c.yaml", "--step", "0"), ("data inspect c.yaml", "--count", "0"),
    ("plan c.yaml", "--ranks", "0"), ("plan c.yaml", "--ranks", "1.5"), ("plan c.yaml", "--memory", "0"),
    ("plan c.yaml", "--memory", "nan"), ("plan c.yaml", "--memory", "80GB"),
    ("checkpoint prune run", "--keep-last", "0"), ("checkpoint prune run", "--keep-every", "0"),
    ("evaluate run", "--checkpoint", "last"), ("export run --out o", "--checkpoint", "-1"),
    ("generate run", "--max-new-tokens", "-1"), ("generate run", "--temperature", "-1"),
    ("generate run", "--temperature", "inf"), ("generate run", "--top-k", "0"), ("generate run", "--top-p", "0"),
    ("generate run", "--top-p", "1.1"), ("inspect run --text t", "--max-tokens", "1"),
    ("compare run", "--checkpoint", "x"), ("ruler --out o", "--documents", "0"),
    ("needles c.yaml", "--answers", "0"), ("needles c.yaml", "--asked", "64,0"),
    ("benchmark memory", "--rounds", "0"), ("benchmark kernels", "--longest", "0"),
    ("benchmark training", "--lengths", "2048,"), ("benchmark training", "--tokens", "many"),
    ("benchmark stream c.yaml", "--stretches", "0"), ("benchmark memory", "--longest", "1023"),
    ("generate run", "--seed", "-1"), ("generate run", "--temperature", "1e-300"),
])  # fmt: skip
def test_numbers_are_checked_before_any_work(words, option, bad, capsys, monkeypatch):
    command = words.split()
    while tuple(command) not in LEAVES:
        command.pop()
    monkeypatch.setattr(LEAVES[tuple(command)], "callback", lambda **_: pytest.fail("the command began"))
    assert cli.run([*words.split(), option, bad]) == 2
    line, end = capsys.readouterr().err.split("\n")
    assert line.startswith(f"titans: error: Invalid value for '{option}': given {bad!r}; allowed: ")
    assert line.endswith(f"(see titans {' '.join(command)} --help)") and end == ""


NUMBERS = [
    (words, option.opts[-1]) for words, command in LEAVES.items() for option in command.params
    if isinstance(option.type, Checked) and option.type not in (NAMES, WORDS)
]  # fmt: skip


@pytest.mark.parametrize(("words", "option"), NUMBERS, ids=str)
def test_every_number_has_bounds(words, option, capsys, monkeypatch):
    monkeypatch.setattr(LEAVES[words], "callback", lambda **_: pytest.fail("the command began"))
    for bad in ("-1", "x", "", "nan", str(10**30)):
        assert cli.run([*words, f"{option}={bad}"]) == 2
        assert f"Invalid value for '{option}': given {bad!r}; allowed: " in capsys.readouterr().err


def test_what_takes_a_number_is_checked_above():
    """An option of click's own number types would have no bounds."""
    for command in LEAVES.values():
        for option in command.params:
            assert not isinstance(option.type, click.types.IntParamType | click.types.FloatParamType), option
    assert len(NUMBERS) >= 30


@pytest.mark.parametrize("words", [
    "compare run --out {folder}", "generate run --prompt a --save-state {folder}", "export run --out {file}",
    "import hf --out {file}", "benchmark memory --out {file}",
])  # fmt: skip
def test_a_folder_for_a_file_and_a_file_for_a_folder(words, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    paths = {name: tmp_path / name for name in ("folder", "file")}
    assert cli.run(words.format(**paths).split()) == 2
    assert "Invalid value for '--" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


PLACES = [(words, option) for words, command in LEAVES.items() for option in command.params
          if isinstance(option.type, Output)]  # fmt: skip
READ = [(words, p) for words, command in LEAVES.items() for p in command.params
        if isinstance(p.type, PathName) and not isinstance(p.type, Output)]  # fmt: skip


@pytest.mark.parametrize(("words", "option"), PLACES, ids=str)
def test_where_nothing_can_be_written_nothing_begins(words, option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(LEAVES[words], "callback", lambda **_: pytest.fail("the command began"))
    (tmp_path / "file").write_text("mine")
    name = option.opts[-1]
    place = tmp_path / "file/deeper/x"
    assert cli.run([*words, f"{name}={place}"]) == 2
    refusal = f"titans: error: {name}: {place} cannot be written to (Not a directory); name"
    assert capsys.readouterr().err.startswith(refusal)
    assert os.listdir(tmp_path) == ["file"]


def test_every_option_that_is_written_to_is_checked():
    """Options that are written to are named --out, or their help says that they keep something."""
    found = {(*words, option.opts[-1]) for words, option in PLACES}
    outs = {(*words, "--out") for words, command in LEAVES.items() for p in command.params if "--out" in p.opts}
    assert found == outs | {("chat", "--save-state"), ("generate", "--save-state")}


def test_all_other_paths_are_read_and_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home")
    monkeypatch.setenv("PLACE", "/place")
    for words, parameter in READ:
        value = parameter.type.convert("~/x/./y", parameter, click.Context(LEAVES[words]))
        assert value == "/home/x/y", (words, parameter)
    assert not [p for command in LEAVES.values() for p in command.params if type(p.type) is click.Path]
    params = parsed("train", "$PLACE/c.yaml", "run.dir=~/x")
    assert params["config"] == "/place/c.yaml"


@pytest.mark.parametrize("name", list(cli.program.commands))
def test_where_a_command_writes_is_something_that_it_takes(name):
    """cli.py names this option or setting as the remedy for a full disk."""
    own = [command for words, command in LEAVES.items() if words[0] == name]
    options = {option for command in own for parameter in command.params for option in parameter.opts}
    writes = cli.program.commands.writes(name)
    if writes is None:  # of a group, some commands may write to a place that they are given
        assert len(own) > 1 or not options & {"--out", "--save-state"}
    elif writes.startswith("--"):
        assert all(writes in {option for p in command.params for option in p.opts} for command in own)
    else:
        assert writes in known_paths() and "overrides" in options


def test_good_numbers_arrive_as_numbers():
    params = parsed("generate", "run", "--top-p", "1", "--temperature", "0", "--seed", "3", "--checkpoint", "20")
    assert (params["top_p"], params["temperature"], params["seed"], params["step"]) == (1.0, 0.0, 3, 20)
    assert (params["max_new_tokens"], params["top_k"]) == (100, None)
    assert parsed("benchmark", "training", "--lengths", "64,128")["lengths"] == [64, 128]
    assert parsed("needles", "c.yaml")["asked"][-1] == 65536
    assert parsed("recall", "c.yaml", "--models=lmm,mac")["models"] == ["lmm", "mac"]


def test_what_is_listed_twice_counts_once():
    assert parsed("benchmark", "training", "--lengths", "64,128,64,64")["lengths"] == [64, 128]
    assert parsed("recall", "c.yaml", "--models=mac,lmm,mac")["models"] == ["mac", "lmm"]


def test_one_file_adds_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "toy.py").write_text(
        "import click\n"
        'SECTION = "tools"\n'
        "@click.command()\n"
        '@click.argument("word", help="what to say")\n'
        "def toy(word: str):\n"
        '    """Say a word."""\n'
        "    print(word)\n"
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    monkeypatch.setattr(cli.program, "commands", commands.Commands())
    monkeypatch.setattr(commands, "toy", None, raising=False)  # both are undone at the end
    monkeypatch.setitem(sys.modules, "titans_pt.commands.toy", None)
    del sys.modules["titans_pt.commands.toy"]
    assert cli.run(["toy", "hello"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert cli.run(["--help"]) == 0
    assert "toy         Say a word." in capsys.readouterr().out


# ---- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_titans(shell, capsys):
    assert cli.run(["completion", shell]) == 0
    assert f"{commands.COMPLETION}={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(("typed", "completed"), [
    ("titans c", ["chat", "check", "checkpoint", "compare", "completion", "config", "convert"]),
    ("titans checkpoint ", ["average", "list", "merge", "prune", "verify"]),
    ("titans plan c.yaml a=1 --", ["--ranks", "--memory", "--help"]),
    ("titans completion z", ["zsh"]),
])  # fmt: skip
def test_what_is_completed(typed, completed, monkeypatch, capsys):
    monkeypatch.setenv(commands.COMPLETION, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert cli.run([]) == 0
    assert capsys.readouterr().out.split() == [f"plain,{word}" for word in completed]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes(tmp_path):
    (tmp_path / "titans").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m titans_pt "$@"\n')
    (tmp_path / "titans").chmod(0o755)
    script = (
        'eval "$(titans completion bash)"; COMP_WORDS=(titans tr); COMP_CWORD=1\n'
        '_titans_completion titans; echo "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True)
    assert result.stdout == "train\n", result.stderr
