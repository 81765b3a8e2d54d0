import unicodedata

import pytest

from titans_pt.data_pipeline.text import one_line, utf8, visible


def test_names_that_are_not_utf8():
    assert utf8("café/日本") == "café/日本"
    assert utf8(b"caf\xe9.txt".decode("utf-8", "surrogateescape")) == "caf\\xe9.txt"
    assert utf8("a\ud800b\udc00") == "a\\ud800b\\udc00"
    assert utf8("a\nb") == "a\nb" and one_line("a\nb\t\x85\u2028\x00") == "a\\nb\\t\\x85\\u2028\\x00"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "\u200b",
        "\ufeff",
        "\u00ad",
        "\0",
        "\0 \u2060\r\n\u3000",
        "\u3164",
        "\u2800",
        "\u200e\u202e",
        "\ufe0f",
        "\U000e0001",
        "\x1b\x7f\x9f",
    ],
)
def test_text_that_nobody_can_see(text):
    assert not visible(text)


@pytest.mark.parametrize("text", ["a", "\u200ba", "\0.", "日", "\U0001f600", "\u0301", "\u0600", "\ufffd", "\ue000"])
def test_text_that_can_be_seen(text):
    assert visible(text)


def test_every_format_and_control_character_but_visible_ones_is_invisible():
    """Arabic number signs and similar characters have the category Cf but are visible."""
    hidden = ("Cc", "Cf", "Zs", "Zl", "Zp")
    shown = [char for char in map(chr, range(0x110000)) if unicodedata.category(char) in hidden and visible(char)]
    assert {unicodedata.name(char).split()[0] for char in shown} <= {"ARABIC", "SYRIAC", "KAITHI", "EGYPTIAN"}
