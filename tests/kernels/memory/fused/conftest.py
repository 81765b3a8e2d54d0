"""Common fixtures of the kernels' tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreted(interpreter):
    pass


@pytest.fixture(autouse=True)
def _nan_where_nothing_was_written():
    """Fill torch.empty with NaN, so that entries that no kernel writes show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before)
