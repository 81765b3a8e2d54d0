"""A SentencePiece model whose decoding returns exactly the encoded text."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

from titans_pt.data_pipeline.text import replace_surrogates
from titans_pt.data_pipeline.tokenizers.base import FILES, Tokenizer
from titans_pt.errors import UserError
from titans_pt.tools.files import copy_file

SPACE = "\u2581"
"""SentencePiece's sign for a space; in a text it would come back as a space."""
_STRETCH = 1 << 16
"""Longest text given to SentencePiece at once: beyond it, time per token doubles, at 100 bytes per character."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Raises:
        UserError: broken file, or ``eos_token`` is no control piece of it.
    """

    def __init__(self, path: Path, model: bytes, eos_token: str | None = None):
        try:
            if not model:
                raise RuntimeError("empty file")
            sp = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size = sp.vocab_size()
            self.names = [sp.id_to_piece(i) for i in range(self.vocab_size)]
            self.pieces = [_piece_bytes(sp, i) for i in range(self.vocab_size)]
        except (RuntimeError, IndexError):
            raise UserError(
                f"tokenizer {path}: not a SentencePiece model, or a truncated one; "
                "copy it again, or set data.tokenizer.path to another file"
            ) from None
        self.path, self.sha256, self._sp = path, hashlib.sha256(model).hexdigest(), sp
        self.bos_id, self.eos_id = sp.bos_id(), sp.eos_id()
        if eos_token is not None:
            self.eos_id = sp.piece_to_id(eos_token)
            if not sp.is_control(self.eos_id):
                raise UserError(
                    f"data.tokenizer.eos_token: given {eos_token!r}, which is no control piece of {path}; "
                    "set it to one, or to null for the model's own"
                )
        self.dummy_prefix = sp.encode_as_pieces("a")[0].startswith(SPACE)
        self._escaped_space = [sp.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._escapes = sp.is_byte(self._escaped_space[0]) and not self.dummy_prefix
        # A newline is a separate piece in all models that keep lines: what follows it is encoded as if alone.
        self._newline = sp.encode("\n")
        alone = not any(b"\n" in piece and piece != b"\n" for piece in self.pieces)
        self._cuts = alone and [self.pieces[i] for i in self._newline[-1:]] == [b"\n"]

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[Sequence[int]]:
        texts = [replace_surrogates(text) for text in texts]
        plain = [not self._escapes or SPACE not in text for text in texts]
        plain = [ok and (len(text) <= _STRETCH or not self._cuts) for ok, text in zip(plain, texts, strict=True)]
        short = [text for ok, text in zip(plain, texts, strict=True) if ok]
        # SentencePiece starts a pool of threads for a list, even for one thread: many times the work of a sentence.
        encoded = iter(self._sp.encode(short, num_threads=threads) if threads > 1 else map(self._sp.encode, short))
        return [next(encoded) if ok else self._encode_parts(text) for ok, text in zip(plain, texts, strict=True)]

    def _encode_parts(self, text: str) -> array:
        """Ids of ``text``: SentencePiece's space signs in it become bytes, and a long text is encoded in stretches."""
        ids = array("i")  # a list of numbers takes nine times the memory
        for i, part in enumerate(text.split(SPACE) if self._escapes else [text]):
            ids.extend(self._escaped_space if i else [])
            for start, stop in _stretches(part) if self._cuts else [(0, len(part))]:
                lead = self._newline if start else []
                ids.extend(self._sp.encode("\n" * bool(start) + part[start:stop])[len(lead) :])
        return ids

    def save(self, folder: Path) -> Path:
        path = folder / FILES[0]
        copy_file(self.path, path)
        return path


def _stretches(text: str) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of stretches of at most _STRETCH characters, cut before a newline, or else before a space.

    The ids are those of the whole text, because no piece crosses a newline, and usually none crosses a space. If a
    stretch has neither, the word that is cut may become other pieces, which decode to the same text.
    """
    start = 0
    while len(text) - start > _STRETCH:
        limit = start + _STRETCH
        cut = text.rfind("\n", start + 1, limit)
        if cut < 0:
            cut = text.rfind(" ", start + 1, limit)
        cut = limit if cut < 0 else cut
        yield start, cut
        start = cut
    yield start, len(text)


def _piece_bytes(sp: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
    """UTF-8 of one piece; a byte piece is that byte, a control piece nothing."""
    if sp.is_control(i):
        return b""
    if sp.is_unknown(i):
        return "\ufffd".encode()
    piece = sp.id_to_piece(i)
    return bytes([int(piece[3:5], 16)]) if sp.is_byte(i) else piece.replace(SPACE, " ").encode()
