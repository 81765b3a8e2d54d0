"""docs/architecture.md agrees with the code: paths, members, and which folder imports which."""

import ast
import inspect
import re
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from torch import nn

from titans_pt.config import Config
from titans_pt.kernels.memory.rules import RULES, OwnGate, Rule
from titans_pt.layers.sharding import Shard
from titans_pt.models.backbone import Backbone
from titans_pt.models.mixers.base import MIXERS, Mixer
from titans_pt.tasks.base import TASKS, Samples, Task, TaskData

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
CLASSES = {c.__name__: c for c in (Mixer, Rule, OwnGate, Task, TaskData, Samples, Shard, Backbone)}
RECIPES = [("mixer", Mixer), ("memory rule", Rule), ("task", Task)]
RECURRENT = {
    "memory": "neural_memory", "linear_memory": "linear_memory", "channel_scan": "channel_scan",
    "ttt_memory": "ttt_memory",
}  # fmt: skip
PACKAGES = [ROOT / "titans_pt", ROOT / "kernels", ROOT / "data_pipeline"]


def words(text: str) -> list[str]:
    """Names in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def column(section: str, header: str) -> list[str]:
    """First cells of the table in ``section`` whose header begins with ``header``."""
    table = re.search(rf"^\| {re.escape(header)} \|.*\n\|---.*\n((?:\|.*\n)+)", SECTIONS[section], re.M)[1]
    return [row.split("|")[1].strip() for row in table.splitlines()]


def public(cls: type) -> set[str]:
    """Public members that ``cls`` itself defines or annotates."""
    return {name for name in {*vars(cls), *inspect.get_annotations(cls)} if not name.startswith("_")}


# ---- the recipes


@pytest.mark.parametrize("recipe, cls", RECIPES)
def test_a_recipe_lists_every_member(recipe, cls):
    listed = [words(cell)[0] for cell in column(f"Recipe: add a {recipe}", "member")]
    assert len(listed) == len(set(listed))
    assert set(listed) == public(cls)


@pytest.mark.parametrize("recipe, cls", RECIPES)
def test_what_a_recipe_always_asks_for_has_no_default(recipe, cls):
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", SECTIONS[f"Recipe: add a {recipe}"], re.M)
    needed = {name for name in public(cls) if not hasattr(cls, name)}
    needed |= {name for name in public(cls) & set(dir(cls)) if _raises(getattr(cls, name))}
    assert {name for name, when in rows if when == "always"} == needed


def _raises(member) -> bool:
    return inspect.isfunction(member) and "raise NotImplementedError" in inspect.getsource(member)


def test_what_the_recipe_says_of_a_mixer_is_so():
    assert Mixer.ends == ("out",) and issubclass(Mixer, nn.Module)
    folders = (MIXERS, "titans_pt/models/mixers"), (RULES, "titans_pt/kernels/memory/rules"), (TASKS, "titans_pt/tasks")
    for registry, folder in folders:
        assert registry.package == folder.replace("/", ".")


def test_the_files_of_a_kernel():
    files = [word for cell in column("Recipe: add a kernel", "file") for word in words(cell)]
    for name in RECURRENT:
        folder = ROOT / "kernels" / name
        assert {"__init__.py", "dispatch.py"} <= {path.name for path in folder.iterdir()}
    for file in files:
        assert any((ROOT / "kernels" / name / file).exists() for name in RECURRENT), file
    assert all((ROOT / "kernels/linear_memory" / file).is_file() for file in files[:4])


@pytest.mark.parametrize("kernel, entry", RECURRENT.items())
def test_the_entry_of_a_kernel(kernel, entry):
    asked = re.search(r"takes the keywords (.+?), and returns", SECTIONS["Recipe: add a kernel"], re.S)[1]
    parameters = inspect.signature(getattr(import_module(f"titans_pt.kernels.{kernel}"), entry)).parameters
    for name in words(asked):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, name
    assert parameters["backend"].default in import_module(f"titans_pt.kernels.{kernel}.dispatch").BACKENDS


# ---- names and paths


def _is_setting(path: str) -> bool:
    section, _, name = path.partition(".")
    return section in Config.model_fields and name in type(getattr(Config(), section)).model_fields


def test_everything_that_the_page_names_exists():
    members = public(Mixer) | public(Rule) | public(Task)
    files = {word for cell in column("Recipe: add a kernel", "file") for word in words(cell)}
    common, entry = import_module("titans_pt.kernels.common"), import_module("titans_pt.kernels.linear_memory.dispatch")
    keywords = inspect.signature(entry.linear_memory).parameters
    for word in words(PAGE):
        if "/" in word:
            pattern = re.sub(r"NAME(\.py)?/?$", "", word)
            assert list(ROOT.glob(pattern)), word
            continue
        owner, _, member = word.partition(".")
        known = (
            word in files or word in members or word in keywords or hasattr(common, word) or hasattr(entry, word)
            or owner in CLASSES and (not member or member in public(CLASSES[owner]) | set(dir(CLASSES[owner])))
            or word in {"@MIXERS.register", "@RULES.register", "@TASKS.register", "@plans(CLASS)"}
            or word in {"__init__(config)", "out", "titans"}
            or re.match(r"make \w+$|titans (train|plan|check|reproduce|export|import)\b|torchrun ", word)
            or re.match(r"task=NAME$|model\.memory\.(rule=)?NAME$", word)
            or _is_setting(word.partition("=")[0])
        )  # fmt: skip
        assert known, word


# ---- who imports whom


def rows() -> list[list[str]]:
    """Folders and files of each row of the page, lowest row first, as path patterns."""
    return [words(cell) for cell in reversed(column("Which folder imports which", "from top to bottom"))]


def row_of(path: str) -> tuple[int, str]:
    """Return (row, pattern) for a module's path from the root."""
    found = [
        (n, room)
        for n, rooms in enumerate(rows())
        for room in rooms
        if (path.startswith(room) if room.endswith("/") else fnmatch(path, room))
    ]
    found = [row for row in found if row[1] == path] or found  # a named file does not count to its folder's row
    assert len(found) == 1, f"{path}: in no row of docs/architecture.md, or in several: {found}"
    return found[0]


