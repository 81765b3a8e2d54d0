"""titans convert: step 0 is the windowed source, bit for bit; what it refuses."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.data_pipeline import TokenFiles
from titans_pt.errors import UserError
from titans_pt.layers.rotary import rotate
from titans_pt.runs import checkpoints
from titans_pt.runs.conversion import convert_run
from titans_pt.runs.loaded import load_run

W, S = 5, 2
DEEP = ["model.memory.depth=2", "model.memory.norm=true"]


@pytest.fixture(scope="module")
def source(tmp_path_factory, prepared):
    """A run of three attention layers whose four heads share two key heads."""
    folder = tmp_path_factory.mktemp("conversion") / "source"
    attention = {"kv_heads": 2, "bias": True}
    data = {"dir": str(prepared), "sources": [{"kind": "files", "path": str(prepared.parent / "text.jsonl")}]}
    return untrained_run(folder, prepared, data=data, mixers=["attention"], n_layers=3, d_model=32,
                         n_heads=4, init_std=0.3, attention=attention)  # fmt: skip


@pytest.fixture
def ids():
    return torch.randint(3, 280, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def windowed(run, ids):
    """The source's own modules under a mask of the window and the sinks."""
    model = run.model
    place = torch.arange(ids.shape[1])
    sees = (place <= place[:, None]) & ((place > place[:, None] - W) | (place < S))
    x = model.embedding(ids) * run.config.model.embedding_factor
    for block in model.blocks:
        layer, y = block.mixer.attention, block.mixer_norm(x)
        turn = layer.rotation_from(0, layer.queries(y))
        k, v = layer.keys_values(y)

        def rotated(z, turn=turn):
            a, b = z.chunk(2, -1)
            return torch.cat([a * turn[0] - b * turn[1], b * turn[0] + a * turn[1]], -1)

        q, k, v = rotated(layer.queries(y)), rotated(k).repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / layer.head_width**0.5
        seen = torch.einsum("bhts,bshd->bthd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)
        x = block.feed(x + block.mixer.out(seen.flatten(-2)))
    return model.head(model.norm(x))[..., : model.tokens]


@torch.no_grad()
@pytest.mark.parametrize("memory", [[], ["model.memory.rule=yaad", "model.conv_width=1"], DEEP])
def test_step_0_is_the_windowed_source(source, ids, tmp_path, memory):
    window = load_run(convert_run(source, tmp_path / "window", "window", W, S))
    titans = load_run(convert_run(source, tmp_path / "titans", "titans", W, S, [0, 2], memory))
    assert window.config.model.pattern == ["swa"] * 3
    assert titans.config.model.pattern == ["mab", "swa", "mab"]
    expected, _ = window.model(ids)
    torch.testing.assert_close(expected, windowed(load_run(source), ids), rtol=1e-4, atol=1e-4)
    logits, _ = titans.model(ids)
    assert torch.equal(logits, expected)
    assert (expected - load_run(source).model(ids)[0]).abs().max() > 0.1  # the window matters
    state, parts = None, []
    for part in ids.split([1, 7, 32], 1):
        y, state = titans.model(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_full_attention_in_some_layers(source, ids, tmp_path):
    """All layers but the last have full attention: the last gets the source's inputs, and its window hides the rest."""
    full, expected = load_run(convert_run(source, tmp_path / "full", "full", W, S, [0, 1])), load_run(source)
    assert full.config.model.pattern == ["attention", "attention", "swa"]
    given = []
    for run in (full, expected):
        run.model.blocks[2].mixer.register_forward_pre_hook(lambda _mixer, x: given.append(x[0]))
    found, wanted = full.model(ids)[0], expected.model(ids)[0]
    assert torch.equal(*given)
    torch.testing.assert_close(found[:, : W + S], wanted[:, : W + S], rtol=1e-4, atol=1e-4)
    assert (found - wanted).abs().amax((0, 2))[W + S :].min() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("words", [[], ["model.liza.mix=0", "model.liza.mix_warmup=0", "model.liza.cross_gate=true"]])
def test_liza_is_the_windowed_source_while_its_mix_is_0(source, ids, tmp_path, words):
    window = load_run(convert_run(source, tmp_path / "window", "window", W, S))
    liza = load_run(convert_run(source, tmp_path / "liza", "liza", W, S, [0, 2], words))
    assert liza.config.model.pattern == ["liza", "swa", "liza"]
    assert liza.model.state_dict().keys() == window.model.state_dict().keys()
    expected, _ = window.model(ids)
    liza.model.blocks.set_progress(0.0)
    assert torch.equal(liza.model(ids)[0], expected)
    liza.model.blocks.set_progress(1.0)
    assert torch.equal(liza.model(ids)[0], expected) == bool(words)


@torch.no_grad()
def test_adapters_of_the_source_end_in_the_weights(prepared, tmp_path):
    """The window, as long as the text, hides nothing; the memory starts from attention with its adapters."""
    source = untrained_run(
        tmp_path / "source", prepared, mixers=["attention"], d_model=32, init_std=0.3, lora={"rank": 3}
    )
    path = checkpoints.find(source / "checkpoints")
    state, weights, draw = checkpoints.read_state(path), checkpoints.read_weights(path), torch.manual_seed(1)
    weights |= {n: 0.3 * torch.randn(p.shape, generator=draw) for n, p in weights.items() if n.endswith("lora_b")}
    checkpoints.save(source / "checkpoints", weights, {}, state)
    ids = torch.randint(3, 280, (2, 16), generator=draw)
    run, adapted = load_run(source), ["model.lora.rank=2"]
    titans = load_run(convert_run(source, tmp_path / "titans", "titans", 16, S))
    assert titans.config.model.lora is None
    torch.testing.assert_close(titans.model(ids)[0], run.model(ids)[0], rtol=1e-4, atol=1e-4)
    mixer, q = titans.model.blocks[0].mixer, run.model.blocks[0].mixer.attention.q
    assert torch.equal(mixer.memory.q.linear.weight, q.merged()) and not torch.equal(q.weight, q.merged())
    again = load_run(convert_run(source, tmp_path / "again", "titans", 16, S, overrides=adapted))
    assert again.config.model.lora.rank == 2 and torch.equal(again.model(ids)[0], titans.model(ids)[0])


@torch.no_grad()
@pytest.mark.parametrize("words", [[], DEEP])
def test_the_memory_begins_with_attentions_projections(source, ids, tmp_path, words):
    mixer = load_run(convert_run(source, tmp_path / "titans", "titans", W, S, None, words)).model.blocks[1].mixer
    a, m = mixer.attention, mixer.memory
    assert torch.equal(m.q.linear.weight, a.q.weight)
    for mine, theirs in ((m.k, a.k), (m.v, a.v)):
        assert torch.equal(mine.linear.weight, theirs.weight.view(2, 8, 32).repeat_interleave(2, 0).view(32, 32))
        assert torch.equal(mine.conv.weight[:, -1], torch.ones(32)) and not mine.conv.weight[:, :-1].any()
    assert torch.equal(m.v.linear.bias, a.v.bias.view(2, 8).repeat_interleave(2, 0).flatten())
    assert not any(p.any() for p in mixer.memory_share.parameters())
    m_out, _ = m(mixer.memory.q.linear.weight[None, :20])
    assert m_out.abs().max() > 1e-3  # the output projection has inputs to learn from


@torch.no_grad()
@pytest.mark.parametrize("hierarchy", [False, True])
def test_a_memory_beside_normed_and_wider_heads_has_their_directions(prepared, tmp_path, hierarchy):
    """Up to the mean that is subtracted, the memory's queries and keys point as attention's do (Qwen3)."""
    attention = {"kv_heads": 2, "qk_norm": True, "head_width": 12}
    source = untrained_run(tmp_path / "source", prepared, mixers=["attention"], n_layers=1, d_model=32, n_heads=4,
                           init_std=0.3, attention=attention)  # fmt: skip
    path = checkpoints.find(source / "checkpoints")
    weights, draw = checkpoints.read_weights(path), torch.manual_seed(1)
    weights |= {n: torch.rand(p.shape, generator=draw) for n, p in weights.items() if "k_norm" in n or "q_norm" in n}
    checkpoints.save(source / "checkpoints", weights, {}, checkpoints.read_state(path))
    words = ["model.memory.hierarchy={locals: [4]}"] if hierarchy else []
    mixer = load_run(convert_run(source, tmp_path / "titans", "titans", W, S, None, words)).model.blocks[0].mixer
    x, a, m = torch.randn(2, 9, 32, generator=draw), mixer.attention, mixer.memory
    for mine, theirs in ((m.q, a.queries(x)), (m.k, a.keys_values(x)[0].repeat_interleave(2, 2))):
        found = torch.nn.functional.linear(x, mine.linear.weight).view(theirs.shape)
        torch.testing.assert_close(torch.cosine_similarity(found, theirs, dim=-1), torch.ones(2, 9, 4))


def test_memories_with_other_heads_are_refused(source, tmp_path):
    """Heads of another number cannot be mixed with attention's one by one."""
    with pytest.raises(UserError, match="model.memory.n_heads: given 2; must be model.n_heads=4: .*; leave it out"):
        convert_run(source, tmp_path / "titans", "titans", W, S, None, ["model.memory.n_heads=2"])


@torch.no_grad()
def test_queries_and_keys_are_centred(source, tmp_path, capsys):
    """The mean over training text, without samples' first tokens, is subtracted; on other text little of it remains."""
    run = load_run(source)
    files, given = TokenFiles.open(run.config), []
    run.model.blocks[1].mixer.register_forward_pre_hook(lambda _mixer, x: given.append(x[0]))
    length = run.config.data.seq_len
    samples = files.samples(run.config)
    ids = torch.stack([torch.from_numpy(samples.sample(n)[0][:-1]) for n in range(4096 // length)])
    run.model(ids)
    x, a = given[0][:, 4:], run.model.blocks[1].mixer.attention
    m = load_run(convert_run(source, tmp_path / "titans", "titans", W, S)).model.blocks[1].mixer.memory
    assert f"the means of {ids.numel():,} training tokens of {run.config.data.dir}" in capsys.readouterr().err
    for mine, theirs in ((m.q, a.q), (m.k, a.k)):
        centred = mine.linear(x)
        assert centred.mean((0, 1)).abs().max() < 1e-5 * theirs(x).abs().max()
        assert (theirs(x) - theirs.bias).mean((0, 1)).abs().max() > 1e-2
    torch.testing.assert_close(m.output_norm.weight, m.v.linear(x).square().mean().sqrt().expand(8))
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    file = moved / "config.yaml"
    file.write_text(file.read_text().replace(run.config.data.dir, str(tmp_path / "none")))
    here = [f"data.dir={run.config.data.dir}"]
    same = load_run(convert_run(moved, tmp_path / "named", "titans", W, S, None, here)).model.blocks[1].mixer.memory
    assert torch.equal(same.k.linear.bias, m.k.linear.bias)  # means of the text that the conversion's settings name
    capsys.readouterr()
    m = load_run(convert_run(moved, tmp_path / "random", "titans", W, S)).model.blocks[1].mixer.memory
    assert "by the means of random tokens, which say less than text (data.dir=" in capsys.readouterr().err
    assert m.k.linear.bias.abs().max() > 1e-3


def test_calibration_where_something_uses_it(source, tmp_path, capsys):
    convert_run(source, tmp_path / "window", "window", W, S)
    assert "centred" not in capsys.readouterr().err


def test_after_zero_3_in_the_same_process(prepared, tmp_path, monkeypatch):
    """DeepSpeed replaces linear permanently, by one that also saves its input for the gradient of a bias."""
    source = untrained_run(tmp_path / "source", prepared, mixers=["attention"], n_layers=1, d_model=32, n_heads=4)
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    convert_run(source, tmp_path / "titans", "titans", W, S)


@torch.no_grad()
def test_full_attention_is_a_mixture_with_what_lies_beyond_the_window(source, ids, tmp_path):
    """A mab layer is full attention if its memory attends to the tokens beyond the window.

    The memory's share is then the softmax weight of these tokens.
    """
    mixer = load_run(convert_run(source, tmp_path / "titans", "titans", W, S)).model.blocks[0].mixer
    x = torch.randn(2, 40, 32, generator=torch.manual_seed(0))
    a = mixer.attention
    turn = a.rotation_from(0, a.queries(x))
    k, v = (y.repeat_interleave(2, 2) for y in a.keys_values(x))
    scores = torch.einsum("bthd,bshd->bhts", rotate(a.queries(x), *turn), rotate(k, *turn)) / 8**0.5
    place = torch.arange(40)
    beyond = (place <= place[:, None] - W) & (place >= S)
    whole = scores.masked_fill(place > place[:, None], -torch.inf).softmax(-1)
    share = (whole * beyond).sum(-1).transpose(1, 2)
    far = torch.einsum("bhts,bshd->bthd", whole * beyond, v) / share.clamp(min=1e-9).unsqueeze(-1)
    mixer.memory.forward = lambda *_: (far.flatten(-2), None)
    mixer.memory_share.forward = lambda _: share
    torch.testing.assert_close(mixer(x)[0], mixer.unlimited(x), rtol=1e-4, atol=1e-5)
    assert share.max() > 0.9


def test_it_learns_from_there(source, ids, tmp_path):
    """At step 0 the memory's share has a gradient; after one step of it, the whole memory has one."""
    model = load_run(convert_run(source, tmp_path / "titans", "titans", W, S)).model.train()
    mixer = model.blocks[0].mixer
    model(ids)[0].square().mean().backward()
    assert mixer.memory_share.weight.grad.abs().max() > 0 and not mixer.memory.k.linear.weight.grad.any()
    with torch.no_grad():
        mixer.memory_share.weight -= mixer.memory_share.weight.grad
    model.zero_grad()
    model(ids)[0].square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in mixer.memory.parameters())


def test_the_command(source, prepared, tmp_path, capsys):
    words = ["convert", str(source), "--to", "titans", "--window", "5", "--out", str(tmp_path / "a")]
    assert cli.run([*words, "--layers", "1", "model.memory.chunk_size=8"]) == 0
    config = load_run(tmp_path / "a").config.model
    assert (config.pattern, config.window, config.attention.sinks, config.memory.chunk_size) == (
        ["swa", "mab", "swa"], 5, 4, 8,
    )  # fmt: skip
    capsys.readouterr()
    for more, message in (
        ([], "a: holds a run already; name another folder"),
        (["--out", str(tmp_path / "b"), "--layers", "3"], "--layers: given 3; "),
        (["--out", str(tmp_path / "b"), "--layers", "1", "--to", "window"], "--layers: given with --to window, which"),
        (["--out", str(tmp_path / "b"), "--layers", "x"], "given 'x'; allowed: all, or numbers of layers"),
        (["--out", str(tmp_path / "b"), "--window", "5000"], "--window: given 5000; at most data.seq_len="),
        (["--out", str(tmp_path / "b"), "model.n_layers=2"], "settings of model are not those of the weights"),
    ):
        assert cli.run([*words, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert cli.run(["convert", str(source), "--to", "full", "--window", "5", "--out", str(tmp_path / "c")]) == 0
    config = load_run(tmp_path / "c").config.model
    assert (config.pattern, config.attention.sinks) == (["attention"] * 3, 0)
    other = untrained_run(tmp_path / "lmm", prepared, mixers=["lmm"])
    with pytest.raises(UserError, match="model.mixers has 'lmm'; only layers of attention and swa can be converted"):
        convert_run(other, tmp_path / "b", "titans", W)
    windowed = untrained_run(tmp_path / "swa", prepared, mixers=["swa"])
    with pytest.raises(UserError, match="swa: its attention sees 8 tokens, .*; give data.seq_len=8 or less"):
        convert_run(windowed, tmp_path / "b", "titans", W)
    convert_run(windowed, tmp_path / "d", "titans", W, overrides=["data.seq_len=8"])
    with pytest.raises(
        UserError, match=r"model.mlp_periods: given \[4\]; a conversion has none: it begins as its sourc"
    ):
        convert_run(source, tmp_path / "b", "titans", W, overrides=["model.mlp_periods=[4]"])
    assert not (tmp_path / "b").exists()


def test_text_of_another_tokenizer_centres_nothing(source, tmp_path, monkeypatch, capsys):
    opened = TokenFiles.open(load_run(source).config)
    other = SimpleNamespace(tokenizer=SimpleNamespace(sha256="of another"), samples=opened.samples)
    monkeypatch.setattr(TokenFiles, "open", lambda config: other)
    convert_run(source, tmp_path / "run", "titans", W, S)
    assert "random tokens, which say less than text (data.dir=" in (told := capsys.readouterr().err)
    assert "encoded with another tokenizer" in told
