"""State tracking: the first test of Titans' Theorem 4.1, with the settings of a memory that decide it."""

from titans_pt.reproduce import measures, pictures
from titans_pt.reproduce.ideas import RULES
from titans_pt.reproduce.measures import TRAINING, Measure
from titans_pt.reproduce.study import Column, Row, Study

LENGTHS = (32, 64, 128, 256, 512)
STEPS = {"parity": 600, "S3": 2000, "A5": 2000}
SEEDS = {"parity": (0, 1, 2), "S3": (0, 1, 2), "A5": (0,)}
_TOKEN = ("model.memory.chunk_size=1",)
_REFLECT = (*_TOKEN, "model.memory.step_bound=1.0")
_LINEAR = ("model.memory.depth=1", "model.memory.norm=false", "model.mlp_hidden=181")
_STILL = ("model.memory.momentum=false",)
_CACHES = Row("lmm", "caching", ("model.memory.caching.segment=16", "model.memory.caching.slots=8"),
              "Memory Caching (GRM)")  # fmt: skip
_HIDDEN = {"omega-4": 145, "omega-16": 137, "caching": 127}
_IDEAS = {
    f"c1-one-{row.variant}": (
        (*_REFLECT, *row.settings, f"model.mlp_hidden={_HIDDEN.get(row.variant, 148)}"),
        f"C = 1, bound 1, {row.change}",
    )
    for row in (*RULES, _CACHES)
}
"""Later ideas in a memory of two layers, as in the study of ideas; the MLPs' widths make the models equally large."""
CHANGES = {
    # variant: (settings, displayed name)
    "": ((), ""),
    "c1": (_TOKEN, "C = 1"),
    "c1-half": ((*_TOKEN, "model.memory.step_bound=0.5"), "C = 1, bound 0.5"),
    "c1-one": (_REFLECT, "C = 1, bound 1"),
    "c1-one-still": ((*_REFLECT, *_STILL), "C = 1, bound 1, no momentum"),
    "c1-half-bare": (
        (*_TOKEN, "model.memory.step_bound=0.5", "model.memory.norm=false"),
        "C = 1, bound 0.5, no LayerNorm",
    ),
    "c1-one-bare": ((*_REFLECT, "model.memory.norm=false"), "C = 1, bound 1, no LayerNorm"),
    "linear": (_LINEAR, "linear"),
    "linear-c1": ((*_LINEAR, *_TOKEN), "linear, C = 1"),
    "linear-c1-half": ((*_LINEAR, *_TOKEN, "model.memory.step_bound=0.5"), "linear, C = 1, bound 0.5"),
    "linear-c1-one": ((*_LINEAR, *_REFLECT), "linear, C = 1, bound 1"),
    "linear-c1-one-still": ((*_LINEAR, *_REFLECT, *_STILL), "linear, C = 1, bound 1, no momentum"),
    "linear-c1-one-still-hard": (
        (*_LINEAR, *_REFLECT, *_STILL, "model.memory.gates=hard"),
        "linear, C = 1, bound 1, no momentum, hard gates",
    ),
    "negative-deltanet": (("model.deltanet.allow_neg_eigval=true",), "beta to 2"),
    "negative-gated_deltanet": (("model.gated_deltanet.allow_neg_eigval=true",), "beta to 2"),
    "negative-kda": (("model.kda.allow_neg_eigval=true",), "beta to 2"),
    "negative-gdn2": (("model.gdn2.allow_neg_eigval=true",), "erasing to 2"),
    "linear-c1-one-yaad": ((*_LINEAR, *_REFLECT, "model.memory.rule=yaad"), "linear, C = 1, bound 1, Huber loss"),
    **_IDEAS,
}
"""Settings that replace a model's own. C: the memory's chunk size, by default 16. bound: upper bound of theta, by
default 0.1. linear: a memory of one matrix, without LayerNorm; wider MLPs keep the model's size."""
_TWO = ("state_tracking.tokens=2", "data.seq_len=80", "train.batch_tokens=5120")
TRAININGS = {
    # last word of a variant: (settings that replace those of the rest, displayed words)
    "slow": (("train.lr=2e-3",), ", half the rate"),
    "fast": (("train.lr=8e-3",), ", twice the rate"),
    "two": (_TWO, ", two tokens an element"),
    "pair": (
        (*_TWO, "state_tracking.generators=pair", "train.max_steps=1000", "train.eval_every=50"),
        ", two generators, two tokens an element",
    ),
}
"""Other trainings of the same model. two: a filler follows each element, and a memory writes twice before it is
asked. pair: with these, two elements are read that generate the group, in place of all."""
_OF_LMM = (
    "", "c1", "c1-half", "c1-one", "c1-one-still", "linear", "linear-c1", "linear-c1-half", "linear-c1-one",
    "linear-c1-one-still",
)  # fmt: skip
_BASELINES = (
    ("transformer", ""), ("mamba2", ""), ("deltanet", ""), ("deltanet", "negative"), ("gated_deltanet", ""),
    ("gated_deltanet", "negative"), ("ttt_linear", ""), ("ttt_mlp", ""),
)  # fmt: skip
_LATER = (
    ("kda", "negative"), ("gdn2", "negative"), ("deltaproduct", ""), ("rwkv7", ""), ("hope", ""),
    ("lmm", "linear-c1-one-yaad"),
)  # fmt: skip
"""Models published after Titans; one seed."""
_DEEP = (("hope", "c1-one"), *(("lmm", change) for change in _IDEAS))
"""Models with a memory of two layers; parity, one seed."""
_OTHER_RATES = tuple((model, f"{change}-{rate}") for rate in ("slow", "fast") for model, change in (
    ("lmm", "c1-one"), ("lmm", "linear-c1-one-still"), ("deltanet", "negative")))  # fmt: skip
