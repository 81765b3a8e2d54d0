"""Exports of the package: names and signatures as in public.txt, imported quickly and without the extras."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import titans_pt

SNAPSHOT = Path(__file__).with_name("public.txt")

FRESH = """
import json, sys, time
seconds = []
for _ in range(5):
    sys.modules.pop("titans_pt", None)
    began = time.perf_counter()
    import titans_pt
    seconds.append(time.perf_counter() - began)
bare = sorted({"torch", "numpy", "pydantic"} & sys.modules.keys())
from titans_pt import NeuralMemory, MAC, mixer
NeuralMemory(16, n_heads=2), MAC(16, n_heads=2), mixer("swa", 16, n_heads=2)
heavy = {"deepspeed", "datasets", "wandb", "matplotlib", "transformers", "pyarrow", "sentencepiece", "tokenizers",
         "torch._dynamo"}
layers = sorted(heavy & sys.modules.keys())
from titans_pt import Titan, save_state
print(json.dumps([min(seconds), bare, layers, sorted(heavy & sys.modules.keys())]))
"""


def public() -> str:
    """The public interface: one line per name, and per method of a class that the package itself defines."""
    lines = []
    for name in sorted(titans_pt.__all__):
        value = getattr(titans_pt, name)
        if value is titans_pt.UserError:
            lines.append(name)
            continue
        lines.append(f"{name}{_signature(value)}")
        if inspect.isclass(value):
            own = {method for kind in value.__mro__ if "titans_pt.library" in kind.__module__ for method in vars(kind)}
            for method in sorted(own):
                if not method.startswith("_") and inspect.isroutine(getattr(value, method)):
                    lines.append(f"{name}.{method}{_signature(getattr(value, method))}")
    return "\n".join(lines) + "\n"


def _signature(value) -> str:
    """Signature with the parameters' names, kinds and defaults, without types."""
    parameters = inspect.signature(value).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def test_the_public_names_and_their_arguments_are_those_of_the_snapshot():
    """A difference here is a change for users: see docs/python.md, "What may change", and add a line to CHANGELOG.md.

    Then: python -c "from tests.titans_pt.library import test_public as t; t.SNAPSHOT.write_text(t.public())"
    """
    assert public() == SNAPSHOT.read_text()
    assert sorted(titans_pt.__all__) == sorted(titans_pt._PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'NeuralMemroy'"):
        _ = titans_pt.NeuralMemroy
    assert set(titans_pt.__all__) <= set(dir(titans_pt))


def test_the_docs_name_every_public_name():
    page = (Path(__file__).parents[3] / "docs/python.md").read_text()
    assert [name for name in titans_pt.__all__ if f"`{name}" not in page] == []


@pytest.mark.thorough
def test_imports_in_a_fresh_process():
    out = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True).stdout
    seconds, bare, layers, titan = json.loads(out)
    assert seconds < 0.1 and bare == []
    assert layers == [] and titan == []
