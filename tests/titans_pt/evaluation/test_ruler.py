"""Needle samples are pure, exact and as long as fits, and worded as RULER's; the score says whether they were found."""

import ast
import re
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.stand_ins import EOS, ESSAY, Characters, OverLines, Recurrent, Scripted, copies
from titans_pt.config import NEEDLE_TASKS, Config
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.evaluation import ruler
from titans_pt.evaluation.haystack import Haystack, prompt_text
from titans_pt.evaluation.long_context import answer_nll
from titans_pt.streaming import prefill
from titans_pt.tasks import ruler_words

NEW = 10


def made(tokenizer, essays, **changes):
    """The evaluation with ``changes`` to its settings; nothing is run."""
    values = {"tasks": list(NEEDLE_TASKS), "lengths": [1500], "depths": None, "max_new_tokens": NEW, "samples": 1}
    section = values | {"essays": str(essays)} | changes
    config = Config.model_validate({"evaluation": {"needle": section}})
    return ruler.RulerNeedles(SimpleNamespace(tokenizer=tokenizer, identity="x"), config)


def check(it, task, length, depth, index):
    """Checks a sample by its text alone."""
    tokenizer, kind = it.tokenizer, ruler.TASKS[task]
    sample = it.sample(task, length, depth, index)
    text = tokenizer.decode(sample.ids.tolist())
    assert tokenizer.document(text) == sample.ids.tolist()
    assert len(sample.ids) + NEW <= length
    words = kind.words
    lines = text.split("\n")
    assert lines[0] == ruler.HEAD.format(**words)
    asked = ruler_words.query(sample.log["keys"])
    ending = ruler_words.QUESTION.format(query=asked, **words) + ruler_words.PREFIX.format(query=asked, **words)
    assert lines[-1] == ending
    told = re.findall(r"One of the special magic (?:numbers|uuids) for (.+?) is: (\S+)\.", text)
    assert len(sample.expected) == kind.values * kind.queries
    for key in sample.log["keys"]:
        values = [value for k, value in told if k == key]
        assert len(values) == kind.values and set(values) <= set(sample.expected)
    if kind.haystack != "needles":
        assert len(told) == kind.keys * kind.values
    for value, place in zip([v for k, v in told if k in sample.log["keys"]], sample.log["depth_tokens"], strict=True):
        assert value not in tokenizer.decode(sample.ids[:place].tolist())
        assert value in tokenizer.decode(sample.ids[: place + len(tokenizer.encode("a" * 200))].tolist())
    if sample.answer_ids:
        answered = [*sample.ids.tolist(), *sample.answer_ids]
        assert text + tokenizer.decode(sample.answer_ids) == tokenizer.decode(answered)
        assert tokenizer.decode(sample.answer_ids).strip() == sample.expected[0]
    return sample, text


COORDINATES = {
    "task": st.sampled_from(NEEDLE_TASKS),
    "length": st.integers(1500, 4000),
    "depth": st.sampled_from([None, 0, 33.3, 50, 100]),
    "index": st.integers(0, 99),
}


def single_or_none(task, depth):
    return depth if ruler.TASKS[task].single else None


def test_samples_of_the_project_tokenizer(sentencepiece, essays):
    it = made(sentencepiece, essays)
    assert all(it._haystack(kind).exact for kind in ("noise", "essays"))

    @given(**COORDINATES)
    @settings(max_examples=40, deadline=None)
    def samples(task, length, depth, index):
        sample, _ = check(it, task, length, single_or_none(task, depth), index)
        # One more word or line would not fit; a line of noise is the longest.
        longest = max(len(sentencepiece.encode(x)) for x in (ruler.NOISE, "a " + ruler_words.NEEDLE + " " + "0" * 80))
        assert length - NEW - len(sample.ids) <= (1 + longest if ruler.TASKS[task].haystack != "essays" else 20)

    samples()


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2"])
def test_samples_of_a_tokenizer_that_merges_over_lines(task, essays):
    it = made(OverLines(), essays)
    assert not it._haystack("noise").exact
    for depth in (0, 50, 100):
        check(it, task, 1500, depth, 1)


