"""Training must not depend on tensor x context x data x ZeRO stage, nor on a change of them in the middle of a run.

    python -m tests.helpers.matrix [equality | resume] [MODEL ...]

prints one table or both, for the named models or all.

Equality: 20 steps under every combination against one process. Resume: 10 steps under each combination, then 10 from
its checkpoint under each combination, against 20 steps of one process.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.conftest import TINY, merged, prepare_corpus
from tests.helpers.processes import run_jobs
from titans_pt.runs.metrics import read_metrics

MODELS = {
    "lmm": "[lmm]", "mac": "[mac]", "mag": "[mag]", "mal": "[mal]", "transformer": "[attention]",
    "hybrid": "[lmm,swa,mac]",
}  # fmt: skip
TOPOLOGIES = ((1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2))
STAGES = (1, 2, 3)
ALL = [(*shape, stage) for shape in TOPOLOGIES for stage in STAGES if shape[1] == 1 or stage < 3]
REFERENCE = (1, 1, 1, 1)
TOLERANCE = 1e-5
"""Largest relative difference of a loss, a gradient norm or a figure of the memory."""
IN_A_START = 15
"""Trainings in one start of processes: each leaves threads of its process groups, which slow all later ones."""
MEMORY = ("theta", "eta", "alpha", "memory_norm", "momentum_norm")
"""Figures of memories (titans_pt.training.probes), without surprise: its last tokens are more than a piece has here."""
# Head size 16: with 4, the memory's LayerNorm makes training chaotic, and even two data-parallel ranks differ.
SIZE = {
    "model": {"d_model": 64, "n_layers": 2, "n_heads": 4, "mlp_hidden": 64, "memory": {"depth": 2, "expansion": 2}},
    "train": {"max_steps": 20, "lr": 1e-3},
}

Combination = tuple[int, int, int, int]
"""tensor, context, data, ZeRO stage."""


def write_config(folder: Path, corpus: Path) -> Path:
    """Write a config file for the models of this module, with the token files of ``corpus``."""
    source = {"kind": "files", "path": str(corpus.parent / "text.jsonl")}
    path = folder / "config.json"  # JSON is YAML
    tree = merged(merged(TINY, SIZE), {"data": {"dir": str(corpus), "sources": [source]}})
    path.write_text(json.dumps(tree))
    return path


def train(config: Path, folder: Path, jobs: dict[str, tuple[str, Combination, list[str]]]):
    """Run the jobs {name: (model, combination, more overrides)}; jobs with equally many processes share starts."""
    by_size: dict[int, dict[str, list[str]]] = {}
    for name, (model, (tensor, context, data, stage), more) in jobs.items():
        overrides = [f"model.mixers={MODELS[model]}", f"parallel.tensor={tensor}", f"parallel.context={context}",
                     f"parallel.zero_stage={stage}"]  # fmt: skip
        by_size.setdefault(tensor * context * data, {})[name] = overrides + more
    for processes, found in by_size.items():
        names = list(found)
        for first in range(0, len(names), IN_A_START):
            batch = {name: found[name] for name in names[first : first + IN_A_START]}
            run_jobs(processes, config, folder, batch, timeout=7200)


def difference(folder: Path, reference: Path) -> float:
    """Largest relative difference of losses, gradient norms and figures of memories over all steps of two runs."""
    found, expected = (watched(path) for path in (folder, reference))
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 21))
    assert [each.keys() for _, each in found] == [each.keys() for _, each in expected]
    pairs = [(x[name], y[name]) for (_, x), (_, y) in zip(found, expected, strict=True) for name in x]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def watched(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, figures that no combination may change) for every step of a run."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], {name: r[name] for name in ("loss", "grad_norm", *MEMORY) if name in r}) for r in records]


def equality(config: Path, folder: Path, model: str, combinations: list[Combination], more: list[str] = ()):
    """Return {combination: difference} between 20 steps under each combination and 20 steps in one process."""
    names = {c: f"{model}-{name_of(c)}" for c in combinations}
    reference = f"{model}-reference"
    jobs = {name: (model, c, list(more)) for c, name in names.items()}
    train(config, folder, {reference: (model, REFERENCE, [])} | jobs)
    return {c: difference(folder / name, folder / reference) for c, name in names.items()}


def resume(config: Path, folder: Path, model: str, sources: list[Combination], targets: list[Combination]):
    """Return {(source, target): difference} between 10 steps under source, then 10 under target, and one process."""
    reference = f"{model}-straight"
    jobs = {f"{model}-{name_of(c)}-half": (model, c, ["train.stop_at=10"]) for c in sources}
    train(config, folder, {reference: (model, REFERENCE, [])} | jobs)
    pairs = {(a, b): f"{model}-{name_of(a)}-to-{name_of(b)}" for a in sources for b in targets}
    for (source, _), name in pairs.items():
        shutil.copytree(folder / f"{model}-{name_of(source)}-half", folder / name)
    train(config, folder, {name: (model, b, []) for (_, b), name in pairs.items()})
    return {pair: difference(folder / name, folder / reference) for pair, name in pairs.items()}


def name_of(combination: Combination) -> str:
    """The combination as a name: tensor x context x data, z stage."""
    return "{}x{}x{}z{}".format(*combination)


def main(words: list[str]):
    tables = [word for word in words if word in ("equality", "resume")] or ["equality", "resume"]
    models = [word for word in words if word not in tables] or list(MODELS)
    print("Largest relative difference of losses and gradient norms; tensor x context x data z ZeRO stage.")
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(Path(folder))
        config = write_config(Path(folder), corpus)
        if "equality" in tables:
            _head("20 steps against 1x1x1z1")
            for model in models:
                found = equality(config, Path(folder), model, ALL)
                print(f"| {model} |", *(f"{found[c]:.0e} |" for c in ALL), flush=True)
        for model in models if "resume" in tables else ():
            found = resume(config, Path(folder), model, ALL, ALL)
            _head(f"{model}: 10 steps as below, then 10 as on the right")
            for source in ALL:
                print(f"| {name_of(source)} |", *(f"{found[source, t]:.0e} |" for t in ALL), flush=True)


def _head(title: str):
    print(f"\n| {title} |", *(f"{name_of(c)} |" for c in ALL))
    print("|---|", *["---|"] * len(ALL), sep="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
