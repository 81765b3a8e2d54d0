import gzip
import json
from collections import Counter
from typing import get_args

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.data_pipeline.small_corpus import write_jsonl
from titans_pt.config import SourceConfig
from titans_pt.data_pipeline import IndexedWriter, sources
from titans_pt.data_pipeline import files as readers
from titans_pt.data_pipeline.kinds import KINDS
from titans_pt.data_pipeline.sources import documents, fingerprint
from titans_pt.errors import UserError


def files(path, **more):
    return SourceConfig(kind="files", path=str(path), **more)


def texts(source, counts=None):
    return [document.text for document in documents(source, counts=counts)]


@pytest.fixture(scope="module")
def stdlib():
    counts = Counter()
    return texts(SourceConfig(), counts), counts


@pytest.mark.thorough
def test_stdlib_is_real_english(stdlib):
    found, counts = stdlib
    joined = "\n".join(found)
    assert len(found) > 400 and len(joined) > 1_500_000 and counts["empty"] > 0
    assert joined.count(" the ") > 10_000
    assert all(text == text.strip() and text for text in found)
    [module] = [text for text in found if text.startswith("json.decoder\n")]
    assert "json.decoder.JSONDecoder.raw_decode\n\nDecode a JSON document" in module
    assert not any(text.startswith(("test.", "idlelib.")) for text in found)


def test_every_kind_has_a_reader():
    assert set(KINDS) == set(get_args(SourceConfig.model_fields["kind"].annotation))


def test_stdlib_fingerprint_is_stable():
    assert fingerprint(SourceConfig()) == fingerprint(SourceConfig())


def test_folder_is_read_recursively_in_order_without_hidden_or_other_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.txt").write_text("hidden")
    (tmp_path / "c.py").write_text("code")
    (tmp_path / "z.txt").write_text("\ufeffä text\nof two lines", encoding="utf-8")
    write_jsonl(tmp_path / "b" / "1.jsonl", ["one", "two"])
    with gzip.open(tmp_path / "b" / "2.jsonl.gz", "wt") as file:
        file.write('{"text": "three"}\n\n{"text": "four", "id": 1}\n')
    rows = [f"row {i}" for i in range(3000)]
    parquet.write_table(pa.table({"id": range(3000), "text": rows}), tmp_path / "a.parquet")
    expected = rows + ["one", "two", "three", "four", "ä text\nof two lines"]
    assert texts(files(tmp_path)) == expected


def test_empty_documents_are_dropped_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "", " \n\t", None, "b")))
    counts = Counter()
    assert texts(files(path), counts) == ["a", "b"]
    assert counts["empty"] == 3


def test_lone_surrogates_are_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert texts(files(path)) == ["a\ufffdb 😀"]


def test_other_text_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "jsonl", "text": 1}\n')
    parquet.write_table(pa.table({"content": ["parquet"]}), tmp_path / "b.parquet")
    assert texts(files(tmp_path, text_column="content")) == ["jsonl", "parquet"]


def test_fingerprint_sees_a_change(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = fingerprint(files(tmp_path)), fingerprint(files(path))
    path.write_text("other")
    assert fingerprint(files(tmp_path)) != before[0] and fingerprint(files(path)) != before[1]


def fails(path, *parts, **more):
    with pytest.raises(UserError) as error:
        list(documents(files(path, **more)))
    message = str(error.value)
    assert "\n" not in message
    for part in ("data.sources", *parts):
        assert part in message, message


def test_missing_path_and_empty_folder(tmp_path):
    fails(tmp_path / "nowhere", "nowhere", "no such file", "set it to")
    (tmp_path / "a.csv").touch()
    fails(tmp_path, "no usable file", ".parquet")
    fails(tmp_path / "a.csv", "no usable file")


def test_broken_jsonl_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "bro\n')
    fails(path, f"{path}:2", "not valid JSON", "remove")
    path.write_bytes(b'{"text": "\xff"}\n')
    fails(path, f"{path}:1", "not valid JSON")
    path.write_text("[1]\n")
    fails(path, f"{path}:1", "not an object")


def test_missing_or_wrong_column(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n')
    fails(path, "text_column='text'", f"{path}:1", "body", "set text_column")
    path.write_text('{"text": 3}\n')
    fails(path, f"{path}:1", "holds a int")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"body": ["x"], "number": [1]}), path)
    fails(path, "text_column='text'", str(path), "body, number", "set text_column")
    fails(path, "holds a int", text_column="number")


