"""The exact dual form: matrix products over mini-batches, no weight set per token.

With the gradients of a mini-batch taken at its start, a layer adds to z = x W + b, for the t-th token, the term

    - tau_t (x S_W + S_b + sum_{s <= t} (x x_s + 1) lr_s g_s)

x_s being the layer's input for key s, g_s the gradient of its output, S the sums of earlier calls in the mini-batch
(arXiv 2407.04620, Section 2.5 and Appendix A).

The parameters at every ``save_every``-th mini-batch are saved; the backward pass recomputes those between.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titans_pt.kernels.blocks import Blocks, cut, in_order
from titans_pt.kernels.common import sent, transformed
from titans_pt.kernels.memory.state import choose
from titans_pt.kernels.ttt_memory.state import EPS, Parameters, TTTState


def dual_ttt_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    tau: Tensor,
    begin: Parameters,
    norm: Parameters,
    state: TTTState,
    reset: Tensor | None,
    save_every: int | None = None,
    *,
    step: Callable[..., tuple[Tensor, Parameters, Parameters]] | None = None,
) -> tuple[Tensor, TTTState]:
    """Arguments and results as in :func:`titans_pt.kernels.ttt_memory.naive.naive_ttt_memory`.

    save_every: mini-batches between two parameter sets saved for the backward pass. None: the square root of the number
    of mini-batches, which needs least memory. step: a compiled :func:`mini_batch`.
    """
    step, device = step or mini_batch, q.device
    layout = _Layout(cut(state.offset, reset, q.shape[1], len(tau), len(tau)), state.offset.cpu(), len(tau))
    queries, keys, values = (layout.fold(x).unbind() for x in (q, k, v))
    rate = layout.fold(rate.unsqueeze(-1)) * sent(layout.valid, device).transpose(0, 1)[:, :, None, :, None]
    rates = rate.unbind()
    steps = tau[sent(layout.place, device).transpose(0, 1).contiguous()][:, :, None, :, None].unbind()
    documents, complete = (
        [f if isinstance(f, bool) else sent(f, device) for f in flags] for flags in (layout.documents, layout.complete)
    )
    zero = tuple(torch.zeros_like(s) for s in state.sums)

    # Each state is a separate argument: torch's hooks, with which plans measure memory, do not see tensors in a tuple.
    def run(first: int, last: int, *carry: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        start, sums, outputs = carry[: len(begin)], carry[len(begin) :], []
        for n in range(first, last):
            if documents[n] is not False:
                start, sums = choose(documents[n], begin, start), choose(documents[n], zero, sums)
            before, end = None if layout.fresh[n] else sums, None if complete[n] is False else tau[-1:]
            out, sums, stepped = step(queries[n], keys[n], values[n], rates[n], steps[n], start, before, norm, end)
            outputs.append(out)
            if complete[n] is not False:
                start, sums = choose(complete[n], stepped, start), choose(complete[n], zero, sums)
        return torch.stack(outputs), (*start, *sums)

    count = len(queries)
    every = save_every or math.isqrt(count)
    outputs, carry = [], (*state.start, *state.sums)
    for first in range(0, count, every):
        last = min(first + every, count)
        if torch.is_grad_enabled() and transformed() is None:  # torch.func knows no checkpoints
            out, carry = checkpoint(run, first, last, *carry, use_reentrant=False, preserve_rng_state=False)
        else:
            out, carry = run(first, last, *carry)
        outputs.append(out)
    end = TTTState(carry[: len(begin)], carry[len(begin) :], layout.blocks.offset)
    return layout.unfold(torch.cat(outputs)), end


def mini_batch(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, tau: Tensor, start: Parameters, sums: Parameters | None,
    norm: Parameters, end: Tensor | None,
) -> tuple[Tensor, Parameters, Parameters]:  # fmt: skip
    """Tokens of one mini-batch -> their outputs (B, H, c, D), the sums after them, and the next mini-batch's start.

    q, k, v (B, H, c, D), rate (B, H, c, 1), tau (B, 1, c, 1), start and sums (None: 0) (B, H, ...). end: (1,), tau of
    the mini-batch's last token; None where the mini-batch goes on, whose start is returned.
    """
    gain, shift = (p.unsqueeze(-2) for p in norm)
    layers = list(zip(start[::2], start[1::2], strict=True))
    inputs, before = [k], []
    for weight, bias in layers:
        z = inputs[-1] @ weight + bias.unsqueeze(-2)
        if len(inputs) < len(layers):
            inputs.append(F.gelu(z, approximate="tanh"))
            before.append(z)
    scale = (z.var(-1, unbiased=False, keepdim=True) + EPS).rsqrt()
    unit = (z - z.mean(-1, keepdim=True)) * scale
    g = gain * (k + gain * unit + shift - v)
    g = scale * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))
    gradients = [rate * g]
    for (weight, _), hidden in zip(reversed(layers[1:]), reversed(before), strict=True):
        g = torch.ops.aten.gelu_backward(g @ weight.mT, hidden, approximate="tanh")
        gradients.insert(0, rate * g)

    x, written = q, []
    for n, ((weight, bias), seen, g) in enumerate(zip(layers, inputs, gradients, strict=True)):
        if n:
            x = F.gelu(x, approximate="tanh")
        change = (x @ seen.mT + 1).tril() @ g
        if sums is not None:
            change = change + x @ sums[2 * n] + sums[2 * n + 1].unsqueeze(-2)
        x = x @ weight + bias.unsqueeze(-2) - tau * change
        written += [seen.mT @ g, g.sum(-2)]
    after = tuple(written) if sums is None else tuple(a + b for a, b in zip(sums, written, strict=True))
    following = start if end is None else tuple(p - end * s for p, s in zip(start, after, strict=True))
    return q + F.layer_norm(x, x.shape[-1:], eps=EPS) * gain + shift, after, following


class _Layout:
    """Conversion between (B, T, H, F) and blocks (n, B, H, c, F), each inside one mini-batch of one document.

    index, valid: (B, n, c), the token of each slot and whether it holds one. place: (B, n, c), the number of the token
    in its mini-batch. documents, complete: per block, whether a document starts with it, whether it ends its
    mini-batch; a bool where all rows agree, else (B,). fresh: per block, whether every row starts a mini-batch with it.
    """

    def __init__(self, blocks: Blocks, offset: Tensor, size: int):
        self.blocks, self.documents = blocks, blocks.new_document
        self.fresh = [flag is True for flag in blocks.new_chunk]
        if blocks.index is None or blocks.valid is None:
            tokens = torch.tensor(blocks.lengths).unsqueeze(-1)
            place = torch.arange(max(blocks.lengths))
            self.valid = (place < tokens).expand(len(offset), -1, -1)
            self.index = torch.where(self.valid, tokens.cumsum(0) - tokens + place, 0)
        else:
            self.index, self.valid = blocks.index, blocks.valid
        # Only a row's first block may continue a mini-batch, the one that the state has begun.
        before = torch.zeros_like(self.index[..., 0])
        before[:, 0] = torch.where(torch.as_tensor(blocks.new_chunk[0]), 0, offset)
        self.place = (before.unsqueeze(-1) + torch.arange(self.index.shape[-1])).clamp(max=size - 1)
        ends = before + self.valid.sum(-1) == size
        self.complete = [bool(e[0]) if (e == e[0]).all() else e for e in ends.unbind(1)]

    def fold(self, x: Tensor) -> Tensor:
        """(B, T, H, F) -> (n, B, H, c, F), contiguous: a compiled step then serves every length."""
        x = torch.take_along_dim(x, sent(self.index, x.device).flatten(1)[:, :, None, None], 1)
        return x.unflatten(1, self.index.shape[1:]).permute(1, 0, 3, 2, 4).contiguous()

    def unfold(self, x: Tensor) -> Tensor:
        """(n, B, H, c, F) -> (B, T, H, F)."""
        return in_order(x.permute(1, 0, 3, 2, 4).flatten(1, 2), self.index, self.valid, int(self.valid[0].sum()))
