"""Text as UTF-8 can hold it."""

import re

_SURROGATES = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """``text`` with lone surrogates, which JSON may hold and UTF-8 cannot, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
