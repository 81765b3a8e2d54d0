"""Every target: the tables and figures of the paper, and studies of small tasks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from titans_pt.errors import UserError
from titans_pt.reproduce import measures, pictures
from titans_pt.reproduce.dna import table4
from titans_pt.reproduce.forecast import table3
from titans_pt.reproduce.ideas import ideas
from titans_pt.reproduce.measures import CHUNKS, NEEDLES, TRAINING, Measure, of_lengths
from titans_pt.reproduce.ruler import ruler
from titans_pt.reproduce.state_tracking import state_tracking
from titans_pt.reproduce.study import MODELS, TITANS, Column, Row, Study
from titans_pt.reproduce.timing import SPEED, speed_at

SIZES = ("tiny", "170m", "340m", "400m", "760m", "1.3b")
LEADING = (*TITANS, "mamba2", "gated_deltanet_h2", "gated_deltanet", "samba", "mamba", "gated_deltanet_h1")
"""The ten best models of the tiny study's table1, which have three seeds there; the others have two."""
_COST = ("model.memory.write_cost=0.1",)
ASKED_AGAIN = ("transformer", "mamba2", "gated_deltanet", "ttt_linear", "deltanet")
"""Baselines with three seeds on needles and recall, as Titans have."""
HIERARCHY = (Row("lmm-hierarchy"), Row("lmm", "chunk-64"))
"""A hierarchy of memories, and one memory with the chunks of its global one."""
EQUAL_TERMS = (
    *(Row(model, "sigmoid", ("model.memory.gates=sigmoid",), "sigmoid gates") for model in ("lmm", "mac")),
    *(Row(model, "cost", _COST, "a cost of writing")
      for model in ("lmm", "mac", "ttt_mlp", "ttt_linear", "deltanet", "gated_deltanet")),
    *(Row("lmm", name) for name in ("depth-1", "no-forgetting", "no-momentum")),
)  # fmt: skip
"""Needles on equal terms: Titans without the hard gates of configs/needles.yaml, models with a cost of writing, and the
steps between TTT-MLP and LMM."""
BABILONG = {
    "babilong": (2048, 4096, 8192, 16384, 32768, 65536, 131072),
    "far": (524288, 1048576, 10485760),
}
"""Lengths of the stories by measure, for models that were trained at 4K."""


SUITES = {
    "commonsense": Measure("commonsense", "commonsense"),
    "needle": of_lengths(
        "needle", "needle", (2048, 4096, 8192, 16384), 500, f"tasks=[{','.join(NEEDLES)}]", "depths=null"
    ),
    **{name: of_lengths(name, "babilong", lengths, 100, far=name == "far") for name, lengths in BABILONG.items()},
    "text": Measure(
        "text", "perplexity", ("evaluation.perplexity.tokens=4194304", "evaluation.perplexity.length=4096"),
    ),
    "long": Measure(
        "long", "perplexity", ("evaluation.perplexity.tokens=1048576", "evaluation.perplexity.length=32768"), (0, 4096),
    ),
    "chunks": Measure("chunks", "chunks"),
}  # fmt: skip
"""Measures for models that were trained at 4K."""
TINY = SUITES | {
    "text": Measure("text", "perplexity", ("evaluation.perplexity.tokens=131072", "evaluation.perplexity.length=512")),
    "long": Measure(
        "long", "perplexity", ("evaluation.perplexity.tokens=65536", "evaluation.perplexity.length=16384"), (0, 512),
    ),
}  # fmt: skip
"""Measures for models that were trained at 512."""
LEADING_IDEAS = ("lmm/omega-16", "lmm/omega-4")
"""The later ideas ahead of LMM and MAC on the tiny study's text: they have a second seed."""
LARGER_RATED = ("mamba2", "gated_deltanet", "ttt_mlp")
"""Models whose larger form is trained at the best of the learning rates that it tried itself; the larger forms of other
models have the small model's rate."""
ABLATIONS = (
    *(Row(model) for model in TITANS), Row("lmm", "depth-1"), Row("lmm", "no-conv"), Row("lmm", "no-momentum"),
    Row("lmm", "no-forgetting"), Row("lmm", "no-persistent"),
)  # fmt: skip


