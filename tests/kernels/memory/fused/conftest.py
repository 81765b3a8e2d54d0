"""What the tests of the kernels share."""

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="session")
def _patched_once():
    """The interpreter swaps all functions of triton.language at every call of a device function, which is most of its
    time; one swap a kernel is enough."""
    original = interpreter._patch_lang

    def once(fn):
        modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        if modules and not any(tl.core.is_builtin(m.load) for m in modules):
            return interpreter._LangPatchScope()
        return original(fn)

    interpreter._patch_lang = once
    yield
    interpreter._patch_lang = original


@pytest.fixture(autouse=True)
def _nan_where_nothing_was_written():
    """torch.empty is full of NaN: a place that no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before)
