"""The source files that a model needs, as an exported folder carries them for ``trust_remote_code``.

transformers copies a folder's modeling file, and the files that it imports relatively, into one flat folder. Each of
our modules that the model imports therefore becomes a file next to the modeling file. Its name is the dotted name with
underscores; in its text, only the imports of our modules change. Triton's kernels, which modules import inside
functions, are included for GPUs. Files that are not Python (kernels in C), which a module finds as
``Path(__file__).with_name(NAME)``, are included as text in CARRIED.
"""

import ast
import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from titans_pt import __version__
from titans_pt.config import ModelConfig
from titans_pt.errors import UserError
from titans_pt.huggingface.modeling import MODELING
from titans_pt.kernels.memory.rules import RULES, Titans
from titans_pt.models.mixers import MIXERS
from titans_pt.token_plans.mixers import planner_of

CARRIED = "titans_pt_carried"
_START = "titans_pt.huggingface.modeling"
HEAD = re.compile(r"# \S+ of titans-pt \S+, Apache-2\.0; only the imports are changed\.$")
"""First line of every carried file except CARRIED."""
_BESIDE = re.compile(r'Path\(__file__\)\.with_name\("([^"]+)"\)')
_FILES = '''"""Files that are not Python, as text."""

import contextlib
import os
from pathlib import Path

FILES = {
'''
_PLACED = '''

def placed(name: str) -> Path:
    """Where a file of FILES is, after all of them were written next to this module, unless they are there; or should
    be, where nothing can be written."""
    folder = Path(__file__).with_name("carried")
    with contextlib.suppress(OSError):
        for other, text in FILES.items():
            path = folder / other
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.{os.getpid()}")
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, path)
    return folder / name
'''


def source_files(model: ModelConfig) -> dict[str, str]:
    """File name -> text of all source files that a model with these settings needs; MODELING comes first.

    Raises:
        UserError: a mixer whose source is not a file, or that imports one of our modules without ``from``.
    """
    mixers = [MIXERS.find(kind) for kind in model.kinds]
    plans = [planner.__module__ for planner in map(planner_of, mixers) if planner is not None]
    # Titans' own rule comes with every memory.
    rules = [] if model.memory.rule == Titans.name else [RULES.find(model.memory.rule).__module__]
    first = [_START, *(mixer.__module__ for mixer in mixers), *rules, *plans]
    ours = {name.partition(".")[0] for name in first}
    modules: dict[str, _Module] = {}
    _collect(first, ours, modules, lambda module: module.needs)  # without what functions import
    others = sorted({top for module in modules.values() for top in module.outside})
    _collect(first, ours, modules, lambda module: module.needs | module.may_need)
    lines = [
        "", "", "# The mixers register themselves, and so do their memory rule and token plans.",
        *(f"from .{_flat(mixer.__module__)} import {mixer.__qualname__}  # noqa: E402, F401" for mixer in mixers),
        *(f"from .{_flat(name)} import __name__ as _  # noqa: E402, F401" for name in dict.fromkeys([*rules, *plans])),
        "", f"# Here transformers looks for packages that are missing: {', '.join(others)}.",
        *(f"import {top}  # noqa: E402, F401" for top in others),
    ]  # fmt: skip
    files = {f"{_flat(name)}.py": module.text for name, module in modules.items()}
    if carried := {name: path for module in modules.values() for name, path in module.beside.items()}:
        texts = [f"    {name!r}: {_literal(path.read_text(encoding='utf-8'))},\n" for name, path in carried.items()]
        files[f"{CARRIED}.py"] = _FILES + "".join(texts) + "}\n" + _PLACED
    lines += [
        "", "",
        "def _all_files():",
        '    """Never called. Before version 5.9, transformers takes along only what this very file imports."""',
        *(f"    from .{Path(name).stem} import __name__ as _" for name in sorted(files) if Path(name).stem != MODELING),
    ]  # fmt: skip
    files[f"{MODELING}.py"] += "\n".join(lines) + "\n"
    return files


