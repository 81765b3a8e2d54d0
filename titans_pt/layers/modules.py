"""A list of modules of one class."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from torch import nn

Item = TypeVar("Item", bound=nn.Module)


class Modules(nn.ModuleList, Generic[Item]):
    """nn.ModuleList, which declares items of any module type, for items of one class."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Item]: ...

        @overload
        def __getitem__(self, n: slice) -> "Modules[Item]": ...

        @overload
        def __getitem__(self, n: int) -> Item: ...

        def __getitem__(self, n: int | slice) -> "Item | Modules[Item]": ...
