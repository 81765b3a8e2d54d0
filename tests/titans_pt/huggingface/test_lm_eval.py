"""lm-eval's own backend for Hugging Face models, end to end on an exported folder: its figures are ours."""

import math

import pytest
import torch

from titans_pt import huggingface
from titans_pt.runs.loaded import load_run
from titans_pt.streaming import continuation_logits, greedy, prefill

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("lm_eval.models")  # registers "hf", unless another test has registered models before

pytestmark = pytest.mark.thorough

TEXTS = ["abc dea fonk", "k", "abc dea fo" + " abc dea fo" * 300]  # the last has more than 2,048 tokens
CHOICES = ["abc", "fonk dea"]


def task(name: str, **more) -> dict:
    rows = datasets.Dataset.from_list([{"question": text, "answer": "x"} for text in TEXTS])
    return {"task": name, "test_split": "test", "custom_dataset": lambda **_: {"test": rows},
            "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", **more}  # fmt: skip


@pytest.fixture(scope="module")
def found(exported):
    """Samples by task."""
    tasks = [
        task("answers", output_type="generate_until", metric_list=[{"metric": "exact_match"}],
             generation_kwargs={"max_gen_toks": 12, "do_sample": False, "until": ["\n\n"]}),
        task("choices", output_type="multiple_choice", metric_list=[{"metric": "acc"}], doc_to_choice=CHOICES,
             doc_to_target=0),
        task("rolling", output_type="loglikelihood_rolling", metric_list=[{"metric": "byte_perplexity"}],
             doc_to_text="", doc_to_target="{{question}}"),
    ]  # fmt: skip
    results = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(exported / "hf")}, tasks=tasks, device="cpu", batch_size=2,
        bootstrap_iters=0, task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
    )  # fmt: skip
    return results["samples"]


@pytest.fixture(scope="module")
def run(exported, tmp_path_factory):
    """The exported weights as a run."""
    return load_run(huggingface.import_run(exported / "hf", tmp_path_factory.mktemp("imported") / "run"))


def by_text(samples: list[dict]) -> list[dict]:
    return sorted(samples, key=lambda sample: sample["doc_id"])


def test_answers_are_as_long_as_asked_and_read_the_whole_prompt(found, run):
    for text, sample in zip(TEXTS, by_text(found["answers"]), strict=True):
        ids = run.tokenizer.encode(text)
        new = greedy(run.model, *prefill(run.model, torch.tensor([ids]), 512), 12, {run.tokenizer.eos_id})
        answer = run.tokenizer.decode([*ids, *new])[len(run.tokenizer.decode(ids)) :]
        assert sample["resps"][0][0] == answer.split("\n\n")[0]
        assert len(answer) > 1


def test_choices_are_as_likely_as_here(found, run):
    for text, sample in zip(TEXTS, by_text(found["choices"]), strict=True):
        ids = run.tokenizer.encode(text)
        for choice, ((logged, _),) in zip(CHOICES, sample["resps"], strict=True):
            more = run.tokenizer.encode(f"{text} {choice}")[len(ids) :]
            logits = continuation_logits(run.model, *prefill(run.model, torch.tensor([ids]), 512), more)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(more)[:, None]).sum()
            assert float(logged) == pytest.approx(expected.item(), abs=1e-2)


def test_the_rolling_loss_is_that_of_the_whole_text(found, run):
    for text, sample in zip(TEXTS, by_text(found["rolling"]), strict=True):
        ids = torch.tensor([[run.tokenizer.eos_id, *run.tokenizer.encode(text)]])
        with torch.no_grad():
            logits, _ = run.model(ids)
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        logged = sample["resps"][0][0]
        assert math.isclose(-float(logged[0] if isinstance(logged, tuple) else logged), expected, rel_tol=1e-3)
