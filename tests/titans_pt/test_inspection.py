"""Inspection: its figures against the states that the model itself returns, its files, its mistakes."""

import io
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config import ModelConfig
from titans_pt.errors import UserError
from titans_pt.inspection import inspect
from titans_pt.inspection import inspector as module
from titans_pt.inspection.picture import COLUMNS, EXCERPT, ROWS, draw, excerpt, running_mean, wrap
from titans_pt.inspection.table import table
from titans_pt.kernels.memory import MemoryState
from titans_pt.layers.memory_gates import MemoryGates
from titans_pt.layers.state import find
from titans_pt.models import build_model
from titans_pt.runs.loaded import load_run

CASES = {name: ([name], {}) for name in ("lmm", "mac", "mag", "mal")}
CASES["hybrid"] = (["lmm", "swa", "mac"], {"per_layer_gates": True})
CASES["linear"] = (["mag"], {"depth": 1, "norm": False})
T = 21


def small(mixers, **memory):
    torch.manual_seed(0)
    config = ModelConfig(
        mixers=mixers, vocab_size=50, d_model=16, n_layers=max(2, len(mixers)), n_heads=2, mlp_hidden=24, window=6,
        segment=8, memory_tokens=4, persistent_tokens=3, memory={"chunk_size": 4, "expansion": 2} | memory,
    )  # fmt: skip
    model = build_model(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def norm_of(matrices):
    return torch.stack([m[0].flatten(1).norm(dim=-1) for m in matrices]).norm(dim=0)


@torch.no_grad()
@pytest.mark.parametrize("piece", [512, 5])
@pytest.mark.parametrize("case", CASES)
def test_figures_are_those_of_the_models_own_states(case, piece, monkeypatch):
    mixers, memory = CASES[case]
    model = small(mixers, **memory)
    ids = torch.randint(0, 50, (T,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(module, "PIECE", piece)
    result = module.read(model, ids, ["x"] * T)
    assert not any(m._forward_hooks for m in model.modules())
    names = [f"blocks.{n}.mixer.memory" for n, block in enumerate(model.blocks) if hasattr(block.mixer, "memory")]
    assert list(result.memories) == names and result.surprise.shape == (len(names), T, 2)

    gates = [[] for _ in names]
    watched = [m for m in model.modules() if isinstance(m, MemoryGates)]
    hooks = [m.register_forward_hook(lambda _m, _a, out, n=n: gates[n].append(out)) for n, m in enumerate(watched)]
    state = None
    for t in range(T):
        _, state = model(ids[None, t : t + 1], state)
        for n, memory_state in enumerate(find(state, MemoryState)):
            for name, matrices in (("weight_norm", memory_state.weights), ("momentum_norm", memory_state.momentum)):
                np.testing.assert_allclose(getattr(result, name)[n, t], norm_of(matrices), rtol=1e-5, atol=1e-7)
            for name, gate in zip(("theta", "eta", "alpha"), gates[n][-1], strict=True):
                gate = gate[0, -1].mean(-1) if gate.dim() == 4 else gate[0, -1]
                np.testing.assert_allclose(getattr(result, name)[n, t], gate, rtol=1e-5)
    for hook in hooks:
        hook.remove()
    logits, _ = model(ids[None])
    assert np.isnan(result.nll[0])
    np.testing.assert_allclose(result.nll[1:], F.cross_entropy(logits[0, :-1], ids[1:], reduction="none"), rtol=1e-4)


@torch.no_grad()
def test_surprise_is_what_moved_the_momentum():
    """Without momentum S_t = -theta_t u_t, so the gradient's norm is seen in the state."""
    model = small(["mac"], momentum=False)
    result = module.read(model, torch.randint(0, 50, (T,)), ["x"] * T)
    np.testing.assert_allclose(result.surprise, result.momentum_norm / result.theta, rtol=1e-5)


def test_medians_are_computed_once():
    """The table asks for the score of each of its tokens."""
    result = module.read(small(["lmm"]), torch.randint(0, 50, (T,)), ["x"] * T)
    assert result.score is result.score and result.relative is result.relative


def test_a_hierarchy_of_memories():
    with pytest.raises(UserError, match="model.memory.hierarchy: a hierarchy of memories cannot be inspected"):
        module.read(
            small(["lmm"], hierarchy={"chunk": 8, "locals": [2], "shard": 8}),
            torch.zeros(4, dtype=torch.int64),
            ["x"] * 4,
        )


def test_a_model_without_memory():
    with pytest.raises(UserError, match="no neural memory"):
        module.read(small(["attention"]), torch.zeros(4, dtype=torch.int64), ["x"] * 4)


@pytest.fixture
def run(tmp_path, prepared):
    return untrained_run(tmp_path / "run", prepared, mixers=["mac", "lmm"], n_layers=2)


def test_files_and_table(run, tmp_path, capfd):
    text = "abc dea $x_1$ fo\u00e9.\n\nkab" * 8
    (tmp_path / "page.txt").write_text(text)
    assert cli.run(["inspect", str(run), "--text", str(tmp_path / "page.txt"), "--checkpoint", "3"]) == 0
    out = capfd.readouterr().out
    folder = run / "inspection" / "step-00000003"
    assert sorted(p.name for p in folder.iterdir()) == ["page.txt.npz", "page.txt.png"]
    assert str(folder / "page.txt.npz") in out and str(folder / "page.txt.png") in out
    assert "blocks.1.mixer.memory" in out
    arrays = np.load(folder / "page.txt.npz")
    assert "".join(arrays["pieces"]) == text
    tokens = len(arrays["ids"])
    assert arrays["nll"].shape == (tokens,)
    for name in ("surprise", "theta", "eta", "alpha", "weight_norm", "momentum_norm"):
        assert arrays[name].shape == (2, tokens, 2) and arrays[name].dtype == np.float32
        assert np.isfinite(arrays[name]).all()
    assert (folder / "page.txt.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_begins_as_documents_did_in_training(prepared, tmp_path):
    run = untrained_run(tmp_path / "run", prepared, data={"tokenizer": {"add_bos": True}})
    (tmp_path / "page.txt").write_text("abc dea fo")
    found = inspect(run, tmp_path / "page.txt")
    loaded = load_run(run)
    ids = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode("abc dea fo")]
    assert found.ids.tolist() == ids and "".join(found.pieces) == "abc dea fo"
    logits, _ = loaded.model(torch.tensor([ids]))
    expected = F.cross_entropy(logits[0, :-1], torch.tensor(ids[1:]), reduction="none").detach()
    np.testing.assert_allclose(found.nll[1:], expected, rtol=1e-4)


def test_only_the_first_tokens_and_another_folder(run, tmp_path, capfd):
    (tmp_path / "page.txt").write_text("abc dea fo " * 30)
    result = inspect(run, tmp_path / "page.txt", out=tmp_path / "there", max_tokens=9)
    assert len(result.ids) == 9 and (tmp_path / "there" / "page.txt.png").is_file()


def pieces(path):
    return "".join(np.load(path)["pieces"])


def test_texts_of_one_name_have_their_own_files(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "draw", lambda result, picture, title: picture.write_bytes(b""))
    there = tmp_path / "there"
    texts = {"a.md": "abc dea", "a.txt": "fo nk fo", "b/a.txt": "dea dea", "a": "nk nk"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        inspect(run, tmp_path / name, out=there)
    (tmp_path / "b/a.txt").write_text("abc abc")  # the same text file again: its files are replaced
    inspect(run, tmp_path / "b" / ".." / "b" / "a.txt", out=there)
    expected = {"a.md": "abc dea", "a.txt": "fo nk fo", "a.txt-2": "abc abc", "a": "nk nk"}
    assert {p.name for p in there.iterdir()} == {f"{name}.{end}" for name in expected for end in ("npz", "png")}
    assert {name: pieces(there / f"{name}.npz") for name in expected} == expected


def test_a_text_is_read_as_it_is(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(module, "draw", lambda result, picture, title: picture.write_bytes(b""))
    content = b"\xef\xbb\xbfabc\r\ndea\xff\x0cfo\xe2\x80\xa8nk\x1b[31m\n"
    text = content.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
    (tmp_path / "page").write_bytes(content)
    inspect(run, tmp_path / "page", out=tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
    assert cli.run(["inspect", str(run), "--text", "-"]) == 0
    folder = run / "inspection" / "step-00000003"
    assert pieces(tmp_path / "page.npz") == pieces(folder / "standard-input.npz") == text
    assert all(c.isprintable() for c in capfd.readouterr().out.replace("\n", ""))  # a terminal gets no escapes


@pytest.mark.parametrize(("content", "words", "message"), [
    (None, [], "No such file"), ("", [], "0 tokens"), ("abc dea", ["--max-tokens", "1"], "'--max-tokens': given '1'"),
    ("abc dea", ["--checkpoint", "9"], "no such checkpoint"),
])  # fmt: skip
def test_mistakes(run, tmp_path, capfd, content, words, message):
    if content is not None:
        (tmp_path / "page.txt").write_text(content)
    assert cli.run(["inspect", str(run), "--text", str(tmp_path / "page.txt"), *words]) == 2
    assert message in capfd.readouterr().err
    assert not (run / "inspection").exists()


def test_one_token_is_no_stream(run):
    with pytest.raises(UserError, match="max_tokens: given 1; allowed: at least 2"):
        inspect(run, "page.txt", max_tokens=1)


@pytest.mark.parametrize("broken", [slice(5, None), slice(None)], ids=["from a token on", "all"])
def test_a_memory_that_ran_away_can_be_looked_at(tmp_path, broken):
    result = module.read(small(["lmm"]), torch.randint(0, 50, (T,)), ["x"] * T)
    for name in ("surprise", "weight_norm", "momentum_norm"):
        getattr(result, name)[:, broken] = np.nan
    result.nll[broken] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        table(result)
        draw(result, tmp_path / "page.png", "broken")
    assert (tmp_path / "page.png").is_file()


# ---- the picture's parts


def test_running_mean():
    values = np.array([np.nan, 1.0, 2.0, 6.0])
    np.testing.assert_allclose(running_mean(values, 1), values)
    np.testing.assert_allclose(running_mean(values, 3), [1.0, 1.5, 3.0, 4.0])


def test_wrap_breaks_where_it_must():
    long = "x" * (COLUMNS - 1)
    lines = wrap(np.array([long, "ab", "\n", "\u00e9\t", ""]), 0, 5)
    assert lines == [[(0, 0, long), (1, COLUMNS - 1, "a")], [(1, 0, "b"), (2, 1, "\u21b5")], [(3, 0, "\u00e9\u00b7")]]


def test_wide_characters_take_two_columns_and_accents_none():
    lines = wrap(np.array(["\u4e2d" * 59, "e\u0301", "\u4e2d", "\U0001f600x", "\x85"]), 0, 5)
    first = [(0, 0, "\u4e2d" * 59), (1, 118, "e\u0301")]  # 119 columns: one more does not hold a wide character
    assert lines == [first, [(2, 0, "\u4e2d"), (3, 2, "\U0001f600x"), (4, 5, "\u00b7")]]


def test_other_scripts_are_drawn_without_a_warning_for_each_character(tmp_path, recwarn, capfd):
    pieces = ["\u4e2d\ud55c", "e\u0301\u05d0", "\U0001f600"] * 7
    result = module.read(small(["lmm"]), torch.randint(0, 50, (T,)), pieces)
    draw(result, tmp_path / "page.png", "\u5929\u5730 $x_1$")
    assert (tmp_path / "page.png").is_file() and not recwarn.list
    assert capfd.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("piece", ["word ", "\n", "a rather long piece of text "])
def test_the_excerpt_fits_and_holds_the_most_surprising(piece):
    score = np.ones(2000)
    score[1500:1516] = 3.0
    first, last, lines = excerpt(np.array([piece] * 2000), score)
    assert first <= 1500 and last >= 1508 and last - first <= EXCERPT
    assert len(lines) <= max(ROWS, 33)
