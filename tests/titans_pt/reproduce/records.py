"""Made-up records of runs, for tests without training."""

from titans_pt.reproduce.runs import Run, portable


def trained(loss: float = 3.0, parameters: int = 1000, tokens: int = 4096) -> dict:
    return {
        "parameters": parameters, "tokens": tokens, "hardware": "a machine", "checkpoint": "c0ffee" * 10,
        "validation_loss": loss, "curve": [[2048, 4.0, 1.0], [4096, loss, 1.0]], "validation": [[4096, loss]],
    }  # fmt: skip


def record(run: Run, measured: dict | None = None, failed: str = "", **about) -> dict:
    """The record of ``run`` with its own settings and these results by measure."""
    words = {m.name: m.settings(run.config.model) for m in run.measures}
    found = {name: {"words": words[name], **result} for name, result in (measured or {}).items()}
    return run.begin(trained(**about), failed) | {"measured": found, "config": portable(run.config)}


def text(loss: float, stderr: float | None = 0.01, tokens: int = 131072, by_stream: tuple[float, ...] = ()) -> dict:
    """Result of the suite perplexity."""
    place = {"first": 1, "last": 512, "mean": loss, "n": tokens, "stderr": stderr}
    by_length = [{"length": 512, "loss": loss, "perplexity": None}]
    about = {"loss": loss, "stderr": stderr, "tokens": tokens, "streams": 256, "by_stream": list(by_stream)}
    return about | {"frozen": [], "positions": [place], "by_length": by_length}
