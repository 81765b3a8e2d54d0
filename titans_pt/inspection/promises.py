"""Check of what every mixer and memory rule promises: no token sees a later one, rows are independent, cuts change
nothing, documents see nothing before them, a memory's fast form equals its definition. For mixers and rules of one's
own before they are trained."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titans_pt.config import ModelConfig
from titans_pt.errors import UserError
from titans_pt.layers.documents import Documents
from titans_pt.layers.memory import NeuralMemory
from titans_pt.layers.state import take_rows
from titans_pt.models.backbone import Backbone, initialise
from titans_pt.models.mixers.common import Windowed, any_memory

ROWS = 3
BLOCKS = 2
CHUNKS = 3
"""Chunks that are compared with the definition, which is slow."""
LEAST = 256
"""Tokens of a check whose number is not given, at least, if the training's samples have as many."""
NOISE = 0.05
"""Size of the noise on all parameters, since parts that start at 0 would hide what they do."""
NEGLIGIBLE = 1e-6
"""Size of gradients, relative to the largest, that are not compared with themselves: some are only rounding."""
TOLERANCE = 1e-6
"""Largest difference between outputs that should be equal, as a share of the largest output. Rounding in float64 gives
1e-12, or 1e-9 in deep memories."""


@dataclass(frozen=True)
class Promise:
    """Outcome for one promise of one mixer.

    difference: largest difference between outputs that should be equal, over the largest output; NaN: not finite. None:
        nothing was compared.
    failed: reason why the promise is broken, or the check could not be made, or "".
    """

    text: str
    difference: float | None = None
    failed: str = ""

    @property
    def kept(self) -> bool:
        return not self.failed and (self.difference is None or self.difference <= TOLERANCE)

    def line(self) -> str:
        found = self.failed or (f"difference {self.difference:.1e}" if self.difference is not None else "")
        return f"  {'kept  ' if self.kept else 'BROKEN'}  {self.text}{found and f' ({found})'}"


def check_promises(config: ModelConfig, longest: int, tokens: int | None = None, seed: int = 0):
    """Check every kind of mixer in ``config``, in two blocks each, and print a line for each promise.

    Random inputs (3, tokens, d_model) and randomly changed parameters, float64, on the CPU.

    Args:
        longest: most tokens that are read if ``tokens`` is None; then :func:`enough` of them are.

    Raises:
        UserError: a promise is broken.
    """
    broken = 0
    for kind in config.kinds:
        alone = config.model_copy(update={"mixers": [kind], "n_layers": BLOCKS})
        length = tokens or min(longest, enough(alone))
        rule = f", memory rule {config.memory.rule}" if any_memory([kind]) else ""
        print(f"{kind}: {BLOCKS} blocks, {length} tokens{rule}")
        for promise in promises(alone, length, seed):
            print(promise.line(), flush=True)
            broken += not promise.kept
    if broken:
        raise UserError(f"model.mixers={config.kinds}: {broken} promises are broken; mend the mixer or rule: "
                        "docs/architecture.md has what each must do")  # fmt: skip