@pytest.mark.parametrize(("kind", "task"), [
    *((Characters, task) for task in NEEDLE_TASKS), (OverLines, "niah_single_1"), (OverLines, "niah_single_2"),
])  # fmt: skip
def test_a_sample_begins_as_documents_did_in_training(kind, task, essays):
    plain, tokenizer = made(kind(), essays), kind()
    tokenizer.begin = (EOS,)  # like GPT-2's, which has one token for both ends
    it = made(tokenizer, essays)
    depth = single_or_none(task, 50)
    without, sample = plain.sample(task, 1500, depth, 0), check(it, task, 1500, depth, 0)[0]
    assert sample.ids[0] == EOS not in sample.ids[1:]
    assert sample.expected == without.expected and it.keys[0] != plain.keys[0]  # the same question, another record
    if sample.log["units"] == without.log["units"]:
        assert sample.log["depth_tokens"] == [place + 1 for place in without.log["depth_tokens"]]


def test_a_sample_of_noise_is_filled_to_the_line(essays):
    it = made(Characters(), essays)
    for length in range(1500, 1700, 7):
        sample, text = check(it, "niah_single_1", length, 50, 0)
        assert length - NEW - len(sample.ids) < len(ruler.NOISE) + 1
        lines = text.split("\n")
        assert lines.index(next(x for x in lines if "One of" in x)) - 1 == int(sample.log["units"] * 0.5)


def test_essays_repeat(sentencepiece, essays):
    sample, text = check(made(sentencepiece, essays), "niah_single_2", 6000, 50, 0)
    assert text.count("nobody owns it") > 10 and 6000 - NEW - len(sample.ids) < 20


def test_long_samples_are_joined_from_pieces(essays):
    encoded = 0

    class Counting(Characters):
        def encode(self, text):
            nonlocal encoded
            encoded += len(text)
            return super().encode(text)

    it = made(Counting(), essays)
    for task in ("niah_single_1", "niah_single_2", "niah_multivalue"):
        encoded = 0
        assert 2_000_000 - NEW - 100 < len(it.sample(task, 2_000_000, None, 0).ids) <= 2_000_000 - NEW
        assert encoded < 100_000


def test_a_sample_is_a_function_of_its_coordinates(essays):
    def drawn(task="niah_single_1", length=900, depth=50.0, index=0, sha="a", **changes):
        tokenizer = Characters()
        tokenizer.sha256 = sha
        it = made(tokenizer, essays, tasks=["niah_single_1"], lengths=[900], **changes)
        sample = it.sample(task, length, depth, index)
        return sample.log["keys"][0], sample.expected[0]

    assert drawn() == drawn()
    others = [drawn(length=901), drawn(depth=51.0), drawn(index=1), drawn(seed=1), drawn(sha="b")]
    assert len({drawn(), *others}) == 6
    # Pinned: results of one version must be those of the next.
    assert drawn() == PINNED


PINNED = ("rightful-litmus", "6655683")


def test_depths_of_the_protocol(essays):
    it = made(Characters(), essays)
    places = [it.sample("niah_single_2", 1500, None, i).log["depth_drawn"] for i in range(60)]
    assert set(places) <= set(ruler_words.DEPTHS) and len(set(places)) > 20
    assert ruler_words.DEPTHS[:3] == [0, 3, 5] and ruler_words.DEPTHS[-1] == 100 and len(set(ruler_words.DEPTHS)) == 40


# ---- the reference


