"""What each table and figure consists of: rows (models and variants of them), columns (figures), and at which size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titans_pt.config import Config
from titans_pt.config_file import load_config
from titans_pt.errors import UserError
from titans_pt.reproduce import measures
from titans_pt.reproduce.measures import CHUNKS, NEEDLES, Find, Measure
from titans_pt.reproduce.runs import PROBE_SHARE, Run
from titans_pt.reproduce.timing import SPEED, Timing, speed_at

SIZES = ("tiny", "170m", "340m", "400m", "760m", "1.3b")
TITANS = ("lmm", "mac", "mag", "mal")
MODELS = (
    "transformer", "swa", *TITANS, "samba", "mamba2", "gated_deltanet", "ttt_linear", "deltanet", "mamba",
    "gated_deltanet_h2", "gated_deltanet_h1", "ttt_mlp", "retnet", "gla", "hgrn2", "linear_attention", "longhorn",
    "rmt",
)  # fmt: skip
"""configs/SIZE/NAME.yaml, those of the first table first."""
TWICE = ("transformer", "swa", "samba", "mamba2", "gated_deltanet", "ttt_linear", *TITANS)
"""Trained with two seeds in the tiny study's table1; elsewhere a model stands beside variants, which have one."""
VARIANTS = {
    "": (),
    "depth-1": ("model.memory.depth=1",),
    "depth-3": ("model.memory.depth=3",),
    "depth-4": ("model.memory.depth=4",),
    "no-conv": ("model.conv_width=1",),
    "no-momentum": ("model.memory.momentum=false",),
    "no-forgetting": ("model.memory.forgetting=false",),
    "no-persistent": ("model.persistent_tokens=0",),
    "chunk-32": ("model.memory.chunk_size=32",),
    "chunk-64": ("model.memory.chunk_size=64",),
    "chunk-128": ("model.memory.chunk_size=128",),
}
"""Named changes of a model's settings. The models as they are have memories of depth 2 and chunks of 16."""
NAMES = {
    "transformer": "Transformer++", "swa": "sliding window", "samba": "Samba", "mamba": "Mamba", "mamba2": "Mamba2",
    "deltanet": "DeltaNet", "gated_deltanet": "Gated DeltaNet", "gated_deltanet_h1": "Gated DeltaNet-H1",
    "gated_deltanet_h2": "Gated DeltaNet-H2", "ttt_linear": "TTT-Linear", "ttt_mlp": "TTT-MLP", "retnet": "RetNet",
    "linear_attention": "linear attention", "longhorn": "Longhorn",
} | {name: name.upper() for name in (*TITANS, "gla", "hgrn2", "rmt")}  # fmt: skip
"""Of models, as papers write them."""
CHANGES = {
    "depth-1": "linear memory (depth 1)", "depth-3": "depth 3", "depth-4": "depth 4", "no-conv": "without convolutions",
    "no-momentum": "without momentum", "no-forgetting": "without forgetting",
    "no-persistent": "without persistent memory", "chunk-32": "chunk 32", "chunk-64": "chunk 64",
    "chunk-128": "chunk 128",
}  # fmt: skip
"""Of variants."""
RATES = {"tiny": (2e-3, 4e-3, 8e-3)}
"""Learning rates that are tried, for sizes where nobody has published one for each model."""


@dataclass(frozen=True)
class Row:
    """A model, or a variant of it."""

    model: str
    variant: str = ""

    @property
    def key(self) -> str:
        """As in published.yaml."""
        return f"{self.model}/{self.variant}" if self.variant else self.model

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{NAMES[self.model]}, {CHANGES[self.variant]}" if self.variant else NAMES[self.model]


@dataclass(frozen=True)
class Column:
    """``find`` looks for its figure in what ``measure`` found; ``published``: its name in published.yaml."""

    title: str
    measure: str
    find: Find
    published: str | None = None


@dataclass(frozen=True)
class Study:
    """A table or figure at one size. ``compared``: the size of the published models beside it."""

    target: str
    title: str
    size: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    measures: tuple[Measure, ...]
    compared: str
    note: str = ""
    timed: tuple[int, ...] = ()
    """Lengths of a study of throughput, for which nothing is trained."""


