"""Text and names as valid UTF-8, names for messages, and a test for invisible text."""

import re

_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_VISIBLE = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f"  # white space, control characters
    r"\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    r"\u2800\ufff9-\ufffb]"  # above: Unicode's Default_Ignorable_Code_Point; here: Braille's blank, annotation marks
)


def replace_surrogates(text: str) -> str:
    """``text`` with lone surrogates, which JSON may hold and UTF-8 cannot, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def visible(text: str) -> bool:
    """Whether ``text`` has a character that leaves a mark: not only spaces, control and zero-width characters."""
    return _VISIBLE.search(text) is not None


def utf8(name: str) -> str:
    """Returns ``name`` as valid UTF-8, with lone surrogates escaped.

    Python has a surrogate for each byte of a file name that is not UTF-8: such a byte becomes \\xe9, another lone
    surrogate \\ud800.
    """
    return name if name.isascii() else _SURROGATES.sub(lambda match: _escape(match[0]), name)


def one_line(name: str) -> str:
    """Returns :func:`utf8` of ``name`` with control characters and line ends escaped, for a message."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), utf8(name))


def _escape(surrogate: str) -> str:
    code = ord(surrogate)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
