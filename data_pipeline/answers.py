"""Answers that are marked in token files, and packing of whole documents into rows."""

import hashlib

import numpy as np
import pyarrow
from pyarrow import parquet

from titans_pt.data_pipeline.files import arrow_file
from titans_pt.data_pipeline.indexed import IndexedDataset
from titans_pt.data_pipeline.parts import ANSWERS
from titans_pt.errors import UserError
from titans_pt.tools.files import unreadable


class Answers:
    """Places of the answers in the documents of a stream, from NAME.documents.parquet.

    Attributes:
        sha256: hash (hex) of all places.

    Raises:
        UserError: the file is missing or damaged, or token files of plain text mark no answers.
    """

    def __init__(self, stream: IndexedDataset):
        path = stream.list_of_documents
        remedy = "run: titans prepare CONFIG --force"
        try:
            with arrow_file(path) as file, parquet.ParquetFile(file) as table:
                if ANSWERS.name not in table.schema_arrow.names:
                    raise UserError(
                        f"data.sources: the token files {stream.prefix} mark no answers; set data.sources.N.format to "
                        f"prompt-completion or messages and {remedy}"
                    )
                found = table.read([ANSWERS.name])[ANSWERS.name].combine_chunks()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path}: damaged ({unreadable(path, error)[:200]}); {remedy}") from None
        if len(found) != len(stream.document_starts):
            raise UserError(f"{path}: has {len(found)} documents, its .idx {len(stream.document_starts)}; {remedy}")
        self._ends = np.cumsum(found.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
        self._places = found.flatten().to_numpy()
        self._plain = found.is_null().to_numpy(zero_copy_only=False)
        self.sha256 = hashlib.sha256(self._plain.tobytes() + self._ends.tobytes() + self._places.tobytes()).hexdigest()

    @property
    def count(self) -> int:
        """Number of marked answers."""
        return len(self._places) // 2

    @property
    def documents(self) -> int:
        """Number of documents with marked answers."""
        return int(np.count_nonzero(~self._plain))

    def of(self, document: int, length: int) -> np.ndarray:
        """Places in a document of ``length`` tokens, int (n, 2): begin and end of each answer."""
        if self._plain[document]:
            return np.array([[0, length]])
        begin = self._ends[document - 1] if document else 0
        return self._places[begin : self._ends[document]].reshape(-1, 2)


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Packs items of ``lengths`` (n,), each 1 to ``capacity``, by best-fit decreasing; returns the indices of each row.

    For any lengths the rows are at most 11/9 as many as the best packing needs, and 6/9 more (Dósa, 2007).
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room left -> rows
    rooms = 0  # bit n: some row has room for exactly n
    for item in np.argsort(-lengths, kind="stable"):
        length = int(lengths[item])
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            rooms ^= (not with_room[room]) << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
    return [np.array(row) for row in rows]