@pytest.fixture(scope="module")
def reference():
    """RULER's sample builder and template from lm-eval, with fewer words, since the builder lists all pairs."""
    nltk, wonderwords = pytest.importorskip("nltk"), pytest.importorskip("wonderwords")
    lm_eval = pytest.importorskip("lm_eval")
    words = {"nouns": [f"oak tree {i}" for i in range(200)], "adjectives": [f"old{i}" for i in range(200)], "verbs": []}
    few = SimpleNamespace(_categories=words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "find", lambda *_: "there")  # its import would download tables
        patch.setattr(wonderwords, "RandomWord", lambda: few)
        from lm_eval.tasks.ruler import prepare_niah
    source = Path(lm_eval.__file__).parent / "tasks" / "ruler" / "niah_utils.py"
    template = re.search(r'^TEMPLATE = (""".*?""")', source.read_text(), re.M | re.S)[1]
    return ast.literal_eval(template), prepare_niah


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_prompts_are_those_of_the_reference(task, reference, essays, monkeypatch):
    template, prepare = reference
    monkeypatch.setattr(prepare, "cached_sent_tokenize", ruler.sentences)
    kind = ruler.TASKS[task]
    words = " ".join(ESSAY.split()).split(" ") * 4
    noise = {"noise": ruler.NOISE, "essays": words, "needles": prepare.NEEDLE}[kind.haystack]
    types = {"noise": "repeat", "essays": "essay", "needles": "needle"}
    for seed, units in ((0, 12), (1, 70), (2, 141), (3, 200)):
        prepare.random.seed(seed)
        text, answers, asked = prepare.generate_input_output(
            units, noise, type_haystack=types[kind.haystack], num_needle_k=kind.keys, type_needle_k=kind.key,
            num_needle_v=kind.values, type_needle_v=kind.value, template=template, num_needle_q=kind.queries,
        )  # fmt: skip
        # The keys and values that it drew, read from its text.
        pattern = r"One of the special magic \w+ for (.+?) is: (\S+)\."
        told = re.findall(pattern, text)
        keys = asked.replace(", and ", ", ").split(", ")
        lines = text.split("\n")[1:-1]
        if kind.haystack == "needles":
            told = [pair for pair in told if pair[0] in keys]
            others = [line for line in lines if re.fullmatch(pattern, line)[1] not in keys]
            haystack = Haystack(Characters(), others, "\n")
        elif kind.haystack == "noise":
            haystack = Haystack(Characters(), [ruler.NOISE], "\n")
        else:
            haystack = ruler.words_of(Characters(), ESSAY)
        if kind.haystack == "essays":
            places, total = [], haystack.sentences(units)
            for key, value in told:
                before = re.sub(pattern + " ?", "", text[: text.index(f"for {key} is: {value}")]).split("\n")[1]
                before = before.removesuffix("One of the special magic " + kind.value + " ").strip()
                place = len(before.split(" ")) if before else 0
                sentence = next(n for n in range(total + 1) if haystack.end_of(n, units) == place)
                places.append(next(d for d in ruler_words.DEPTHS if int(total * (d / 100)) == sentence))
        else:
            at = next(i for i, line in enumerate(lines) if f"for {keys[0]} is" in line)
            places = [100 * (at + 0.5) / units]
        drawn = ruler.Draw(told, places, keys)
        ours = prompt_text(ruler.arrange(kind, drawn, haystack, units), haystack)
        prefix = ruler_words.PREFIX.format(query=asked, **kind.words)
        assert ours == text + prefix
        assert sorted(drawn.expected) == sorted(answers)


def test_keys_are_pairs_of_words():
    adjectives, nouns = ruler_words._words()
    assert len(adjectives) > 800 and len(nouns) > 4000
    assert all(ruler.draw("words", Random(i)).split("-")[0] in " ".join(adjectives) for i in range(20))


# ---- the evaluation


@pytest.mark.parametrize("tokenizer", [Characters(), OverLines()])
def test_a_length_without_room_is_refused(tokenizer, essays):
    """All samples are drawn at once: the length that the error names is enough for each."""
    with pytest.raises(UserError, match=r"evaluation\.needle\.lengths: given 200; .* need (\d+), room") as caught:
        made(tokenizer, essays, tasks=["niah_single_1"], lengths=[200], samples=20)
    needed = int(re.search(r"need (\d+)", str(caught.value))[1])
    made(tokenizer, essays, tasks=["niah_single_1"], lengths=[needed], samples=20)


def test_the_room_of_every_task_is_checked_first(essays):
    """Sixteen needles need more room than one; their samples come after all of the other task's."""
    made(Characters(), essays, tasks=["niah_single_1"], lengths=[600])
    with pytest.raises(UserError, match=r"evaluation\.needle\.lengths: given 600; "):
        made(Characters(), essays, tasks=["niah_single_1", "niah_multiquery"], lengths=[600])


