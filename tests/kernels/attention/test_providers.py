"""The choice between the providers of FlashAttention."""

from importlib import metadata
from importlib.machinery import ModuleSpec

import pytest
import torch

from titans_pt.kernels import common
from titans_pt.kernels.attention import dispatch, providers
from titans_pt.kernels.common import warn_once


@pytest.fixture(autouse=True)
def warned_of_nothing():
    common.warned_of.cache_clear()


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """``installed(version, *files)`` fakes a flash-attn package with these files; version None: no version."""

    def put(version, *files):
        for name in files:
            (tmp_path / name).touch()
        spec = ModuleSpec("flash_attn", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]

        def version_of(_):
            if version is None:
                raise metadata.PackageNotFoundError
            return version

        monkeypatch.setattr(providers, "find_spec", lambda _: spec)
        monkeypatch.setattr(metadata, "version", version_of)

    return put


@pytest.mark.parametrize("version", ["2.7.4.post1", "2.8.3", "3.0"])
def test_a_flash_attn_that_is_new_enough_serves(installed, version):
    installed(version, "flash_attn_interface.py")
    assert providers.flash_attn_serves()


def test_an_older_one_does_not_and_a_warning_says_so(installed):
    installed("2.6.3", "flash_attn_interface.py")
    with pytest.warns(UserWarning, match="flash-attn 2.6.3 is too old, .* pip install 'flash-attn>=2.7'"):
        assert not providers.flash_attn_serves()


def test_one_without_the_functions_does_not(installed):
    installed("4.0.0b1", "cute.py")
    assert not providers.flash_attn_serves()
    installed(None, "flash_attn_interface.py")
    assert not providers.flash_attn_serves()


def test_explicit_masks_in_place_of_flash_attention_are_told(monkeypatch):
    monkeypatch.setattr(dispatch, "flash_serves", lambda _: True)
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 6, 2, 8)
    with pytest.warns(UserWarning, match="documents beside a state .* take explicit masks"):
        dispatch.causal_attention(q, k, k, window=3, first=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.warns(UserWarning, match="documents beside sinks take explicit masks"):
        dispatch.causal_attention(q, q, q, window=3, sinks=1, first=torch.zeros(1, 4, dtype=torch.int64))


def test_a_warning_breaks_no_graph():
    def warns(x):
        warn_once("told once")
        return x + 1

    with pytest.warns(UserWarning):
        assert torch.compile(warns, backend="eager", fullgraph=True)(torch.zeros(2)).sum() == 2
