"""Weights set by hand, with which a linear memory tracks A5 (Titans, Theorem 4.1): its 60 elements are the rotations of
an icosahedron, and every rotation is two reflections, which are two writes."""

import math

import numpy as np
import pytest
import torch

from titans_pt import NeuralMemory
from titans_pt.tasks.groups import group

A5 = group("A5")
HEADS, WIDTH = 3, 8
"""Each head has the same memory, and reads one row of it."""
VALUE_OF_ONE = HEADS
"""Channel of the inputs that is 1 for every token."""


def rotation(axis: np.ndarray, angle: float) -> np.ndarray:
    """(3, 3), for row vectors."""
    cross = np.cross(np.eye(3), axis)
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def order(element: int) -> int:
    power, n = element, 1
    while power:
        power, n = A5.table[power, element], n + 1
    return n


def rotations() -> np.ndarray:
    """(60, 3, 3): those of a, then b, are rotations[a] @ rotations[b]. An element of order 2 and one of order 3 whose
    product has order 5 generate the group; the angle between their axes follows from the product's."""
    two, three = next(
        (a, b) for a in range(60) for b in range(60) if (order(a), order(b), order(A5.table[a, b])) == (2, 3, 5)
    )
    cosine = math.cos(math.pi / 5) / math.sin(math.pi / 3)
    half = rotation(np.array([0, 0, 1]), math.pi)
    third = rotation(np.array([math.sqrt(1 - cosine**2), 0, cosine]), 2 * math.pi / 3)
    found, todo = {0: np.eye(3)}, [0]
    for element in todo:
        for factor, turn in ((two, half), (three, third)):
            after = A5.table[element, factor]
            if after not in found:
                found[after] = found[element] @ turn
                todo.append(after)
    return np.stack([found[element] for element in range(60)])


def reflections(turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors u, w with turn = (I - 2 w w^T) (I - 2 u u^T)."""
    *_, rows = np.linalg.svd(turn - np.eye(3))
    x, axis = rows[0], rows[2]
    u = np.cross(axis, x)
    w = x - turn @ x
    return (u, w / np.linalg.norm(w)) if np.linalg.norm(w) > 1e-9 else (u, u)


def before_silu(y: np.ndarray) -> np.ndarray:
    """x with SiLU(x) = y, for y between -0.25 and 0.25; Newton's method."""
    x = 2 * y
    for _ in range(50):
        s = 1 / (1 + np.exp(-x))
        x -= (x * s - y) / (s * (1 + x * (1 - s)))
    return x


@torch.no_grad()
def memory_of_a5(**settings) -> NeuralMemory:
    """A linear memory whose M is the rotation of the product so far: M_0 is I, the values are 0, and with theta = 1 a
    write of the key u multiplies M by I - 2 u u^T."""
    settings = {"chunk_size": 1, "step_bound": 1.0} | settings
    memory = NeuralMemory(
        HEADS * WIDTH, n_heads=HEADS, depth=1, norm=False, residual=False, momentum=False, forgetting=False,
        conv_width=1, **settings,
    )  # fmt: skip
    for parameter in memory.parameters():
        parameter.zero_()
    memory.network.weight_0.copy_(torch.eye(WIDTH))
    memory.output_norm.weight.fill_(1.0)
    memory.gates.linear.bias.fill_(50.0)  # the sigmoid's value is 1
    for head in range(HEADS):
        memory.k.linear.weight[head * WIDTH : head * WIDTH + 3, :3] = torch.eye(3)
        memory.q.linear.weight[head * WIDTH + head, VALUE_OF_ONE] = 1.0
    return memory


def tokens_of_a5() -> torch.Tensor:
    """(60, 2, d_model): two tokens for each element, whose keys are its reflections."""
    tokens = np.zeros((60, 2, HEADS * WIDTH), np.float32)
    tokens[..., VALUE_OF_ONE] = 1.0
    for element, turn in enumerate(rotations()):
        tokens[element, :, :3] = before_silu(0.25 * np.stack(reflections(turn.T)))
    return torch.from_numpy(tokens)


@torch.no_grad()
def right_answers(elements: np.ndarray, memory: NeuralMemory, at_once: int = 4096) -> float:
    """Share of the products so far that are read from the memory, which reads ``at_once`` elements a call."""
    tokens = tokens_of_a5()
    readout = torch.from_numpy(rotations()).float().mT.flatten(1)  # trace(R^T M) is largest for M's own rotation
    product, state, right = 0, None, 0
    for start in range(0, len(elements), at_once):
        here = elements[start : start + at_once]
        y, state = memory(tokens[here].flatten(0, 1).unsqueeze(0), state)
        rows = y[0, 1::2].unflatten(-1, (HEADS, WIDTH))[..., :3]
        answers = (rows.flatten(1) @ readout.mT).argmax(1)
        for element, answer in zip(here, answers.tolist(), strict=True):
            product = A5.table[product, element]
            right += int(answer == product)
    return right / len(elements)


def test_the_rotations_multiply_as_the_group():
    turns = rotations()
    assert np.allclose(turns[:, None] @ turns[None], turns[A5.table])
    for turn in turns:
        u, w = (np.eye(3) - 2 * np.outer(v, v) for v in reflections(turn))
        assert np.allclose(w @ u, turn)


def test_a_linear_memory_tracks_a5():
    """Rounding errors do not add up to a wrong answer."""
    elements = np.random.default_rng(0).integers(0, 60, 10_000)
    assert right_answers(elements, memory_of_a5()) == 1.0


@pytest.mark.parametrize("settings", [{"step_bound": 0.5}, {"chunk_size": 2}], ids=str)
def test_with_smaller_steps_or_two_writes_at_one_point_it_does_not(settings):
    """Up to theta = 1/2 no transition has a negative eigenvalue; inside a chunk transitions do not multiply."""
    elements = np.random.default_rng(0).integers(0, 60, 1000)
    assert right_answers(elements, memory_of_a5(**settings)) < 0.1