@pytest.mark.parametrize("keep", [0, 3, 0.5, 0.99])
def test_truncated_parquet(tmp_path, keep):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"row {i}" for i in range(1000)]}), path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep in (0, 3) else int(keep * len(data))])
    fails(path, str(path), "truncated")


def test_truncated_or_foreign_gzip(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    data = gzip.compress(b"".join(b'{"text": "line %d"}\n' % i for i in range(5000)))
    for broken in (data[: len(data) // 2], data[:40] + b"\0" * 9 + data[49:], b"not gzip"):
        path.write_bytes(broken)
        fails(path, str(path))


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    fails(path, str(path), "not UTF-8 at byte 3", "convert")


def skipped(path, **more):
    """Return (texts, rejected) with unusable input skipped."""
    rejected = []
    return [d.text for d in documents(files(path, **more), reject=rejected.append)], rejected


def test_skipping_goes_on_behind_what_is_broken(tmp_path):
    lines = [b'{"text": "one"}', b'{"text": "\xff"}', b'{"text": "bro', b'{"body": 1}', b'{"text": "two"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.jsonl").touch()
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n' * 3000)[:-20])
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "f.parquet")
    (tmp_path / "z.txt").write_text("four")
    found, rejected = skipped(tmp_path)
    assert [text for text in found if text != "three"] == ["one", "two", "four"]
    wrong = [(item.where.removeprefix(f"{tmp_path}/"), item.reason.split(" (")[0]) for item in rejected]
    assert wrong == [
        ("a.jsonl:2", "not valid JSON"),
        ("a.jsonl:3", "not valid JSON"),
        ("a.jsonl:4", "has no column as text_column='text' says"),
        ("b.txt", "not UTF-8 at byte 0"),
        ("c.jsonl", "an empty file"),
        ("d.jsonl.gz", "unreadable or truncated"),
        ("e.parquet", "unreadable or truncated"),
        ("f.parquet", "has no column as text_column='text' says"),
    ]


def test_parquet_rows_that_are_not_utf8(tmp_path):
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffc")])
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    fails(tmp_path, "a.parquet, row 1", "not UTF-8 at byte 0", "data.bad_input=skip")
    assert skipped(tmp_path)[0] == ["a", "c"]


def test_a_broken_row_group_costs_only_its_rows(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"text": [f"row {i} {i * i}" for i in range(400)]}), path, row_group_size=100, use_dictionary=False
    )
    column = parquet.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset : column.data_page_offset + column.total_compressed_size] = bytes(
        column.total_compressed_size
    )
    path.write_bytes(data)
    found, [rejected] = skipped(path)
    assert found == [f"row {i} {i * i}" for i in range(400) if not 100 <= i < 200]
    assert "rows 100 to 199" in rejected.where


@settings(max_examples=60)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12),
    st.integers(1, 90),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_pieces_of_jsonl_are_the_whole(tmp_path_factory, texts, target, newline):
    path = tmp_path_factory.mktemp("pieces") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": text}, ensure_ascii=False) + newline for text in texts).encode())
    rows = [
        row
        for start, stop, _ in readers.pieces(path, files(path), target)
        for row in readers.rows(path, files(path), start, stop)
    ]
    assert [row.values["text"] for row in rows if isinstance(row, readers.SourceRow)] == texts


