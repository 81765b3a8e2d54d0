"""Test of whether a tokenizer gives back the text, on kinds of text that lossy tokenizers change."""

from titans_pt.data_pipeline.tokenizers.base import Tokenizer

KINDS = {
    "line breaks": "a\nb\n\nc\n",
    "carriage returns": "a\r\nb",
    "tabs": "if a:\n\tb\tc",
    "spaces at the start": (" a", "  a"),
    "spaces at the end": "a  ",
    "runs of spaces": "if a:\n    b  = c",
    "digits": "0 12 345 2026",
    "capital letters": "Ab aB ABC",
    "accents": "é ü ñ Å ß",
    "combining accents": "e\u0301 u\u0308",
    "compatibility forms": "\ufb01 \u2460 \uff21 \u00b2 \u2026",
    "mathematical signs and quotes": "∀x ∈ ℝ — “x” ‘y’",
    "Greek and Cyrillic": "Ξεσκεπάζω съешь",
    "Arabic and Hebrew": "نص حكيم דג סקרן",
    "Devanagari and Thai": "ऋषियों เป็นมนุษย์",
    "CJK": "天地玄黃 日本語のテキスト 한국어",
    "emoji": "😀 👩‍👩‍👧 🇩🇪",
    "control characters": "a\x00\x01\x07\x1b\x7fb",
    "invisible characters": "a\u00a0b\u00adc\u200bd\u2028e\ufefff",
}
"""Kind -> an example text, or several, each tried by itself."""


def lost_kinds(tokenizer: Tokenizer) -> list[str]:
    """The KINDS that ``tokenizer`` does not give back exactly; empty for one that loses nothing."""
    if not tokenizer.is_text:
        return []
    texts = {kind: (given,) if isinstance(given, str) else given for kind, given in KINDS.items()}
    return [kind for kind, tried in texts.items() if not all(tokenizer.gives_back(text) for text in tried)]
