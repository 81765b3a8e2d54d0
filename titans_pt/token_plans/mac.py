"""The plan of MAC."""

import torch
from torch import Tensor

from titans_pt.kernels.attention import AttentionToken
from titans_pt.kernels.one_token import Map, Maps, Rotation, add
from titans_pt.layers.attention import Attention
from titans_pt.models.mixers.mac import MAC, MACState
from titans_pt.token_plans.attention import attention_maps, key_value_maps
from titans_pt.token_plans.gate import gate_step
from titans_pt.token_plans.memory import memory_plan, projection_map, recall_step
from titans_pt.token_plans.mixers import plans
from titans_pt.token_plans.plan import TokenPlan, plain, weight_of


@plans(MAC)
def mac_plan(mixer: MAC, x: Tensor, term: Tensor) -> TokenPlan:
    attention = plain(mixer.attention, Attention)
    heads, conv = (attention.kv_heads, attention.head_width), (len(x), mixer.read.conv.width - 1, x.shape[1])
    rotation = Rotation(attention.turns(), x)
    inputs = Maps(len(x), projection_map(mixer.read, x), *attention_maps(attention, x, rotation))
    queries, turned, *new = inputs.out
    recall, recalled = recall_step(mixer.memory, queries)
    group = Maps(len(x), *key_value_maps(attention, recalled, rotation))
    prefix = mixer.persistent is not None
    unturned = inputs.unturned[1]
    assert unturned is not None  # its map has a rotation
    attended = [unturned, turned, turned] if prefix else [turned, turned]
    attend = AttentionToken(attention.n_heads, attention.kv_heads, *attended)
    written = joined = attend.out
    steps = []
    if mixer.write is not None:
        written, write = add(x, mixer.write, attend.out)
        joined, join = add(x, None, attend.out)
        steps = [write, join]
    memory = memory_plan(mixer.memory, written)
    gated, gate = gate_step(mixer.gate, x, joined, memory.out)
    out = Maps(len(x), Map(gated, weight_of(mixer.out), term=term))
    new_k, new_v, group_k, group_v = (y.view(len(x), 1, *heads) for y in (*new, *group.out))
    segment, stride = mixer.segment, mixer.stride

    def accepts(state: MACState) -> bool:
        if not (mixer.fits(state) and memory.accepts(state.memory)) or (state.persistent is not None) != prefix:
            return False
        if state.behind is not None:  # one rotation for all rows
            return False
        alike = [w.shape for w in state.read_weights] == [w.shape for w in state.memory.memory.weights]
        alike = alike and state.read_conv.shape == conv and state.k.shape[2:] == state.h_k.shape[2:] == heads
        alike = alike and all(t.dtype == x.dtype for t in (*state.read_weights, state.read_conv))
        offset = set(state.offset.tolist())
        if not alike or len(offset) != 1:  # segments of the rows end at different tokens
            return False
        # If only some rows of a state were taken, it may keep memory tokens that only the others saw.
        start = state.position - max(offset)
        own = all(place >= start and (place - start) % stride == 0 for place in state.h_place.tolist())
        return own and state.k.shape[1] == max(offset)

    def advance(state: MACState) -> MACState:
        read, place = state.offset.tolist()[0], state.position
        rotation.at(place)
        read_conv = inputs.follow(0, state.read_conv)
        inputs()
        # The state keeps exactly the tokens and memory tokens of the current segment.
        k, v, h_k, h_v = (kept.to(turned.dtype) for kept in (state.k, state.v, state.h_k, state.h_v))
        places, weights = state.h_place, state.read_weights
        if read == 0:
            weights = state.memory.memory.weights
        if read % stride == 0:
            recall(weights)
            group()
            h_k, h_v = torch.cat([h_k, group_k], 1), torch.cat([h_v, group_v], 1)
            places = torch.cat([places, torch.tensor([place])])
        k, v = torch.cat([k, new_k], 1), torch.cat([v, new_v], 1)
        attend(*([] if state.persistent is None else [state.persistent]), (h_k, h_v), (k, v))
        for step in steps:
            step()
        after = memory.advance(state.memory)
        gate()
        out()
        if read + 1 == segment:
            k, v, h_k, h_v, places = k[:, :0], v[:, :0], h_k[:, :0], h_v[:, :0], places[:0]
        offset = torch.full_like(state.offset, (read + 1) % segment)
        return MACState(after, weights, read_conv, k, v, h_k, h_v, places, offset, place + 1, state.persistent)

    return TokenPlan(out.out[0], accepts, advance)
