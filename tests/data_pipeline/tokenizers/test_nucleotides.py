"""One token per base, in our tokenizer and in Hugging Face's library."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from titans_pt.data_pipeline.tokenizers import NucleotideTokenizer, load_tokenizer, lost_kinds
from titans_pt.data_pipeline.tokenizers.nucleotides import MODEL
from titans_pt.errors import UserError


def test_saved_it_is_read_again_and_hugging_faces_library_agrees(tmp_path):
    path = NucleotideTokenizer(tmp_path).save(tmp_path)
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, NucleotideTokenizer) and tokenizer.vocab_size == 12
    text = "ACGTNacgtnRYx-"
    ids = [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 11, 11, 11, 11]
    assert list(tokenizer.encode(text)) == ids
    assert Tokenizer.from_buffer(MODEL).encode(text).ids == ids
    assert tokenizer.decode(ids) == "ACGTNACGTNNNNN" and tokenizer.decode([tokenizer.eos_id, 7]) == "A"
    assert tokenizer.gives_back("ACGTN") and not tokenizer.gives_back("acgt") and not tokenizer.gives_back("ACé")
    assert lost_kinds(tokenizer) == []
    assert tokenizer.sha256 == load_tokenizer(tmp_path / "tokenizer.json").sha256
    assert np.array_equal(tokenizer.complement[ids[:5]], [10, 9, 8, 7, 11])


def test_it_has_its_own_end_of_text(tmp_path):
    path = NucleotideTokenizer(tmp_path).save(tmp_path)
    assert isinstance(load_tokenizer(path, "[SEP]"), NucleotideTokenizer), "as an exported folder names it"
    with pytest.raises(UserError, match="tokenizer.json"):
        load_tokenizer(path, "[CLS]")
