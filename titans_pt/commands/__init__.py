"""The commands of ``titans``: one file each, or one for a group such as ``titans checkpoint``.

To add a command, add one file here; nothing else lists them. ``titans NAME`` is ``NAME.py``, which holds

- ``SECTION``: the heading under which ``titans --help`` shows it, one of :data:`SECTIONS`;
- ``WRITES``, if it writes: the setting or option that chooses another place, for the message about a full disk;
- a :class:`click.Command` called ``NAME``: its arguments are declared above its action, and the first paragraph of its
  docstring is its help. ``_arguments.py`` has the arguments and number types that several commands share.

An action imports what it needs when it runs, so that ``--help`` and errors answer at once. A word that Python reserves
gets an underscore (``import_.py``); files that begin with one are not commands.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path

import click

SECTIONS = ("data", "train", "evaluate", "study", "tools")

COMPLETION = "_TITANS_COMPLETE"
"""Environment variable by which a shell asks for completions; the script of ``titans completion`` sets it."""

SUBJECT = "titans_pt.subject"
"""Key in a context's ``meta`` for the command's CONFIG or RUN, which completes errors that name no file."""


class Commands(Mapping[str, click.Command]):
    """Every command by its name, in alphabetical order; a command's file is imported when it is used."""

    @cached_property
    def _files(self) -> dict[str, str]:
        files = sorted(path.stem for folder in __path__ for path in Path(folder).glob("[!_]*.py"))
        return {file.removesuffix("_"): file for file in files}

    def __getitem__(self, name: str) -> click.Command:
        file = self._files[name]
        return getattr(import_module(f"{__name__}.{file}"), file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def writes(self, name: str | None) -> str | None:
        """The setting or option that says where the command writes; None if there is none, or no command."""
        return None if name is None else getattr(import_module(f"{__name__}.{self._files[name]}"), "WRITES", None)

    def section(self, name: str) -> str:
        """The heading of ``titans --help`` under which the command is listed."""
        return import_module(f"{__name__}.{self._files[name]}").SECTION
