"""A SentencePiece tokenizer whose decoding gives back exactly the text that was encoded."""

import codecs
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from data_pipeline.sources import replace_surrogates
from titans_pt.errors import UserError

_SPACE = "\u2581"
"""SentencePiece's own sign for a space; in text it would come back as one."""
_LINE_CHARACTERS = 4096
"""Longest line given to the trainer at once; it silently skips longer ones than its limit, which is in bytes."""


class Tokenizer:
    """Text to ids and back. Build it with :meth:`load`.

    Attributes:
        path: the model file. sha256: hash of its bytes (hex).
        vocab_size, bos_id, eos_id: as the model has them.
    """

    def __init__(self, path: Path, model: bytes):
        self.path = Path(path)
        self.sha256 = hashlib.sha256(model).hexdigest()
        self._processor = sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = sp.vocab_size()
        self.bos_id: int = sp.bos_id()
        self.eos_id: int = sp.eos_id()
        self._bytes = [_piece_bytes(sp, i) for i in range(self.vocab_size)]
        self._escaped_space = [sp.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        # Llama's tokenizers put a space before the text, which decoding must take away again.
        self._dummy_prefix = sp.encode_as_pieces("a")[0].startswith(_SPACE)
        self._escapes = sp.is_byte(self._escaped_space[0]) and not self._dummy_prefix

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a SentencePiece ``.model`` file.

        Raises:
            UserError: the file is missing, broken, or without an end-of-text piece.
        """
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {path}: {error.strerror}; set data.tokenizer.path to a SentencePiece .model "
                            "file, or to null to train one with: titans prepare") from None
        try:
            if not model:
                raise RuntimeError("empty file")
            tokenizer = cls(Path(path), model)
        except (RuntimeError, IndexError):
            raise UserError(f"tokenizer {path}: not a SentencePiece model, or a truncated one; "
                            "copy it anew, or set data.tokenizer.path to another file") from None
        if tokenizer.eos_id < 0:
            raise UserError(f"tokenizer {path}: has no end-of-text piece, which separates documents; "
                            "set data.tokenizer.path to a model with eos_id")
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without bos or eos. Lone surrogates become U+FFFD; nothing else is changed."""
        text = replace_surrogates(text)
        if not self._escapes or _SPACE not in text:
            return self._processor.encode(text)
        first, *rest = text.split(_SPACE)
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._escaped_space + self._processor.encode(part)
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text, on all cores."""
        if self._escapes and any(_SPACE in text for text in texts):
            return [self.encode(text) for text in texts]
        return self._processor.encode([replace_surrogates(text) for text in texts], num_threads=-1)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bos and eos are silent, bytes that are not UTF-8 become U+FFFD."""
        decoder = StreamDecoder(self)
        return "".join([decoder.push(i) for i in ids]) + decoder.finish()


class StreamDecoder:
    """Ids to text, one at a time: what :meth:`push` and :meth:`finish` return, joined, is ``decode`` of all ids.

    Args:
        continues: the ids go on from other text (generation after a prompt), so a leading space belongs to them.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False):
        self._pieces = tokenizer._bytes
        self._strip = tokenizer._dummy_prefix and not continues
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
    part = out_path.with_name(out_path.name + ".part")
    try:
        part.write_bytes(model.getvalue())
        os.replace(part, out_path)
    except OSError as error:
        part.unlink(missing_ok=True)
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
