"""Interface of tokenizers: text to ids, and back to exactly the text that was encoded."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

FILES = ("tokenizer.model", "tokenizer.json")
"""Names of a tokenizer in a folder of token files or of a run: SentencePiece's, Hugging Face's."""
_JOINED = 1 << 16
"""Most bytes objects joined at once: join takes 88 bytes of memory for each, and a document may have millions."""


class Tokenizer(ABC):
    """Text to ids and back. It knows the bytes of each of its pieces, so that decoding is joining them.

    Attributes:
        path: the model file. sha256: hash of its bytes (hex).
        vocab_size: ids are below it. bos_id, eos_id: begin and end of text; -1 if there is none.
        begin: ids that training puts before the text of every document: bos with data.tokenizer.add_bos, else none.
        names: each id's piece as the model file spells it; "" where an id has none.
        pieces: bytes (UTF-8) of each id; b"" for control pieces.
        dummy_prefix: encoding puts a space before the text, and decoding must remove it (Llama's tokenizers).
        is_text: False for an alphabet of bases, from which no text could come back.
        chat_template: transformers' template of a chat, for exports; None without one.
        complement: id -> id of the complementary base, int64 (vocab_size,); None if there is no other strand.
    """

    path: Path
    sha256: str
    vocab_size: int
    bos_id: int
    eos_id: int
    begin: tuple[int, ...] = ()
    names: list[str]
    pieces: list[bytes]
    dummy_prefix: bool
    is_text: bool = True
    chat_template: str | None = None
    complement: np.ndarray | None = None

    @abstractmethod
    def encode_batch(self, texts: list[str], threads: int = 1) -> list[Sequence[int]]:
        """Ids of each text, without bos or eos. Lone surrogates become U+FFFD; nothing else is changed.

        Args:
            threads: how many the library may use.
        """

    @abstractmethod
    def save(self, folder: Path) -> Path:
        """Copies what :func:`load_tokenizer` needs into ``folder``, under one of FILES; returns its path there."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text, as :meth:`encode_batch`."""
        return list(self.encode_batch([text])[0])

    def encode_spelled(self, text: str) -> list[int]:
        """Ids of a text in which control tokens are spelled, as a chat template writes it; they become these tokens.
        A tokenizer without chat templates encodes it like any text."""
        return self.encode(text)

    def document(self, text: str) -> list[int]:
        """Ids of a document that begins with ``text``, as a model read it in training. Its end is not marked: text may
        follow."""
        return [*self.begin, *self.encode(text)]

    @property
    def before_text(self) -> list[int]:
        """Tokens that a model has read when the text of a document begins: ``begin``, or the eos of the document
        before."""
        return list(self.begin) or [self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bos and eos are silent, bytes that are not UTF-8 become U+FFFD."""
        decoder = StreamDecoder(self)
        return "".join([decoder.push(i) for i in ids]) + decoder.finish()

    def gives_back(self, text: str, ids: Sequence[int] | None = None) -> bool:
        """Whether decoding the ids of ``text`` gives exactly ``text``. Lone surrogates in it never come back.

        Args:
            ids: what :meth:`encode` returns for it, if that is known.
        """
        ids, piece = self.encode(text) if ids is None else ids, self.pieces.__getitem__
        parts = (ids[i : i + _JOINED] for i in range(0, len(ids), _JOINED))
        data = b"".join(b"".join(map(piece, part)) for part in parts)
        return (data.removeprefix(b" ") if self.dummy_prefix else data) == text.encode(errors="surrogatepass")


def saved_tokenizer(folder: Path) -> Path:
    """Path of the tokenizer in a folder; if there is none, the path that it should have."""
    return next((folder / name for name in FILES if (folder / name).is_file()), folder / FILES[0])


class StreamDecoder:
    """Ids to text, one at a time: the results of :meth:`push` and :meth:`finish`, joined, are ``decode`` of all ids.

    Args:
        continues: the ids continue other text (generation after a prompt): a leading space belongs to them.
        unfinished: the property of that name from the decoder of the preceding ids.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False, unfinished: bytes = b""):
        self._pieces = tokenizer.pieces
        self._strip = tokenizer.dummy_prefix and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.setstate((unfinished, 0))

    @property
    def unfinished(self) -> bytes:
        """Bytes of a character whose rest has not come yet."""
        return self._utf8.getstate()[0]

    def push(self, token: int) -> str:
        """The text that is certain after this id; empty inside a character of several byte pieces."""
        piece = self._pieces[token]
        if self._strip and piece:
            piece, self._strip = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """Rest of the text: U+FFFD for a character that was cut, else nothing."""
        return self._utf8.decode(b"", final=True)
