"""Base class of sections and common value types of the settings tree."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Once = AfterValidator(lambda entries: entries and list(dict.fromkeys(entries)))
"""Annotates a list of things to measure: duplicate entries are removed."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

PATH = "path"
PathName = Annotated[str, PATH]
"""A file or folder; ``~`` and ``$VARIABLES`` are expanded when settings are read (values.py)."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class OpenSection(Section):
    """A section that also holds sections of mixers, memory rules or tasks, as given: their owners validate them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]

    def section(self, name: str) -> dict[str, Any]:
        """The settings of ``name`` that were given."""
        return self.__pydantic_extra__.get(name, {})


class NoSettings(Section):
    """Empty section of mixers, tasks and memory rules without settings of their own."""
