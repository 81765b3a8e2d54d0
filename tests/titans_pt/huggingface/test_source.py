"""Source files that an exported folder carries."""

import ast
import sys
from types import ModuleType

import pytest

from titans_pt.config import ModelConfig
from titans_pt.errors import UserError
from titans_pt.huggingface import source
from titans_pt.models.mixers.lmm import LMM


@pytest.mark.parametrize("place", ["__main__", "made_in_memory", "nowhere_at_all"])
def test_a_mixer_of_a_notebook_is_refused(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "made_in_memory", ModuleType("made_in_memory"))
    monkeypatch.setattr(LMM, "__module__", place)
    with pytest.raises(
        UserError, match=f"^{place}: no source file that can be imported, .*; put the mixer in a file of"
    ):
        source.source_files(ModelConfig(mixers=["lmm"]))


def test_a_whole_import_of_our_modules_is_refused(tmp_path, monkeypatch):
    (tmp_path / "whole_import.py").write_text("import math\nimport titans_pt.config\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(LMM, "__module__", "whole_import")
    with pytest.raises(
        UserError, match="^whole_import: line 2: .* 'import titans_pt.config'; write it as 'from ... import"
    ):
        source.source_files(ModelConfig(mixers=["lmm"]))


@pytest.mark.parametrize("text", ["a\nb", "a\\n", "a'", "'''", "a\\", "\r\n", ""])
def test_a_carried_text_is_a_literal(text):
    assert ast.literal_eval(source._literal(text)) == text
