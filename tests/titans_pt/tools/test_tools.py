"""The tools import nothing from the rest of the package but errors."""

import subprocess
import sys
from pathlib import Path

from titans_pt import tools

PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"titans_pt.tools.{name}")
print(*sys.modules)
"""


def test_tools_import_nothing_else_of_ours_and_nothing_heavy():
    names = [path.stem for path in Path(tools.__file__).parent.glob("*.py") if path.stem != "__init__"]
    assert len(names) > 3
    found = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=True)
    modules = set(found.stdout.split())
    ours = {name for name in modules if name.startswith("titans_pt.") and not name.startswith("titans_pt.tools")}
    assert ours <= {"titans_pt.errors"}
    assert not {"torch", "numpy", "matplotlib"} & modules
