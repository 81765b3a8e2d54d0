"""Sections of mixers, memory rules and tasks; the settings tree holds them unvalidated, as given."""

from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from titans_pt.config.fields import Section
from titans_pt.config.values import typed
from titans_pt.config.words import one_line
from titans_pt.errors import UserError

S = TypeVar("S", bound=Section)


class Need(Protocol):
    """Raises a UserError of one line, "path: given ...; allowed", unless ``ok``."""

    def __call__(self, ok: bool, path: str, given: Any, allowed: str) -> None: ...


def own_section(given: dict[str, Any], kind: type[S], path: str) -> S:
    """Validates the given settings of the section ``path``, such as model.mac.

    Raises:
        UserError: a setting is wrong or unknown.
    """
    try:
        return kind.model_validate(typed(given, kind, path))
    except ValidationError as error:
        raise UserError(one_line(error, f"{path}.", kind)) from None
