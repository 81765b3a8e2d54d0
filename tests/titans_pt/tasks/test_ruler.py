"""RULER's needles trained by their answers: prompts keep their promises, a run trains, resumes and is evaluated."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest

from tests.helpers.trainings import check_resume
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import task_of
from titans_pt.tasks.ruler_words import CHANCE_NATS
from titans_pt.training import loop

pytestmark = pytest.mark.usefixtures("one_group")

KINDS = ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1"]
TOLD = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+) is: ([0-9a-f-]+)\.")
ASKED = re.compile(r"The special magic (number|uuid) for (\S+) mentioned in the provided text is (\S+)$")


def settings(prepared, *words):
    source = f"[{{kind: files, path: {prepared.parent / 'text.jsonl'}}}]"
    given = [
        "task=ruler", f"data.dir={prepared}", f"data.sources={source}", "data.seq_len=1200",
        "data.validation_fraction=0.2", "model.mixers=[lmm]", "model.memory.chunk_size=64",
        "ruler.lengths='600,1200'", "train.batch_tokens=2400", "train.max_steps=4", "train.warmup_steps=1",
        "train.log_every=1", "train.eval_every=2", "train.eval_samples=2", "train.checkpoint_every=2",
    ]  # fmt: skip
    return [*given, *words]


@pytest.fixture
def configured(prepared, tiny):
    def make(*words):
        return load_config(tiny(), settings(prepared, *words))

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_prompts(configured, kind):
    task = task_of(configured(f"ruler.tasks=[{kind}]"))
    prompts = task.open().train.at(10)
    assert prompts.length == 1200
    for index in range(20):
        ids, places = prompts.sample(3, index)
        text = task.tokenizer.decode(ids[: places[-1] + 2].tolist())
        told, (form, asked, answer) = dict(TOLD.findall(text)), ASKED.search(text).groups()
        assert len(ids) == 1200 and len(told) == (4 if kind == "niah_multikey_1" else 1)
        assert told[asked] == answer and form == ("uuid" if kind == "niah_single_3" else "number")
        assert 1200 - 64 <= places[-1] + 2 <= 1200 and all(b == a + 1 for a, b in pairwise(places))
        assert task.tokenizer.decode(ids[places + 1].tolist()).strip() == answer
        assert ("The grass is green." in text) == (kind == "niah_single_1")
    assert np.array_equal(prompts.sample(3, 7)[0], prompts.sample(3, 7)[0])
    assert not np.array_equal(prompts.sample(3, 7)[0], prompts.sample(4, 7)[0])


def test_needles_are_hidden_in_the_texts_of_training_and_of_validation(configured):
    """Part of a token-file row surrounds each needle: a training row in training, else a validation row."""
    task = task_of(configured("ruler.tasks=[niah_single_2]"))
    data = task.open()
    for packed in (data.train, data.validation):
        prompts = packed.at(10)
        rows = [prompts.text.sample(n)[0].tobytes() for n in range(len(prompts.text))]
        begin = len(task.tokenizer.document("A special magic number is hidden within the following text. Make sure to "
                                            "memorize it. I will quiz you about the number afterwards.\n"))  # fmt: skip
        for index in range(10):
            ids, _ = prompts.sample(0, index)
            stretch = ids[begin : begin + 40].astype(prompts.text.sample(0)[0].dtype).tobytes()
            text = task.tokenizer.decode(ids[begin : begin + 40].tolist())
            assert any(stretch in row for row in rows) or "One of" in text
    assert prompts.text is not data.train.at(10).text


def test_lengths_grow_with_the_position_and_validation_has_the_last(configured):
    data = task_of(configured()).open()
    assert [data.train.at(position).length for position in (0, 3, 4, 7, 100)] == [600, 600, 1200, 1200, 1200]
    assert data.validation.at(0).length == 1200
    ids, reset, asked = data.train.sample(0)
    assert reset.nonzero()[0].tolist() == [0, 600] and len(ids) == 1201
    ends = np.flatnonzero(asked[:-1] & ~asked[1:])
    assert [end // 600 for end in ends] == [0, 1] and not asked[599]


def test_answers_begin_anywhere_in_a_chunk(configured):
    """Models trained with answers at only one place of a chunk answered nowhere else."""
    prompts = task_of(configured()).open().train.at(0)
    begins = {int(prompts.sample(0, index)[1][0]) % 16 for index in range(200)}
    assert begins == set(range(16))


def test_the_baseline_knows_the_form_alone(configured):
    task = task_of(configured("ruler.tasks=[niah_single_1]"))
    baseline = task.open().baseline
    assert baseline * len(task.open().train.at(0).sample(0, 0)[1]) == pytest.approx(CHANCE_NATS["numbers"])


def test_what_cannot_be_is_one_line(configured):
    with pytest.raises(UserError, match="ruler.lengths: given '600,4000'; each at most data.seq_len=1200"):
        configured("ruler.lengths='600,4000'")
    for length in (60, 2):
        with pytest.raises(UserError, match=f"ruler.lengths: given {length}; with this tokenizer a prompt .* use at"):
            task_of(configured(f"ruler.lengths='{length},1200'")).open()
    with pytest.raises(UserError, match="model.memory.write_cost: given 0.1; must be 0 with parallel.context > 1"):
        configured("parallel.context=2", "model.memory.write_cost=0.1")
    with pytest.raises(UserError, match="with parallel.context > 1 only loss and accuracy"):
        configured("parallel.context=2", "train.stop_when=whole >= 0.9")


def test_it_trains_resumes_and_is_evaluated(configured, tmp_path):
    check_resume(configured, tmp_path)
    validation = [r for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "validation"][-1]
    assert {"validation_loss", "validation_accuracy", "validation_whole"} <= validation.keys()
    words = ["evaluation.needle.tasks=[niah_single_1]", "evaluation.needle.lengths=[700]",
             "evaluation.needle.depths=null", "evaluation.needle.samples=2"]  # fmt: skip
    assert cli.run(["evaluate", str(tmp_path / "whole"), "--suite", "needle", *words]) == 0
    (found,) = tmp_path.glob("whole/evaluation/*/summary.json")
    assert json.loads(found.read_text())["needle"]["tasks"]["niah_single_1"]["n"] == 2


def test_weights_of_a_language_model(configured, tmp_path):
    """A training on answers can start from these weights, embedding included: the tokenizer is the same."""
    words = ["task=language", f"run.dir={tmp_path / 'language'}", "train.stop_at=2"]
    loop.train(configured(*words))
    for name, more in (("fresh", []), ("tuned", [f"train.init_from={tmp_path / 'language'}"])):
        loop.train(configured(f"run.dir={tmp_path / name}", "train.stop_at=1", *more))
    fresh, tuned = (read_metrics(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("fresh", "tuned"))
    assert fresh != tuned
    assert re.search(r"\b0 of \d+ parameters start fresh", (tmp_path / "tuned" / "log.txt").read_text())
