import io
import random
import tracemalloc
from pathlib import Path

import mistral_common
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data_pipeline.small_corpus import VOCAB, make_texts
from titans_pt.data_pipeline.tokenizers import StreamDecoder, ids_within, load_tokenizer, train_tokenizer
from titans_pt.data_pipeline.tokenizers import sentencepiece as module
from titans_pt.errors import UserError

SCRIPTS = "Ünïcode  текст 日本語のテキスト العربية हिन्दी 😀👩‍👩‍👧 e\u0301\r\n\n  \tindented\n    four spaces  "


@pytest.fixture(scope="session")
def llama(tmp_path_factory, texts):
    """A tokenizer that puts a space before the text, like Llama's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=VOCAB,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("llama") / "llama.model"
    path.write_bytes(model.getvalue())
    return load_tokenizer(path)


def streamed(tokenizer, ids, **more):
    decoder = StreamDecoder(tokenizer, **more)
    return "".join(decoder.push(i) for i in ids) + decoder.finish()


def test_attributes(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (VOCAB, 1, 2)
    again = load_tokenizer(str(tokenizer.path))
    assert again.sha256 == tokenizer.sha256 and len(again.sha256) == 64


@settings(max_examples=300, deadline=None)
@given(st.text())
@example(SCRIPTS)
@example("")
@example(" ")
@example("   leading\n\n\n")
@example("\u2581 SentencePiece's own space \u2581\u2581")
@example("\0 \u2585 <s> </s> <unk> <0x41> \ufeff \u2028")
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text == streamed(tokenizer, ids)
    assert [list(one) for one in tokenizer.encode_batch([text, "x"])] == [ids, tokenizer.encode("x")]
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_real_text_is_compressed_and_digits_are_split(tokenizer, texts):
    assert len(tokenizer.encode(texts[0])) < 0.7 * len(texts[0])
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.encode("a\n\nb") == [*tokenizer.encode("a"), *2 * tokenizer.encode("\n"), *tokenizer.encode("b")]


def test_lone_surrogate_becomes_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_control_tokens_are_silent_and_broken_bytes_replaced(tokenizer):
    ids = tokenizer.encode("é")
    assert tokenizer.decode([1, *ids, 2]) == "é"
    assert tokenizer.decode(ids[:1]) == "\ufffd" == streamed(tokenizer, ids[:1])
    assert tokenizer.decode([*ids[:1], *tokenizer.encode("a")]) == "\ufffda"
    assert tokenizer.decode([0]) == "\ufffd"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1)))
def test_streaming_any_ids_is_decoding(tokenizer, ids):
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_streaming_yields_text_as_soon_as_it_is_certain(tokenizer):
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in tokenizer.encode("😀")] == ["", "", "", "😀"]


def test_a_long_text_is_compared_in_little_memory(tokenizer, texts):
    text = "\n".join(texts) * (500_000 // len("\n".join(texts)))
    ids = tokenizer.encode_batch([text])[0]
    tracemalloc.start()
    try:
        assert tokenizer.gives_back(text, ids)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(ids)  # 88 bytes for each of the 65,536 joined at once, and the text twice
    assert not tokenizer.gives_back(text, ids[:-1]) and not tokenizer.gives_back(text, [*ids, ids[0]])


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
@example("  two spaces")
def test_dummy_prefix_round_trip(llama, text):
    ids = llama.encode(text)
    assert llama.decode(ids) == text == streamed(llama, ids) == streamed(llama, [llama.bos_id, *ids])


@pytest.mark.parametrize("text", [" is", "ry is", "", " ", "\nnext", "\u00e9", "."])
def test_text_in_the_middle_of_a_document_has_no_dummy_prefix(llama, text):
    ids = ids_within(llama, text)
    assert llama.decode([*llama.encode("The memo"), *ids]) == "The memo" + text
    assert ids_within(llama, " is") == llama.encode("The memory is")[len(llama.encode("The memory")) :]


def test_dummy_prefix_is_kept_when_a_prompt_continues(llama):
    ids = llama.encode("memory")
    assert streamed(llama, ids) == "memory"
    assert streamed(llama, ids, continues=True) == " memory"


def test_training_is_deterministic_and_reads_at_most_max_characters(tmp_path, texts):
    one, two = (train_tokenizer(texts, tmp_path / name, 300, 5000) for name in "ab")
    assert one.sha256 == two.sha256
    taken = []
    train_tokenizer((taken.append(text) or text for text in texts), tmp_path / "c", 300, 5000)
    assert sum(map(len, taken[:-1])) < 5000 < sum(map(len, texts))


def test_a_line_of_any_length_is_used(tmp_path):
    line = " ".join(make_texts(300, seed=1)).replace("\n", " ")
    assert len(line) > 30_000
    tokenizer = train_tokenizer([line], tmp_path / "a.model", 320, 10**6)
    assert len(tokenizer.encode(line)) < 0.7 * len(line)


def test_too_little_text_names_the_largest_vocabulary_that_works(tmp_path):
    texts = ["hello world, hello memory"]
    with pytest.raises(UserError, match="model.vocab_size: given 5000; .* at most (\\d+)") as error:
        train_tokenizer(texts, tmp_path / "a.model", 5000, 1000)
    largest = int(str(error.value).split("at most ")[1].split(":")[0])
    assert train_tokenizer(texts, tmp_path / "a.model", largest, 1000).vocab_size == largest
    for size, limit in {1: "need (\\d+): raise", 100: "need (\\d+): raise", 2**31: f"at most {largest}:"}.items():
        with pytest.raises(UserError, match=f"model.vocab_size: given {size}; .* {limit}"):
            train_tokenizer(texts, tmp_path / "b.model", size, 1000)
    with pytest.raises(UserError, match="data.sources: no text"):
        train_tokenizer([], tmp_path / "b.model", 300, 1000)
    assert not (tmp_path / "b.model").exists()


def test_user_defined_symbols_are_one_token_each(tmp_path, texts):
    symbols = [" kitchen", " kitchen table", "<|user|>", 'a"b', ",x", '"', "é", "7up"]
    tokenizer = train_tokenizer(texts, tmp_path / "a.model", 340, 10**6, symbols)
    assert [symbol.encode() for symbol in symbols] == tokenizer.pieces[3 : 3 + len(symbols)]
    text = 'In the kitchenette, a kitchen table<|user|>a"b,x" 7up Kitchen é \u2581kitchen\nkitchen'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text == streamed(tokenizer, ids)
    assert [ids.count(3 + i) for i in range(len(symbols))] == [1, 1, 1, 1, 1, 1, 1, 1]
    assert train_tokenizer(texts, tmp_path / "b.model", 340, 10**6).sha256 != tokenizer.sha256


def test_an_error_of_the_text_comes_through_training(tmp_path):
    def broken():
        yield "some text"
        raise UserError("line 3 is broken")

    with pytest.raises(UserError, match="line 3 is broken"):
        train_tokenizer(broken(), tmp_path / "a.model", 300, 1000)


def test_training_is_quiet(tmp_path, texts, capfd):
    train_tokenizer(texts, tmp_path / "a.model", 300, 5000)
    assert capfd.readouterr() == ("", "")


def test_missing_broken_or_unfit_model(tmp_path, tokenizer):
    good = tokenizer.path.read_bytes()
    with pytest.raises(UserError, match="nowhere.model.*No such file.*data.tokenizer.path"):
        load_tokenizer(tmp_path / "nowhere.model")
    path = tmp_path / "broken.model"
    for data in (b"", b"no model", good[: len(good) // 2], random.Random(0).randbytes(3000)):
        path.write_bytes(data)
        with pytest.raises(UserError, match="broken.model: not a SentencePiece model") as error:
            load_tokenizer(path)
        assert "\n" not in str(error.value)


def test_an_eos_token_that_ends_no_document(tokenizer):
    for token in ("a", "nothing"):
        with pytest.raises(UserError, match=f"eos_token: given '{token}', .* no control piece of {tokenizer.path}"):
            load_tokenizer(tokenizer.path, token)


def test_model_without_end_of_text(tmp_path, texts):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        eos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "a.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match="no end-of-text piece"):
        load_tokenizer(tmp_path / "a.model")


def test_unwritable_output(tmp_path, texts):
    (tmp_path / "no folder").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        train_tokenizer(texts, tmp_path / "no folder" / "tokenizer.model", 300, 5000)


# ---- a real model of 32,000 pieces, and real text


@pytest.fixture(scope="session")
def mistral():
    """A tokenizer like Llama's: dummy prefix, byte fallback, bos 1, eos 2."""
    [path] = Path(mistral_common.__file__).parent.glob("data/tokenizer.model.v1")
    return load_tokenizer(path)


