"""Context parallelism: each rank has a piece of every sequence, and mixers' states go from rank to rank.

A mixer's state makes a cut of the sequence invisible (titans_pt.models.mixers.base): of all tokens before its piece, a
rank's mixer needs only the final state of the previous rank. In the backward pass the gradient of that state comes
from the next rank. Any mixer with a state serves, whatever the state holds. A rank begins a layer's mixer when the
previous rank has finished it: if mixers take the share s of a layer's time, P ranks reach 1 / (1 + (P - 1) s / L) of
the ideal speed with L layers.
"""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titans_pt.layers.documents import Documents
from titans_pt.models.backbone import Block
from titans_pt.models.ways import Blocks, Stack
from titans_pt.parallel.topology import RankGroup

ALIGNED = 16
"""Alignment, in bytes, of each tensor in a message."""


class Context:
    """A backbone's way (titans_pt.models.ways) for calls without a state: this rank reads one piece of each sequence,
    the other ranks of its group read the other pieces. The states that a call returns are those after the rank's piece.

    Args:
        group: the ranks that share a sequence, in its order.
        host: the same ranks on gloo, for the parts of a state that the host knows: its structure, sizes, plain numbers.
    """

    def __init__(self, group: RankGroup, host: dist.ProcessGroup):
        self.group, self.host = group, host
        ranks = dist.get_process_group_ranks(group.group)
        self._before = ranks[group.rank - 1] if group.rank else None
        self._behind = ranks[group.rank + 1] if group.rank + 1 < group.size else None
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def __call__(
        self, backbone: Stack, blocks: Blocks, states: bool, x: Tensor, state: Any, documents: Documents | None
    ) -> tuple[Tensor, Any]:
        if state is not None:
            return blocks(x, state, documents)
        self.begin()
        found = []
        for block in backbone:
            x, before = self.receive(x, block)
            x, after = backbone.call(_mix, block, x, before, documents)
            x = backbone.call(_feed, block, self.send(x, after))
            if states:
                found.append(after)
        return x, found if states else None

    def begin(self):
        """Wait, before the first block, until all messages of the last pass have arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def receive(self, x: Tensor, block: nn.Module) -> tuple[Tensor, Any]:
        """A block's input, x (B, T / P, d_model), and the state of its mixer before this rank's piece; None on the
        first rank.

        DeepSpeed takes gradients in the order in which they arrive, which must be the same on all ranks. Parameters
        that only a sequence's start uses, such as M_0, have no gradient on later ranks. Therefore every parameter of a
        block gets a gradient of 0 here, and all gradients of the block arrive at this point.
        """
        if self._before is None:
            (x,) = _Received.apply(x, self._anchor(x), self, 0, *block.parameters())
            return x, None
        size = torch.empty((), dtype=torch.int64)
        dist.recv(size, self._before, self.host)
        header = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(header, self._before, self.host)
        shapes, skeleton = pickle.loads(header.numpy().tobytes())
        found = self._take(shapes, self._before, x.device)
        numbers = [t for t in found if t.is_floating_point()]
        x, *numbers = _Received.apply(x, self._anchor(x), self, len(numbers), *numbers, *block.parameters())
        numbers = iter(numbers)
        return x, _rebuilt(skeleton, [next(numbers) if t.is_floating_point() else t for t in found])

    def send(self, x: Tensor, state: Any) -> Tensor:
        """Send the state of a block's mixer after this rank's piece to the next rank, if there is one; returns x."""
        if self._behind is None:
            return x
        skeleton, found = _parts(state, x.device)
        text = pickle.dumps(([(t.shape, t.dtype) for t in found], skeleton))
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._post(torch.tensor(len(header)), self._behind, self.host)
        self._post(header, self._behind, self.host)
        self._give(found, self._behind)
        return _Sent.apply(x, self._anchor(x), self, *(t for t in found if t.is_floating_point()))

    def _anchor(self, x: Tensor) -> Tensor:
        """Scalar that requires a gradient whenever there is a backward pass: both ranks then take part in the exchange
        of gradients."""
        return torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())

    def _give(self, tensors: list[Tensor], rank: int):
        """Send all tensors in one message."""
        if tensors:
            self._post(_message(tensors), rank, self.group.group)

    def _take(self, shapes: list[tuple[torch.Size, torch.dtype]], rank: int, device: torch.device) -> list[Tensor]:
        if not shapes:
            return []
        message = torch.empty(_places(shapes)[1], dtype=torch.uint8, device=device)
        dist.recv(message, rank, self.group.group)
        return _contents(message, shapes)

    def _post(self, message: Tensor, rank: int, group: dist.ProcessGroup | None):
        """Sends without waiting: the rank that receives may be a layer behind."""
        work = dist.isend(message, rank, group)
        assert work is not None  # this rank is in the group
        self._sent.append((work, message))


def _mix(block: Block, x: Tensor, state: Any, documents: Documents | None) -> tuple[Tensor, Any]:
    return block.mix(x, state, documents)


def _feed(block: Block, x: Tensor) -> Tensor:
    return block.feed(x)


class _Received(torch.autograd.Function):
    """(x, anchor, context, count, *numbers, *parameters) -> (x, *numbers), with ``count`` numbers. Their gradients go
    to the previous rank, if there is one; the parameters' gradients are 0."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor, context: Context, count: int, *given: Tensor):
        ctx.context, ctx.parameters = context, given[count:]
        return x.view_as(x), *(t.view_as(t) for t in given[:count])

    @staticmethod
    def backward(ctx, d_x: Tensor, *d_numbers: Tensor):
        ctx.context._give(list(d_numbers), ctx.context._before)  # none on the first rank
        zeros = (p.new_zeros(()).expand_as(p) for p in ctx.parameters)
        return d_x, None, None, None, *(None for _ in d_numbers), *zeros


