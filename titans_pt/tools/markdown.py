"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A line for the head, one below it, and one for each row, without a newline at the end."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