def study(target: str, size: str) -> Study:
    """The study of ``target`` at ``size``.

    Raises:
        UserError: there is no such study at this size.
    """
    if target not in TARGETS:
        raise UserError(f"TARGET: given {target!r}; allowed: {', '.join(TARGETS)}")
    if target in SMALL and size != "tiny":
        raise UserError(f"--size: given {size!r}; {target} has models of one size: tiny")
    if (size == "paper") != (target in OF_THEIR_OWN) and size != "tiny":
        only = "tiny or paper" if target in OF_THEIR_OWN else f"one of {', '.join(SIZES)}"
        raise UserError(f"--size: given {size!r}; {target} has {only}")
    return TARGETS[target](size)


def _table1(size: str) -> Study:
    rows = tuple(Row(model) for model in MODELS)
    if size == "tiny":
        note = "The paper's figures are perplexities of WikiText, of models of 340M parameters: compare their order."
        return Study("table1", "Language models at equal parameters and tokens", size, rows, _text_columns(),
                     _measures(size, "text", "long"), "340m", note,
                     seeds=dict.fromkeys(MODELS, (0, 1)) | dict.fromkeys(LEADING, (0, 1, 2)))  # fmt: skip
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
        return Study("table5", "What each part of the memory gives", size, ABLATIONS, columns,
                     _measures(size, "text", "long"), "400m", note,
                     seeds={row.key: (0, 1, 2) for row in ABLATIONS})  # fmt: skip
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
        seeds={row.key: (0, 1) if row.variant == "depth-4" else (0, 1, 2) for row in rows} if size == "tiny" else {},
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
    if size == "tiny":
        return _babilong_answers()
    tasks = ("qa1", "qa2", "qa3", "qa4", "qa5")
    columns = tuple(Column(_short(n), name, measures.mean_of(tasks, (n,)), _short(n))
                    for name, lengths in BABILONG.items() for n in lengths)  # fmt: skip
    rows = tuple(Row(model) for model in ("mac", "mag", "mal", "lmm", "transformer", "gated_deltanet", "rmt"))
    note = ("Few-shot, of the pretrained models, in the text of evaluation.babilong.haystack (Python's documentation "
            "unless set); the published figures are of fine-tuned ones in PG19's books.")  # fmt: skip
    return Study("babilong", "BABILong", size, rows, columns, _measures(size, *BABILONG), size, note)


def _babilong_answers() -> Study:
    """Study of models that learn bAbI's stories in short texts, from the answers alone, and answer in long texts."""
    asked = (("near", (4096, 16384), 50), ("long", (65536,), 20), ("far", (1048576,), 4))
    columns = tuple(
        Column(f"{task}, {_short(n)}", name, measures.question(task, n))
        for task in ("qa1", "qa2", "qa3") for name, lengths, _ in asked for n in lengths
    )  # fmt: skip
    taken = tuple(of_lengths(name, "babilong", lengths, samples, far=name == "far") for name, lengths, samples in asked)
    note = "Percent right by the benchmark's score; trained on stories in at most 2,048 tokens of text."
    rows = tuple(map(Row, ("lmm", "mac", "swa", "mamba2", "rmt")))
    return Study("babilong", "BABILong, small", "tiny", rows, columns, taken, "tiny", note, folder="babilong",
                 rated=False, seeds=dict.fromkeys(("lmm", "mac"), (0, 1)), pictures=(pictures.training,))  # fmt: skip


def _short(length: int) -> str:
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}K"


def _chunks(size: str) -> Study:
    rows = (Row("lmm"), Row("lmm", "chunk-32"), Row("lmm", "chunk-64"), Row("lmm", "chunk-128"))
    columns = tuple(Column(f"at {n}", "chunks", measures.at_chunk(n), str(n)) for n in CHUNKS)
    note = "Rows: the chunk of training. Columns: the chunk of evaluation, with the same weights."
    title = "Chunks, trained and evaluated crosswise"
    return Study("chunks", title, size, rows, columns, _measures(size, "chunks"), size, note)


