"""Table 4: models pretrained on a genome that then classify short sequences, and the same models from scratch."""

from titans_pt.reproduce import measures, pictures
from titans_pt.reproduce.measures import TRAINING, Measure
from titans_pt.reproduce.study import Column, Row, Study

PRETRAIN = "pretrain"
"""Variant that is pretrained on the genome. All others start from its weights, except those from scratch."""
BENCHMARKS = {
    # name: (folder, data.seq_len, training sequences)
    "cohn": ("human_enhancers_cohn", 512, 20_843), "ensembl": ("human_enhancers_ensembl", 576, 123_872),
    "regulatory": ("human_ensembl_regulatory", 832, 231_348), "nontata": ("human_nontata_promoters", 256, 27_097),
    "ocr": ("human_ocr_ensembl", 640, 139_804),
}  # fmt: skip
_OFF = ("model.memory.writes=false",)
STARTS = {"": (), "scratch": (), "memory-off": _OFF, "scratch-memory-off": _OFF}
"""Ways of training on a set: pretrained or from scratch, with the memory on or off."""
TINY_MODELS, PAPER_MODELS = ("lmm", "transformer", "mamba2"), ("lmm", "transformer", "mamba", "mamba2")
TINY_SETS = ("coding", "splice")
SEEDS = {"tiny": (0, 1, 2), "paper": (0, 1, 2, 3, 4)}
_EPOCHS, _BATCH = 10, 256
"""Epochs of a set, and sequences per step, at the paper's size."""
_COMMON = ("task=classify_dna", "data.validation_fraction=0.1", "train.weight_decay=0.01")


def _tiny(name: str, length: int, batch: int, steps: int, each: int) -> tuple[str, ...]:
    return (
        *_COMMON, f"classify_dna.set={name}", f"data.dir=data/dna/{name}", f"data.seq_len={length}",
        f"train.batch_tokens={batch * length}", f"train.micro_batch={batch}", f"train.max_steps={steps}",
        f"train.warmup_steps={steps // 10}", f"train.eval_every={each}", "train.checkpoint_every=1000",
        "train.eval_samples=1000", "train.patience=4", "train.lr=2e-3",
    )  # fmt: skip


def _paper(name: str) -> tuple[str, ...]:
    folder, length, rows = BENCHMARKS[name]
    each = round(0.9 * rows / _BATCH)
    return (
        *_COMMON, "classify_dna.set=null", f"classify_dna.path=data/genomic_benchmarks/datasets/{folder}",
        "classify_dna.reference=data/genomes/GRCh38.fa", f"data.dir=data/dna/{name}", f"data.seq_len={length}",
        f"train.batch_tokens={_BATCH * length}", "train.micro_batch=64", f"train.max_steps={_EPOCHS * each}",
        f"train.warmup_steps={each}", f"train.eval_every={each}", f"train.checkpoint_every={each}",
        "train.eval_samples=30000", "train.patience=3", "train.lr=1e-3",
    )  # fmt: skip


_SETS = {"coding": _tiny("coding", 100, 64, 225, 25), "splice": _tiny("splice", 60, 64, 432, 36)}
_SETS |= {name: _paper(name) for name in BENCHMARKS}
_NAMES = {"cohn": "enhancers (Cohn)", "ensembl": "enhancers (Ensembl)", "regulatory": "regulatory (Ensembl)",
          "nontata": "promoters without TATA box", "ocr": "open chromatin (Ensembl)",
          "coding": "E. coli, coding or not", "splice": "splice sites"}  # fmt: skip


def _row(model: str, name: str, start: str) -> Row:
    variant = f"{name}-{start}" if start else name
    words = (*_SETS[name], *STARTS[start])
    return Row(
        model,
        variant,
        words,
        f"{_NAMES[name]}, {pictures.STARTED[start]}",
        "" if start.startswith("scratch") else PRETRAIN,
    )


def table4(size: str) -> Study:
    models, sets = (TINY_MODELS, TINY_SETS) if size == "tiny" else (PAPER_MODELS, tuple(BENCHMARKS))
    rows = [Row(model, PRETRAIN, (), "reads the genome") for model in models]
    for name in sets:
        rows += [_row(model, name, start) for start in ("", "scratch") for model in models]
        rows += [_row("lmm", name, start) for start in ("memory-off", "scratch-memory-off")]
    baselines = {"majority": "majority", "length": "length", "look-up": "look-up", "5-mer regression": "5-mers"}
    columns = (
        Column("accuracy (%)", "classes", measures.classified("test"), "accuracy"),
        Column("MCC", "classes", measures.classified("test", correlation=True)),
        Column("without copies (%)", "classes", measures.classified("distinct")),
        Column("middle 200 bases (%)", "classes", measures.classified("middle")),
        *(Column(f"{shown} (%)", "classes", measures.baseline(name)) for name, shown in baselines.items()),
        Column("nats a base", "text", measures.nats),
        Column("steps", TRAINING, measures.steps_trained),
    )
    tokens = 622_592 if size == "tiny" else 4_194_304  # tiny: all validation blocks, as for the Markov floor
    text = Measure(
        "text", "perplexity", (f"evaluation.perplexity.tokens={tokens}", "evaluation.perplexity.length=1024")
    )
    note = (
        "A tenth of the training sequences, drawn by the seed, chooses the checkpoint; the test is read once. "
        "Published figures are those of Titans' Table 4, whose baselines are Based's and HyenaDNA's: these chose "
        "settings and epoch on the test."
    )
    return Study(
        "table4", "DNA: classes of short sequences", size, tuple(rows), columns, (Measure("classes", "classes"), text),
        size, note, folder="dna-tiny" if size == "tiny" else "dna", rated=False,
        seeds={row.key: SEEDS[size] for row in rows if row.variant != PRETRAIN},
        pictures=(pictures.classes,),
    )  # fmt: skip
