"""A class of tensors whose values are not at their address, where C would read them."""

import torch


class Packed(torch.Tensor):
    """A weight that is stored in another form, such as torchao's: a tensor without memory of its own."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.halved = weight / 2

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        whole = [2 * a.halved if isinstance(a, Packed) else a for a in arguments]
        result = function(*whole, **(named or {}))
        return Packed(result) if function is torch.ops.aten.detach.default else result
