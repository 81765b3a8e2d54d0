"""BABILong's samples hold their facts in order and fill their length; both scores tell answers apart."""

import hashlib
import re
from types import SimpleNamespace

import pytest

from tests.helpers.stand_ins import ESSAY, Characters, Scripted
from titans_pt.config import BabilongConfig, Config
from titans_pt.data_pipeline.tokenizers import load_tokenizer
from titans_pt.errors import UserError
from titans_pt.evaluation import babilong
from titans_pt.runs.folder import RunFolder
from titans_pt.tasks import babi


def made(tokenizer, essays, model=None, **changes):
    haystack = {"kind": "files", "path": str(essays)}
    section = {"lengths": [3000], "samples": 2, "haystack": haystack} | changes
    config = Config.model_validate({"evaluation": {"babilong": section}})
    folder = RunFolder(essays)
    run = SimpleNamespace(tokenizer=tokenizer, identity="x", model=model, folder=folder, results=folder, caching=None,
                          read_last=None)  # fmt: skip
    return babilong.Babilong(run, config)


def test_a_length_that_is_short_for_one_sample_is_refused_before_any_is_read(sentencepiece, essays):
    """Stories differ in length: the first may fit and another not. The length that the error names fits all."""
    with pytest.raises(UserError, match=r"evaluation.babilong.lengths: given 60; .* need (\d+), room") as caught:
        made(sentencepiece, essays, wording="plain", lengths=[60, 3000], samples=20)
    needed = int(re.search(r"need (\d+)", str(caught.value))[1])
    made(sentencepiece, essays, wording="plain", lengths=[needed], samples=20)


