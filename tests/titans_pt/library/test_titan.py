"""A trained model from Python: the places it is loaded from, the text it writes, and its state as a value."""

import re

import pytest
import torch

from tests.helpers.chats import SIZE, byte_tokenizer
from tests.helpers.untrained import untrained_run
from titans_pt import Titan, UserError, detach_state, evaluation, fork_state, join_rows
from titans_pt.huggingface import export_run
from titans_pt.layers.state import tensors
from titans_pt.library import titan
from titans_pt.streaming import Sampling


@pytest.fixture(scope="module")
def run(tmp_path_factory, prepared):
    return untrained_run(tmp_path_factory.mktemp("run") / "run", prepared)


@pytest.fixture(scope="module")
def model(run):
    return Titan.from_pretrained(run)


def test_it_writes_what_titans_generate_writes(run, model, capsys):
    expected = evaluation.generate(run, "some words", 12, Sampling(0.8, top_p=0.95, seed=3))
    # The text ends inside a character, which is left to the following text.
    assert model.generate("some words", max_new_tokens=12, seed=3) == expected.removesuffix("\ufffd")
    assert model.generate("some words", max_new_tokens=12, seed=4) != expected


def test_a_run_a_checkpoint_and_an_exported_folder_are_one_model(run, model, tmp_path):
    exported = export_run(run, tmp_path / "exported")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected, _ = model(ids)
    model.read("some words").save(tmp_path / "state.safetensors")
    asked = model.generate(" and", 8, temperature=0, state=model.state)
    for path in (run / "checkpoints/step-00000003", exported):
        other = Titan.from_pretrained(path)
        assert torch.equal(other(ids)[0], expected)
        state = other.load_state(tmp_path / "state.safetensors")
        assert other.generate(" and", 8, temperature=0, state=state) == asked
    (exported / "SHA256SUMS").unlink()  # as after save_pretrained of transformers
    other = Titan.from_pretrained(exported)
    assert torch.equal(other(ids)[0], expected)
    with pytest.raises(UserError, match="state.safetensors: "):
        other.load_state(tmp_path / "state.safetensors")


def test_a_checkpoint_by_a_relative_path_or_a_link(run, model, tmp_path, monkeypatch):
    expected, _ = model(torch.tensor([[5, 6, 7, 8]]))
    (tmp_path / "newest").symlink_to(run / "checkpoints/step-00000003")
    monkeypatch.chdir(run / "checkpoints/step-00000003")
    for path in (tmp_path / "newest", "."):
        assert torch.equal(Titan.from_pretrained(path)(torch.tensor([[5, 6, 7, 8]]))[0], expected)


def test_a_state_is_left_as_it_is(model):
    notes = model.read("a text that was read before")
    before = [t.clone() for t in tensors(notes.state)]
    first = model.generate(" and", 8, temperature=0, state=notes)
    assert model.generate(" and", 8, temperature=0, state=notes) == first
    model.generate(max_new_tokens=8, state=notes)  # nothing to read: continues token by token from the state
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(notes.state), strict=True))
    twin = notes.fork()
    assert {t.data_ptr() for t in tensors(twin.state) if t.numel()}.isdisjoint(
        t.data_ptr() for t in tensors(notes.state) if t.numel()
    )
    assert model.generate(" and", 8, temperature=0, state=twin) == first


def test_pieces_continue_as_one(model):
    whole = model.generate("some words", 8, temperature=0)
    first = model.generate("some words", 3, temperature=0)
    assert first + model.generate(max_new_tokens=5, temperature=0, state=model.state) == whole


def test_a_character_that_is_cut_is_left_to_the_next_text(model, tmp_path, monkeypatch):
    pieces = model.run.tokenizer.pieces
    left = [pieces.index(bytes([byte])) for byte in "\u4e2d".encode()]

    def scripted(model, logits, state, count, *more, **named):
        for _ in range(min(count, len(left))):
            yield left.pop(0)
        return logits, state

    monkeypatch.setattr(titan, "continuation", scripted)
    assert model.generate("some words", 1) == ""
    model.state.fork().save(tmp_path / "state")
    assert model.generate(max_new_tokens=1, state=model.load_state(tmp_path / "state")) == ""
    assert model.generate(max_new_tokens=1, state=model.state.fork()) == "\u4e2d"


