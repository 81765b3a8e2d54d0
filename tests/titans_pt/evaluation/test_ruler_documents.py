"""Documents of RULER's needles: the question's words, one needle, its answer at the end."""

import json

import pytest

from titans_pt import cli
from titans_pt.errors import UserError
from titans_pt.evaluation import ruler_documents as it
from titans_pt.tasks.ruler_words import NEEDLE, NOISE, PREFIX, QUESTION

TEXT = [f"word{n}{'.' if n % 7 == 6 else ''}" for n in range(5000)]


def test_documents_ask_for_what_they_tell():
    found = list(it.documents(["niah_single_1", "niah_single_2"], 40, (20, 400), TEXT, 0))
    sizes = []
    for n, document in enumerate(found):
        text = document["text"]
        told = {"kind": "numbers", "are_all": "is", "are": "is"}
        key, value = text.rsplit(" number for ", 1)[1].removesuffix(".").split(" mentioned in the provided text is ")
        one = told | {"kind": "number", "query": key}
        assert document["task"] == f"niah_single_{n % 2 + 1}" and 1_000_000 <= int(value) < 10_000_000
        assert text.count(NEEDLE.format(key=key, value=value, kind="numbers")) == 1
        assert text.endswith("\n" + QUESTION.format(**one) + PREFIX.format(**one) + f" {value}.")
        hay = text.count(NOISE) * len(NOISE.split()) if n % 2 == 0 else text.count("word")
        assert hay <= 400 and (n % 2 == 0 or hay >= 20)
        sizes.append(hay)
    assert sorted(sizes)[20] < 130  # half below the geometric mean of 20 and 400, 89
    assert len({document["text"] for document in found}) == 40
    again = list(it.documents(["niah_single_1", "niah_single_2"], 10, (20, 400), TEXT, 0))
    assert again == found[:10] != list(it.documents(["niah_single_1", "niah_single_2"], 10, (20, 400), TEXT, 1))


def test_the_command(tmp_path, capsys):
    texts, out = tmp_path / "texts", tmp_path / "new" / "d.jsonl"
    texts.mkdir()
    (texts / "a.txt").write_text(" ".join(TEXT[:300]))
    words = ["ruler", "--out", str(out), "--documents", "3", "--texts", str(texts), "--words", "5,200"]
    assert cli.run([*words, "--tasks", "niah_single_3"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["task"] for line in lines] == ["niah_single_3"] * 3
    for wrong, said in (
        (["--words", "5"], "given '5'; allowed: two whole numbers of at least 1 with a comma between"),
        (["--words", "9,8"], "--words: given 9,8; write the fewest and the most words"),
        (["--words", "9,301"], "--words: given 9,301; the texts have 300 words"),
        (["--tasks", "niah_multivalue"], "--tasks: given 'niah_multivalue'; allowed: niah_single_1"),
    ):
        assert cli.run([*words, *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.thorough
def test_the_default_text_is_there(tmp_path):
    it.write_documents(tmp_path / "d.jsonl", ["niah_single_2"], 2, (100, 100))
    with pytest.raises(UserError, match="no .txt files there"):
        it.write_documents(tmp_path / "d.jsonl", ["niah_single_2"], 2, (100, 100), str(tmp_path))