def _ideas(size: str) -> Study:
    rows = (Row("lmm"), Row("mac"), *ideas(421, 293))
    note = "Perplexity on text. The same models on needles, recall and state tracking: those studies."
    seeds: dict[str, tuple[int, ...]] = dict.fromkeys(("lmm", "mac"), (0, 1, 2))
    seeds |= dict.fromkeys(LEADING_IDEAS, (0, 1))
    return Study("ideas", "What each later idea adds to Titans", size, rows, _text_columns(),
                 _measures(size, "text", "long"), size, note, seeds=seeds)  # fmt: skip


def _scaling(size: str) -> Study:
    """Four times the tokens, and four times the parameters (without embedding), at the learning rates of the tiny study
    or of their own."""
    wide = "model.d_model=256", "model.n_heads=8"
    hidden = {"mac": 768, "lmm": 1032, "mag": 856, "mamba2": 1000, "gated_deltanet": 1040, "ttt_mlp": 1128,
              "transformer": 1224}  # fmt: skip
    heads = {"gated_deltanet": ("model.gated_deltanet.n_heads=8",)}
    rows = (
        *map(Row, hidden),
        *(Row(model, "tokens-4x", ("train.max_steps=4096",), "four times the tokens") for model in hidden),
        *(Row(model, "size-4x", (*wide, *heads.get(model, ()), f"model.mlp_hidden={width}"), "four times the size",
              rated=model in LARGER_RATED) for model, width in hidden.items()),
    )  # fmt: skip
    longer = Measure("longer", "perplexity", ("evaluation.perplexity.tokens=262144",
                                              "evaluation.perplexity.length=65536"))  # fmt: skip
    columns = (*_text_columns()[:2], Column("to 64K", "longer", measures.text_loss))
    own = ", ".join(Row(model).name for model in LARGER_RATED)
    note = ("All rows of a model have its learning rate, chosen on a tenth of the tokens of its first row. Only the "
            f"larger models of {own} chose theirs on a tenth of their own.")  # fmt: skip
    return Study("scaling", "Does the order last: more tokens, larger models", size, rows, columns,
                 (*_measures(size, "text", "long"), longer), size, note, seeds={row.key: (0, 1) for row in rows},
                 pictures=(pictures.training, partial(pictures.positions, measure="longer")))  # fmt: skip


def _filters(size: str) -> Study:
    others = (
        ("lmm", "value-random"), ("mac", "value-random"), ("mamba2", "value-identity"),
        ("gated_deltanet", "value-identity"),
    )  # fmt: skip
    rows = tuple(row for model, variant in others for row in (Row(model), Row(model, variant)))
    note = "Titans' convolutions of values start as the identity, the others' at random: each with the other's start."
    return Study("filters", "Start of the values' convolutions", size, rows, _text_columns(),
                 _measures(size, "text", "long"), size, note)  # fmt: skip


def _optimizer(size: str) -> Study:
    models = ("lmm", "mac", "mamba2", "gated_deltanet", "transformer")
    rows = tuple(Row(model, variant) for model in models for variant in ("", "by-muon"))
    note = "Each model by AdamW and by Muon, at the rate that AdamW's runs chose: Muon's steps have the same size."
    return Study("optimizer", "Does the order depend on the optimiser", size, rows, _text_columns(),
                 _measures(size, "text", "long"), size, note)  # fmt: skip


def _states(size: str) -> Study:
    """The LMM with a smaller memory, and the best recurrences with states of the LMM's size, at equal parameters."""
    heads = "model.gated_deltanet.n_heads=1"
    rows = (
        Row("lmm"), Row("mamba2"), Row("gated_deltanet"),
        Row("lmm", "state-quarter", ("model.memory.expansion=1", "model.mlp_hidden=528"), "a quarter of the memory"),
        Row("mamba2", "state-4x", ("model.mamba2.state=256", "model.mlp_hidden=344"), "four times the state"),
        Row("gated_deltanet", "state-4x", (heads,), "one head, four times the state"),
        Row("gated_deltanet", "state-8x", (heads, "model.gated_deltanet.key_expansion=1.5", "model.mlp_hidden=456"),
            "one head, eight times the state"),
    )  # fmt: skip
    note = "Variants have their model's learning rate, and in the MLP what their state leaves of the parameters."
    return Study("states", "Does the lead come from the size of the state", size, rows, _text_columns(),
                 _measures(size, "text", "long"), size, note)  # fmt: skip


