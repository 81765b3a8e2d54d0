"""States as files: bit for bit for every mixer, also when they are continued."""

import errno
import importlib
import json
import os
import random
import resource
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.mixers import own_settings
from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config import ModelConfig
from titans_pt.errors import UserError
from titans_pt.kernels.memory import MemoryState
from titans_pt.layers.state import compact, fork, map_tensors, state_bytes, take_rows
from titans_pt.models import build_model
from titans_pt.models.mixers import MIXERS
from titans_pt.runs import states
from titans_pt.runs.loaded import load_run
from titans_pt.runs.states import FORMAT, READABLE, load_state, read_about, save_state
from titans_pt.streaming import greedy, prefill
from titans_pt.training.probes import find

SEED = 3
PATTERNS = [[mixer] for mixer in MIXERS.built_in()] + [["lmm", "swa", "mac"]]


def small(mixers, dtype=torch.float32):
    torch.manual_seed(0)
    settings = dict(
        mixers=mixers, vocab_size=50, d_model=16, n_layers=len(mixers), n_heads=2, mlp_hidden=24, window=6, segment=8,
        memory_tokens=4, persistent_tokens=3, memory={"chunk_size": 4, "expansion": 2},
    )  # fmt: skip
    config = ModelConfig(**settings | own_settings(mixers))
    return build_model(config).to(dtype).eval()


def flat(state):
    return list(find(state, torch.Tensor))