@pytest.mark.parametrize("wording", ["instructions", "plain"])
@pytest.mark.parametrize("task", babi.TASKS)
def test_samples(task, wording, sentencepiece, essays):
    it = made(sentencepiece, essays, wording=wording)
    assert it.haystack.exact
    for length in (3000, 3500, 20_000):
        sample = it.sample(task, length, None, 0)
        text = sentencepiece.decode(sample.ids.tolist())
        assert sentencepiece.encode(text) == sample.ids.tolist()
        longest = max(len(sentencepiece.encode(" " + unit)) for unit in it.haystack.units)
        assert 0 <= length - 20 - len(sample.ids) < longest
        assert text.endswith(f"Question: {sample.log['question']}" + ("\nAnswer:" if wording == "plain" else ""))
        inside = re.search(r"<context>\n(.*)\n</context>", text, re.S)[1] if wording == "instructions" else text
        rest = inside.split("\nQuestion:")[0]
        for unit in it.haystack.units:
            rest = rest.replace(unit, "")
        facts = re.findall(r"[A-Z][^.]*\.", rest)
        assert len(facts) == sample.log["facts"] <= max(4, length // 8)
        if wording == "instructions":
            assert text.count("<example>") == len(babilong.WORDINGS[task].examples)
        else:
            assert sentencepiece.decode(sample.answer_ids).strip() == sample.expected[0]


@pytest.mark.parametrize(
    "task, sha256",
    {"qa1": "f5e3011ea3d3e075", "qa2": "d109d7974eb1ae20", "qa3": "f7d8fe55b57e3ab1", "qa4": "d0c741d44257244b",
     "qa5": "4df5c66d774d89e8"}.items(),
)  # fmt: skip
def test_prompts_are_the_benchmarks_to_the_letter(task, sha256):
    """Hashes of what get_formatted_input of github.com/booydar/babilong (7a6efee) makes of the task's
    DEFAULT_PROMPTS."""
    before, after = babilong.frame(task, babi.Story([], "Where is Mary?", "", []), "instructions", 3)
    assert hashlib.sha256(f"{before}The context.{after}".encode()).hexdigest().startswith(sha256)
    begin, end = before.index("<example>"), before.rindex("</example>") + len("</example>")
    without, _ = babilong.frame(task, babi.Story([], "Where is Mary?", "", []), "instructions", 0)
    assert without == before[:begin] + before[end:], "the benchmark's template keeps its blank lines"


def test_other_words_are_other_samples(essays, monkeypatch):
    """Records of prompts with earlier words are not taken for those of today; the plain prompt has no words."""

    def keys():
        return {wording: made(Characters(), essays, wording=wording, tasks=["qa1"], lengths=[9000]).keys
                for wording in ("instructions", "plain")}  # fmt: skip

    before = keys()
    monkeypatch.setitem(babilong.WORDINGS, "qa1", babilong.WORDINGS["qa2"])
    after = keys()
    assert before["plain"] == after["plain"] and not set(before["instructions"]) & set(after["instructions"])


@pytest.mark.parametrize("wording", ["instructions", "plain"])
def test_a_sample_begins_as_documents_did_in_training(wording, sentencepiece, essays):
    it = made(load_tokenizer(sentencepiece.path, add_bos=True), essays, wording=wording)
    sample = it.sample("qa1", 3000, None, 0)
    text = sentencepiece.decode(sample.ids.tolist())
    assert sample.ids.tolist() == [sentencepiece.bos_id, *sentencepiece.encode(text)] and len(sample.ids) <= 3000 - 20


def test_ten_million_tokens(sentencepiece, essays):
    sample = made(sentencepiece, essays).sample("qa1", 10_000_000, None, 0)
    assert 0 <= 10_000_000 - 20 - len(sample.ids) < 100


def test_short_sentences_are_left_out(essays):
    assert all(len(s) >= 10 for s in made(Characters(), essays).haystack.units)
    (essays / "garden.txt").write_text("No. Yes. No.")
    with pytest.raises(UserError, match=r"evaluation\.babilong\.haystack: .*no sentence of 10 tokens"):
        made(Characters(), essays)


def test_a_text_that_is_not_there_is_named_by_its_own_setting(essays):
    with pytest.raises(UserError, match=r"^evaluation\.babilong\.haystack: path='/nowhere': no such file or folder"):
        made(Characters(), essays, haystack={"kind": "files", "path": "/nowhere"})


@pytest.mark.parametrize("source", [{"kind": "indexed"}, {"kind": "files", "format": "messages"}])
def test_a_source_without_plain_text_hides_no_facts(source):
    key, given = list(source.items())[-1]
    with pytest.raises(ValueError, match=f"haystack.{key}: given '{given}', which holds no plain text"):
        BabilongConfig(haystack=source | {"path": "/there"})


def test_only_so_many_characters_are_read(essays):
    assert len(" ".join(made(Characters(), essays, characters=120).haystack.units)) <= 120 < len(ESSAY)


@pytest.mark.parametrize("prediction, strict, substring", [
    (" The most recent location of Mary is garden. Kitchen.", 1, 1),
    ("garden", 1, 1),
    ("the garden or the kitchen", 0, 1),
    ("the kitchen. garden", 0, 1),
    ("GARDEN<example>kitchen", 1, 1),
    ("", 0, 0),
])  # fmt: skip
def test_scores(prediction, strict, substring):
    sample = SimpleNamespace(expected=["garden"], log={"question": "Where is Mary?"})
    scores = babilong.Babilong.score(None, "qa1", sample, prediction)
    assert scores == {"score": strict, "score_substring": substring}


def test_labels_of_the_question_are_free():
    assert babilong.strict_score("qa3", "Where was the apple before the kitchen?", "garden", "kitchen: garden") == 1
    assert babilong.strict_score("qa3", "Where was the apple before the kitchen?", "garden", "office: garden") == 0


def test_the_evaluation(essays):
    it = made(Characters(), essays, Scripted(lambda text: "garden."[len(text.rpartition("?")[2]) % 7]), tasks=["qa1"])
    summary = it.summary([it.measure(i) for i in range(len(it.keys))])
    figures = summary["tasks"]["qa1"]
    assert figures["n"] == 2 and figures["mean"] == figures["score_substring"] in (0.0, 0.5, 1.0)
    assert "qa1" in it.table(summary) and len(set(it.keys)) == 2
