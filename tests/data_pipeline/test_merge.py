from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_pipeline.small_corpus import write_jsonl
from titans_pt.data_pipeline import TokenFiles, merge, sources
from titans_pt.data_pipeline.parts import SCHEMA
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.data_pipeline.sources import Part
from titans_pt.errors import UserError


@settings(max_examples=8)
@given(st.lists(st.integers(0, 15), min_size=12, max_size=40), st.integers(1, 9), st.integers(40, 400))
def test_duplicates_are_found_across_parts_and_buckets(tmp_path_factory, tokenizer, chosen, bucket, part_bytes):
    """The first of equal documents stays, wherever the duplicates are."""
    from titans_pt.config import Config

    folder = tmp_path_factory.mktemp("merge")
    texts = [f"document {number} of some words" for number in [*range(100, 120), *chosen]]
    write_jsonl(folder / "a.jsonl", texts)
    config = Config.model_validate(
        {
            "data": {
                "dir": str(folder / "data"),
                "sources": [{"kind": "files", "path": str(folder / "a.jsonl")}],
                "tokenizer": {"path": str(tokenizer.path)},
                "validation_fraction": 0.3,
            },
            "model": {"vocab_size": 320},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_BUCKET_DOCUMENTS", bucket)
        patch.setattr(sources, "PART_BYTES", part_bytes)
        manifest = prepare(config)
    assert manifest["dropped"]["duplicate"] == len(texts) - len(set(texts))
    files = TokenFiles.open(config)
    train, validation = (
        [tokenizer.decode(ids.tolist()) for ids in stream] for stream in (files.train[0], files.validation)
    )
    assert Counter(train + validation) == Counter(dict.fromkeys(texts, 1))
    assert train == [text for text in dict.fromkeys(texts) if text in set(train)]


def test_a_part_without_its_counts_is_refused(tmp_path):
    """Its .json is written last: another process may have removed it, or never have finished the part."""
    part = Part(0, (("a.jsonl", 0, None),), 1)
    with pytest.raises(UserError, match="part-000000.json: not the file that was written; remove"):
        merge.merge([part], tmp_path, tmp_path / "out", 320, ["train"], SCHEMA)