@settings(max_examples=80)
@given(
    st.lists(st.text("ab \n\u00e9", max_size=12), max_size=9),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([None, "<|end|>", "\n---\n"]),
)
def test_pieces_of_txt_are_the_whole(tmp_path_factory, texts, target, newline, separator):
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    joined = (separator or "\n\n").join(texts)
    path.write_bytes(joined.replace("\n", newline).encode())
    source = files(path, separator=separator)
    documents = [
        part.strip("\n") for text in ([joined] if separator else texts) for part in text.split(separator or "\n\n")
    ]
    for size in (target, 10**9):
        rows = [
            row
            for start, stop, _ in readers.pieces(path, source, size)
            for row in readers.rows(path, source, start, stop)
        ]
        assert [row.values["text"] for row in rows] == [text for text in documents if text and not text.isspace()]
        content = path.read_bytes()
        assert all(
            content[row.number :].replace(b"\r\n", b"\n").lstrip(b"\n").startswith(row.values["text"].encode())
            for row in rows
        )


def test_one_text_file_is_cut_into_paragraphs_and_a_folder_of_them_is_not(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffOne line,\r\nanother.\r\n\r\n\r\nA second\n\nthird\n".encode())
    assert texts(files(path)) == ["One line,\nanother.", "A second", "third"]
    assert len(texts(files(path, separator=""))) == len(texts(files(tmp_path))) == 1
    assert texts(files(tmp_path, separator="nd\n")) == ["One line,\nanother.\n\n\nA seco", "third"]


def test_one_bad_document_of_a_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nb\xffd\n\nalso good")
    fails(path, "a.txt, document at byte 6: not UTF-8 at byte 1 of it")
    rejected = []
    found = list(documents(files(path), reject=rejected.append))
    assert [(d.text, d.row) for d in found] == [("good", 0), ("also good", 11)] and len(rejected) == 1


def test_pieces_of_parquet_are_the_whole(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"text": [f"row {i}" for i in range(1000)], "id": range(1000)}), path, row_group_size=64
    )
    pieces = list(readers.pieces(path, files(path), 1500))
    rows = [row for start, stop, _ in pieces for row in readers.rows(path, files(path), start, stop)]
    assert len(pieces) > 4 and [(row.number, row.values["text"]) for row in rows] == [
        (i, f"row {i}") for i in range(1000)
    ]
    assert [document.id for document in documents(files(path))] == [str(i) for i in range(1000)]


def test_zstd_of_several_frames_and_a_truncated_one(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    frames = [pa.compress(json.dumps({"text": text}).encode() + b"\n", "zstd", asbytes=True) for text in ("one", "two")]
    path.write_bytes(b"".join(frames))
    assert texts(files(path)) == ["one", "two"]
    path.write_bytes(b"".join(frames)[:-4])
    fails(path, "a.jsonl.zst", "truncated")


def test_minimum_of_a_column(tmp_path):
    rows = [{"text": f"{score}", "int_score": score} for score in (1, 3, None, 4)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = Counter()
    assert texts(files(path, minimum={"int_score": 3}), counts) == ["3", "4"] and counts["filtered"] == 2
    fails(path, "has no column 'score'", "minimum", minimum={"score": 1})
    path.write_text('{"text": "a", "int_score": "4"}')
    fails(path, "holds a str, not a number", minimum={"int_score": 3})


def test_indexed_files_as_a_source(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        for ids in ([5, 6, 2], [7, 8], [9, 2]):
            writer.add(ids)
    found = list(documents(SourceConfig(kind="indexed", path=str(tmp_path / "a"))))
    assert [(d.row, d.tokens.tolist()) for d in found] == [(0, [5, 6, 2]), (1, [7, 8]), (2, [9, 2])]
    with pytest.raises(UserError, match="nowhere.idx: No such file"):
        sources.fingerprint(SourceConfig(kind="indexed", path=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"data.sources: path: given .*a.bin'; leave .bin out"):
        sources.fingerprint(SourceConfig(kind="indexed", path=str(tmp_path / "a.bin")))
