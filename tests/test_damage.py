"""Random damage to the files that commands read: each is refused in one line, never a traceback."""

import json
import random
import shutil

import pytest
import yaml

from tests.conftest import TINY, merged
from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.tools.sealed import seal

DAMAGES = {
    "delete": lambda content, draw: None,
    "folder": lambda content, draw: None,
    "empty": lambda content, draw: b"",
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "zeroed": lambda content, draw: bytes(len(content)),
    "no UTF-8": lambda content, draw: b"\xff\xfe\x80" + draw.randbytes(60),
    "other JSON": lambda content, draw: draw.choice([b"[]", b"{}", b"null", b"3", b'"text"']),
    "bits": lambda content, draw: flipped(content, draw),
}


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(3):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prepared):
    """An undamaged folder with a run, its results, a state, token files and a config."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(prepared, folder / "data")
    untrained_run(folder / "run", prepared)
    rows = [{"length": 1024, "mean": 0.5, "low": 0.0, "high": 1.0, "n": 4}]
    results = folder / "run/evaluation/step-00000003/summary.json"
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps(seal({"step": 3, "needle": {"tasks": {"niah_single_1": {"by_length": rows}}}})))
    source = {"kind": "files", "path": str(prepared.parent / "text.jsonl")}
    (folder / "config.yaml").write_text(yaml.safe_dump(merged(TINY, {"data": {"sources": [source]}})))
    words = ["--prompt", "a", "--max-new-tokens", "1", "--save-state", str(folder / "state")]
    assert cli.run(["generate", str(folder / "run"), *words]) == 0
    return folder


COMMANDS = {
    "generate RUN --prompt a --max-new-tokens 1 --state STATE": [
        "state", "run/config.yaml", "run/tokenizer.model", "run/checkpoints/step-00000003/model.safetensors",
        "run/checkpoints/step-00000003/trainer.json", "run/checkpoints/step-00000003/manifest.json",
    ],
    "compare RUN --task niah_single_1 --out PICTURE": ["run/evaluation/step-00000003/summary.json"],
    "data inspect CONFIG data.dir=DATA --verify": [
        "data/manifest.json", "data/train.bin", "data/train.idx", "data/train.crc32", "data/validation.bin",
        "data/tokenizer.model", "data/train.documents.parquet",
    ],
    "data inspect CONFIG data.dir=DATA --sample 0": [
        "data/manifest.json", "data/train.idx", "data/train.crc32", "data/validation.idx", "data/tokenizer.model",
    ],
}  # fmt: skip
"""Files of each command, which refuses every damage to them."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split(" ")[0])
def test_damage_is_refused_in_one_line(whole, tmp_path, capsys, caplog, command, damage):
    shutil.copytree(whole, tmp_path / "w")
    places = {"RUN": "run", "STATE": "state", "PICTURE": "c.png", "CONFIG": "config.yaml"}
    words = [str(tmp_path / "w" / places[word]) if word in places else word for word in command.split()]
    words = [word.replace("DATA", str(tmp_path / "w/data")) for word in words]
    assert cli.run(words) == 0, "undamaged"
    capsys.readouterr()
    for name in COMMANDS[command]:
        path, draw = tmp_path / "w" / name, random.Random(f"{name} {damage}")
        content = path.read_bytes()
        changed = DAMAGES[damage](content, draw)
        path.unlink()
        if damage == "folder":
            path.mkdir()
        elif changed is not None:
            path.write_bytes(changed)
        status = cli.run(words)
        if status == 0 and name == "run/config.yaml":  # users may change it
            assert "config.yaml: damaged, or changed since training wrote it" in caplog.text
        else:
            assert status == 2, name
        error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("titans: error: ")]
        assert len(error) == (status == 2), name
        if damage == "folder":
            path.rmdir()
        path.write_bytes(content)
