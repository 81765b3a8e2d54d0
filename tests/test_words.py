"""Style of docstrings, comments, messages and pages, as far as a test can tell."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SHIPPED = [ROOT / "titans_pt", ROOT / "kernels", ROOT / "data_pipeline"]
"""Folders whose strings are messages; in tests they are also patterns and settings."""
HELD = [page for page in PAGES if page.name != "notebook.md"]
"""Pages without hinges: the notebook keeps its old entries as they are."""
HINGE = re.compile(
    r"(?<=[.;:,] )[Ss]o\b(?! that\b| far\b)|\b[Tt]hus\b|, too\b|\bas well\b(?! as\b)|\b[Aa]new\b|\b[Ww]hoever\b"
    r"|\b[Ww]hat (?:is there|there is)\b"
)
"""Words on which an argument turns without its subject being named again."""
OPENING = re.compile(r"\s*(Of|What|Where|Why|Those)\b")
"""First words of a docstring that should begin with a verb or a noun."""
NUMBER = re.compile(r"(?<![\w.\\)\]])\.\d+\b")
"""A number without its leading zero."""


def sources(*folders: Path) -> list[Path]:
    """Every Python file once: titans_pt has links to the folders beside it."""
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings that stand as a statement: of modules, classes and functions, and below what they describe."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def messages(tree: ast.AST) -> Iterator[ast.AST]:
    """Strings with a space in them; the format of a value, such as .0%, is none."""
    formats = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) and node.format_spec
               for part in ast.walk(node.format_spec)}  # fmt: skip
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in formats else None
        if isinstance(text, str) and " " in text:
            yield node


def faults(source: str, shipped: bool = True) -> list[tuple[int, str]]:
    """(line, what is wrong) of a Python file."""
    if not NUMBER.search(source) and not re.search(rf"[\"']{OPENING.pattern}", source):
        return []  # most files: nothing to parse
    tree, found = ast.parse(source), []
    for node in docstrings(tree):
        if opening := OPENING.match(node.value):
            found.append((node.lineno, f"a docstring that begins with {opening[1]}"))
        found += [(node.lineno, number) for number in NUMBER.findall(node.value)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += [(token.start[0], number) for number in NUMBER.findall(token.string)]
    if shipped:
        said = {id(node) for node in docstrings(tree)}
        found += [(node.lineno, number) for node in messages(tree) if id(node) not in said
                  for number in NUMBER.findall(node.value)]  # fmt: skip
    return found


def test_docstrings_comments_and_messages():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sources(*SHIPPED, ROOT / "tests")
        if path != Path(__file__).resolve()
        for line, what in faults(path.read_text(), shipped=ROOT / "tests" not in path.parents)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_of_a_page_have_their_leading_zero(page):
    wrong = [line for line in page.read_text().splitlines() if NUMBER.search(line)]
    assert not wrong, "\n".join(wrong)


def hinges(page: str) -> list[str]:
    """Every hinge outside blocks of code, with the words around it."""
    text = " ".join(re.sub(r"```.*?```", "", page, flags=re.S).split())
    return [text[max(0, found.start() - 30) : found.end() + 30] for found in HINGE.finditer(text)]


@pytest.mark.parametrize("page", HELD, ids=lambda page: page.name)
def test_no_hinges(page):
    assert not hinges(page.read_text())


def test_planted_hinges_are_found():
    planted = ["It is slow, so use two.", "It is slow.\nSo use two.", "Thus it is.", "A table, too.",
               "It helps as well.", "It starts anew.", "Ask whoever reads.", "This is what is there."]  # fmt: skip
    assert [len(hinges(text)) for text in planted] == [1] * len(planted)
    assert not hinges("A table as well as a plot, so that it is read; too many, so far.\n```\nx = 1, so\n```")


def test_what_is_planted_is_found():
    planted = '''"""Of a module."""
x = 1
"""What a setting is."""


class C:
    """
    Of a class."""

    def f(self):
        """Off by .5 at most."""

    def g(self):
        """Why it fails; None if it does not."""

    def h(self):
        """Where it lies."""
        """Those of a row."""
        # within .77 nats
        raise ValueError(f"given {x:.0%} of -.25, at most")
'''
    openings = [(1, "Of"), (3, "What"), (7, "Of"), (14, "Why"), (17, "Where"), (18, "Those")]
    begins = [(line, f"a docstring that begins with {word}") for line, word in openings]
    assert sorted(faults(planted)) == sorted([*begins, (11, ".5"), (19, ".77"), (20, ".25")])
    assert not faults('"""Often 0.5 of blocks.0.x, 3.10, v(x).1"""\nf"{1:.2f} of it"')
    assert not faults('"""Whatever it is, Whether it is, of what"""\nx = "What it is"')