SUITES = {
    "commonsense": Measure("commonsense", "commonsense"),
    "needle": Measure(
        "needle", "needle",
        (f"evaluation.needle.tasks=[{','.join(NEEDLES)}]", "evaluation.needle.lengths=[2048,4096,8192,16384]",
         "evaluation.needle.depths=null", "evaluation.needle.samples=500"),
    ),
    "babilong": Measure(
        "babilong", "babilong",
        ("evaluation.babilong.lengths=[2048,4096,8192,16384,32768,65536,131072,524288,1048576,10485760]",
         "evaluation.babilong.samples=100"),
    ),
    "text": Measure(
        "text", "perplexity", ("evaluation.perplexity.tokens=4194304", "evaluation.perplexity.length=4096"),
    ),
    "long": Measure(
        "long", "perplexity", ("evaluation.perplexity.tokens=1048576", "evaluation.perplexity.length=32768"), (0, 4096),
    ),
    "chunks": Measure("chunks", "chunks"),
}  # fmt: skip
"""What is measured of models that were trained at 4K."""
TINY = SUITES | {
    "babilong": Measure(
        "babilong", "babilong",
        ("evaluation.babilong.lengths=[1024,2048,4096]", "evaluation.babilong.samples=20"),
    ),
    "text": Measure("text", "perplexity", ("evaluation.perplexity.tokens=131072", "evaluation.perplexity.length=512")),
    "long": Measure(
        "long", "perplexity", ("evaluation.perplexity.tokens=65536", "evaluation.perplexity.length=16384"), (0, 512),
    ),
}  # fmt: skip
"""The same of models that were trained at 512."""
ABLATIONS = (
    *(Row(model) for model in TITANS), Row("lmm", "depth-1"), Row("lmm", "no-conv"), Row("lmm", "no-momentum"),
    Row("lmm", "no-forgetting"), Row("lmm", "no-persistent"),
)  # fmt: skip


def study(target: str, size: str) -> Study:
    """
    Raises:
        UserError: there is no such study at this size.
    """
    if target not in TARGETS:
        raise UserError(f"TARGET: given {target!r}; allowed: {', '.join(TARGETS)}")
    return TARGETS[target](size)


def _table1(size: str) -> Study:
    rows = tuple(Row(model) for model in MODELS)
    if size == "tiny":
        note = "The paper's figures are perplexities of WikiText, of models of 340M parameters: compare their order."
        return Study("table1", "Language models at equal parameters and tokens", size, rows, _text_columns(),
                     _tiny("text", "long"), "340m", note)  # fmt: skip
    accuracies = {
        "piqa": "acc", "hellaswag": "acc_norm", "winogrande": "acc", "arc_easy": "acc", "arc_challenge": "acc_norm",
        "social_iqa": "acc", "boolq": "acc",
    }  # fmt: skip
    columns = (
        Column("WikiText ppl", "commonsense", measures.harness("wikitext", "word_perplexity"), "wikitext"),
        Column("LAMBADA ppl", "commonsense", measures.harness("lambada_openai", "perplexity"), "lambada_perplexity"),
        Column("LAMBADA", "commonsense", measures.harness("lambada_openai", "acc"), "lambada"),
        *(Column(task, "commonsense", measures.harness(task, by), task) for task, by in accuracies.items()),
    )
    title = "Language modelling and commonsense reasoning"
    return Study("table1", title, size, rows, columns, (SUITES["commonsense"],), size)


def _text_columns() -> tuple[Column, ...]:
    return (
        Column("perplexity", "text", measures.text_loss, "wikitext"),
        Column("to 16K", "long", measures.text_loss),
        Column("to 16K, memory off", "long", measures.frozen_loss(0)),
        Column("to 16K, frozen after 512", "long", measures.frozen_loss(512)),
    )


def _table2(size: str) -> Study:
    columns = tuple(
        Column(f"S{n} {length // 1024}K", "needle", measures.question(task, length), f"S{n} {length // 1024}K")
        for n, task in enumerate(NEEDLES, start=1) for length in (2048, 4096, 8192, 16384)
    )  # fmt: skip
    rows = tuple(Row(m) for m in ("ttt_linear", "mamba2", "deltanet", *TITANS, "transformer", "gated_deltanet"))
    return Study("table2", "Needles in a haystack (RULER)", size, rows, columns, _measures(size, "needle"), size)


