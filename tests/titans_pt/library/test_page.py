"""The code blocks of docs/python.md run in order, in a folder with a tiny run."""

import re
from pathlib import Path

from tests.helpers.chats import SIZE, byte_tokenizer
from tests.helpers.untrained import untrained_run

PAGE = Path(__file__).parents[3] / "docs/python.md"


def test_the_blocks_of_the_page_run(prepared, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    untrained_run(tmp_path / "runs/quickstart", prepared)
    byte_tokenizer(tmp_path / "tokenizer")  # stands for an imported chat model's
    untrained_run(tmp_path / "runs/smollm2", tmp_path / "tokenizer", vocab_size=SIZE)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 6
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    # Comments show the lines that were printed.
    said = re.findall(r"print\(error\)  # (.+)$", "".join(blocks), re.M)
    printed = capsys.readouterr().out.splitlines()
    assert said and set(said) <= set(printed)
    assert names["y"].shape == names["y2"].shape == (2, 64, 512)
    assert Path("notes.safetensors").is_file()
