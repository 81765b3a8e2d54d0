"""Ideas published after Titans, each as a row beside LMM and MAC: other recurrences, other rules of the memory."""

from titans_pt.reproduce.study import Row

MIXERS = ("kda", "gdn2", "deltaproduct", "rwkv7", "hope")
"""Models with a linear memory, and Hope, whose memories make their own keys, values and gates."""
RULES = (
    Row("lmm", "yaad", ("model.memory.rule=yaad",), "Huber loss (Yaad)"),
    Row("lmm", "omega-4", ("model.memory.rule=omega", "model.memory.omega.window=4"), "windows of 4 (Omega)"),
    Row("lmm", "omega-16", ("model.memory.rule=omega", "model.memory.omega.window=16"), "windows of 16 (Omega)"),
    Row("lmm", "dgd", ("model.memory.rule=dgd",), "delta gradient descent"),
    Row("lmm", "unit", ("model.memory.rule=muon", "model.memory.muon.form=unit"), "momentum over its norm"),
    Row("lmm", "muon", ("model.memory.rule=muon",), "orthogonal momentum (Muon)"),
)
"""LMM with one change and as many parameters."""


def ideas(lmm: int, mac: int) -> tuple[Row, ...]:
    """All rows.

    Args:
        lmm, mac: model.mlp_hidden of these models with caches; it offsets the parameters of the caches' gates.
    """
    caches = ("model.memory.caching.segment=64", "model.memory.caching.slots=8")
    cached = (Row(model, "caching", (*caches, f"model.mlp_hidden={hidden}"), "Memory Caching (GRM)")
              for model, hidden in (("lmm", lmm), ("mac", mac)))  # fmt: skip
    return (*map(Row, MIXERS), *RULES, *cached)
