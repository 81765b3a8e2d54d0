"""The plans of attention: of the layer, and of the mixer that consists of it alone."""

import torch
from torch import Tensor, nn

from titans_pt.kernels.attention import AttentionToken
from titans_pt.kernels.one_token import Map, Maps, Rotation
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.norm import RMSNorm
from titans_pt.models.mixers.attention import AttentionMixer
from titans_pt.token_plans.mixers import plans
from titans_pt.token_plans.plan import TokenPlan, affine_map, own, plain, weight_of


def attention_plan(attention: nn.Module, x: Tensor, prefix: bool) -> TokenPlan:
    """Plan of attention for x (B, d_model), after states with a prefix or without."""
    attention = own(attention, Attention)
    window = attention.window
    shape = len(x), 1, attention.kv_heads, attention.head_width
    rotation = Rotation(attention.turns(), x)
    inputs = Maps(len(x), *attention_maps(attention, x, rotation))
    q, k, v = inputs.out
    unturned = inputs.unturned[0]
    assert unturned is not None  # its map has a rotation
    queries = [unturned, q] if prefix else [q]
    attend, k, v = AttentionToken(attention.n_heads, attention.kv_heads, *queries), k.view(shape), v.view(shape)

    def accepts(state: AttentionState) -> bool:
        alike = state.visible is None and state.behind is None  # one window and one rotation for all rows
        return attention.fits(state) and alike and (state.prefix_k is not None) == prefix

    def advance(state: AttentionState) -> AttentionState:
        rotation.at(state.position)
        inputs()
        keys, values = (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        keys, values = attention.kept(keys, values, window)
        always = [] if state.prefix_k is None or state.prefix_v is None else [(state.prefix_k, state.prefix_v)]
        attend(*always, (keys, values))
        keys, values = attention.kept(keys, values, window and window - 1)
        return AttentionState(keys, values, state.prefix_k, state.prefix_v, None, state.position + 1)

    return TokenPlan(attend.out, accepts, advance)


def attention_maps(attention: Attention, x: Tensor, rotation: Rotation) -> tuple[Map, Map, Map]:
    """Rotated queries and keys, and values, of a token x (B, d_model)."""
    return (
        affine_map(x, attention.q, rotation=rotation, **_norm(attention.q_norm)),
        *key_value_maps(attention, x, rotation),
    )


def key_value_maps(attention: Attention, x: Tensor | int, rotation: Rotation) -> tuple[Map, Map]:
    """Rotated keys, and values, of a token x: (B, d_model), or the index of the map that computes it."""
    return (
        affine_map(x, attention.k, rotation=rotation, **_norm(attention.k_norm)),
        affine_map(x, attention.v),
    )


def _norm(norm: RMSNorm | None) -> dict[str, Tensor | float]:
    """A map's fields for the norm of its heads."""
    return {} if norm is None else {"norm": plain(norm, RMSNorm).weight, "eps": norm.eps}


@plans(AttentionMixer)
def attention_mixer_plan(mixer: AttentionMixer, x: Tensor, term: Tensor) -> TokenPlan:
    plan = attention_plan(mixer.attention, x, prefix=False)
    return plan.then(Maps(len(x), Map(plan.out, weight_of(mixer.out), term=term)))
