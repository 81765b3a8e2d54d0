"""Tokenizers whose decoding gives back exactly the text that was encoded: SentencePiece, and Hugging Face's.

A :class:`Tokenizer` knows the bytes of each of its pieces, so that decoding is joining them.
"""

import codecs
import hashlib
import io
import re
import shutil
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from titans_pt.data_pipeline.sources import replace_surrogates
from titans_pt.errors import UserError
from titans_pt.tools.files import write_atomically

FILES = ("tokenizer.model", "tokenizer.json")
"""Names of a tokenizer in a folder of token files or of a run: SentencePiece's, Hugging Face's."""
_SPACE = "\u2581"
"""SentencePiece's own sign for a space; in text it would come back as one."""
_LINE_CHARACTERS = 4096
"""Longest line given to the trainer at once; it silently skips longer ones than its limit, which is in bytes."""
_STRETCH = 1 << 16
"""Longest text given to SentencePiece at once: beyond, its time a token doubles, and it takes 100 bytes a character."""


class Tokenizer(ABC):
    """Text to ids and back. Build it with :meth:`load`.

    Attributes:
        path: the model file. sha256: hash of its bytes (hex).
        vocab_size: ids are below it. bos_id, eos_id: begin and end of text; -1 if there is none.
        names: each id's piece as the model file spells it; "" where an id has none.
        pieces: bytes (UTF-8) of each id; b"" for control pieces.
        dummy_prefix: a space is put before the text, which decoding must take away again (Llama's tokenizers).
    """

    path: Path
    sha256: str
    vocab_size: int
    bos_id: int
    eos_id: int
    names: list[str]
    pieces: list[bytes]
    dummy_prefix: bool

    @staticmethod
    def load(path: str | Path, eos_token: str | None = None) -> "Tokenizer":
        """Reads a SentencePiece ``.model`` or a Hugging Face ``tokenizer.json``.

        Args:
            eos_token: the piece that ends a document. None: the model's own; for tokenizer.json that of
                tokenizer_config.json beside it.

        Raises:
            UserError: the file is missing, broken, or without an end-of-text piece.
        """
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {path}: {error.strerror}; set data.tokenizer.path to a SentencePiece .model "
                            "file or a tokenizer.json, or to null to train one with: titans prepare") from None
        if Path(path).suffix == ".json":
            from titans_pt.data_pipeline.hf_tokenizer import HuggingFaceTokenizer as Kind
        else:
            Kind = SentencePieceTokenizer
        tokenizer = Kind(Path(path), model, eos_token)
        if tokenizer.eos_id < 0:
            raise UserError(f"tokenizer {path}: has no end-of-text piece, which separates documents; set "
                            "data.tokenizer.eos_token to one, or data.tokenizer.path to a model that has it")
        return tokenizer

    @abstractmethod
    def encode_batch(self, texts: list[str], threads: int = 1) -> list[Sequence[int]]:
        """Ids of each text, without bos or eos. Lone surrogates become U+FFFD; nothing else is changed.

        Args:
            threads: how many the library may use.
        """

    @abstractmethod
    def save(self, folder: Path) -> Path:
        """Copies what :meth:`load` needs into ``folder``, under one of FILES; returns its path there."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text, as :meth:`encode_batch`."""
        return list(self.encode_batch([text])[0])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bos and eos are silent, bytes that are not UTF-8 become U+FFFD."""
        decoder = StreamDecoder(self)
        return "".join([decoder.push(i) for i in ids]) + decoder.finish()


def saved_tokenizer(folder: Path) -> Path:
    """The path of the tokenizer in a folder; of the one that should be there, if there is none."""
    return next((folder / name for name in FILES if (folder / name).is_file()), folder / FILES[0])


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Raises as :meth:`Tokenizer.load`."""

    def __init__(self, path: Path, model: bytes, eos_token: str | None = None):
        try:
            if not model:
                raise RuntimeError("empty file")
            sp = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size = sp.vocab_size()
            self.names = [sp.id_to_piece(i) for i in range(self.vocab_size)]
            self.pieces = [_piece_bytes(sp, i) for i in range(self.vocab_size)]
        except (RuntimeError, IndexError):
            raise UserError(f"tokenizer {path}: not a SentencePiece model, or a truncated one; "
                            "copy it anew, or set data.tokenizer.path to another file") from None
        self.path, self.sha256, self._sp = path, hashlib.sha256(model).hexdigest(), sp
        self.bos_id, self.eos_id = sp.bos_id(), sp.eos_id()
        if eos_token is not None:
            self.eos_id = sp.piece_to_id(eos_token)
            if not sp.is_control(self.eos_id):
                raise UserError(f"data.tokenizer.eos_token: given {eos_token!r}, which is no control piece of {path}; "
                                "set it to one, or to null for the model's own")
        self.dummy_prefix = sp.encode_as_pieces("a")[0].startswith(_SPACE)
        self._escaped_space = [sp.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        self._escapes = sp.is_byte(self._escaped_space[0]) and not self.dummy_prefix
        # A newline is a piece of its own in all models that keep lines: what follows it is encoded as if alone.
        self._newline = sp.encode("\n")
        alone = not any(b"\n" in piece and piece != b"\n" for piece in self.pieces)
        self._cuts = alone and [self.pieces[i] for i in self._newline[-1:]] == [b"\n"]

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[Sequence[int]]:
        texts = [replace_surrogates(text) for text in texts]
        plain = [not self._escapes or _SPACE not in text for text in texts]
        plain = [ok and (len(text) <= _STRETCH or not self._cuts) for ok, text in zip(plain, texts, strict=True)]
        short = [text for ok, text in zip(plain, texts, strict=True) if ok]
        encoded = iter(self._sp.encode(short, num_threads=threads))
        return [next(encoded) if ok else self._encode_parts(text) for ok, text in zip(plain, texts, strict=True)]

    def _encode_parts(self, text: str) -> array:
        """``text`` with spaces of SentencePiece's own in it as bytes, and a long one stretch by stretch."""
        ids = array("i")  # a list of numbers takes nine times the memory
        for i, part in enumerate(text.split(_SPACE) if self._escapes else [text]):
            ids.extend(self._escaped_space if i else [])
            for start, stop in _stretches(part) if self._cuts else [(0, len(part))]:
                behind = self._newline if start else []
                ids.extend(self._sp.encode("\n" * bool(start) + part[start:stop])[len(behind):])
        return ids

    def save(self, folder: Path) -> Path:
        return Path(shutil.copyfile(self.path, folder / FILES[0]))


def _stretches(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of stretches of at most _STRETCH, cut before a newline or else a space where there is one.

    No piece crosses a newline, and usually none a space, so the ids are those of the whole text. Where a stretch has
    neither, the one word that is cut may be split otherwise; it is decoded to the same text.
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


class StreamDecoder:
    """Ids to text, one at a time: what :meth:`push` and :meth:`finish` return, joined, is ``decode`` of all ids.

    Args:
        continues: the ids go on from other text (generation after a prompt), so a leading space belongs to them.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False):
        self._pieces = tokenizer.pieces
        self._strip = tokenizer.dummy_prefix and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain after this id; empty inside a character of several byte pieces."""
        piece = self._pieces[token]
        if self._strip and piece:
            piece, self._strip = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was cut, else nothing."""
        return self._utf8.decode(b"", final=True)


def _piece_bytes(sp: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
    """UTF-8 of one piece; a byte piece is that byte, a control piece nothing."""
    if sp.is_control(i):
        return b""
    if sp.is_unknown(i):
        return "\ufffd".encode()
    piece = sp.id_to_piece(i)
    return bytes([int(piece[3:5], 16)]) if sp.is_byte(i) else piece.replace(_SPACE, " ").encode()


def train_tokenizer(texts: Iterable[str], out_path: str | Path, vocab_size: int, max_characters: int) -> Tokenizer:
    """Trains a BPE model with byte fallback on the first ``max_characters`` of ``texts`` and writes it.

    The text is taken as it is (no normalisation, no added space), digits are single pieces, newlines are
    bytes, so no piece crosses a line. The same texts give the same file. unk 0, bos 1, eos 2.

    Raises:
        UserError: the text has too few different words for ``vocab_size``, or too many different
            characters; or the file cannot be written.
    """
    model = io.BytesIO()
    failures: list[Exception] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts, max_characters, failures), model_writer=model, vocab_size=vocab_size,
            model_type="bpe", byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            unk_id=0, bos_id=1, eos_id=2, pad_id=-1, max_sentence_length=4 * _LINE_CHARACTERS, minloglevel=2,
        )
    except RuntimeError as error:
        raise failures[0] if failures else _explain(str(error), vocab_size) from None
    out_path = Path(out_path)
    try:
        write_atomically(out_path, lambda temporary: temporary.write_bytes(model.getvalue()))
    except OSError as error:
        raise UserError(f"tokenizer {out_path}: cannot be written: {error.strerror}; free space or choose another "
                        "data.dir") from None
    return Tokenizer.load(out_path)


def _lines(texts: Iterable[str], max_characters: int, failures: list[Exception]) -> Iterator[str]:
    """Lines of at most _LINE_CHARACTERS, max_characters in all.

    What ``texts`` raises is noted in ``failures``: the trainer turns it into a RuntimeError of its own.
    """
    try:
        for text in texts:
            for line in text[:max_characters].split("\n"):
                for start in range(0, len(line), _LINE_CHARACTERS):
                    yield line[start:start + _LINE_CHARACTERS]
            max_characters -= len(text)
            if max_characters <= 0:
                return
    except Exception as error:
        failures.append(error)
        raise


def _explain(error: str, vocab_size: int) -> Exception:
    """SentencePiece's own message, said in our settings."""
    if match := re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", error):
        return UserError(f"model.vocab_size: given {vocab_size}; the text is enough for at most {match[1]}: "
                         "lower it, or add text in data.sources")
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return UserError(f"model.vocab_size: given {vocab_size}; bytes and the characters of the text alone need "
                         f"{match[1]}: raise it")
    if "sentences_.empty()" in error:
        return UserError("data.sources: no text to train a tokenizer on; add text, or set data.tokenizer.path")
    return RuntimeError(error)