@torch.no_grad()
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mixers", PATTERNS, ids="-".join)
def test_saved_loaded_and_continued(tmp_path, mixers, dtype, reset):
    model, ids = small(mixers, dtype), torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(1))
    starts = torch.zeros(2, 13, dtype=torch.bool)
    starts[1, 5] = True
    _, state = model(ids[:, :13], reset=starts if reset else None)
    save_state(state, tmp_path / "state", {"from": "a test"})
    loaded = load_state(tmp_path / "state")
    assert type(loaded) is type(state) and read_about(tmp_path / "state") == {"from": "a test"}
    for a, b in zip(flat(loaded), flat(state), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    expected, end = model(ids[:, 13:], state)
    logits, end_ = model(ids[:, 13:], loaded)
    assert torch.equal(logits, expected)
    assert all(torch.equal(a, b) for a, b in zip(flat(end_), flat(end), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("mixers", PATTERNS, ids="-".join)
def test_a_state_keeps_nothing_else_alive(mixers):
    """A state with tails of a 997-token call keeps at most twice its own size alive, the limit for shared tensors."""
    model = small(mixers)
    _, state = model(torch.randint(0, 50, (1, 997), generator=torch.Generator().manual_seed(1)))
    held = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in flat(state)}
    assert sum(held.values()) <= 2 * state_bytes(state)


def test_compact_copies_only_what_keeps_much_else_alive():
    whole = torch.arange(10.0)
    tail, half = compact([whole[8:], torch.arange(10.0)[4:]])
    assert tail.untyped_storage().nbytes() == 8 and tail.tolist() == [8, 9]
    assert half.untyped_storage().nbytes() == 40
    both = compact([whole[:5], whole[5:]])
    assert both[0].data_ptr() == whole.data_ptr()


@torch.no_grad()
@pytest.mark.parametrize("mixers", PATTERNS, ids="-".join)
def test_forks_are_apart(mixers):
    _, state = small(mixers)(torch.zeros(1, 11, dtype=torch.int64))
    copy = fork(state)
    before = [t.clone() for t in flat(state)]
    map_tensors(copy, torch.Tensor.zero_)
    assert all(torch.equal(a, b) for a, b in zip(flat(state), before, strict=True))


def test_plain_values_keep_their_kind(tmp_path):
    value = ([1, None, (2.5, True, "x"), [], {"a": {}, "": 2}], torch.arange(3), torch.zeros(0, 4))
    save_state(value, tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert loaded[0] == value[0] and isinstance(loaded, tuple) and isinstance(loaded[0][2], tuple)
    assert torch.equal(loaded[1], value[1]) and loaded[2].shape == (0, 4)


def test_a_bare_tensor(tmp_path):
    save_state(torch.eye(2), tmp_path / "new" / "state")
    assert torch.equal(load_state(tmp_path / "new" / "state"), torch.eye(2))


def test_whole_numbers_stay_on_the_host(tmp_path):
    save_state((torch.arange(2), torch.zeros(2)), tmp_path / "state")
    assert [t.device.type for t in load_state(tmp_path / "state", "meta")] == ["cpu", "meta"]


@dataclass
class Foreign:
    x: int


Foreign.__module__ = "elsewhere"  # other tests of this package define mixers


class Named(NamedTuple):
    k: torch.Tensor
    n: int


def test_containers_are_walked_and_others_refused():
    """A layer's own state may consist of dicts and named tuples, as in other libraries."""
    state = {"a": [Named(torch.arange(6.0).view(3, 2), 4)], "b": OrderedDict(x=torch.ones(3, 1, requires_grad=True))}
    doubled = map_tensors(state, lambda t: 2 * t.detach())
    assert type(doubled["a"][0]) is Named and doubled["a"][0].n == 4 and type(doubled["b"]) is OrderedDict
    assert torch.equal(doubled["a"][0].k, 2 * state["a"][0].k) and not doubled["b"]["x"].requires_grad
    assert take_rows(state, torch.tensor([2, 0]))["a"][0].k.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    places = [{t.data_ptr() for t in flat(each)} for each in (state, fork(state))]
    assert state_bytes(state) == 36 and not places[0] & places[1]
    for walk in (fork, lambda s: take_rows(s, torch.tensor([0]))):
        with pytest.raises(TypeError, match="state: holds a Sealed; a state is made of tensors and plain values in"):
            walk({"a": Sealed()})


class Sealed:
    def __init__(self):
        self.x = torch.ones(1)


def test_states_of_a_mixers_package_and_of_files_beside_it_are_saved(tmp_path, monkeypatch):
    """A mixer and the class of its state may lie in two modules."""
    (tmp_path / "made").mkdir()
    for name, text in (("made/state", STATE), ("made/mixer", ""), ("beside_state", STATE), ("beside_mixer", "")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for mixer, state in (("made.mixer", "made.state"), ("beside_mixer", "beside_state")):
        kind = importlib.import_module(state).Own
        with pytest.raises(TypeError, match=f"{state}.Own: not a class of titans_pt or of a mixer's package"):
            save_state(kind(torch.ones(2)), tmp_path / "file")
        importlib.import_module(mixer)
        with monkeypatch.context() as patch:
            patch.setattr(states, "MIXERS", [type("Mine", (), {"__module__": mixer})])
            save_state(kind(torch.ones(2)), tmp_path / "file")
            assert torch.equal(load_state(tmp_path / "file").x, torch.ones(2))


STATE = "from dataclasses import dataclass\n\n@dataclass\nclass Own:\n    x: object\n"


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "state"
    save_state([1], path)
    for wrong in (Foreign(1), {2: 1}, {1}, Named(1, 2), {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}):
        with pytest.raises(TypeError):
            save_state(wrong, path)
    assert load_state(path) == [1] and list(tmp_path.iterdir()) == [path]


def test_a_mixer_without_a_file_vouches_for_no_other_module(monkeypatch):
    """A mixer that a program makes by itself has no folder, and neither has a module that is not loaded."""
    made = type("Made", (), {"__module__": "made"})
    monkeypatch.setattr(states, "MIXERS", [*states.MIXERS, made])
    with pytest.raises(TypeError, match="elsewhere.Foreign: not a class of titans_pt or of a mixer's package"):
        save_state(Foreign(1), "unwritten")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state"
    save_state([1], path)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("titans_pt.tools.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_state([2], path)
    assert load_state(path) == [1] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("structure", "message"), [
    ({"class": "subprocess:Popen", "fields": {}}, "subprocess:Popen"),
    ({"class": "titans_pt.nowhere:State", "fields": {}}, "titans_pt.nowhere:State"),
    ({"class": "titans_pt.models:NoSuchState", "fields": {}}, "NoSuchState"),
    ({"class": "titans_pt.models:build_model", "fields": {}}, "build_model"),
    ({"class": "titans_pt.models:LanguageModelState", "fields": {}}, "other fields"),
    ({"set": []}, "set"),
])  # fmt: skip
def test_files_that_hold_something_else(tmp_path, structure, message):
    path = tmp_path / "state"
    save_file({"x": torch.zeros(1)}, path, {"format": READABLE[0], "structure": json.dumps(structure), "about": "{}"})
    with pytest.raises(UserError, match=message):
        load_state(path)


def test_classes_of_earlier_versions_are_found(tmp_path):
    """The package kernels has become titans_pt.kernels."""
    path = tmp_path / "state"
    tensors = {"weights": {"list": [{"tensor": "x"}]}, "momentum": {"list": []}, "chunk_weights": {"list": []},
               "offset": {"tensor": "x"}}  # fmt: skip
    structure = {"class": "kernels.memory.state:MemoryState", "fields": tensors}
    save_file({"x": torch.ones(1)}, path, {"format": READABLE[0], "structure": json.dumps(structure), "about": "{}"})
    assert isinstance(load_state(path), MemoryState)


def test_a_file_that_cannot_be_opened_is_no_missing_file(tmp_path):
    """safetensors says "No such file" for any reason, without an error number: the command would end in a traceback."""
    path = tmp_path / "s.safetensors"
    save_state(torch.zeros(1), path)
    before, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as error:
            load_state(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (error.value.errno, error.value.filename) == (errno.EMFILE, str(path))


def test_every_flipped_bit_is_damage(tmp_path):
    """Bits of the header, of the numbers and of the checksum itself."""
    path, draw = tmp_path / "state", random.Random(0)
    state = [torch.arange(40.0), {"about": 1}["about"], (torch.zeros(3, dtype=torch.int64), None)]
    save_state(state, path, {"from": "0" * 64, "sha256": "a test"})
    whole = path.read_bytes()
    assert read_about(path) == {"from": "0" * 64, "sha256": "a test"}
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        for read in (load_state, read_about):
            with pytest.raises(UserError, match=r"state: .*titans generate RUN --save-state FILE"):
                read(path)
    path.write_bytes(whole)
    assert torch.equal(load_state(path)[0], state[0])


@pytest.mark.parametrize("metadata", [
    {"structure": "{", "about": "{"}, {}, {"structure": '{"tensor": "nothing"}', "about": "3"},
    {"structure": "[" * 100_000, "about": "[" * 100_000}, {"structure": '{"list": 3}', "about": "null"},
])  # fmt: skip
def test_a_damaged_file_without_a_checksum_is_one_line(tmp_path, metadata):
    """Earlier versions wrote files without a checksum; an undamaged one loads."""
    path = tmp_path / "state"
    save_file({"x": torch.ones(1)}, path, {"format": READABLE[0], **metadata})
    for read in (load_state, read_about):
        with pytest.raises(UserError, match="state: damaged"):
            read(path)
    save_file({"x": torch.ones(1)}, path, {"format": READABLE[0], "structure": '{"tensor": "x"}', "about": "{}"})
    assert load_state(path).tolist() == [1] and read_about(path) == {}
    save_file({"x": torch.ones(1)}, path, {"format": FORMAT, "structure": '{"tensor": "x"}', "about": "{}"})
    with pytest.raises(UserError, match="damaged: its content does not have the checksum"):
        load_state(path)


def test_files_that_are_no_state(tmp_path):
    with pytest.raises(UserError, match="no such state file"):
        load_state(tmp_path / "none")
    (tmp_path / "text").write_text("hello, this is no tensor file")
    with pytest.raises(UserError, match="not a state file"):
        load_state(tmp_path / "text")
    save_state([torch.zeros(100)], tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-10])
    with pytest.raises(UserError, match="damaged"):
        load_state(tmp_path / "cut")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(UserError, match="format None"):
        load_state(tmp_path / "other")


# ---- on the command line


@pytest.fixture(scope="module")
def run(tmp_path_factory, prepared):
    return untrained_run(tmp_path_factory.mktemp("state-run"), prepared)


def generate(run, *words):
    return cli.run(["generate", str(run), "--temperature", "0", *map(str, words)])


@pytest.mark.parametrize("mixers", PATTERNS, ids="-".join)
def test_in_parts_equals_in_one_go(tmp_path, prepared, capfd, mixers):
    # With this seed no part ends inside a character of several tokens; a part cannot print half of one.
    run = untrained_run(tmp_path / "run", prepared, SEED, mixers=mixers, n_layers=len(mixers))
    assert generate(run, "--prompt", "abc dea fo", "--max-new-tokens", 21, "--save-state", tmp_path / "whole") == 0
    whole = capfd.readouterr().out
    state = tmp_path / "state"
    parts = ""
    for words in (["--prompt", "abc dea fo"], ["--state", state], ["--state", state]):
        assert generate(run, *words, "--max-new-tokens", 7, "--save-state", state) == 0
        parts += capfd.readouterr().out.removesuffix("\n")
    assert parts == whole.removesuffix("\n")
    with safe_open(tmp_path / "whole", "pt") as a, safe_open(state, "pt") as b:
        assert set(a.keys()) == set(b.keys())
        assert all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in a.keys())  # noqa: SIM118


def test_a_prompt_after_a_state(tmp_path, run, capfd):
    state = tmp_path / "state"
    assert generate(run, "--prompt", "abc", "--max-new-tokens", 1, "--save-state", state) == 0
    capfd.readouterr()
    assert generate(run, "--state", state, "--prompt", " dea", "--max-new-tokens", 5) == 0
    text = capfd.readouterr().out.removesuffix("\n")

    loaded = load_run(run)
    model, tokenizer = loaded.model, loaded.tokenizer
    start = prefill(model, torch.tensor([tokenizer.encode("abc")]), 100)
    start = prefill(model, torch.tensor([list(greedy(model, *start, 1))]), 100, start[1])
    start = prefill(model, torch.tensor([tokenizer.encode(" dea")]), 100, start[1])
    assert text == tokenizer.decode(greedy(model, *start, 5, {tokenizer.eos_id}))


def test_states_of_others_are_refused(tmp_path, prepared, run, capfd):
    state = tmp_path / "state"
    assert generate(run, "--prompt", "abc", "--max-new-tokens", 2, "--save-state", state) == 0
    other = untrained_run(tmp_path / "other", prepared, n_layers=2)
    weights = untrained_run(tmp_path / "weights", prepared, seed=1)
    save_state([1], tmp_path / "plain")
    capfd.readouterr()
    for folder, file, message in (
        (other, state, "a model of other settings"),
        (weights, state, "another checkpoint"),
        (run, tmp_path / "plain", "not one that titans generate"),
        (run, tmp_path / "none", "no such state file"),
    ):
        assert generate(folder, "--state", file) == 2
        assert message in capfd.readouterr().err


def test_a_prompt_or_a_state_is_needed(run, capfd):
    assert generate(run) == 2
    assert "prompt" in capfd.readouterr().err
