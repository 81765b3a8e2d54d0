"""Streams a long document through a trained model in constant memory, keeps its state in a file, and asks later.

titans prepare quickstart && titans train quickstart    # or any run of a language model
python examples/stream_and_ask.py runs/quickstart document.txt "What is a decorator?"
"""

import argparse
from pathlib import Path

from titans_pt import Titan


def main(run: str, document: str, question: str, state: str = "document.safetensors") -> str:
    """Read the document, save the state, ask the question and return the answer."""
    model = Titan.from_pretrained(run)
    model.read(Path(document).read_text(encoding="utf-8")).save(state)
    print(f"{document} is read; what the memory holds of it: {state}, {Path(state).stat().st_size:,} bytes")

    later = Titan.from_pretrained(run)  # another process, another day
    notes = later.load_state(state)
    answer = later.generate(f"\n{question}\n", max_new_tokens=40, temperature=0.0, state=notes)
    print(answer)
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("document")
    parser.add_argument("question")
    parser.add_argument("--state", default="document.safetensors")
    main(**vars(parser.parse_args()))
