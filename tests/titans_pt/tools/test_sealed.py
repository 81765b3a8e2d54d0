import errno
import json
import os
import random
from pathlib import Path

import pytest

from titans_pt.data_pipeline import manifest
from titans_pt.errors import UserError
from titans_pt.genomics import prepared
from titans_pt.tools.sealed import CHECKSUM, read_sealed, seal, unseal

TREE = {"key": "a", "loss": 2.5, "none": None, "small": 1e-300, "text": "é\n\u2028", "list": [1, [2, {"b": True}]]}


def test_what_is_sealed_comes_back_with_any_spaces():
    for text in (json.dumps(seal(TREE)), json.dumps(seal(TREE), indent=2), json.dumps(seal(TREE)).encode()):
        assert unseal(text) == TREE
    assert unseal(json.dumps(seal({}))) == {}
    assert unseal(json.dumps(seal({"a": float("inf"), 3: (1, 2)}))) == {"a": float("inf"), "3": [1, 2]}


def test_of_an_earlier_version():
    assert unseal(json.dumps(TREE)) == TREE


def test_a_file(tmp_path):
    path = tmp_path / "a.json"
    assert read_sealed(path, "write it again") is read_sealed(path / "below", "write it again") is None
    path.write_text(json.dumps(seal(TREE)))
    assert read_sealed(path, "write it again") == TREE
    path.write_text(json.dumps(seal(TREE)).replace("2.5", "2.6"))
    with pytest.raises(UserError, match=r"a\.json: damaged \(its content .*\); write it again"):
        read_sealed(path, "write it again")
    with pytest.raises(UserError, match=f"{tmp_path}: Is a directory; write it again"):
        read_sealed(tmp_path, "write it again")


@pytest.mark.parametrize("read", [manifest.read_manifest, prepared.read_manifest])
def test_a_failing_disk_is_no_damage(tmp_path, monkeypatch, read):
    def broken(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(OSError, match="Stale file handle") as error:
        read(tmp_path)
    assert Path(error.value.filename).parent == tmp_path


def test_every_flipped_bit_is_noticed():
    """Flips in the checksum's name and in spaces may pass: the values are still the same."""
    text, draw = json.dumps(seal(TREE)).encode(), random.Random(0)
    for at in range(len(text)):
        changed = bytearray(text)
        changed[at] ^= 1 << draw.randrange(8)
        try:
            found = unseal(bytes(changed))
        except ValueError:
            continue
        assert {key: found.get(key) for key in TREE} == TREE and len(found) <= len(TREE) + 1


@pytest.mark.parametrize("text", [
    "", "{", "[]", "3", b"\0" * 99, b"\xff\xfe{", b'{"a": "\xe9"}', "[" * 100_000, '{"a": 1, "crc32": "00000000"}',
    '{"a": 1, "crc32": null}',
])  # fmt: skip
def test_damage_is_a_value_error(text):
    with pytest.raises(ValueError):
        unseal(text)


def test_the_name_of_the_checksum():
    assert CHECKSUM == "crc32" and list(seal({"a": 1})) == ["a", "crc32"]
