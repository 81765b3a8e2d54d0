"""Training throughput as a run of a study: a few steps, timed at several lengths (``titans benchmark training``)."""

from dataclasses import asdict, dataclass
from typing import Any

from titans_pt.benchmarks.training import STEPS, Case, in_a_process
from titans_pt.reproduce.figures import Figure
from titans_pt.reproduce.measures import Find
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.runs import Run, hardware
from titans_pt.runs.folder import versions

SPEED = "speed"


@dataclass(frozen=True)
class Timing(Run):
    """A timing in wall time: nothing else may run beside it. It has failed if no length could be timed.

    ``file``: a config, in which {model} stands for the model's name; ``words``: settings over it.
    """

    file: str = ""
    words: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    tokens: int = 0
    """Tokens per step, the same at every length."""

    def _asked(self) -> list[Any]:
        return [list(self.lengths), self.tokens]

    def missing(self, record: dict[str, Any] | None) -> list[str]:
        return [] if record and record["measured"][SPEED]["words"] == self._asked() else [SPEED]

    def complete(self, records: Records, ranks: int, claim: int) -> int:
        cases = [Case(self.model, length) for length in self.lengths]
        found = [asdict(in_a_process(case, self.file, list(self.words), self.tokens)) for case in cases]
        trained = {
            "parameters": self.cost.parameters, "tokens": 0, "hardware": hardware(versions()), "checkpoint": "",
            "validation_loss": None, "curve": [], "validation": [],
        }  # fmt: skip
        measured = {SPEED: {"words": self._asked(), "cases": found}}
        failed = "" if any(not case["failure"] for case in found) else found[0]["failure"]
        records.write(self.name, self.begin(trained, failed) | {"measured": measured})
        return 0


def speed_at(length: int) -> Find:
    """Tokens per second of a training step; None if it failed (out of memory, for example)."""

    def find(result: dict) -> Figure | None:
        case = next((case for case in result["cases"] if case["length"] == length), None)
        return Figure("number", case["tokens_per_second"], STEPS) if case and not case["failure"] else None

    return find
