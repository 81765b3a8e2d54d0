"""Fixtures shared by the kernels' tests: other projects' plain PyTorch functions, computing in float64."""

from importlib import import_module

import numpy as np
import pytest
import torch


class _Double:
    """The module torch, except that fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def reference(monkeypatch):
    """``reference(package, module, function)`` returns the function, or skips if the package is not installed.

    flash-linear-attention's modules import triton; its naive functions do not use it.
    """

    def find(package: str, module: str, function: str):
        pytest.importorskip(package, reason=f"pip install {'fla-core==0.6.0' if package == 'fla' else package}")
        if package == "fla":
            pytest.importorskip("triton", reason="pip install triton, which flash-linear-attention imports")
        found = import_module(f"{package}.{module}")
        monkeypatch.setattr(found, "torch", _Double())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        function = getattr(found, function)
        # transformers delegates its functions to fla or mamba-ssm if they are installed.
        return getattr(function, "__wrapped__", function)

    return find


@pytest.fixture
def scans_by_rows(monkeypatch):
    """Make Triton's interpreter scan row by row (along the first axis): entry by entry takes minutes."""
    from triton.runtime import interpreter

    def scan(self, given):
        assert self.axis == 0
        arrays = [x.handle.data for x in given]
        found = [array[:1].copy() for array in arrays]
        for row in range(1, len(arrays[0])):
            late = [self.to_tensor(array[-1:], x.dtype) for array, x in zip(found, given, strict=True)]
            new = [self.to_tensor(array[row : row + 1], x.dtype) for array, x in zip(arrays, given, strict=True)]
            made = self.combine_fn.fn(*late, *new)
            found = [np.concatenate([array, x.handle.data]) for array, x in zip(found, made, strict=True)]
        return [self.to_tensor(array, x.dtype) for array, x in zip(found, given, strict=True)]

    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", scan)
