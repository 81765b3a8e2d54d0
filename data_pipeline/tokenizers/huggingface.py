"""A Hugging Face tokenizer.json whose decoding returns exactly the encoded text."""

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from titans_pt.data_pipeline.text import replace_surrogates
from titans_pt.data_pipeline.tokenizers.base import FILES, Tokenizer
from titans_pt.errors import UserError

CONFIG = "tokenizer_config.json"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of byte-level BPE (GPT-2's family) or of SentencePiece's kind (Llama's, with byte fallback).

    Raises:
        UserError: broken file, one of another kind, or ``eos_token`` is no piece of it.
    """

    def __init__(self, path: Path, model: bytes, eos_token: str | None = None):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
            tree = json.loads(model)
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"tokenizer {path}: not a tokenizer.json ({' '.join(str(error).split())}); copy it again, "
                            "or set data.tokenizer.path to another file") from None
        self.path, self.sha256 = path, hashlib.sha256(model).hexdigest()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the end of a document
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.names = [self._tokenizer.id_to_token(i) or "" for i in range(self.vocab_size)]
        self.pieces = self._piece_bytes(tree)
        config = _config(path)
        self._ends = {"bos_token": config.get("bos_token"), "eos_token": eos_token or config.get("eos_token")}
        self.bos_id, self.eos_id = (self._id(self._ends[key]) for key in ("bos_token", "eos_token"))
        if eos_token and self.eos_id < 0:
            raise UserError(f"data.tokenizer.eos_token: given {eos_token!r}, which is no piece of {path}; set it to "
                            "one, or to null for that of tokenizer_config.json next to it")
        first = self.encode("a")
        self.dummy_prefix = bool(first) and self.pieces[first[0]].startswith(b" ")

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[Sequence[int]]:
        texts = [replace_surrogates(text) for text in texts]
        if threads == 1:  # the library's batches take all cores, whatever this process was given
            return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def save(self, folder: Path) -> Path:
        (folder / CONFIG).write_text(json.dumps(self._ends, indent=1) + "\n", encoding="utf-8")
        return Path(shutil.copyfile(self.path, folder / FILES[1]))

    def _id(self, token: str | None) -> int:
        found = None if token is None else self._tokenizer.token_to_id(token)
        return -1 if found is None else found

    def _piece_bytes(self, tree: dict) -> list[bytes]:
        kinds = set(_kinds(tree.get("decoder")))
        if "ByteLevel" in kinds:
            of_character = {character: byte for byte, character in _byte_level().items()}
        elif not kinds & {"Metaspace", "Replace"}:
            raise UserError(f"tokenizer {self.path}: its decoder ({', '.join(sorted(kinds)) or 'none'}) does not give "
                            "back the text; use byte-level BPE, or SentencePiece's kind with byte fallback")
        else:
            of_character = None
        added = self._tokenizer.get_added_tokens_decoder()
        pieces = []
        for i, piece in enumerate(self.names):
            if not piece or (i in added and added[i].special):
                pieces.append(b"")
            elif i in added:
                pieces.append(piece.encode())
            elif of_character is not None:
                pieces.append(bytes(of_character[character] for character in piece))
            elif found := _BYTE.fullmatch(piece):
                pieces.append(bytes([int(found[1], 16)]))
            else:
                pieces.append(piece.replace("\u2581", " ").encode())
        return pieces


def _config(path: Path) -> dict:
    """bos_token and eos_token of tokenizer_config.json next to ``path``, as strings."""
    try:
        tree = json.loads((path.parent / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(f"tokenizer {path.parent / CONFIG}: not valid JSON; copy it again") from None
    found = {key: tree.get(key) for key in ("bos_token", "eos_token")}
    return {key: value["content"] if isinstance(value, dict) else value for key, value in found.items()}


def _kinds(tree: dict | None) -> list[str]:
    """Names of a decoder and of those that it is made of."""
    if tree is None:
        return []
    return [tree["type"], *(kind for part in tree.get("decoders", []) for kind in _kinds(part))]


def _byte_level() -> dict[int, str]:
    """The character that stands for each byte in byte-level BPE (Radford et al. 2019): itself where it can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