class _Sent(torch.autograd.Function):
    """(x, anchor, context, *numbers) -> x; gradients of the numbers, which were sent, come from the next rank."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor, context: Context, *numbers: Tensor):
        ctx.context, ctx.shapes = context, [(t.shape, t.dtype) for t in numbers]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x: Tensor):
        return d_x, None, None, *ctx.context._take(ctx.shapes, ctx.context._behind, d_x.device)


def _places(shapes: list[tuple[torch.Size, torch.dtype]]) -> tuple[list[int], int]:
    """Offset of each tensor in a message, and the message's size, in bytes."""
    places, end = [], 0
    for shape, dtype in shapes:
        places.append(end)
        end += -(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED
    return places, end


def _message(tensors: list[Tensor]) -> Tensor:
    shapes = [(t.shape, t.dtype) for t in tensors]
    message = torch.empty(_places(shapes)[1], dtype=torch.uint8, device=tensors[0].device)
    for place, t in zip(_contents(message, shapes), tensors, strict=True):
        place.copy_(t.detach())
    return message


def _contents(message: Tensor, shapes: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """The inverse of :func:`_message`: views."""
    return [
        message[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for place, (shape, dtype) in zip(_places(shapes)[0], shapes, strict=True)
    ]


def _parts(state: Any, device: torch.device) -> tuple[bytes, list[Tensor]]:
    """``state``, pickled without its floating-point tensors and its tensors on ``device``, and these tensors in order.
    Integer tensors elsewhere stay in the pickle."""
    found: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> int | None:
            if not isinstance(item, Tensor) or (item.device != device and not item.is_floating_point()):
                return None
            found.append(item)
            return len(found) - 1

    text = io.BytesIO()
    Pickler(text).dump(state)
    return text.getvalue(), found


def _rebuilt(skeleton: bytes, found: list[Tensor]) -> Any:
    """The inverse of :func:`_parts`."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Tensor:
            return found[number]

    return Unpickler(io.BytesIO(skeleton)).load()
