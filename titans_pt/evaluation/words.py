"""Words for the keys of needles: a key is an adjective-noun pair such as ``gentle-harbor``.

RULER draws its pairs from the wonderwords package. These short lists of our
own stand in for it, so that samples depend on no package's version; keys are only labels that must be told apart.
"""

ADJECTIVES = """
    amber ancient bitter brave bright calm careful cheerful clever cold crimson curious dusty eager early empty
    faint fancy fierce gentle golden grand hidden hollow honest humble icy jolly keen lively lonely lucky
    mellow mighty modest narrow noble orange patient plain polite proud purple quick quiet rapid rough rusty
    salty silent silver simple sleepy smooth steady swift tender tiny violet warm wild wise wooden young
""".split()  # noqa: SIM905 - a paragraph is easier to read and to change
NOUNS = """
    anchor apron badger barrel basket beacon blanket bottle bridge bucket button cabin candle canyon carpet castle
    cellar chimney cousin desert dolphin engine falcon feather forest fountain garden goblet hammer harbor helmet
    island jacket kettle ladder lantern lemon library marble meadow mirror mitten monkey nutmeg orchard otter
    paddle parrot pencil pepper pillow planet pocket river saddle shelter spider teapot ticket tunnel valley
    violin walnut window
""".split()  # noqa: SIM905 - a paragraph is easier to read and to change
KEYS = tuple(f"{adjective}-{noun}" for adjective in sorted(ADJECTIVES) for noun in sorted(NOUNS))
