"""Settings of data that contradict each other."""

import pytest

from titans_pt.config.files import load_config
from titans_pt.errors import UserError

NUCLEOTIDES = "data.tokenizer.kind=nucleotides"
SYMBOLS = "data.tokenizer.user_defined_symbols"


@pytest.mark.parametrize(("words", "message"), [
    ([NUCLEOTIDES, f"{SYMBOLS}=[a]"], f"{SYMBOLS}: given with kind='nucleotides', .*; remove them"),
    ([f"{SYMBOLS}=[a, b, a]"], f"{SYMBOLS}: given 'a' twice; remove one"),
    ([f'{SYMBOLS}=["a\\nb"]'], rf"{SYMBOLS}: given 'a\\nb'; no token has '\\n', remove it"),
    ([f"{SYMBOLS}=[<0x0A>]"], f"{SYMBOLS}: given '<0x0A>', a name of the tokenizer's own; choose another"),
    ([NUCLEOTIDES, "data.tokenizer.add_bos=true", "data.reverse_complement=true"],
     "data.reverse_complement: given True; not with data.tokenizer.add_bos"),
])  # fmt: skip
def test_settings_of_a_tokenizer(words, message):
    with pytest.raises(UserError, match=f"^{message}"):
        load_config("quickstart", words)
