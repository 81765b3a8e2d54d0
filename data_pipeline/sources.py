"""Text sources: each yields documents, one string at a time, in an order that never changes."""

import ast
import gzip
import hashlib
import json
import platform
import re
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from titans_pt.config import SourceConfig
from titans_pt.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
_SKIPPED = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
_SURROGATES = re.compile("[\ud800-\udfff]")


def documents(source: SourceConfig, counts: Counter | None = None) -> Iterator[str]:
    """Yields the documents of one source: non-empty text that UTF-8 can hold.

    Args:
        counts: its ``"empty"`` is raised by one for each document without a visible character, which is dropped.

    Raises:
        UserError: missing path, folder without usable file, broken or truncated file, missing column.
    """
    counts = Counter() if counts is None else counts
    for text in _stdlib() if source.kind == "stdlib" else _from_files(source):
        if not text or text.isspace():
            counts["empty"] += 1
        else:
            yield replace_surrogates(text)


def fingerprint(source: SourceConfig) -> str:
    """SHA-256 (hex) of names, sizes and modification times: tells that a source has changed, without reading it."""
    if source.kind == "stdlib":  # times differ between two installations of the same Python; its version does not
        rows = [[platform.python_version()], *([name, path.stat().st_size] for name, path in _modules())]
    else:
        root = Path(source.path)
        stats = [(path, path.stat()) for path in source_files(source)]
        rows = [[path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return hashlib.sha256(json.dumps([source.kind, source.text_column, rows]).encode()).hexdigest()


def replace_surrogates(text: str) -> str:
    """``text`` with lone surrogates, which JSON may hold and UTF-8 cannot, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def source_files(source: SourceConfig) -> list[Path]:
    """The files of a kind=files source in reading order; hidden files and folders are left out.

    Raises:
        UserError: the path does not exist, or holds no file with a known suffix.
    """
    root = Path(source.path)
    if not root.exists():
        raise UserError(f"data.sources: path={source.path!r}: no such file or folder; set it to your text")
    files = [root] if root.is_file() else sorted(
        (path for path in root.rglob("*") if path.is_file() and not _hidden(path.relative_to(root))),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    files = [path for path in files if path.name.endswith(SUFFIXES)]
    if not files:
        raise UserError(f"data.sources: path={source.path!r}: no usable file; allowed are {', '.join(SUFFIXES)}")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


# --- files ---


def _from_files(source: SourceConfig) -> Iterator[str | None]:
    for path in source_files(source):
        try:
            if path.name.endswith(".parquet"):
                yield from _parquet(path, source.text_column)
            elif path.name.endswith(".txt"):
                yield path.read_text(encoding="utf-8-sig")
            else:
                yield from _jsonl(path, source.text_column)
        except UnicodeDecodeError as error:
            raise UserError(f"data.sources: {path}: not UTF-8 at byte {error.start}; convert or remove it") from None
        except (EOFError, OSError, zlib.error) as error:
            reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
            raise UserError(f"data.sources: {path}: unreadable or truncated ({reason}); replace or remove it") from None


def _jsonl(path: Path, column: str) -> Iterator[str | None]:
    with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # bad JSON and bad UTF-8 alike
                raise UserError(f"data.sources: {path}:{number}: not valid JSON ({error}); "
                                "repair or remove the line") from None
            if not isinstance(row, dict) or column not in row:
                has = f"its fields: {', '.join(row) or 'none'}" if isinstance(row, dict) else "it is not an object"
                raise UserError(f"data.sources: text_column={column!r}: {path}:{number} has no such field ({has}); "
                                "set text_column to the one that holds the text")
            yield _text(row[column], column, f"{path}:{number}")


def _parquet(path: Path, column: str) -> Iterator[str | None]:
    import pyarrow  # slow to import, and only this reader needs it
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if column not in columns:
                raise UserError(f"data.sources: text_column={column!r}: {path} has no such column "
                                f"({', '.join(columns)}); set text_column to the one that holds the text")
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield _text(value, column, str(path))
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from None


def _text(value: object, column: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"data.sources: text_column={column!r}: {where} holds a {type(value).__name__}, not text; "
                    "set text_column to the one that holds the text")


# --- the standard library's own documentation ---


def _stdlib() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].strip()
    for name, path in _modules():
        yield _docstrings(name, path)


def _modules() -> list[tuple[str, Path]]:
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
            if not isinstance(child, ast.expr):  # no definition stands inside an expression
                visit(child, prefix)

    visit(tree, name)
    return "\n\n\n".join(sections)