def _recall(size: str) -> Study:
    variants = [Row(model, "memory-off") for model in TITANS]
    variants += [Row("lmm", name) for name in ("no-momentum", "no-forgetting", "depth-1", "no-conv", "no-ln")]
    columns = (
        Column("accuracy (%)", "recall", measures.recalled),
        Column("tokens to 95 %", TRAINING, measures.first_at(0.95)),
        Column("tokens in all", TRAINING, measures.tokens_trained),
    )
    note = "Eight pairs, at least 40 tokens of filler, eight queries (docs/recall.md)."
    rows = (*map(Row, MODELS), *HIERARCHY, *variants, *ideas(257, 190))
    return Study(
        "recall", "Associative recall outside the attention window", size, rows, columns,
        (Measure("recall", "recall"),), size, note, folder="recall", rated=False, probe_share=1,
        seeds=dict.fromkeys((*TITANS, *ASKED_AGAIN), (0, 1, 2)) | {row.key: (0, 1) for row in HIERARCHY},
        pictures=(pictures.training, pictures.recall),
    )  # fmt: skip


def _needles(size: str) -> Study:
    near = Measure("needles", "needles", ("evaluation.needles.lengths=[2048,16384,65536]",
                                          "evaluation.needles.answers=128"))  # fmt: skip
    far = Measure("far", "needles", ("evaluation.needles.lengths=[1048576]", "evaluation.needles.answers=64"), far=True)
    study = needles_in_noise((near, far), {"needles": (2048, 16384, 65536), "far": (1048576,)})
    rows = (*map(Row, MODELS), *HIERARCHY, *EQUAL_TERMS, *ideas(257, 190))
    seeds: dict[str, tuple[int, ...]] = dict.fromkeys((*TITANS, *ASKED_AGAIN, "ttt_mlp"), (0, 1, 2))
    seeds |= {row.key: (0, 1) for row in (*HIERARCHY, *EQUAL_TERMS, Row("lmm", "yaad"))}
    return replace(study, rows=rows, seeds=seeds)


def needles_in_noise(
    taken: tuple[Measure, ...], lengths: dict[str, Sequence[int]], needles: Sequence[int] = ()
) -> Study:
    """The study of needles with these measures; a column for each measure, number of needles and length."""
    columns = tuple(
        Column(f"{count} needles, {length:,}" if count else f"{length:,}", name, measures.found_at(length, count))
        for name, asked in lengths.items() for count in (needles or (None,)) for length in asked
    )  # fmt: skip
    note = "Percent right of needles shown once in noise; trained at no more than 2,048 tokens."
    return Study(
        "needles", "Needles in noise, far beyond the training length", "tiny", (), columns, taken, "tiny", note,
        folder="needles", rated=False, probe_share=1, pictures=(pictures.training, pictures.needles),
    )  # fmt: skip


def _measures(size: str, *names: str) -> tuple[Measure, ...]:
    return tuple((TINY if size == "tiny" else SUITES)[name] for name in names)


SMALL = ("ideas", "scaling", "filters", "optimizer", "states", "recall", "needles", "ruler", "statetracking")
"""Studies that exist only at the size tiny."""
OF_THEIR_OWN = ("table3", "table4")
"""Studies whose large size is called paper."""
TARGETS = {
    "table1": _table1, "table2": _table2, "table3": table3, "table4": table4, "table5": _table5, "figure7": _figure7,
    "figure8": _figure8,
    "figure9": _figure9, "babilong": _babilong, "chunks": _chunks, "ideas": _ideas, "scaling": _scaling,
    "filters": _filters, "optimizer": _optimizer, "states": _states, "recall": _recall,
    "needles": _needles, "ruler": ruler, "statetracking": state_tracking,
}  # fmt: skip
