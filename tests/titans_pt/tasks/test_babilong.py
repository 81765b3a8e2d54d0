"""BABILong trained by its answers: prompts tell a story in text, a run trains, resumes and is evaluated."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from tests.helpers.trainings import check_resume
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.tasks import babi, task_of

pytestmark = pytest.mark.usefixtures("one_group")

FACT = re.compile(r" (?:(?:Mary|John|Sandra|Daniel|Fred|Jeff|Bill) [a-z ]+|The \w+ is \w+ of the \w+)\.")
ASKED = re.compile(r"\nQuestion: (.*\?)\nAnswer: (\w+)\.")


@pytest.fixture
def configured(prepared, tiny):
    def make(*words):
        source = f"[{{kind: files, path: {prepared.parent / 'text.jsonl'}}}]"
        given = [
            "task=babilong", f"data.dir={prepared}", f"data.sources={source}", "data.seq_len=1600",
            "data.validation_fraction=0.2", "model.mixers=[lmm]", "model.memory.chunk_size=64",
            "babilong.lengths='800,1600'", "train.batch_tokens=3200", "train.max_steps=4", "train.warmup_steps=1",
            "train.log_every=1", "train.eval_every=2", "train.eval_samples=2", "train.checkpoint_every=2",
        ]  # fmt: skip
        return load_config(tiny(), [*given, *words])

    return make


@pytest.mark.parametrize("kind", list(babi.TASKS))
def test_prompts_tell_a_story_in_order_and_end_with_answers(configured, kind, monkeypatch):
    task, told = task_of(configured(f"babilong.tasks=[{kind}]", "babilong.questions=3")), []
    data, story = task.open(), babi.story
    monkeypatch.setattr(babi, "story", lambda *given: told.append(story(*given)) or told[-1])
    for prompts, most in ((data.train.at(10), 3), (data.validation.at(10), 1)):
        for index in range(12):
            ids, places = prompts.sample(3, index)
            text, found = task.tokenizer.decode(ids[: places[-1] + 2].tolist()), told[-1]
            assert len(ids) == 1600 and 1600 - 64 <= places[-1] + 2 <= 1600
            at, ends = 0, []
            for fact in found.facts:  # after one another
                at = text.index(f" {fact}", at) + len(fact) + 1
                ends.append(at)
            asked = list(ASKED.finditer(text))
            assert asked[-1].groups() == (found.question, found.answer) and asked[-1].start() >= at
            others = [(sum(end <= each.start() for end in ends), *each.groups()) for each in asked[:-1]]
            assert not Counter(others) - Counter(found.others)
            assert len(asked) == min(most, 1 + len(found.others))
            said, rest = task.tokenizer.decode(ids[places + 1].tolist()).split(), ASKED.sub("", text)
            assert said == [f"{each[2]}." for each in asked]
            for fact in found.facts:
                rest = rest.replace(f" {fact}", "", 1)
            assert not FACT.search(rest)
    assert np.array_equal(prompts.sample(3, 7)[0], prompts.sample(3, 7)[0])
    assert not np.array_equal(prompts.sample(3, 7)[0], prompts.sample(4, 7)[0])


def test_questions_that_do_not_fit_are_left_out(configured):
    prompts = task_of(configured("babilong.tasks=[qa1]", "babilong.lengths='160,1600'")).open().train.at(0)
    asked = [len(ASKED.findall(prompts.tokenizer.decode(prompts.sample(0, n)[0].tolist()))) for n in range(40)]
    assert set(asked) >= {1, 2} and len(prompts.sample(0, 0)[0]) == 160


def test_the_baseline_guesses_among_the_answers(configured):
    task = task_of(configured("babilong.tasks=[qa1]"))
    baseline, tokens = task.open().baseline, []
    for place in babi.PLACES:
        tokens.append(len(task.tokenizer.encode(f"Answer: {place}.")) - len(task.tokenizer.encode("Answer:")))
    assert baseline == pytest.approx(np.log(6) / np.mean(tokens))


def test_what_cannot_be_is_one_line(configured):
    with pytest.raises(UserError, match="babilong.lengths: given '800,4000'; each at most data.seq_len=1600"):
        configured("babilong.lengths='800,4000'")
    with pytest.raises(UserError, match="babilong.lengths: given 30; with this tokenizer a prompt .* use at"):
        task_of(configured("babilong.lengths='30,1600'")).open()
    with pytest.raises(UserError, match="babilong.tasks"):
        configured("babilong.tasks=[qa6]")


def test_it_trains_resumes_and_is_evaluated(configured, tmp_path):
    short = "data.seq_len=800", "babilong.lengths='400,800'", "train.batch_tokens=800", "train.micro_batch=1"
    check_resume(configured, tmp_path, *short)
    words = ["evaluation.babilong.tasks=[qa1]", "evaluation.babilong.lengths=[900]", "evaluation.babilong.samples=2",
             "evaluation.babilong.wording=plain", "evaluation.babilong.characters=50000"]  # fmt: skip
    assert cli.run(["evaluate", str(tmp_path / "whole"), *words]) == 0
    (found,) = tmp_path.glob("whole/evaluation/*/summary.json")
    assert json.loads(found.read_text())["babilong"]["tasks"]["qa1"]["n"] == 2