def test_essays_that_are_not_utf_8_are_one_line(essays):
    (essays / "garden.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(UserError, match="evaluation.needle.essays: .*garden.txt: not UTF-8 at byte 3; convert it"):
        ruler.essays(str(essays))


def test_without_essays(tmp_path):
    with pytest.raises(UserError, match=r"evaluation\.needle\.essays: .*no \.txt files"):
        made(Characters(), tmp_path)


def test_answer_nll_is_that_of_the_whole_text(recurrent):
    prompt, answer = torch.randint(128, (1, 30)), [5, 6, 7, 8]
    logits, state = prefill(recurrent, prompt, 7)
    before = state.ids.clone()
    found = answer_nll(recurrent, logits, state, answer)
    with torch.no_grad():
        whole, _ = recurrent(torch.cat([prompt, torch.tensor([answer])], dim=1))
    losses = -torch.log_softmax(whole[0, 29:-1], dim=-1)[range(4), answer]
    assert found == pytest.approx(float(losses.mean()), rel=1e-5)
    assert torch.equal(state.ids, before)
    assert answer_nll(recurrent, logits, state, answer[:1]) == pytest.approx(float(losses[0]), rel=1e-5)


def evaluation(run, model, *overrides):
    run.model = model
    return ruler.RulerNeedles(run, load_config(run.folder.config, overrides))


def test_a_model_that_copies_scores_100_percent(run):
    it = evaluation(run, Scripted(copies))
    records = [it.measure(i) for i in range(len(it.keys))]
    summary = it.summary(records)
    figures = summary["tasks"]["niah_single_1"]
    assert figures["mean"] == 1.0 and figures["n"] == 12 and len(figures["cells"]) == 6
    assert figures["answer_nll"] < 1e-6
    assert all(r["prediction"] == f" {r['expected'][0]}" and r["score"] == 1 for r in records)
    assert all(r["tokens"] + NEW <= r["length"] for r in records)
    assert [row["length"] for row in figures["by_length"]] == [700, 900]
    assert "100 [61, 100] 6" in it.table(summary)


def test_a_constant_model_scores_0_percent(run):
    it = evaluation(run, Scripted(lambda text: "7"))
    figures = it.summary([it.measure(i) for i in range(len(it.keys))])["tasks"]["niah_single_1"]
    assert figures["mean"] == 0.0 and figures["low"] == 0.0 and figures["high"] == pytest.approx(0.2425, abs=1e-4)
    assert figures["answer_nll"] > 10


def test_half_of_the_values_are_half_a_point():
    sample = SimpleNamespace(expected=["AB-1", "cd"])
    assert ruler.RulerNeedles.score(None, "niah_multivalue", sample, "it is ab-1.") == {"score": 0.5}


def test_a_model_that_says_nothing(run):
    it = evaluation(run, Scripted(lambda text: "\0"))
    record = it.measure(0)
    assert record["prediction"] == "" and record["score"] == 0 and record["decode_tokens_per_s"] is None
    assert " - " in it.table(it.summary([record]))


def test_the_log_of_a_sample(run):
    torch.manual_seed(0)
    it = evaluation(run, Recurrent().eval())
    record = it.measure(5)
    assert (record["length"], record["depth"], record["index"]) == (700, 100.0, 1)
    assert record["state_bytes"] == 16 * 4
    assert record["peak_memory"] > 10 * 2**20
    assert record["prefill_tokens_per_s"] > 0 and record["decode_tokens_per_s"] > 0
    assert 0 < record["depth_tokens"][0] < record["tokens"]


def test_drawn_depths_are_gathered_by_tens(run):
    it = evaluation(run, Scripted(copies), "evaluation.needle.depths=null", "evaluation.needle.samples=5")
    assert len(it.jobs) == 10
    cells = it.summary([it.measure(i) for i in range(10)])["tasks"]["niah_single_1"]["cells"]
    assert sum(cell["n"] for cell in cells) == 10 and all(cell["depth"] % 10 == 0 for cell in cells)


def test_keys_tell_measurements_apart(run):
    keys = ruler.RulerNeedles(run, run.config).keys
    assert len(set(keys)) == len(keys) == 12
    other = SimpleNamespace(tokenizer=run.tokenizer, identity="other")
    assert not set(keys) & set(ruler.RulerNeedles(other, run.config).keys)
