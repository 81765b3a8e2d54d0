"""The model card of an exported folder: what the model is, how to call it, and what was measured."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from titans_pt import __version__
from titans_pt.errors import UserError
from titans_pt.runs.loaded import LoadedRun
from titans_pt.runs.metrics import read_metrics
from titans_pt.tools.markdown import markdown_table
from titans_pt.tools.sealed import unseal

_USE = """\
```
pip install torch transformers pydantic sentencepiece
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

FOLDER is this folder, or its name on the hub. The code is in it. Where titans-pt is installed, `import
titans_pt.huggingface` takes its place, and `titans import FOLDER --out RUN` makes a run of the folder. A batch of
different lengths is padded on the left, as the tokenizer does it with `padding=True`."""


def model_card(run: LoadedRun) -> str:
    """Text of README.md with the run's figures and the hub's metadata, in Markdown, without paths of this machine."""
    name = run.folder.path.resolve().name
    figures = list(_figures(run))
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["titans", "custom_code"], model_name=name,
        eval_results=[
            EvalResult(task_type="text-generation", dataset_type="text", dataset_name=dataset, metric_type=kind,
                       metric_name=metric, metric_value=value)
            for dataset, kind, metric, value in figures
        ] or None,
    )  # fmt: skip
    parts = [
        f"---\n{data.to_yaml()}\n---", f"# {name}",
        "A Titans language model ([arXiv 2501.00663](https://arxiv.org/abs/2501.00663)): its long-term memory is a "
        f"small network that keeps learning at test time. Trained with titans-pt {__version__}.",
        markdown_table(["setting", "value"], _facts(run)), "## Use", _USE, "## Figures",
        markdown_table(
            ["on", "figure", "value"], [(dataset, metric, f"{value:.4g}") for dataset, _, metric, value in figures]
        )
        if figures else "None were measured on this checkpoint.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _facts(run: LoadedRun) -> list[tuple[str, str]]:
    model, train, data = run.config.model, run.config.train, run.config.data
    names = [source.path for source in data.sources if source.kind == "hub" and source.path]
    hub = [name for name in names if not name.startswith((".", "/"))]
    return [
        ("parameters", f"{sum(p.numel() for p in run.model.parameters()):,}"),
        ("mixers", ", ".join(model.mixers)),
        ("blocks, width", f"{model.n_layers}, {model.d_model}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("step", f"{run.step:,} of {train.max_steps:,}"),
        ("tokens of one step, of one sample", f"{train.batch_tokens:,}, {data.seq_len:,}"),
        ("peak learning rate, weight decay", f"{train.lr:g}, {train.weight_decay:g}"),
        ("precision in training; of these weights", f"{train.precision}; fp32"),
        *([("text", ", ".join(hub))] if hub else []),
        ("checkpoint (SHA-256)", f"`{run.checkpoint_hash[:16]}`"),
    ]


def _figures(run: LoadedRun) -> Iterator[tuple[str, str, str, float]]:
    """Yield (data, kind, name, value) of each figure of this checkpoint, from training and from titans evaluate."""
    for record in read_metrics(run.folder.metrics):
        if record["step"] == run.step and record["kind"] == "validation" and record.get("validation_loss") is not None:
            data = "validation text" if run.task.name == "language" else f"validation samples of {run.task.name}"
            yield f"{data}, while training", "loss", f"loss ({run.task.unit})", record["validation_loss"]
    path = run.folder.evaluation / f"step-{run.step:08d}" / "summary.json"
    try:
        summary = unseal(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); make it again with: titans evaluate {run.folder.path}, or delete "
                        "it to export without its figures") from None  # fmt: skip
    if summary.get("checkpoint_hash") != run.checkpoint_hash or summary.get("caching"):
        return  # figures of other weights, or with caches, which the exported model does not have
    if "perplexity" in summary:
        other = summary["perplexity"].get("text")
        data = f"validation part of {Path(other).name}" if other else "validation text"
        yield data, "perplexity", "perplexity per token", summary["perplexity"]["perplexity"]
    for suite in ("needle", "babilong"):
        for task, found in summary.get(suite, {}).get("tasks", {}).items():
            for row in found["by_length"]:
                yield f"{suite}: {task}", "accuracy", f"accuracy at {row['length']:,} tokens", row["mean"]
    for task, found in summary.get("commonsense", {}).get("tasks", {}).items():
        for metric, value in found.items():
            if isinstance(value, float):
                yield f"lm-eval: {task}", metric, metric, value
