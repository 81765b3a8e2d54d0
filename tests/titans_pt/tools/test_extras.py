"""The core needs four packages; a missing package of an extra is one line that names the extra."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from titans_pt.errors import UserError
from titans_pt.tools.extras import EXTRAS, WITHIN, missing, needed

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"pyyaml": "yaml", "fla-core": "fla"}

# For a fresh process in which the packages of `absent` are missing: first all extras, then all but text and demo.
ABSENT = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

from titans_pt.tools.extras import EXTRAS

absent = {name for names in EXTRAS.values() for name in names} | {"platformdirs", "pandas", "psutil", "rich"}

class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
said = {}

def program(*words):
    from titans_pt.__main__ import main

    sys.argv, shown = ["titans", *words], io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.suppress(SystemExit):
        main()
    said[" ".join(words)] = shown.getvalue()

import torch
from titans_pt import MAC, NeuralMemory, Titan, UserError, mixer

x, x2 = torch.randn(2, 64, 64), torch.randn(2, 64, 64)
memory = NeuralMemory(64, n_heads=8, chunk_size=16, depth=2)
y, state = memory(x)
y2, state = memory(x2, state)
y2.sum().backward()
MAC(16, n_heads=2, segment=16)(x[..., :16])
mixer("gated_deltanet", 16, n_heads=2)(x[..., :16])
try:
    Titan.from_pretrained("runs/quickstart")
except UserError as error:
    said["Titan"] = str(error)
program("demo")
program("train", "quickstart")
absent -= {*EXTRAS["text"], *EXTRAS["demo"]}
program("prepare", "quickstart")
program("evaluate", "nowhere")
print(json.dumps([list(y2.shape), said]))
"""


def test_an_extra_has_the_packages_of_pyproject():
    for extra, lines in PROJECT["optional-dependencies"].items():
        if extra == "dev":
            continue
        names = [re.match(r"[\w.-]+", line)[0] for line in lines if not line.startswith("titans-pt[")]
        brought = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
        assert brought == set(EXTRAS[extra]) - {"huggingface_hub"}, extra  # it comes with transformers
        inner = {name for line in lines for name in re.findall(r"titans-pt\[(\w+)\]", line)}
        assert inner <= {*WITHIN.get(extra, ()), "train"}, extra
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys() - {"dev"}


def test_the_core_has_four_packages_and_dev_has_all_extras():
    names = {re.match(r"[\w.-]+", line)[0] for line in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "pydantic", "safetensors"}
    (extras,) = re.findall(r"titans-pt\[([\w,]+)\]", " ".join(PROJECT["optional-dependencies"]["dev"]))
    brought = set(extras.split(","))
    assert brought | {"train", "demo", "text"} == EXTRAS.keys(), "eval brings train"


@pytest.mark.thorough
def test_the_layers_need_the_core_alone_and_the_program_says_what_it_lacks(tmp_path):
    out = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    shape, said = json.loads(out.stdout.splitlines()[-1])
    assert shape == [2, 64, 64]
    assert said["Titan"] == "yaml: not installed, and Titan.from_pretrained needs it; pip install 'titans-pt[text]'"
    assert said["demo"] == "titans: error: click: not installed, and the program titans needs it; " \
        "pip install 'titans-pt[demo]'\n"  # fmt: skip
    assert said["train quickstart"] == "titans: error: click: not installed, and the program titans needs it; " \
        "pip install 'titans-pt[train]'\n"  # fmt: skip
    assert re.fullmatch(r"titans: error: \w+: not installed, and titans prepare needs it; "
                        r"pip install 'titans-pt\[train\]'\n", said["prepare quickstart"]), said  # fmt: skip
    assert said["evaluate nowhere"].startswith("titans: error: nowhere"), "what needs no package is said first"


def test_a_missing_package_names_its_extra():
    def told(name, *ask_for):
        return str(missing(ModuleNotFoundError(name=name), "titans x", ask_for))

    assert told("lm_eval.api") == "lm_eval: not installed, and titans x needs it; pip install 'titans-pt[eval]'"
    assert "'titans-pt[text]'" in told("yaml") and "'titans-pt[train]'" in told("yaml", "train")
    assert "'titans-pt[demo]'" in told("tqdm", "demo") and "'titans-pt[train]'" in told("click", "train")
    assert "'titans-pt[train]'" in told("deepspeed", "demo"), "demo does not bring it"
    assert "'titans-pt[eval]'" in told("transformers", "train")
    assert missing(ModuleNotFoundError(name="titans_pt.nothing"), "x") is None
    with pytest.raises(UserError, match="nltk: not installed, and this needs it"), needed("this"):
        raise ModuleNotFoundError(name="nltk.data")
    with pytest.raises(ModuleNotFoundError), needed("this"):
        raise ModuleNotFoundError(name="titans_pt.nothing")