def enough(config: ModelConfig) -> int:
    """Number of tokens that pass the ends of the window, and of two segments."""
    with torch.device("meta"):
        blocks = Backbone(config)
    window = max((config.window for mixer in blocks.mixers if isinstance(mixer, Windowed)), default=0)
    return max(LEAST, window + LEAST // 2, 2 * max(mixer.piece for mixer in blocks.mixers) + 1)


def promises(config: ModelConfig, tokens: int, seed: int = 0) -> Iterator[Promise]:
    """Outcome of each promise for the blocks of ``config``, one after the other."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = Backbone(config)
        initialise(blocks, config)
    blocks = blocks.double().eval()
    with torch.no_grad():
        for p in blocks.parameters():
            p.add_(NOISE * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    x = torch.randn(ROWS, tokens, config.d_model, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        whole = blocks(x)[0]
    largest = whole.abs().max()

    def differs(*pairs: tuple[Tensor, Tensor]) -> float:
        # Not the built-in max, which loses NaN.
        return torch.stack([(a - b).abs().max() / largest for a, b in pairs]).max().item()

    def places(count: int) -> list[int]:
        """Places 1 .. tokens - 1, in order."""
        return sorted((torch.randperm(tokens - 1, generator=draw)[:count] + 1).tolist())

    def causal() -> float:
        found = []
        for place in places(3):
            other = torch.randn(x[:, place:].shape, generator=draw, dtype=x.dtype)
            found.append((blocks(torch.cat([x[:, :place], other], 1))[0][:, :place], whole[:, :place]))
        return differs(*found)

    def independent() -> float:
        return differs((blocks(x[1:])[0], whole[1:]), (blocks(x.flip(0))[0], whole.flip(0)))

    def cut() -> float:
        return differs((_in_pieces(blocks, x, [*places(3), tokens - 1, tokens]), whole))

    def rows() -> float:
        (place,) = places(1)
        state = take_rows(blocks(x[:, :place])[1], torch.tensor([2, 0, 0]))
        return differs((blocks(x[[2, 0, 0], place:], state)[0], whole[[2, 0, 0], place:]))

    def documents() -> float:
        begins = places(ROWS)
        begins += [1] * (ROWS - len(begins))  # fewer places than rows
        reset = torch.zeros(ROWS, tokens, dtype=torch.bool)
        reset[torch.arange(ROWS), begins] = True
        found = blocks(x, None, Documents.of(reset, x.device))[0]
        pairs = [(found[row, :begin], whole[row, :begin]) for row, begin in enumerate(begins)]
        pairs += [(found[row, begin:], blocks(x[row : row + 1, begin:])[0][0]) for row, begin in enumerate(begins)]
        return differs(*pairs)

    for text, check in (
        ("no token sees a later one", causal),
        ("a row sees no other row", independent),
        ("a sequence that is cut gives the outputs of one call", cut),
        ("rows of a state may be taken in any order", rows),
        ("a document sees nothing before it", documents),
    ):
        yield _kept(text, torch.no_grad()(check))  # not around yield: the caller would run without gradients
    yield _kept("every parameter has a finite gradient", lambda: _gradients(blocks, x))
    yield _kept("inputs in bf16 give finite outputs in bf16", lambda: _in_bf16(blocks, x))
    yield _kept("its FLOPs are counted, for plans and logs", lambda: _flops(blocks, tokens))
    if memories := [module for module in blocks.modules() if isinstance(module, NeuralMemory)]:
        text = "the memory equals its definition, token by token, with all gradients"
        yield _kept(text, lambda: _definition(blocks, memories, x[:, : CHUNKS * config.memory.chunk_size + 1]))


def _kept(text: str, check: Callable[[], float | None]) -> Promise:
    try:
        return Promise(text, check())
    except Exception as error:  # of the mixer: the other promises can be checked nevertheless
        reason = " ".join(str(error).split())[:200]
        return Promise(text, failed=f"{type(error).__name__}: {reason}")


def _in_pieces(blocks: Backbone, x: Tensor, ends: list[int]) -> Tensor:
    state: Any = None
    found, begin = [], 0
    for end in ends:
        if end > begin:
            y, state = blocks(x[:, begin:end], state)
            found.append(y)
            begin = end
    return torch.cat(found, 1)


def _gradients(blocks: Backbone, x: Tensor):
    """
    Raises:
        ValueError: a gradient is not finite, or a parameter has none: data parallelism would wait for it.
    """
    blocks.zero_grad()
    blocks(x)[0].square().mean().backward()
    missing = [name for name, p in blocks.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise ValueError(f"{len(missing)} have none, such as {missing[0]}")
    for name, p in blocks.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            raise ValueError(f"that of {name} is not finite")


def _in_bf16(blocks: Backbone, x: Tensor):
    """
    Raises:
        ValueError: an output is not finite.
        TypeError: a mixer returns another type, which the weights after it do not take.
    """

    def check(_mixer: Any, _given: Any, found: tuple[Tensor, Any]):
        if found[0].dtype != torch.bfloat16:
            raise TypeError(f"given torch.bfloat16, the mixer returns {found[0].dtype}; cast it to x.dtype")

    blocks = copy.deepcopy(blocks).bfloat16()
    for mixer in blocks.mixers:
        mixer.register_forward_hook(check)
    with torch.no_grad():
        if not blocks(x.bfloat16())[0].isfinite().all():
            raise ValueError("an output is not")


def _flops(blocks: Backbone, tokens: int):
    """
    Raises:
        TypeError: they are not counted.
    """
    try:
        blocks.flops(tokens)
    except NotImplementedError:
        raise TypeError("define flops(length)") from None


def _definition(blocks: Backbone, memories: list[NeuralMemory], x: Tensor) -> float:
    """Largest difference of outputs and of gradients, each over the largest number of its own tensor, which counts as
    no less than NEGLIGIBLE times the largest of all."""
    found = []
    for backend in ("naive", "auto"):
        for memory in memories:
            memory.backend = backend
        blocks.zero_grad()
        given = x.clone().requires_grad_()
        y = blocks(given)[0]
        y.square().mean().backward()
        gradients = [p.grad for p in [given, *blocks.parameters()] if p.grad is not None]
        found.append([y.detach(), *(gradient.clone() for gradient in gradients)])
    sizes = torch.stack([exact.abs().max() for exact in found[0]])
    differences = torch.stack([(exact - fast).abs().max() for exact, fast in zip(*found, strict=True)])
    return (differences / sizes.clamp(min=NEGLIGIBLE * sizes.max())).max().item()
