"""RULER's needles in text, small: models that learn them from the answers alone, in three stages."""

from titans_pt.reproduce import measures, pictures
from titans_pt.reproduce.measures import NEEDLES, of_lengths
from titans_pt.reproduce.study import Column, Row, Study

MODELS = ("lmm", "lmm-defaults", "ttt_mlp", "gated_deltanet", "mamba2", "transformer")
_DEBIAN = (
    "data.dir=data/ruler-debian", "data.tokenizer.path=data/ruler-text/tokenizer.model",
    "data.sources=[{kind: files, path: corpora/debian/HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet}]",
    "data.validation_fraction=0.01", "data.seq_len=4096", "train.batch_tokens=4096", "train.lr=1e-3",
)  # fmt: skip
STAGES = {
    "stage-1": ((), "Python's documentation, to 2,048 tokens"),
    "stage-2": (
        (*_DEBIAN, "train.max_steps=840", "ruler.lengths=512,1024,2048:2,4096:2",
         "ruler.tasks=[niah_single_1,niah_single_2,niah_single_2,niah_single_2]"),
        "then Debian's documentation, to 4,096 tokens",
    ),
    "stage-3": (
        (*_DEBIAN, "train.max_steps=700", "ruler.lengths=512:2,1024,2048,4096",
         "ruler.tasks=[niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_1,niah_multikey_1]"),
        "and then one of four keys",
    ),
}  # fmt: skip
"""Settings of each stage besides those of configs/ruler.yaml, and what it reads. A stage starts from the weights of the
one before it."""
_ASKED = {"near": ((2048, 2053, 16384, 16389), 20), "long": ((131072, 131077), 10), "far": ((1048576,), 5)}
"""Lengths, and samples of each, by measure. Lengths five tokens apart end at other places in the memory's chunks."""


def ruler(size: str) -> Study:
    before = dict(zip(STAGES, ("", *STAGES), strict=False))
    rows = tuple(
        Row(model, stage, words, change, before[stage]) for stage, (words, change) in STAGES.items() for model in MODELS
    )
    tasks = NEEDLES[:2]
    taken = tuple(
        of_lengths(name, "needle", lengths, samples, f"tasks=[{','.join(tasks)}]", far=name != "near")
        for name, (lengths, samples) in _ASKED.items()
    )
    columns = tuple(
        Column(f"{where}, {length:,}", name, measures.question(task, length))
        for task, where in zip(tasks, ("noise", "essays"), strict=True)
        for name, (lengths, _) in _ASKED.items() for length in lengths
    )  # fmt: skip
    note = "Percent right; the essays are in no training. Full attention is not asked beyond 16,389 tokens."
    return Study("ruler", "Needles in text, learned from the answers alone", size, rows, columns, taken, size, note,
                 folder="ruler", rated=False, pictures=(pictures.training,))  # fmt: skip
