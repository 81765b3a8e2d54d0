"""Peak memory of a whole ``titans prepare``, each in a separate process."""

import json
import subprocess
import sys

import pytest
import yaml

from tests.data_pipeline.small_corpus import make_texts

PROGRAM = """
import resource, sys
from titans_pt.data_pipeline import merge, sources
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.config.files import load_config
sources.PART_BYTES, merge._BUCKET_DOCUMENTS = 1 << 20, 1 << 14
prepare(load_config(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def peak(config, folder, lines, tokenizer):
    """Peak memory in MiB of preparing these lines of .jsonl. A tokenizer is given: training one would take memory."""
    folder.mkdir()
    with open(folder / "text.jsonl", "w") as file:
        for text in lines:
            file.write(json.dumps({"text": text}) + "\n")
    source = {"kind": "files", "path": str(folder / "text.jsonl")}
    data = {"dir": str(folder / "data"), "sources": [source], "tokenizer": {"path": str(tokenizer.path)}}
    tree = config(data=data).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    result = subprocess.run([sys.executable, "-c", PROGRAM, folder / "config.yaml"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(config, tokenizer, tmp_path):
    small, large = (
        peak(config, tmp_path / f"{n}", (f"{i} {text}" for i in range(n // 100) for text in make_texts(100)), tokenizer)
        for n in (20_000, 160_000)
    )
    assert large < small + 40, (small, large)


@pytest.mark.slow
def test_a_document_of_50_megabytes(config, tokenizer, tmp_path):
    small = peak(config, tmp_path / "small", make_texts(300), tokenizer)
    words = "\n".join(make_texts(400))
    long = peak(config, tmp_path / "long", [*make_texts(300), words * (50_000_000 // len(words))], tokenizer)
    assert long < small + 600, (small, long)
