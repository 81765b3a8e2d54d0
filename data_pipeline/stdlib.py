"""The standard library's own documentation: real English that every machine with Python has."""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def read() -> Iterator[tuple[str, str]]:
    """Yields (name, text): the language reference by topic, then the docstrings of each module, by name."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield name, topics[name].strip()
    for name, path in modules():
        yield name, _docstrings(name, path)


def modules() -> list[tuple[str, Path]]:
    """(dotted name, file) of every module of the standard library that is written in Python, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not _SKIPPED & set(parts) and all(part.isidentifier() for part in parts):
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return sorted(found)


def _docstrings(name: str, path: Path) -> str:
    """The docstrings of one module, each under its dotted name; empty if there is none. Nothing is executed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in strings of the library are not ours to report
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ""  # a template or a deliberately broken file
    sections: list[str] = []

    def visit(node: ast.AST, prefix: str) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            prefix = prefix if isinstance(node, ast.Module) else f"{prefix}.{node.name}"
            if text := (ast.get_docstring(node) or "").strip():
                sections.append(f"{prefix}\n\n{text}")
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # an expression contains no definition
                visit(child, prefix)

    visit(tree, name)
    return "\n\n\n".join(sections)