def test_state_files_are_those_of_titans_generate(run, model, tmp_path, capsys):
    file, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    model.read("some words").save(file)
    expected = model.generate(" and", 8, temperature=0, state=model.state)
    assert evaluation.generate(run, " and", 8, state_file=file, save_to=theirs) == expected
    more = model.generate(" or", 4, temperature=0, state=model.state)
    assert model.generate(" or", 4, temperature=0, state=model.load_state(theirs)) == more


def test_a_chat_is_that_of_titans_chat(tmp_path):
    """Also after a state was saved and read; a state is left as it is."""
    pytest.importorskip("transformers")
    byte_tokenizer(tmp_path / "tokenizer")
    folder = untrained_run(tmp_path / "chats", tmp_path / "tokenizer", vocab_size=SIZE, init_std=0.5, mixers=["lmm"])
    model, questions = Titan.from_pretrained(folder), ["one", "two", "three"]
    expected = evaluation.chat(folder, questions, system="brief", max_new_tokens=6)
    first = model.chat("one", 6, temperature=0, system="brief")
    model.state.save(tmp_path / "talk.state")
    state = model.load_state(tmp_path / "talk.state")
    for _ in range(2):
        second = model.chat("two", 6, temperature=0, state=state)
        third = model.chat("three", 6, temperature=0, state=model.state)
        # A character that the last token leaves incomplete is shown by the program alone.
        found = [answer.rstrip("\ufffd") for answer in (first, second, third)]
        assert found == [answer.rstrip("\ufffd") for answer in expected]
    with pytest.raises(UserError, match="system: given together with a state"):
        model.chat("one", state=state, system="brief")


def test_errors(run, model, prepared, tmp_path):
    with pytest.raises(UserError, match="neither a run's folder nor one of its checkpoints"):
        Titan.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="precision: given 'fp8'; allowed: 'bf16', 'fp32'"):
        Titan.from_pretrained(run, precision="fp8")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(UserError, match=f"^device: given '{device}': .*; leave it out for c") as error:
            Titan.from_pretrained(run, device=device)
        assert "\n" not in str(error.value)
    assert re.fullmatch(r"Reading\(state of [0-9.]+ MiB\)", repr(model.read("some")))
    with pytest.raises(UserError, match="text: given ''; allowed"):
        model.generate("")
    with pytest.raises(UserError, match="temperature: given -1"):
        model.generate("some", temperature=-1)
    wrong = {"top_k": 2.5, "max_new_tokens": 3.0, "seed": None, "top_p": "all", "temperature": None}
    for name, given in wrong.items():
        with pytest.raises(UserError, match=f"^{name}: given {given!r}; allowed: a (whole )?number"):
            model.generate("some", **{name: given})
    with pytest.raises(UserError, match="state: given a list; allowed"):
        model.generate("some", state=[])
    with pytest.raises(UserError, match="text: given a list; allowed: one string"):
        model.generate(["some", "more"])
    notes = model.read("some words")
    with pytest.raises(UserError, match="state: given a Reading; .* pass reading.state"):
        model(torch.tensor([[5]]), notes)
    with pytest.raises(UserError, match="state: given a tuple; allowed: .* or reading.state"):
        model(torch.tensor([[5]]), (notes.logits, notes.state))
    deeper = Titan.from_pretrained(untrained_run(tmp_path / "deeper", prepared, n_layers=5))
    with pytest.raises(ValueError, match=r"state: given one of \d blocks; the model has 5"):
        deeper(torch.tensor([[5]]), notes.state)
    for function in (fork_state, detach_state, lambda state: join_rows([state, state])):
        with pytest.raises(UserError, match="state: given a Reading, .* pass reading.state"):
            function(notes)
    two = join_rows([notes.state, notes.state])
    assert torch.equal(*model(torch.tensor([[5], [5]]), two)[0])
    other = Titan.from_pretrained(untrained_run(tmp_path / "other", prepared, seed=1))
    with pytest.raises(UserError, match="state: given one of other weights"):
        other.generate("some", state=model.read("some words"))
    model.state.save(tmp_path / "state")
    with pytest.raises(UserError, match="saved with another checkpoint"):
        other.load_state(tmp_path / "state")
