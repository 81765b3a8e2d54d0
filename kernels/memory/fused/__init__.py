"""The memory in Triton kernels, for a GPU (or, slowly, for Triton's interpreter on a CPU).

coefficients.py   coefficients of each block of tokens, from the gates: parallel over blocks
scan.py           the state from block to block: serial, keys and values only
read.py           outputs: parallel over blocks
step.py           decoding, token by token
operators.py      the kernels as differentiable operators; states kept for the backward pass
configurations.py served shapes and launch parameters
"""

import torch
from torch import Tensor

from titans_pt.kernels.memory.call import MemoryCall
from titans_pt.kernels.memory.fused.configurations import STEP_TOKENS, unsupported
from titans_pt.kernels.memory.fused.operators import memory, memory_step
from titans_pt.kernels.memory.state import MemoryState, choose

__all__ = ["fused_memory", "unsupported"]


def fused_memory(call: MemoryCall) -> tuple[Tensor, MemoryState]:
    """Outputs (B, T, H, D) in q's dtype, and the state after them. For memory use see operators.Call.

    Host and device do not wait for each other, except for a ``reset`` on the GPU without ``max_resets``: its
    documents are counted first, because their number decides how much is allocated. The state's offset moves to the GPU
    and stays there.
    """
    network, reset, chunk_size, initial_state = call.network, call.reset, call.chunk_size, call.state
    q, k, v = (x.to(call.q.dtype).contiguous() for x in (call.q, call.k, call.v))
    gates = [g.float().contiguous() for g in (call.theta, call.eta, call.alpha)]
    begin = torch.stack([w.float().flatten(1) for w in call.weights], 1)
    affine = None if call.norm is None else torch.stack([p.float() for p in call.norm])
    batch, length = q.shape[:2]
    offset, resets, to_start = None, 0, call.to_start
    if initial_state is None:
        start = begin.expand(batch, *begin.shape)
        state = torch.stack([start, torch.zeros_like(start), start])
        before = torch.zeros(batch, dtype=torch.int64, device=q.device)
    else:
        groups = initial_state.weights, initial_state.momentum, initial_state.chunk_weights
        state = torch.stack([torch.stack([w.float().flatten(2) for w in group], 2) for group in groups])
        before = offset = initial_state.offset.to(q.device, non_blocking=True)
    if reset is not None:
        resets = int(reset.sum(1).max()) if call.max_resets is None else call.max_resets
        reset = reset.to(q.device, non_blocking=True)
    after = _offset_after(before, reset, length, chunk_size)

    tensors = [q, k, v, *gates, begin, affine, state]
    form = network.residual, network.activation, to_start  # tensor shapes give the rest of the network
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not keep and reset is None and length <= STEP_TOKENS:
        out, state = memory_step(q, k, v, *gates, begin, affine, state, before, chunk_size, *form)
    else:
        if to_start:  # weights as differences to M_0
            base = torch.stack([begin, torch.zeros_like(begin), begin]).unsqueeze(1)
            tensors[-1] = state - base
        out, state, _ = memory(*tensors, offset, reset, chunk_size, resets, *form, call.save_every or 0, keep)
        if to_start:
            state = state + base

    current, momentum, frozen = (
        tuple(group[:, :, n].unflatten(-1, shape) for n, shape in enumerate(network.layers)) for group in state
    )
    # A chunk that is complete ends here: the next one starts at the current weights.
    if offset is None and reset is None:
        return out, MemoryState(current, momentum, frozen if length % chunk_size else current, after)
    return out, MemoryState(current, momentum, choose(after == 0, current, frozen), after)


def _offset_after(offset: Tensor, reset: Tensor | None, length: int, chunk: int) -> Tensor:
    """Tokens already read of the current chunk after ``length`` more tokens, (B,)."""
    position = offset + length
    if reset is not None:
        place = torch.arange(length, device=offset.device)
        last = torch.where(reset, place, -1).amax(1)
        position = torch.where(last < 0, position, length - last)
    return position % chunk
