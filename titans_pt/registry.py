"""Finds classes by the names used in settings: in a file of a package, or registered from elsewhere."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

from titans_pt.errors import UserError


class _Named(Protocol):
    name: ClassVar[str]


T = TypeVar("T", bound=_Named)


class Registry(Generic[T]):
    """Classes of one kind (mixers, tasks), each with a ``name``.

    A name is looked up among the registered classes (:meth:`register`), then as a module of ``package``: the file
    NAME.py there registers the class NAME. To add a class, add a file. A class that lives elsewhere registers itself
    when its module is imported (``run.imports`` names these modules).

    Args:
        package: dotted name of the package.
        setting: the setting that takes these names, such as model.mixers, for the error message.
    """

    def __init__(self, package: str, setting: str):
        self.package, self.setting = package, setting
        self._found: dict[str, type[T]] = {}

    def register(self, cls: type[T]) -> type[T]:
        """Registers a class, as a decorator.

        Raises:
            UserError: another class already has the name.
        """
        other, own = (f"{kind.__module__}.{kind.__qualname__}" for kind in (self._found.setdefault(cls.name, cls), cls))
        if other != own:
            raise UserError(f"{self.setting}: {cls.name!r} is {other} already; choose another name for {own}")
        self._found[cls.name] = cls  # a reloaded module defines the same class again
        return cls

    def find(self, name: str) -> type[T]:
        """The class of this name.

        Raises:
            UserError: no class has this name.
        """
        if name not in self._found and name in self._files():
            importlib.import_module(f"{self.package}.{name}")
        if name not in self._found:
            raise UserError(f"{self.setting}: given {name!r}; allowed: {', '.join(self.names())} (your own: name its "
                            "module in run.imports)")  # fmt: skip
        return self._found[name]

    def __iter__(self) -> Iterator[type[T]]:
        """The classes that have registered so far."""
        return iter(self._found.values())

    def names(self) -> list[str]:
        """Every name that :meth:`find` knows, sorted; imports all modules of the package."""
        for name in self._files():
            importlib.import_module(f"{self.package}.{name}")
        return sorted(self._found)

    def built_in(self) -> list[str]:
        """Names of classes that files of the package define."""
        return [name for name in self.names() if self._found[name].__module__.startswith(f"{self.package}.")]

    def _files(self) -> list[str]:
        return [module.name for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__)]
