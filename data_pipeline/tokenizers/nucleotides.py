"""Tokenizer with one token per base: A, C, G, T, N and HyenaDNA's seven special tokens."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titans_pt.data_pipeline.tokenizers.base import FILES, Tokenizer
from titans_pt.genomics.alphabet import BOS, COMPLEMENT, EOS, LETTERS, SPECIALS, TOKENS, encoded
from titans_pt.tools.files import write_atomically


def _file() -> bytes:
    """The tokenizer as a tokenizer.json, which Hugging Face's library reads in the same way: each letter is a token,
    lower case counts as upper case, everything else is N."""
    upper = [{"type": "Replace", "pattern": {"String": x.lower()}, "content": x} for x in LETTERS.decode()]
    added = [{"id": i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for i, name in enumerate(SPECIALS)]  # fmt: skip
    tree = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": upper},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(TOKENS)}, "unk_token": "N"},
    }  # fmt: skip
    return json.dumps(tree).encode()


MODEL = _file()
"""Bytes of the model file, by which load_tokenizer recognises it."""
CONFIG = json.dumps({
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[BOS]", "eos_token": "[SEP]", "pad_token": "[PAD]",
})  # fmt: skip


_SPELT = np.array([ord(name[0]) for name in TOKENS], np.uint8)
"""Byte of each id's letter; "[" for the specials, which no text becomes."""


class NucleotideTokenizer(Tokenizer):
    """Tokenizer of twelve ids. Lower case counts as upper case; all else, ambiguous bases included, becomes N."""

    is_text = False
    complement = COMPLEMENT

    def __init__(self, path: Path):
        self.path, self.sha256 = path, hashlib.sha256(MODEL).hexdigest()
        self.vocab_size = len(TOKENS)
        self.names = list(TOKENS)
        self.pieces = [b"" if name in SPECIALS else name.encode() for name in TOKENS]
        self.bos_id, self.eos_id, self.dummy_prefix = BOS, EOS, False

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[Sequence[int]]:
        return [encoded(text.encode("ascii", "replace")) for text in texts]  # type: ignore[misc]  # an array is one

    def gives_back(self, text: str, ids: Sequence[int] | None = None) -> bool:
        found = encoded(text.encode("ascii", "replace")) if ids is None else np.asarray(ids)
        return _SPELT[found].tobytes() == text.encode("utf-8", "surrogatepass")

    def save(self, folder: Path) -> Path:
        path = folder / FILES[1]
        write_atomically(folder / "tokenizer_config.json", lambda temporary: temporary.write_text(CONFIG))
        write_atomically(path, lambda temporary: temporary.write_bytes(MODEL))
        return path
