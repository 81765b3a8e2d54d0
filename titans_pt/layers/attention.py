"""Multi-head and grouped-query attention with a cache of constant size (sliding window) or a growing one (full)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.kernels.attention import Prefix, causal_attention
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, attention_flops, linear_flops, mean_keys
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.rotary import rotate, rotation_from, turns
from titans_pt.layers.sharding import Shard
from titans_pt.layers.state import counted_together, join_parts, take_parts


@dataclass
class AttentionState:
    """k, v: (B, n, K, D), the last n <= window - 1 tokens (all of them without a window), keys rotated. Before them lie
        the sinks, the first tokens of the row's document, which are always seen; unused entries come first of all.
    prefix_k, prefix_v: (B, P, K, D) or None.
    visible: (B,) int64, how many of the newest cached tokens belong to the row's document, or None for all.
    position, behind: tokens read so far, see titans_pt.layers.state.counted_together. A row that is behind has unused
        entries.
    """

    k: Tensor
    v: Tensor
    prefix_k: Tensor | None
    prefix_v: Tensor | None
    visible: Tensor | None
    position: int
    behind: Tensor | None = None

    @staticmethod
    def join_rows(states: "Sequence[AttentionState]", place: str) -> "AttentionState":
        """See titans_pt.layers.state.join_rows."""
        entries = {state.k.shape[1] for state in states}
        full = {state.k.shape[1] for state in states if state.k.shape[1] < state.position}  # windows of this size
        same_window = not full or full == {max(entries)}
        states = counted_together(states)
        if same_window and (len(entries) > 1 or any(state.visible is not None for state in states)):
            states = [state.with_room(max(entries)) for state in states]
        return join_parts(states, place)

    def take_rows(self, index: Tensor) -> "AttentionState":
        """See titans_pt.layers.state.take_rows. Entries that no row uses any more are dropped."""
        (taken,) = counted_together([take_parts(self, index)])
        if taken.visible is None:
            return taken
        unused = max(0, taken.k.shape[1] - taken.position)
        k, v = (x[:, unused:] for x in (taken.k, taken.v))
        return replace(taken, k=k, v=v, visible=None if bool((taken.visible == k.shape[1]).all()) else taken.visible)

    def with_room(self, entries: int) -> "AttentionState":
        """The state with this many entries, unused ones first, and ``visible`` for all rows."""
        rows, own = self.k.shape[:2]
        k, v = (torch.cat([x.new_zeros(rows, entries - own, *x.shape[2:]), x], 1) for x in (self.k, self.v))
        visible = torch.full((rows,), own, device=k.device) if self.visible is None else self.visible
        return replace(self, k=k, v=v, visible=visible)


class Attention(nn.Module):
    """(B, T, d_model) -> (B, T, H D), heads side by side; the output projection is the mixer's.

    H heads of queries share K heads of keys and values (model.attention.kv_heads). With model.attention.qk_norm,
    queries and keys pass an RMSNorm over each head before their rotation (arXiv 2505.09388, Qwen3).
    """

    sharding = {
        "": Shard.ENTER, "q": Shard.COLUMN, "k": Shard.COLUMN, "v": Shard.COLUMN,
        "q_norm": Shard.SUMMED, "k_norm": Shard.SUMMED,
    }  # fmt: skip
    per_rank = ("n_heads", "kv_heads")

    def __init__(self, config: ModelConfig, window: int | None = None):
        super().__init__()
        own = config.attention
        if own.head_width is None and config.d_model % config.n_heads or config.head_width % 2:
            raise ValueError(
                f"n_heads: given {config.n_heads}; d_model={config.d_model} over it must be an even width, for RoPE"
            )
        if config.n_heads % config.kv_heads:
            raise ValueError(f"attention.kv_heads: given {config.kv_heads}; must divide n_heads={config.n_heads}")
        self.n_heads, self.kv_heads, self.head_width = config.n_heads, config.kv_heads, config.head_width
        self.window, self.sinks = window, own.sinks if window else 0
        self.rope_base, self.rope_scaling = config.rope_base, own.rope_scaling
        self.q, self.k, self.v = (
            nn.Linear(config.d_model, heads * config.head_width, bias=own.bias)
            for heads in (self.n_heads, self.kv_heads, self.kv_heads)
        )
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_width, eps=config.norm_eps) if own.qk_norm else None for _ in "qk"
        )

    @property
    def width(self) -> int:
        """Width of the outputs, H D."""
        return self.q.out_features

    def queries(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> queries (not rotated), (B, T, H, D)."""
        q = self.q(x).unflatten(-1, (self.n_heads, -1))
        return q if self.q_norm is None else self.q_norm(q)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, d_model) -> keys (not rotated) and values, (B, T, K, D)."""
        k, v = (y.unflatten(-1, (self.kv_heads, -1)) for y in (self.k(x), self.v(x)))
        return (k if self.k_norm is None else self.k_norm(k)), v

    def rotation_from(self, first: int, like: Tensor, behind: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotation of heads shaped like ``like`` (B, T, H, D), for tokens from position ``first`` on, or for each row
        from ``first`` - ``behind`` (B,) on."""
        return rotation_from(first, like, self.rope_base, self.rope_scaling, behind)

    def turns(self) -> Tensor:
        """(D / 2,) fp64: turns per token of the rotation."""
        return turns(self.head_width, self.rope_base, self.rope_scaling)

    def seen(self, length: int) -> float:
        """Mean number of keys that one of ``length`` tokens sees, without a prefix."""
        return mean_keys(length, self.window and self.window + self.sinks)

    def flops(self, keys: float) -> Flops:
        """Per token that sees ``keys`` keys on average."""
        return linear_flops(self) + attention_flops(self.width, keys)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        documents: Documents | None = None,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """prefix (1, P, d_model): tokens that every token sees, without position; needed where ``state`` is None."""
        return self.attend(self.queries(x), *self.keys_values(x), state, documents, prefix)

    def attend(
        self,
        plain: Tensor,
        k: Tensor,
        v: Tensor,
        state: AttentionState | None = None,
        documents: Documents | None = None,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """:meth:`forward` from the :meth:`queries` ``plain``, (B, T, H, D), and the :meth:`keys_values`, (B, T, K, D):
        for mixers that use these for more than attention.

        Raises:
            ValueError: the state is of attention with another window, other sinks or other heads.
        """
        batch, length = plain.shape[:2]
        position, behind = (state.position, state.behind) if state else (0, None)
        # Compiled code does not check: it would be compiled again for every position in a stream.
        if state and not torch.compiler.is_compiling() and not self.fits(state):
            raise ValueError(f"state: given one of another attention, keys {tuple(state.k.shape)} after {position} "
                             f"tokens; window={self.window}, sinks={self.sinks} and {self.kv_heads} heads here keep "
                             "others")  # fmt: skip
        turn = self.rotation_from(position, plain, behind)
        q, k = rotate(plain, *turn), rotate(k, *turn)
        if state:
            prefix_k, prefix_v = (p if p is None else p.to(k.dtype) for p in (state.prefix_k, state.prefix_v))
            k, v = (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        elif prefix is not None:
            prefix_k, prefix_v = (p.expand(batch, -1, -1, -1) for p in self.keys_values(prefix))
        else:
            prefix_k = prefix_v = None
        first = self._first(batch, k.shape[1] - length, length, state, documents, plain.device)
        always = None if prefix_k is None or prefix_v is None else Prefix(plain, prefix_k, prefix_v)
        bounds = None if documents is None else documents.bounds
        y = causal_attention(q, k, v, window=self.window, sinks=self.sinks, prefix=always, first=first, bounds=bounds)
        k, v, visible = self._after(k, v, first)
        return y.flatten(-2), AttentionState(k, v, prefix_k, prefix_v, visible, position + length, behind)

    def fits(self, state: AttentionState) -> bool:
        """Whether ``state`` has as many keys and heads as attention with this window and these sinks keeps."""
        kept = state.position if self.window is None else min(state.position, self.window - 1 + self.sinks)
        return state.k.shape[1:] == state.v.shape[1:] == (kept, self.kv_heads, self.head_width)

    def unlimited(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Output of :meth:`forward` for whole sequences without a window, (B, T, H D)."""
        q = self.queries(x)
        k, v = self.keys_values(x)
        turn = self.rotation_from(0, q)
        first = self._first(x.shape[0], 0, x.shape[1], None, documents, x.device)
        bounds = None if documents is None else documents.bounds
        return causal_attention(rotate(q, *turn), rotate(k, *turn), v, first=first, bounds=bounds).flatten(-2)

    def kept(self, k: Tensor, v: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
        """The sinks and the newest ``count`` of the keys and values (B, n, K, D) that follow them; None: all."""
        past = 0 if count is None else k.shape[1] - self.sinks - count
        if past <= 0:
            return k, v
        if not self.sinks:
            return k[:, past:], v[:, past:]
        k, v = (torch.cat([x[:, : self.sinks], x[:, self.sinks + past :]], 1) for x in (k, v))
        return k, v

    def _after(self, k: Tensor, v: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values that a state keeps, (B, n, K, D), and ``visible``.

        Documents may begin at a different place in every row; each row's sinks still lie directly before its newest
        tokens. The number of keys of a row's document, counted from the end, gives the document's start in the state
        and in the sequence alike.
        """
        count = self.window and self.window - 1
        if first is None:
            return *self.kept(k, v, count), None
        read = k.shape[1]
        own = read - first[:, -1]
        if count is None or read <= self.sinks + count:
            return k, v, own
        past = read - self.sinks - count
        if not self.sinks:
            return k[:, past:], v[:, past:], own.clamp(max=count)
        place = torch.arange(past, read, device=k.device).expand(len(k), -1)
        sinks = first[:, -1:] + torch.arange(self.sinks, device=k.device)
        long = (own > self.sinks + count)[:, None]
        place = torch.cat([torch.where(long, sinks, place[:, : self.sinks]), place[:, self.sinks :]], 1)
        rows = torch.arange(len(k), device=k.device)[:, None]
        return k[rows, place], v[rows, place], own.clamp(max=self.sinks + count)

    @staticmethod
    def _first(batch, past, length, state, documents, device) -> Tensor | None:
        """Index (B, T) of the key at which each query's document starts, or None if no key is masked."""
        hidden = None if state is None else state.visible
        if documents is None and hidden is None:
            return None
        start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        if hidden is not None:
            start = past - hidden.to(device)[:, None]
        if documents is None:
            return start.expand(batch, length)
        return torch.where(documents.begin < 0, start, documents.begin + past)