LANGUAGES = {
    "English": "When in the course of human events, it becomes necessary ...\n\n\tfor (int i = 0; i < n; i++)\n",
    "German": "Größenwahn und Übermut: \u201eZwölf Boxkämpfer jagen Viktor quer über den Sylter Deich\u201c.",
    "Russian": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "Arabic": "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "Hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "Hindi": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "Thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "Chinese": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "Japanese": "いろはにほへと ちりぬるを わかよたれそ つねならむ",
    "Korean": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "signs": "∀x ∈ ℝ: ⌈x⌉ = −⌊−x⌋ \U0001f600\u200d\U0001f9d1 e\u0301 \ufeff\u2028\r\n   ",
}


def test_real_model(mistral):
    assert (mistral.vocab_size, mistral.bos_id, mistral.eos_id, mistral.dummy_prefix) == (32000, 1, 2, True)


@pytest.mark.parametrize("language", LANGUAGES)
def test_round_trip_in_several_scripts(mistral, tokenizer, language):
    text = LANGUAGES[language]
    for one in (mistral, tokenizer):
        ids = one.encode(text)
        assert one.decode(ids) == text and not {one.bos_id, one.eos_id, 0} & set(ids)


def test_round_trip_of_real_text(mistral):
    from pydoc_data.topics import topics

    texts = [*topics.values(), Path(random.__file__).read_text()]
    assert [mistral.decode(ids) for ids in mistral.encode_batch(texts)] == texts


