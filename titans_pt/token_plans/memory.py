"""The neural memory's plan: projections, gates, the memory's step, its norm; and reading without writing."""

from collections.abc import Callable

from torch import Tensor, nn

from titans_pt.kernels.memory.call import rule_alone
from titans_pt.kernels.memory.native import token as memory_token
from titans_pt.kernels.one_token import Map, Maps, memory_gates
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.memory import MemoryNetwork, NeuralMemory, NeuralMemoryState, Projection
from titans_pt.layers.memory_gates import STRETCH, MemoryGates, share_for
from titans_pt.token_plans.norm import norm_step
from titans_pt.token_plans.plan import TokenPlan, Unplanned, affine_map, own, plain


def memory_plan(memory: nn.Module, x: Tensor) -> TokenPlan:
    """Plan of the memory for x (B, d_model): its read and its write."""
    memory = own(memory, NeuralMemory)
    if memory.caching is not None or rule_alone(memory.gates.rule) or memory_token.unserved(x, memory.shape):
        raise Unplanned
    gates = plain(memory.gates, MemoryGates)
    maps = [projection_map(part, x) for part in (memory.q, memory.k, memory.v)]
    inputs = Maps(len(x), *maps, affine_map(x, gates.linear))
    q, k, v, raw = inputs.out
    made, make_gates = _gates_step(gates, raw, v)
    weights, norm = plain(memory.network, MemoryNetwork).learned()
    write = memory_token.MemoryToken(
        q, k, v, made, network=memory.shape, norm=norm, chunk_size=memory.config.chunk_size,
        to_start=memory.config.forget_to == "start",
    )  # fmt: skip
    normal, normalise = norm_step(memory.output_norm, write.out.view(-1, memory.shape.width))
    past = len(x), memory.q.conv.width - 1, q.shape[1]
    shapes = [*((len(x), *w.shape) for w in weights), past, past, past]

    def accepts(state: NeuralMemoryState) -> bool:
        tensors = (*state.memory.weights, state.q, state.k, state.v)
        if [t.shape for t in tensors] != shapes or any(t.dtype != x.dtype or t.device != x.device for t in tensors):
            return False
        return max(state.memory.offset.tolist()) < memory.config.chunk_size  # else the ordinary path raises an error

    def advance(state: NeuralMemoryState) -> NeuralMemoryState:
        of_q, of_k, of_v = (inputs.follow(n, past) for n, past in enumerate((state.q, state.k, state.v)))
        start = tuple(w[0] for w in state.start) if state.start else weights
        inputs()
        make_gates()
        after = write(start, state.memory)
        normalise()
        return NeuralMemoryState(after, of_q, of_k, of_v, state.start)

    return TokenPlan(normal.view(len(x), -1), accepts, advance)


def recall_step(memory: nn.Module, queries: Tensor) -> tuple[Callable[[tuple[Tensor, ...]], object], Tensor]:
    """Step that computes ``NeuralMemory.read`` of queries (B, d_model) at given weights, and its output tensor."""
    memory = plain(memory, NeuralMemory)
    if memory_token.unserved(queries, memory.shape):
        raise Unplanned
    _, norm = plain(memory.network, MemoryNetwork).learned()
    recall = memory_token.MemoryRecall(queries, memory.q.n_heads, network=memory.shape, norm=norm)
    normal, normalise = norm_step(memory.output_norm, recall.out.view(-1, memory.shape.width))

    def step(weights: tuple[Tensor, ...]):
        recall(weights)
        normalise()

    return step, normal.view(len(queries), -1)


def projection_map(projection: nn.Module, x: Tensor) -> Map:
    """Output of a projection for a token x (B, d_model), heads side by side."""
    projection = plain(projection, Projection)
    linear, conv = plain(projection.linear, nn.Linear), plain(projection.conv, ShortConvolution)
    unit = len(linear.weight) // projection.n_heads if projection.unit else 0
    taps = conv.weight if conv.width > 1 else None
    activation = "identity" if projection.affine else "silu"
    return affine_map(x, linear, taps=taps, activation=activation, unit=unit)


def _gates_step(
    gates: MemoryGates, raw: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[], object]]:
    """Gates from their linear layer's output, (B, n), and the values, (B, d_model), as (B, 1, H, 1 or L)
    each, and the step that fills them."""
    config = gates.config
    if gates.alpha_out is not None:
        raise Unplanned
    made, fill = memory_gates(
        raw.view(len(raw), -1, gates.kinds), hard=config.gates == "hard", free=config.theta == "free",
        momentum=config.momentum, forgetting=config.forgetting, bound=gates.bound, stretch=STRETCH,
    )  # fmt: skip
    theta, eta, alpha = (gate.view(len(raw), 1, gates.n_heads, gates.layers) for gate in made)
    values = v.view(len(v), 1, gates.n_heads, -1)

    def step():
        fill(gates.writes)
        if gates.damped:
            theta.mul_(share_for(values).unsqueeze(-1))

    return (theta, eta, alpha), step