def _table5(size: str) -> Study:
    if size == "tiny":
        note = "The paper's figures are the means of WikiText's and LAMBADA's perplexities at 400M parameters."
        columns = (Column("perplexity", "text", measures.text_loss, "perplexities"), *_text_columns()[1:])
        return Study("table5", "What each part of the memory gives", size, ABLATIONS, columns, _tiny("text", "long"),
                     "400m", note)  # fmt: skip
    columns = (
        Column("WikiText and LAMBADA ppl", "commonsense", measures.both_perplexities, "perplexities"),
        Column("reasoning", "commonsense", measures.average, "reasoning"),
        Column("needles", "needle", measures.mean_of(NEEDLES, (2048, 4096, 8192, 16384)), "needles"),
    )
    taken = _measures(size, "commonsense", "needle")
    return Study("table5", "What each part of the memory gives", size, ABLATIONS, columns, taken, size)


def _figure7(size: str) -> Study:
    rows = (Row("lmm", "depth-1"), Row("lmm"), Row("lmm", "depth-3"), Row("lmm", "depth-4"))
    first, last = (512, 16384) if size == "tiny" else (2048, 32768)
    lengths = [first << n for n in range((last // first).bit_length())]
    columns = tuple(Column(f"{length:,}", "long", measures.loss_up_to(length)) for length in lengths)
    return Study(
        "figure7", "Perplexity by the memory's depth and the length of the text", size, rows, columns,
        _measures(size, "long"), size, "The paper prints a curve, no numbers.",
    )  # fmt: skip


def _throughput(target: str, title: str, size: str, rows: tuple[Row, ...]) -> Study:
    lengths = (512, 1024, 2048, 4096) if size == "tiny" else (2048, 4096, 8192, 16384, 32768)
    columns = tuple(Column(f"tokens/s at {length:,}", SPEED, speed_at(length)) for length in lengths)
    note = "Wall time of whole training steps: run nothing beside it. The paper prints a curve, no numbers."
    return Study(target, title, size, rows, columns, (), size, note, lengths)


def _figure8(size: str) -> Study:
    rows = (Row("lmm", "depth-1"), Row("lmm"), Row("lmm", "depth-3"), Row("lmm", "depth-4"))
    return _throughput("figure8", "Training throughput by the memory's depth", size, rows)


def _figure9(size: str) -> Study:
    return _throughput("figure9", "Training throughput by length", size, tuple(map(Row, MODELS)))


def _babilong(size: str) -> Study:
    taken = _measures(size, "babilong")
    lengths = [int(n) for n in taken[0].words[0].partition("[")[2].rstrip("]").split(",")]
    tasks = ("qa1", "qa2", "qa3", "qa4", "qa5")
    columns = tuple(Column(_short(n), "babilong", measures.mean_of(tasks, (n,)), _short(n)) for n in lengths)
    rows = tuple(Row(model) for model in ("mac", "mag", "mal", "lmm", "transformer", "gated_deltanet", "rmt"))
    note = "Few-shot, of the pretrained models; the published figures are of fine-tuned ones (docs/evaluation.md)."
    return Study("babilong", "BABILong", size, rows, columns, taken, size, note)


def _short(length: int) -> str:
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}K"


def _chunks(size: str) -> Study:
    rows = (Row("lmm"), Row("lmm", "chunk-32"), Row("lmm", "chunk-64"), Row("lmm", "chunk-128"))
    columns = tuple(Column(f"at {n}", "chunks", measures.at_chunk(n), str(n)) for n in CHUNKS)
    note = "Rows: the chunk of training. Columns: the chunk of evaluation, with the same weights."
    title = "Chunks, trained and evaluated crosswise"
    return Study("chunks", title, size, rows, columns, _measures(size, "chunks"), size, note)


def _measures(size: str, *names: str) -> tuple[Measure, ...]:
    return tuple((TINY if size == "tiny" else SUITES)[name] for name in names)


def _tiny(*names: str) -> tuple[Measure, ...]:
    return _measures("tiny", *names)


TARGETS = {
    "table1": _table1, "table2": _table2, "table5": _table5, "figure7": _figure7, "figure8": _figure8,
    "figure9": _figure9, "babilong": _babilong, "chunks": _chunks,
}  # fmt: skip


# ---- the runs of a study


@dataclass(frozen=True)
class Order:
    """What the command line asks for.

    models: as in configs/SIZE, None for all of the study. seeds: None for the study's own. tokens: of each run, None
    for the configured. rates: learning rates to choose from, () for the configured one. words: KEY=VALUE for every run.
    """

    out: Path
    models: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    tokens: int | None = None
    rates: Sequence[float] = ()
    words: Sequence[str] = ()


def chosen(study: Study, order: Order) -> Study:
    """``study`` with the rows of the models asked for.

    Raises:
        UserError: the study has none of a model.
    """
    if order.models is None:
        return study
    known = list(dict.fromkeys(row.model for row in study.rows))
    for model in order.models:
        if model not in known:
            raise UserError(f"--models: given {model!r}; {study.target} has {', '.join(known)}")
    rows = tuple(row for model in order.models for row in study.rows if row.model == model)
    return replace(study, rows=rows)


def seeds_of(study: Study, row: Row, order: Order) -> tuple[int, ...]:
    if order.seeds is not None:
        return tuple(order.seeds)
    return (0, 1) if (study.target, study.size) == ("table1", "tiny") and row.model in TWICE else (0,)


def run_name(row: Row, seed: int) -> str:
    return f"{row.model}{'-' + row.variant if row.variant else ''}-s{seed}"


def runs_of(study: Study, order: Order) -> list[Run]:
    """The runs of a study, in the order in which they are worth having: first seeds first, each after its probes.

    Raises:
        UserError: a setting that is wrong.
    """
    if study.timed:
        return [_timing(study, row, order) for row in study.rows]
    planned = [(row, seed) for row in study.rows for seed in seeds_of(study, row, order)]
    runs, probes = [], {}
    for row, seed in sorted(planned, key=lambda item: item[1]):  # stable: the study's order within a seed
        if row.model not in probes:
            probes[row.model] = tuple(_probe(study, row.model, rate, order) for rate in order.rates)
            runs += probes[row.model]
        config = _config(study, row, seed, order, order.tokens, run_name(row, seed), ())
        runs.append(Run(run_name(row, seed), row.model, row.variant, config, study.measures, probes[row.model]))
    return runs


def _timing(study: Study, row: Row, order: Order) -> Timing:
    name = f"speed-{row.key.replace('/', '-')}"
    config = _config(study, row, 0, order, None, name, ())
    words = (*VARIANTS[row.variant], *order.words)
    return Timing(name, row.model, row.variant, config, file=f"{study.size}/{{model}}", words=words,
                  lengths=study.timed, tokens=max(study.timed))  # fmt: skip


def _probe(study: Study, model: str, rate: float, order: Order) -> Run:
    """A tenth of the tokens of the model as it is, at seed 0; its variants use the same rate."""
    name, row = f"{model}-lr{rate:g}", Row(model)
    whole = _config(study, row, 0, order, order.tokens, name, ())
    tokens = whole.train.max_steps * whole.train.batch_tokens // PROBE_SHARE
    return Run(name, model, "", _config(study, row, 0, order, tokens, name, (f"train.lr={rate!r}",)), is_probe=True)


def _config(
    study: Study, row: Row, seed: int, order: Order, tokens: int | None, name: str, more: tuple[str, ...]
) -> Config:
    own = (f"run.dir={order.out / 'runs' / name}", f"run.seed={seed}")
    words = [*VARIANTS[row.variant], *order.words, *more, *own]
    file = f"{study.size}/{row.model}"
    config = load_config(file, words)
    if tokens is None:
        return config
    steps = max(1, tokens // config.train.batch_tokens)
    # A warm-up of more than a fifth of a short run would leave little of it.
    warmup = min(config.train.warmup_steps, steps // 5)
    return load_config(file, [*words, f"train.max_steps={steps}", f"train.warmup_steps={warmup}"])