_TWO_TOKENS = (("lmm", "linear-c1-one-two"), ("deltanet", "negative-two"))
_PAIR = (
    ("lmm", "linear-c1-one-still-pair"), ("lmm", "linear-c1-one-still-hard-pair"), ("lmm", "linear-c1-one-pair"),
    ("lmm", "c1-one-pair"), ("lmm", "pair"), ("transformer", "pair"), ("mamba2", "pair"), ("deltanet", "pair"),
    ("deltanet", "negative-pair"),
)  # fmt: skip
MODELS = {
    "parity": (
        *(("lmm", change) for change in _OF_LMM), ("mac", ""), ("mac", "c1-one"), ("mag", ""), ("mag", "c1-one"),
        ("lmm", "c1-half-bare"), ("lmm", "c1-one-bare"), *_BASELINES, *_LATER, *_DEEP, *_OTHER_RATES,
    ),
    "S3": (
        ("lmm", ""), ("lmm", "c1-one"), ("lmm", "c1-one-still"), ("lmm", "linear-c1-one"),
        ("lmm", "linear-c1-one-still"), ("mac", "c1-one"), ("transformer", ""), ("mamba2", ""),
        ("deltanet", "negative"), ("gated_deltanet", "negative"), ("lmm", "c1-one-yaad"), *_LATER, *_TWO_TOKENS,
    ),
    "A5": (("lmm", "c1-one"), ("lmm", "linear-c1-one"), ("transformer", ""), ("deltanet", "negative"), *_PAIR),
}  # fmt: skip


def _row(model: str, change: str, problem: str) -> Row:
    first, _, last = change.rpartition("-")
    of_model, (trained, how) = (first, TRAININGS[last]) if last in TRAININGS else (change, ((), ""))
    words, name = CHANGES[f"{of_model}-{model}" if of_model == "negative" else of_model]
    steps = STEPS[problem]
    more = (f"state_tracking.problem={problem}", f"train.max_steps={steps}", f"train.eval_every={steps // 20}")
    shown = f"{problem}{name and ', ' + name}{how}"
    return Row(model, f"{problem}-{change}" if change else problem, (*words, *more, *trained), shown)


def state_tracking(size: str) -> Study:
    rows = [_row(model, change, problem) for problem, models in MODELS.items() for model, change in models]
    seeds = {row.key: SEEDS[row.variant.partition("-")[0]] for row in rows}
    once = (*_LATER, *_DEEP, *_TWO_TOKENS, *(row for row in _OTHER_RATES if row[1].endswith("slow")))
    seeds |= {_row(model, change, problem).key: (0,) for problem in MODELS for model, change in once}
    seeds |= {_row(model, change, "A5").key: (0, 1, 2) for model, change in _PAIR}
    seeds[_row("lmm", "c1-one-yaad", "parity").key] = SEEDS["parity"]  # the only later idea ahead of the LMM
    columns = [Column(f"last of {n} (%)", "states", measures.last_answer(n)) for n in LENGTHS]
    columns += [
        Column("tokens to 99 % of samples", TRAINING, measures.first_at(0.99, "whole")),
        Column("steps", TRAINING, measures.steps_trained),
    ]
    note = (
        "Percent of last answers right, of 256 samples of each length; trained at 3 to 40 elements. Chance: parity 50, "
        "S3 16.7, A5 1.7. Titans' Theorem 4.1 has no published measurement."
    )
    return Study(
        "statetracking", "State tracking: the product so far in a group", size, tuple(rows), tuple(columns),
        (Measure("states", "state_tracking", (f"evaluation.state_tracking.lengths={list(LENGTHS)}",
                                              "evaluation.state_tracking.samples=256")),),
        size, note, folder="state_tracking", rated=False,
        seeds=seeds, pictures=(pictures.states,),
    )  # fmt: skip
