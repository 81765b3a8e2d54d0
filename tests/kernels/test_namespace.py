"""Operators of an exported folder's copies next to the package's operators."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from titans_pt.kernels.linear_memory import fla


@pytest.mark.parametrize("changed", [False, True])
def test_a_copy_of_any_version_leaves_the_packages_operators_alone(changed, tmp_path, monkeypatch):
    """An older version's operator has other arguments. If it took the name, the package could not call its own."""
    name = "transformers_modules.folder.titans_pt_kernels_linear_memory_fla"
    text = Path(fla.__file__).read_text(encoding="utf-8")
    path = tmp_path / "copy.py"
    path.write_text(text + ("# another version\n" if changed else ""), encoding="utf-8")
    before = torch.ops.titans.delta_memory.default._schema
    for _ in range(2):  # two folders of one version share their operators
        spec = spec_from_file_location(name, path)
        copy = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, copy)
        spec.loader.exec_module(copy)
    assert copy.NAMESPACE.startswith("titans_") and fla.NAMESPACE == "titans"
    assert torch.ops.titans.delta_memory.default._schema is before
    ones = torch.ones(1, 2, 1, 2), torch.ones(1, 1, 2, 2)
    monkeypatch.setattr(copy, "_call", lambda q, k, v, decay, beta, erase, state, reset: (2 * v, 2 * state))
    monkeypatch.setattr(fla, "_call", lambda q, k, v, decay, beta, erase, state, reset: (3 * v, 3 * state))
    for module, factor in ((copy, 2), (fla, 3)):
        out, _ = module._operator(*[ones[0]] * 3, None, None, None, ones[1], None)
        assert torch.equal(out, factor * ones[0])