@pytest.mark.parametrize("cut", [7, 50, 400])
def test_stretches_have_the_ids_of_the_whole(mistral, tokenizer, monkeypatch, cut):
    """Text cut at newlines, else at spaces, has the same ids, for models with and without a dummy prefix."""
    from pydoc_data.topics import topics

    texts = [text[:3000] for text in list(topics.values())[:8]]
    whole = [(one, text, one.encode(text)) for one in (mistral, tokenizer) for text in texts]
    monkeypatch.setattr(module, "_STRETCH", cut)
    for one, text, ids in whole:
        found = one.encode(text)
        assert one.decode(found) == text
        if cut == 400:  # no word is longer
            assert found == ids


def test_one_long_line_without_spaces(mistral, monkeypatch):
    monkeypatch.setattr(module, "_STRETCH", 100)
    text = "".join(random.Random(0).choices("abcdefgh\u4e00é", k=5000))
    assert mistral.decode(mistral.encode(text)) == text


def test_a_copy_that_fails_leaves_the_earlier_one(tokenizer, tmp_path, full_disk):
    """A training copies its tokenizer into the run at every start: a full disk must not cut the copy there."""
    path = tokenizer.save(tmp_path)
    before = path.read_bytes()

    full_disk()
    with pytest.raises(OSError, match="space"):
        tokenizer.save(tmp_path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
