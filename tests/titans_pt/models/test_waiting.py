"""A model's forward pass on a GPU does not wait for it: no blocking copy from the host, and none to it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.mixers import small_config
from titans_pt.models import LanguageModel

pytest.importorskip("triton", reason="the fused memory is made of its kernels")


class Waits(TorchDispatchMode):
    """Counts blocking copies of the host's tensors to meta tensors, which follow the GPU path. A copy to the host is an
    error of PyTorch, since meta tensors have no content."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        copies = function is torch.ops.aten._to_copy.default and found.is_meta and not args[0].is_meta
        self.count += copies and not (kwargs or {}).get("non_blocking")
        return found


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("mixer, changes", [
    ("lmm", {}), ("mac", {}), ("hope", {}), ("ttt_mlp", {}), ("swa", {"mlp_periods": [8]}),
    ("lmm", {"memory": {"caching": {"segment": 16}}}),
    ("lmm", {"memory": {"hierarchy": {"chunk": 8, "shard": 16, "locals": [4]}}}),
], ids=lambda given: given if isinstance(given, str) else next(iter(given.get("memory", given)), ""))  # fmt: skip
def test_nothing_waits(mixer, changes, documents):
    config = small_config([mixer], d_model=64, n_heads=2, mac={"segment": 16, "memory_tokens": 8}, **changes)
    with torch.device("meta"):
        model = LanguageModel(config).bfloat16()
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[0, 13] = starts[1, 21] = True
    with Waits() as waits:
        model(torch.zeros(2, 40, dtype=torch.int64, device="meta"), reset=starts if documents else None)
    assert waits.count == 0
