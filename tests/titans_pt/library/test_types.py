"""The package's types as mypy sees them from a user's file, with the package and its py.typed installed."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
USER = """
import torch
from torch import Tensor, nn

from titans_pt import MAC, LMM, MemoryFigures, NeuralMemory, Reading, Titan

x, x2 = torch.randn(2, 64, 512), torch.randn(2, 64, 512)
memory = NeuralMemory(512, n_heads=8, chunk_size=16, depth=2)
y, state = memory(x)
y2, state = memory(x2, state)
model = Titan.from_pretrained("runs/quickstart")
text: str = model.generate("The function returns", max_new_tokens=50)
notes: Reading = model.read("A document")
figures: MemoryFigures = memory.inspect(x2, state)


class Block(nn.Module):
    def __init__(self, width: int, mixer: type[MAC] | type[LMM] = MAC) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mixer = mixer(width, n_heads=4)

    def forward(self, x: Tensor, state: object = None) -> tuple[Tensor, object]:
        y, state = self.mixer(self.norm(x), state)
        return x + y, state
"""
WRONG = """
from titans_pt import NeuralMemory, Titan

length: int = Titan.from_pretrained("runs/quickstart").generate("The")
memory = NeuralMemory("512")
"""


@pytest.mark.slow(reason="mypy reads torch's types: half a minute")
def test_a_typed_users_file(tmp_path):
    pytest.importorskip("mypy")
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (site / "titans_pt").symlink_to(ROOT / "titans_pt")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}",
         f"--python-executable={tmp_path / 'env/bin/python'}", "user.py", "wrong.py"],
        cwd=tmp_path, env=os.environ | {"MYPYPATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    errors = [line.split(" ")[0] + line[line.rfind("[") :] for line in found.stdout.splitlines() if ": error:" in line]
    assert errors == ["wrong.py:4:[assignment]", "wrong.py:5:[arg-type]"], found.stdout + found.stderr