def modules() -> dict[str, str]:
    """Return {dotted name: path from the root} of our modules, except those that only start the program."""
    found = {}
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            path = file.relative_to(ROOT)
            if path.parts[1] in ("kernels", "data_pipeline"):
                continue  # links: the folders that they point to are in PACKAGES
            parts = path.with_suffix("").parts
            parts = parts if parts[0] == "titans_pt" else ("titans_pt", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path.as_posix()
    return {name: path for name, path in found.items() if name not in ("titans_pt", "titans_pt.__main__")}


def imports(tree: ast.AST, inside: bool = False):
    """Yield (dotted name, whether inside a function) for every import under ``tree``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        yield from imports(node, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def test_imports_point_down():
    known, up = modules(), set()
    assert len(known) > 100
    for path in known.values():
        row, room = row_of(path)
        for name, inside in imports(ast.parse((ROOT / path).read_text())):
            target = next((n for n in (name, name.rpartition(".")[0]) if n in known), None)
            if target is None:
                assert not name.startswith("titans_pt.") or name == "titans_pt.__version__", f"{path}: {name}"
                continue
            other_row, other = row_of(known[target])
            if other_row < row or other == room:
                continue
            assert inside, f"{path} imports {name}: docs/architecture.md has {other} above {room} or beside it"
            up.add((room, other))
    stated = re.findall(r"^- `(.+?)` asks (.+)$", SECTIONS["Which folder imports which"], re.M)
    assert up == {(room, other) for room, others in stated for other in words(others)}


def test_no_files_import_each_other_in_a_circle():
    """Not even in functions, or for type checkers; a package's __init__ only hands names on, and does not count."""
    files = {name: path for name, path in modules().items() if not path.endswith("__init__.py")}
    graph = {
        name: {part for found, _ in imports(ast.parse((ROOT / path).read_text()))
               for part in (found, found.rpartition(".")[0]) if part in files}
        for name, path in files.items()
    }  # fmt: skip
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_room_of_the_page_exists():
    for room in (room for row in rows() for room in row):
        assert any(row_of(path)[1] == room for path in modules().values()), room


def test_parallelism_comes_from_outside():
    """Beyond the rows: models and layers never import torch.distributed or parallel/, not even in functions."""
    for name, path in modules().items():
        if name.startswith(("titans_pt.models", "titans_pt.layers", "titans_pt.kernels")):
            for imported, _ in imports(ast.parse((ROOT / path).read_text())):
                assert not imported.startswith(("titans_pt.parallel", "torch.distributed", "deepspeed")), path
    users = {
        path
        for path in modules().values()
        for imported, _ in imports(ast.parse((ROOT / path).read_text()))
        if imported.startswith("deepspeed")
    }
    assert users == {"titans_pt/training/engine.py", "titans_pt/training/masters.py"}
