"""The notebook of examples/: its cells run, and its text agrees with its committed outputs."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
(NOTEBOOK,) = (ROOT / "examples").glob("*.ipynb")
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
FEW = {"STEPS": 2, "TOKENS": 4096}
"""Sizes of the quick run."""


def run_cells(monkeypatch, sizes: dict[str, int]) -> tuple[dict, int]:
    """Run every code cell in order; return the names that they define, and the number of pictures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: (shown.append(plt.gcf()), plt.close("all")))
    names: dict = {"__name__": "notebook"}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for name, size in sizes.items():
                source = re.sub(rf"^{name} = [\d_]+", f"{name} = {size}", source, flags=re.M)
            exec(compile(source, f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    assert all(names[name] == size for name, size in sizes.items())
    return names, len(shown)


def test_the_cells_run(monkeypatch, capsys):
    names, pictures = run_cells(monkeypatch, FEW)
    assert pictures == 4
    assert [(point.memory, point.window) for point in names["asked"]] == [(8, 8), (8, 0)]
    writes, on_needles = re.search(
        r"block 1: writes (\S+) in all, (\S+) of it on needles", capsys.readouterr().out
    ).groups()
    assert float(writes) > 0 and writes == on_needles


@pytest.mark.slow(reason="twenty seconds of training and reading")
def test_what_the_text_says_of_surprise(monkeypatch):
    names, _ = run_cells(monkeypatch, {})
    second, control = names["second"], names["control"]
    assert abs(second.mean() / control.mean() - 1) < 0.05 < (second.std() / second.mean())


def test_the_file_is_light_and_holds_the_outputs_of_one_run():
    assert NOTEBOOK.stat().st_size < 200_000
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    printed = "".join("".join(output.get("text", [])) for output in outputs)
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    said = re.findall(r"\b\d+\.\d\d\b", text)
    assert said and all(figure in printed for figure in said)
    assert f"../examples/{NOTEBOOK.name}" in (ROOT / "docs/python.md").read_text(encoding="utf-8")
