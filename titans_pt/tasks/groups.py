"""Finite groups as multiplication tables: cyclic, symmetric and alternating ones, and their direct products."""

import itertools
import math
import re
from dataclasses import dataclass
from functools import cache, cached_property, reduce

import numpy as np

LARGEST = 1000
"""Most elements of a group: its table has the square of this number of entries."""
WORDS = "parity, Zn, Sn or An with a number n, or a product of these such as A4xZ5"


@dataclass(frozen=True, eq=False)
class Group:
    """Permutations of n points. Element 0 is the identity.

    elements: (order, n) int64; row a maps point i to elements[a, i].
    table: (order, order) int64; table[a, b] is the product a b: first a, then b.
    """

    elements: np.ndarray
    table: np.ndarray

    @property
    def order(self) -> int:
        return len(self.table)

    @property
    def moved(self) -> np.ndarray:
        """(order,) int64: how many points each element moves."""
        return (self.elements != np.arange(self.elements.shape[1])).sum(1)

    @cached_property
    def pair(self) -> np.ndarray:
        """The first two elements that generate the group; empty if no two do."""
        pairs = itertools.combinations(range(1, self.order), 2)
        return np.array(next((pair for pair in pairs if len(self._generated(pair)) == self.order), ()), dtype=np.int64)

    def _generated(self, some: tuple[int, ...]) -> set[int]:
        """The products of any number of these elements."""
        found, new = {0}, {0}
        while new:
            new = {int(after) for element in new for after in self.table[element, list(some)]} - found
            found |= new
        return found

    def generators(self, name: str) -> np.ndarray:
        """The elements, ascending, that ``name`` stands for; empty if there are none.

        Names: all; pair (the first two that generate the group); swaps (of two points); three_cycles; moves-K (all that
        move at most K points, and the identity).
        """
        if name == "all":
            return np.arange(self.order)
        if name == "pair":
            return self.pair
        if name.startswith("moves-"):
            return np.flatnonzero(self.moved <= int(name.removeprefix("moves-")))
        return np.flatnonzero(self.moved == {"swaps": 2, "three_cycles": 3}[name])  # three moved points form a cycle

    def products(self, generators: np.ndarray, factors: int) -> np.ndarray:
        """(order,) float64: probability of each element as the product of this many random generators."""
        likely = np.eye(self.order)[0]
        for _ in range(factors):
            after = np.zeros(self.order)
            for b in generators:
                np.add.at(after, self.table[:, b], likely / len(generators))
            likely = after
        return likely


@cache
def group(name: str) -> Group:
    """The group that a name such as S5 or A4xZ5 stands for.

    Raises:
        ValueError: the name is unknown, or the group too large (:data:`LARGEST`); the message says which.
    """
    factors = [re.fullmatch(r"([ZSA])([1-9]\d{0,3})", part) for part in ("Z2" if name == "parity" else name).split("x")]
    if not all(factors):
        raise ValueError(f"allowed: {WORDS}")
    kinds = [(factor[1], int(factor[2])) for factor in factors if factor]
    order = math.prod(_order(*kind) for kind in kinds)
    if not 2 <= order <= LARGEST:
        raise ValueError(f"a group of 2 to {LARGEST:,} elements, this one has {order:,}")
    return _from_permutations(reduce(_beside, (_permutations(*kind) for kind in kinds)))


def _order(kind: str, n: int) -> int:
    if kind == "Z":
        return n
    few = math.factorial(min(n, 12))  # far beyond LARGEST
    return few if kind == "S" else max(1, few // 2)


def _permutations(kind: str, n: int) -> np.ndarray:
    """(order, n), the identity first."""
    if kind == "Z":
        return (np.arange(n)[:, None] + np.arange(n)) % n
    every = list(itertools.permutations(range(n)))
    return np.array([p for p in every if kind == "S" or _is_even(p)], dtype=np.int64)


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i, j in itertools.combinations(range(len(p)), 2)) % 2 == 0


def _beside(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The direct product: each pair of elements, on the points of both."""
    return np.concatenate([np.repeat(a, len(b), 0), np.tile(b, (len(a), 1)) + a.shape[1]], 1)


def _from_permutations(elements: np.ndarray) -> Group:
    index = {row.tobytes(): n for n, row in enumerate(elements)}
    table = np.empty((len(elements), len(elements)), dtype=np.int64)
    for a, first in enumerate(elements):
        table[a] = [index[row.tobytes()] for row in elements[:, first]]
    return Group(elements, table)