def _literal(text: str) -> str:
    """A string literal of ``text``: a raw one if possible."""
    raw = f"r'''{text}'''"
    try:
        return raw if ast.literal_eval(raw) == text else repr(text)
    except SyntaxError:
        return repr(text)


def _collect(first: list[str], ours: set[str], modules: dict[str, "_Module"], needs: Callable[["_Module"], set[str]]):
    """Adds the modules ``first``, and all modules that they need, to ``modules``."""
    todo, seen = list(first), set()
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            if name not in modules:
                modules[name] = _Module(name, ours)
            todo += sorted(needs(modules[name]))


def _flat(module: str) -> str:
    return MODELING if module == _START else module.replace(".", "_")


class _Module:
    """One module, rewritten.

    Attributes:
        text: source text with relative imports of flat names.
        needs, may_need: our modules that it imports, and our modules that its functions and try blocks import.
        outside: packages without which it cannot be imported.
        beside: files that are not Python and lie next to it, by their path in the package.
    """

    def __init__(self, name: str, ours: set[str]):
        spec = None
        if name != "__main__":  # importing that file again would run the program
            with contextlib.suppress(ValueError):  # a module that was made in memory
                spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise UserError(f"{name}: no source file that can be imported, and an exported folder must carry it; put "
                            "the mixer in a file of its own")  # fmt: skip
        self.name, self.package = name, name if spec.submodule_search_locations else name.rpartition(".")[0]
        self.needs: set[str] = set()
        self.may_need: set[str] = set()
        self.outside: set[str] = set()
        self.beside: dict[str, Path] = {}
        path = Path(spec.origin)
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        tree = ast.parse(source)
        required, typed = set(map(id, tree.body)), set(map(id, _imports_for_types(tree)))
        for node in sorted(_imports(tree), key=lambda node: -node.lineno):
            tops = {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                tops = {self._absolute(node).partition(".")[0]}
            if tops & ours and id(node) in typed:
                lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + "pass"]
            elif tops & ours:
                needs = self.needs if id(node) in required else self.may_need
                lines[node.lineno - 1 : node.end_lineno] = self._rewritten(node, needs)
            elif id(node) in required:
                self.outside |= tops - sys.stdlib_module_names
        for i, line in enumerate(lines):
            lines[i] = _BESIDE.sub(lambda match: self._placed(path.with_name(match[1])), line)
        if self.beside:
            first = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
            lines.insert(first.lineno - 1, f"from .{CARRIED} import placed")
        head = f"# {name} of titans-pt {__version__}, Apache-2.0; only the imports are changed.\n"
        self.text = head + "\n".join(lines) + "\n"

    def _placed(self, path: Path) -> str:
        place = "/".join([*self.package.split("."), path.name])
        self.beside[place] = path
        return f'placed("{place}")'

    def _absolute(self, node: ast.ImportFrom) -> str:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), self.package)

    def _rewritten(self, node: ast.Import | ast.ImportFrom, needs: set[str]) -> list[str]:
        """Lines that replace an import of our modules, which are added to ``needs``."""
        indent = " " * node.col_offset
        if isinstance(node, ast.Import):
            raise UserError(f"{self.name}: line {node.lineno}: an exported folder carries this file, and cannot with "
                            f"'import {node.names[0].name}'; write it as 'from ... import ...'")  # fmt: skip
        origin = self._absolute(node)
        lines, names = [], []
        for alias in node.names:
            there, module = import_module(origin), f"{origin}.{alias.name}"
            known = hasattr(there, alias.name)
            if isinstance(getattr(there, alias.name), ModuleType) if known else importlib.util.find_spec(module):
                needs.add(module)
                flat = _flat(module)
                # The first line is for transformers, which copies only what stands after "from .".
                lines += [f"{indent}from .{flat} import __name__ as _",
                          f"{indent}from . import {flat} as {alias.asname or alias.name}"]  # fmt: skip
            else:
                names.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
        if names:
            needs.add(origin)
            lines.insert(0, f"{indent}from .{_flat(origin)} import {', '.join(names)}")
        return lines


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _imports_for_types(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports under ``if TYPE_CHECKING:``, which never run: the modules that they name are not carried."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (each for line in node.body for each in _imports(line))
