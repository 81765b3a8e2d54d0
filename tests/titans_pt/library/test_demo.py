"""titans demo: the model that comes with the package keeps its needles; a window loses them."""

import hashlib
import re

import pytest
import torch

from titans_pt import Titan, UserError
from titans_pt.cli import run
from titans_pt.config.files import load_config
from titans_pt.library.demo import Asked, demo
from titans_pt.library.titan import PRETRAINED

FOLDER = PRETRAINED / "needles-lmm"
CARD = (FOLDER / "README.md").read_text()


@pytest.fixture(scope="module")
def model():
    return Titan.from_pretrained("needles-lmm")


def test_the_memory_keeps_what_the_window_loses(capsys, tmp_path):
    picture = tmp_path / "demo.png"
    assert demo(9000, picture=picture) == [Asked(2048, 8, 8), Asked(4096, 8, 0), Asked(8192, 8, 0), Asked(9000, 8, 0)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr()
    assert re.search(r"^ +9,000 +8 of 8 +0 of 8$", shown.out, re.M)
    assert re.search(r"reading: +\d+%.*/9\.00k", shown.err), "a progress bar"


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["demo", "--tokens", "2048", "--seed", "3"]) == 0
    assert "picture: titans-demo.png" in capsys.readouterr().out and (tmp_path / "titans-demo.png").is_file()
    assert run(["demo", "--tokens", "2047"]) == 2
    assert "given '2047'; allowed: a whole number of at least 2048" in capsys.readouterr().err
    assert run(["demo", "--out", "picture.txt"]) == 2
    assert "picture.txt: no figure can be written as .txt" in capsys.readouterr().err
    with pytest.raises(UserError, match="tokens: given 100; allowed: at least 2048"):
        demo(100)


def test_the_card_says_what_the_folder_holds(model):
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in CARD
    (command,) = re.findall(r"^    titans needles (.+)$", CARD, re.M)
    assert command == "configs/needles.yaml --models lmm needles.held_out=16 model.memory.write_cost=0.1"
    words = ["model.mixers=[lmm]", "needles.held_out=16", "model.memory.write_cost=0.1", "train.stop_when=null"]
    trained, said = model.run.config, load_config("configs/needles.yaml", words)
    assert trained.model == said.model and trained.section("needles") == said.section("needles")
    assert trained.train == said.train and trained.run.seed == 0
    assert not re.search(r"/(tmp|work|home)/", (FOLDER / "config.yaml").read_text())
    (weights,) = FOLDER.glob("checkpoints/*/model.safetensors")
    assert hashlib.sha256(weights.read_bytes()).hexdigest().startswith("f71dd5d2754a6fdb")


def test_it_is_a_model_of_ids(model):
    ids = torch.tensor([[0, 70, 130, 5, 6]])
    logits, state = model(ids)
    more, _ = model(torch.tensor([[1, 70]]), state)
    assert logits.shape == (1, 5, 256)
    assert more[0, -1].argmax() == 130, "asked for the key, it says the value"
    with pytest.raises(UserError, match="has no text"):
        model.read("some text")
