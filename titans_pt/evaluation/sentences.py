"""Splitting of texts into sentences."""

from titans_pt.errors import UserError
from titans_pt.tools.data_wheels import PUNKT, fetch


def sentences(text: str) -> list[str]:
    """Split ``text`` into sentences with NLTK's Punkt for English.

    Raises:
        UserError: nltk is not installed, or its tables cannot be fetched.
    """
    try:
        import nltk
    except ImportError:
        raise UserError("nltk: not installed, and needed to find sentences: pip install 'titans-pt[eval]'") from None
    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        nltk.data.path.append(str(fetch(PUNKT) / "llama_index/core/_static/nltk_cache"))
    return nltk.sent_tokenize(text)
