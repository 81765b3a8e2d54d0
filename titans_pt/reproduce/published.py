"""Published numbers; all of them stand in published.yaml."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Published:
    """A published table: values by row (MODEL or MODEL/VARIANT) and column, and their source."""

    source: str
    values: dict[str, dict[str, float]]

    def value(self, row: str, column: str | None) -> float | None:
        """Published value; None: not published."""
        return None if column is None else self.values.get(row, {}).get(column)


@cache
def published(target: str, size: str) -> Published | None:
    """Published figures of ``target`` for models of ``size``; None: there are none."""
    tree = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    table = tree.get(target)
    rows = table and (table.get(size) or table.get("every size"))
    if not rows:
        return None
    values = {row: dict(zip(table["columns"], numbers, strict=True)) for row, numbers in rows.items()}
    return Published(f"{tree['works'][table['work']]}, {table['place']}: {table['about']}", values)
