import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from titans_pt.data_pipeline import StreamDecoder, TokenFiles, load_tokenizer
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.data_pipeline.tokenizers import huggingface as module
from titans_pt.errors import UserError

SCRIPTS = "Ünïcode  текст 日本語 العربية हिन्दी 😀👩‍👩‍👧 e\u0301\r\n\n  \tindented\n <|endoftext|> </s>  "


def saved(folder, tokenizer, eos="<|endoftext|>"):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": eos}, "bos_token": None}))
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory, texts):
    """A byte-level tokenizer like GPT-2's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return saved(tmp_path_factory.mktemp("byte_level") / "a", tokenizer)


@pytest.fixture(scope="session")
def llama(tmp_path_factory, texts):
    """A tokenizer like Llama-2's: a space before the text, spaces as U+2581, bytes for text without a piece."""
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = sorted(set("".join(texts)) - set(" \n") | {"\u2581"})
    pieces |= {letter: len(pieces) + i for i, letter in enumerate(letters)}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("o", "r"), ("m", "e")]
    pieces |= {a + b: len(pieces) + i for i, (a, b) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return saved(tmp_path_factory.mktemp("llama") / "a", tokenizer, "</s>")


class Counting:
    """A tokenizer of the library that keeps the length of the longest text that it encodes."""

    def __init__(self, inner):
        self.inner, self.longest = inner, 0

    def encode(self, text, **options):
        self.longest = max(self.longest, len(text))
        return self.inner.encode(text, **options)

    def encode_batch_fast(self, texts, **options):
        self.longest = max(self.longest, *map(len, texts))
        return self.inner.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize("threads", [1, 2])
def test_long_texts_are_encoded_in_stretches_to_the_same_ids(request, texts, monkeypatch, kind, threads):
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    words, scripts = "\n".join(texts)[:20_000], SCRIPTS.replace("\u2581", "") * 40
    long = [words, words.replace("\n", " "), scripts, "the\r\n\n" * 2000, "天地玄黃" * 2000, "e\u0301" * 3000]
    whole = [list(ids) for ids in tokenizer.encode_batch(long)]
    monkeypatch.setattr(module, "_STRETCH", 500)
    tokenizer._tokenizer = counting = Counting(tokenizer._tokenizer)
    mixed = [part for text in long for part in (text, text[:100])]
    found = [list(ids) for ids in tokenizer.encode_batch(mixed, threads)]
    assert found[::2] == whole and counting.longest <= 500 + module._AROUND
    assert found[1::2] == [tokenizer.encode(text[:100]) for text in long]


def test_a_text_that_cannot_be_cut_is_encoded_at_once(byte_level, monkeypatch):
    monkeypatch.setattr(module, "_STRETCH", 300)
    tokenizer = load_tokenizer(byte_level)
    text = "a" + " " * 2000 + "b"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    monkeypatch.setattr(module, "_places", lambda *_: [])
    assert tokenizer.encode(text) == tokenizer._encode(text)


def test_a_text_that_was_cut_inside_a_token_is_encoded_at_once(byte_level, texts, monkeypatch):
    monkeypatch.setattr(module, "_STRETCH", 300)
    tokenizer, text = load_tokenizer(byte_level), "\n".join(texts)[:5000]
    monkeypatch.setattr(type(tokenizer), "_end_of_stretch", lambda _, text, start: min(start + 101, len(text)))
    parts = [id for at in range(0, len(text), 101) for id in tokenizer._encode(text[at : at + 101])]
    assert tokenizer.encode(text) == tokenizer._encode(text) != parts


def test_a_byte_level_piece_that_spells_no_bytes(byte_level, tmp_path):
    tree = json.loads(byte_level.read_text())
    tree["model"]["vocab"]["<｜end｜>"] = len(tree["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", "<|endoftext|>")
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<｜end｜>"
    assert tokenizer._tokenizer.decode([tokenizer.vocab_size - 1]) == "<｜end｜>"


def streamed(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return "".join(decoder.push(i) for i in ids) + decoder.finish()


@settings(max_examples=150)
@given(st.text())
@example(SCRIPTS)
@example("  two spaces")
def test_byte_level_round_trip(byte_level, text):
    tokenizer = load_tokenizer(byte_level)
    ids = tokenizer.encode(text)
    text = text.encode(errors="surrogatepass").decode(errors="replace") if text.isascii() else text
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == text
    assert tokenizer.eos_id not in ids and tokenizer.encode_batch([text, text], threads=2) == [ids, ids]


@settings(max_examples=150)
@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
@example(SCRIPTS)
@example("  two spaces")
def test_llama_round_trip(llama, text):
    tokenizer = load_tokenizer(llama)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == text
    assert tokenizer.dummy_prefix and tokenizer.eos_id == 2 and 2 not in ids


def test_prepare_and_open(byte_level, config, texts, tmp_path):
    settings = config(data={"tokenizer": {"path": str(byte_level)}}, model={"vocab_size": 400})
    prepare(settings)
    files = TokenFiles.open(settings)
    assert files.tokenizer.path == tmp_path / "data" / "tokenizer.json"
    assert files.tokenizer.decode(files.validation[0].tolist()) in texts
    assert files.validation[0][-1] == files.tokenizer.eos_id == 0


def test_another_eos(byte_level, tmp_path):
    with pytest.raises(UserError, match="eos_token: 'a' of .* is an ordinary piece.*added_tokens: <|endoftext|>"):
        load_tokenizer(byte_level, "a")
    with pytest.raises(UserError, match="eos_token: given 'nothing', which is no piece"):
        load_tokenizer(byte_level, "nothing")
    alone = tmp_path / "tokenizer.json"
    alone.write_bytes(byte_level.read_bytes())
    with pytest.raises(UserError, match="no end-of-text piece.*data.tokenizer.eos_token"):
        load_tokenizer(alone)
    tokenizer = load_tokenizer(alone, "<|endoftext|>")
    assert load_tokenizer(tokenizer.save(tmp_path_of(tmp_path))).eos_id == tokenizer.eos_id  # stored next to the copy


PLAIN = "no special token"
CONTROLS = {
    "eos_token": "<|endoftext|>", "bos_token": "<|begin|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>",
    "additional_special_tokens": "<|turn|>", "added_tokens_decoder": "<|mark|>",
}  # fmt: skip


@pytest.fixture(scope="module", params=["bpe", "bpe normalized", "unigram"])
def not_special(request, tmp_path_factory, byte_level):
    """tokenizer.json lists control tokens with special: false; only tokenizer_config.json says what they are."""
    path = tmp_path_factory.mktemp("not_special") / "tokenizer.json"
    if request.param == "unigram":
        pieces = [*CONTROLS.values(), "<unk>", "\u2581", *sorted(set("".join(CONTROLS.values())))]
        pieces += [f"<0x{byte:02X}>" for byte in range(256)]
        model = models.Unigram([(piece, -1.0 * (piece not in CONTROLS.values())) for piece in pieces], 6, True)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer = tokenizers.Tokenizer.from_file(str(byte_level))
    tokenizer.add_tokens([
        tokenizers.AddedToken(token, special=False, normalized=request.param == "bpe normalized")
        for token in (*CONTROLS.values(), PLAIN)
    ])  # fmt: skip
    tree = json.loads(tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(tree))
    config = {key: CONTROLS[key] for key in ("eos_token", "pad_token")} | {
        "bos_token": {"content": CONTROLS["bos_token"], "lstrip": False}, "unk_token": CONTROLS["unk_token"],
        "additional_special_tokens": [CONTROLS["additional_special_tokens"]],
        "added_tokens_decoder": {"9": {"content": CONTROLS["added_tokens_decoder"], "special": True}},
    }  # fmt: skip
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("control", CONTROLS.values())
def test_text_that_spells_a_control_token_is_text(not_special, control, tmp_path):
    tokenizer = load_tokenizer(not_special)
    index, text = tokenizer.names.index(control), f"a{control}b {control}{control}\n{control}"
    for one in (tokenizer, load_tokenizer(tokenizer.save(tmp_path))):  # the copy in data.dir and in the run
        ids = one.encode(text)
        assert index not in ids and one.decode(ids) == text
        assert one.pieces[index] == b"" and one.sha256 == tokenizer.sha256
    assert tokenizer.eos_id == tokenizer.names.index("<|endoftext|>")


def test_other_added_tokens_are_found_in_text(not_special):
    tokenizer = load_tokenizer(not_special)
    index = tokenizer.names.index(PLAIN)
    assert index in tokenizer.encode(f"a{PLAIN}a") and tokenizer.pieces[index] == PLAIN.encode()


def test_another_eos_beside_the_tokenizer_is_a_change(byte_level, config, tmp_path, capsys):
    library = tokenizers.Tokenizer.from_file(str(byte_level))
    library.add_special_tokens(["<|im_end|>"])
    path = saved(tmp_path / "tokenizer", library)
    settings = config(data={"tokenizer": {"path": str(path)}}, model={"vocab_size": 401})
    names = path.parent / "tokenizer_config.json"
    before = names.read_text()
    content = prepare(settings)["content"]
    assert prepare(settings)["content"] == content and "up to date" in capsys.readouterr().err
    names.write_text(before.replace("<|endoftext|>", "<|im_end|>"))
    with pytest.raises(UserError, match=r"\(data.tokenizer.path: documents begin or end with '<\|endoftext\|>', now"):
        prepare(settings)
    prepare(settings, force=True, shard=(0, 1))
    names.write_text(before)  # the parts with the other eos do not count
    assert prepare(settings, force=True)["content"] == content
    names.write_text(before.replace("<|endoftext|>", "<|im_end|>"))
    assert prepare(settings, force=True)["content"] != content
    assert TokenFiles.open(settings).tokenizer.eos_id == 400


def test_documents_that_spell_eos_hold_it_once(not_special, config, tmp_path):
    text = tmp_path / "text.jsonl"
    lines = [{"text": f"{i} before<|endoftext|>after <|endoftext|>"} for i in range(40)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = load_tokenizer(not_special).vocab_size
    settings = config(
        data={"tokenizer": {"path": str(not_special)}, "seq_len": 8, "sources": [{"kind": "files", "path": str(text)}]},
        model={"vocab_size": size},
    )
    prepare(settings)
    files = TokenFiles.open(settings)
    for stream in (*files.train, files.validation):
        for j in range(len(stream.document_starts)):
            ids = stream.document(j).tolist()
            assert ids.count(files.tokenizer.eos_id) == 1 and ids[-1] == files.tokenizer.eos_id
            assert "before<|endoftext|>after <|endoftext|>" in files.tokenizer.decode(ids)


def tmp_path_of(folder):
    (folder / "copy").mkdir()
    return folder / "copy"


def test_broken_or_lossy(tmp_path, byte_level):
    path = tmp_path / "tokenizer.json"
    for content in ("{}", "no json", byte_level.read_text()[:500]):
        path.write_text(content)
        with pytest.raises(UserError, match="not a tokenizer.json"):
            load_tokenizer(path)
    tree = json.loads(byte_level.read_text())
    path.write_text(json.dumps(tree | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))
    with pytest.raises(UserError, match="WordPiece.*does not give back the text"):
        load_tokenizer(path)
    path.write_text(json.dumps(tree | {"decoder": None}))
    with pytest.raises(UserError, match=r"decoder \(none\) does not give back the text"):
        load_tokenizer(path)


@pytest.mark.parametrize("token", [5, ["a"], {"content": 5}])
def test_a_control_token_that_is_no_text(byte_level, tmp_path, token):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_level.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "bos_token": token}))
    with pytest.raises(UserError, match=r"tokenizer .*tokenizer_config\.json: bos_token is .*, not a text; repair it"):
        load_tokenizer(path)


def test_an_alphabet_without_the_letter_a(tmp_path):
    own = tokenizers.Tokenizer(tokenizers.models.BPE({"b": 0, "c": 1}, []))
    own.pre_tokenizer, own.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    own.add_special_tokens(["<|endoftext|>"])
    tokenizer = load_tokenizer(saved(tmp_path / "own", own))
    assert tokenizer.bos_id == -1 and tokenizer.decode(tokenizer.encode("cab")) == "cb"


def test_chat_templates_that_cannot_be_read(byte_level, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_level.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "chat_template": ["a"]}')
    assert load_tokenizer(path).chat_template is None
    several = [{"name": name, "template": f"of {name}"} for name in ("tool_use", "default")]
    config = {"eos_token": "<|endoftext|>", "chat_template": several}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(path).chat_template == "of default"
    for content in (b"{", b"[]", b"\xff"):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer .*tokenizer_config\.json: not valid JSON; copy it again"):
            load_tokenizer(path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=r"tokenizer .*chat_template\.jinja: not UTF-8; copy it again"):
        load_tokenizer(path)


@pytest.mark.slow  # building it takes half a minute
def test_a_vocabulary_over_uint16(tmp_path, byte_level, config):
    large = tokenizers.Tokenizer.from_file(str(byte_level))
    large.add_tokens([f"Document 0 {i}" for i in range(65_500)])
    path = saved(tmp_path / "large", large)
    settings = config(data={"tokenizer": {"path": str(path)}}, model={"vocab_size": 65_900})
    prepare(settings)
    files = TokenFiles.open(settings)
    assert files.train[0].dtype == "int32" and files.tokenizer.vocab_size == 65_900
    assert files.tokenizer.decode(files.train[0][0].tolist()).startswith("Document 0 ")


def test_a_copy_that_fails_leaves_the_earlier_one(byte_level, tmp_path, full_disk):
    tokenizer = load_tokenizer(byte_level)
    tokenizer.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    full_disk()
    with pytest.raises(OSError, match="space"):
        tokenizer.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
