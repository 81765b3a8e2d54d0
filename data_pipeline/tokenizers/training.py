"""Trains a tokenizer on the text that will be prepared."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from titans_pt.data_pipeline.tokenizers.base import Tokenizer
from titans_pt.data_pipeline.tokenizers.sentencepiece import SPACE, SentencePieceTokenizer
from titans_pt.errors import UserError
from titans_pt.tools.files import write_atomically

_LINE_CHARACTERS = 4096
"""Longest line given to the trainer, which silently skips lines beyond a limit of its own, in bytes."""


def train_tokenizer(
    texts: Iterable[str], out_path: str | Path, vocab_size: int, max_characters: int, symbols: Sequence[str] = ()
) -> Tokenizer:
    """Trains a BPE model with byte fallback on the first ``max_characters`` of ``texts`` and writes it.

    The text is taken as it is (no normalisation, no added space), digits are single pieces. Newlines are
    bytes, which keeps every piece inside a line. Each of ``symbols`` is one token wherever a text has it
    (SentencePiece's user-defined symbols), the longest if several match. The same texts and symbols give the same
    file. unk 0, bos 1, eos 2.

    Raises:
        UserError: the text has too few different words for ``vocab_size``, or too many different
            characters; or the file cannot be written.
    """
    model = io.BytesIO()
    failures: list[Exception] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts, max_characters, failures),
            model_writer=model,
            vocab_size=min(max(vocab_size, 3), 1 << 24),  # beyond these it says nothing that a user understands
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            user_defined_symbols=[symbol.replace(" ", SPACE) for symbol in symbols],
            max_sentence_length=4 * _LINE_CHARACTERS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise failures[0] if failures else _explain(str(error), vocab_size) from None
    out_path = Path(out_path)
    try:
        write_atomically(out_path, lambda temporary: temporary.write_bytes(model.getvalue()))
    except OSError as error:
        raise UserError(
            f"tokenizer {out_path}: cannot be written: {error.strerror}; free space or choose another data.dir"
        ) from None
    return SentencePieceTokenizer(out_path, model.getvalue())


def _lines(texts: Iterable[str], max_characters: int, failures: list[Exception]) -> Iterator[str]:
    """Lines of at most _LINE_CHARACTERS, max_characters in all.

    An exception of ``texts`` is kept in ``failures``: the trainer turns it into a plain RuntimeError.
    """
    try:
        for text in texts:
            for line in text[:max_characters].split("\n"):
                for start in range(0, len(line), _LINE_CHARACTERS):
                    yield line[start : start + _LINE_CHARACTERS]
            max_characters -= len(text)
            if max_characters <= 0:
                return
    except Exception as error:
        failures.append(error)
        raise


def _explain(error: str, vocab_size: int) -> Exception:
    """SentencePiece's message in terms of our settings."""
    if match := re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", error):
        return UserError(
            f"model.vocab_size: given {vocab_size}; the text is enough for at most {match[1]}: "
            "lower it, or add text in data.sources"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return UserError(
            f"model.vocab_size: given {vocab_size}; bytes, data.tokenizer.user_defined_symbols and the characters "
            f"of the text alone need {match[1]}: raise it"
        )
    if "sentences_.empty()" in error:
        return UserError("data.sources: no text to train a tokenizer on; add text, or set data.tokenizer.path")
    return RuntimeError(error)
