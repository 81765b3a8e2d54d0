"""A small corpus of English-like words, for all tests of this folder."""

import json
import random

VOCAB = 320
WORDS = [
    "memory",
    "learns",
    "what",
    "surprises",
    "it",
    "and",
    "forgets",
    "what",
    "does",
    "not",
    "matter",
    "while",
    "the",
    "window",
    "slides",
    "over",
    "tokens",
    "a",
    "long",
    "sequence",
    "is",
    "read",
    "once",
    "segment",
    "by",
    "segment",
    "with",
    "gradients",
    "momentum",
    "decay",
]


def make_texts(count, seed=0):
    """``count`` different documents of some lines each."""
    rng = random.Random(seed)
    lines = [
        [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))) for _ in range(rng.randint(1, 6))] for _ in range(count)
    ]
    return [f"Document {seed} {i}\n" + "\n".join(text) for i, text in enumerate(lines)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
