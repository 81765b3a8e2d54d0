"""Files of a folder: which ones are read, reported as unread or refused, and their allowed content."""

import bz2
import errno
import gzip
import hashlib
import json
import lzma
import os
import shutil
import subprocess

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from titans_pt.config import SourceConfig
from titans_pt.data_pipeline import files as readers
from titans_pt.data_pipeline.kinds import of_source
from titans_pt.data_pipeline.sources import documents
from titans_pt.errors import UserError


def files(path, **more):
    return SourceConfig(kind="files", path=str(path), **more)


def read(path, **more):
    """Return (texts, rejected) with unusable input skipped."""
    rejected = []
    found = [document.text for document in documents(files(path, **more), reject=rejected.append)]
    return found, rejected


def fails(path, *parts, **more):
    with pytest.raises(UserError) as error:
        list(documents(files(path, **more)))
    message = str(error.value)
    assert message.isprintable() and message.encode()
    for part in parts:
        assert part in message, message


def line(text, **more):
    return json.dumps({"text": text, **more}).encode() + b"\n"


def zstd_frame(window_log, content):
    """A frame of one raw block whose header asks for a window of this size, like zstd --long."""
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return b"\x28\xb5\x2f\xfd" + bytes([0, window_log - 10 << 3]) + block


LATIN = os.fsdecode(b"caf\xe9")


# --- which files ---


def test_suffixes_in_any_case_and_compressions(tmp_path):
    for name, pack in {
        "a.JSONL": bytes,
        "b.ndjson": bytes,
        "c.json.gz": gzip.compress,
        "d.jsonl.xz": lzma.compress,
        "e.ndjson.bz2": bz2.compress,
        "f.Jsonl.Zst": lambda data: zstd_frame(20, data),
        "g.json.ZST": lambda data: zstd_frame(27, data),
    }.items():
        (tmp_path / name).write_bytes(pack(line(name)))
    for name, pack in {"h.TXT": bytes, "i.txt.gz": gzip.compress, "j.txt.XZ": lzma.compress}.items():
        (tmp_path / name).write_bytes(pack(f"{name}\r\nof two lines\rof three".encode()))
    parquet.write_table(pa.table({"text": ["k"]}), tmp_path / "k.PARQUET")
    found, rejected = read(tmp_path)
    assert found == [
        "a.JSONL",
        "b.ndjson",
        "c.json.gz",
        "d.jsonl.xz",
        "e.ndjson.bz2",
        "f.Jsonl.Zst",
        "g.json.ZST",
        *(f"{name}\nof two lines\nof three" for name in ("h.TXT", "i.txt.gz", "j.txt.XZ")),
        "k",
    ]
    assert not rejected and not of_source(files(tmp_path)).listing().ignored


def test_one_compressed_text_is_cut_into_paragraphs(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\n\r\ntwo\n"))
    assert read(tmp_path / "a.txt.gz")[0] == ["one", "two"]


def test_what_is_not_read_is_named_hidden_ones_last(tmp_path):
    for name in ("a.txt", "b.csv", "README", "info.json", "x.parquet.gz", ".hidden.txt", LATIN + ".md"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.html").touch()
    (tmp_path / ".git" / "objects").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    found = of_source(files(tmp_path)).listing()
    assert [path.name for path in found.files] == ["a.txt"]
    assert found.ignored == [
        "README",
        "b.csv",
        LATIN + ".md",
        "info.json",
        "pipe",
        "sub/deep.html",
        "x.parquet.gz",
        ".git/",
        ".hidden.txt",
    ]
    assert readers.abridged(found.ignored, count=20, most=3) == "README, b.csv, caf\\xe9.md and 17 more"
    (tmp_path / "a.txt").unlink()
    fails(tmp_path, r"no usable file (there are: README, b.csv, caf\xe9.md", "and 1 more)", ".jsonl")


def test_folders_of_runs_and_of_token_files_are_not_read(tmp_path):
    """Logs were trained on where the texts were those of the folder in which a run was started."""
    for name in ("a.txt", "runs/b/config.yaml", "runs/b/versions.json", "runs/b/log.txt", "tokens/manifest.json",
                 "tokens/train.idx", "tokens/rejected.jsonl", "set/manifest.json", "set/c.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = of_source(files(tmp_path)).listing()
    assert [path.name for path in found.files] == ["a.txt", "c.txt"]
    assert found.ignored == ["runs/b/", "set/manifest.json", "tokens/"]
    assert [path.name for path in of_source(files(tmp_path / "runs" / "b")).listing().files] == ["log.txt"]  # as asked


def test_a_folder_that_may_not_be_entered_is_rejected_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    real_stat, real_scan = os.stat, os.scandir

    def closed(path, real, *args, **options):
        if "closed" in str(path) and (real is real_scan or os.path.basename(path) != "closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", lambda path, *args, **how: closed(path, real_stat, *args, **how))
    monkeypatch.setattr(os, "scandir", lambda path: closed(path, real_scan))
    assert [path.name for path in of_source(files(tmp_path)).listing().files] == ["a.txt", "closed"]
    fails(tmp_path, "closed: unreadable (Permission denied); replace or remove it")


@pytest.mark.parametrize(("name", "call"), [
    ("a.jsonl", "titans_pt.data_pipeline.files._opened"), ("a.txt", "titans_pt.data_pipeline.files._opened"),
    ("a.parquet", "pyarrow.parquet.ParquetFile.iter_batches"), ("a.parquet", "pyarrow.parquet.read_metadata"),
    ("a.fa", "titans_pt.genomics.fasta._records"), ("a.jsonl", "os.stat"),
])  # fmt: skip
def test_a_server_that_fails_is_no_bad_input(tmp_path, monkeypatch, name, call):
    """It may recover: with data.bad_input=skip, its files would be left out for good."""
    path, rejected = tmp_path / name, []
    path.write_bytes(b">a\nACGT\n" if name == "a.fa" else line("some text"))
    if name == "a.parquet":
        parquet.write_table(pa.table({"text": ["some text"]}), path)
    source = SourceConfig(kind="fasta" if name == "a.fa" else "files", path=str(tmp_path))
    assert len(list(documents(source, reject=rejected.append))) == 1
    real = os.stat

    def failing(given, *args, **how):
        if call != "os.stat" or str(given) == str(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(given, *args, **how)

    monkeypatch.setattr(call, failing)
    with pytest.raises(OSError, match="Stale file handle") as error:
        list(documents(source, reject=rejected.append))
    assert not rejected and error.value.filename == str(path)


@pytest.mark.parametrize("name", ["a.csv", "A.Tsv", "data-00000-of-00001.arrow", "a.json"])
def test_files_that_datasets_reads_are_named_with_their_kind(tmp_path, name):
    (tmp_path / name).write_text("text")
    (tmp_path / "README").touch()
    fails(tmp_path, "no usable file", f"; for {os.path.splitext(name)[1].lower()} set kind=hub and path to the folder")


def test_a_json_file_is_read_when_it_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(line("one") + line("two"))
    assert read(path)[0] == ["one", "two"]
    path.write_text('[{"text": "one"},\n{"text": "two"}]')
    fails(path, "a.json:1", "not valid JSON", "one array", "jq -c '.[]'")
    path.write_text('[{"text": "one"}]')
    fails(path, "a.json:1", "not an object", "jq -c '.[]'")


def test_linked_folders_and_files_are_read(tmp_path):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "disk" / "deep" / "a.jsonl").write_bytes(line("far"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.jsonl").write_bytes(line("near"))
    (tmp_path / "text" / "linked").symlink_to("../disk")
    (tmp_path / "text" / "c.jsonl").symlink_to(tmp_path / "disk" / "deep" / "a.jsonl")
    assert read(tmp_path / "text")[0] == ["near", "far", "far"]
    (tmp_path / "whole").symlink_to("text")
    assert read(tmp_path / "whole")[0] == ["near", "far", "far"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        *((target, "a folder that it is in itself") for target in ("..", ".", "/", "../sub")),
        ("link", "cannot be followed (Too many levels"),
        ("/gone/x.jsonl", "cannot be followed (No such file"),
        (os.fsdecode(b"/gone/caf\xe9\n"), r"to /gone/caf\xe9\n, which"),
    ],
)
@pytest.mark.parametrize("name", ["link", "link.jsonl", "link.csv"])
def test_links_that_lead_nowhere_or_back_are_refused(tmp_path, target, reason, name):
    """Any name is refused: a dangling link may stand for a folder, or a disk that is not mounted."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl").write_bytes(line("one"))
    link = tmp_path / "sub" / name
    link.symlink_to(name if target == "link" else target)
    fails(tmp_path, f"data.sources: {link}: a link to ", reason, "remove the link", "data.bad_input=skip")
    found, [rejected] = read(tmp_path)
    assert found == ["one"] and reason in rejected.reason


def test_pipes_are_not_waited_for(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line("one"))
    os.mkfifo(tmp_path / "b.jsonl")
    fails(tmp_path, "b.jsonl: a pipe or device, not a file", "write what it gives to a file")
    assert read(tmp_path)[0] == ["one"]
    fails(tmp_path / "b.jsonl", "a pipe or device, which cannot be read twice; write what it gives to a file")
    fails("/dev/null", "a pipe or device")


def test_paths_that_cannot_be(tmp_path):
    fails("a\0b", "path='a\\x00b': ", "embedded null ", "; set it to your text")  # Python 3.13 words it otherwise
    fails("a" * 5000, "File name too long; set it to your text")
    (tmp_path / "me").symlink_to("me")
    fails(tmp_path / "me", "Too many levels of symbolic links")
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    fails(tmp_path / "empty", "no usable file (it is empty)")


def test_folders_and_files_without_permission(tmp_path, monkeypatch):
    """Root may read everything, therefore the system's error is imitated."""
    (tmp_path / "a.jsonl").write_bytes(line("one"))
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut" / "b.jsonl").write_bytes(line("two"))
    scandir = os.scandir

    def refuse(path):
        if os.path.basename(path) == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(readers.os, "scandir", refuse)
    fails(tmp_path, f"{tmp_path}/shut: unreadable (Permission denied)")
    assert read(tmp_path)[0] == ["one"]


# --- names ---


@pytest.mark.parametrize("name", [LATIN, "line\nbreak", "tab\tand\x07bell", "café"])
def test_strange_file_names_of_every_format(tmp_path, name):
    (tmp_path / f"{name}.jsonl").write_bytes(line("one"))
    (tmp_path / f"{name}.jsonl.zst").write_bytes(zstd_frame(20, line("two")))
    with open(tmp_path / f"{name}.parquet", "wb") as file:
        parquet.write_table(pa.table({"text": ["three"]}), file)
    (tmp_path / f"{name}.txt").write_bytes(b"four")
    found = list(documents(files(tmp_path)))
    assert sorted(document.text for document in found) == ["four", "one", "three", "two"]
    expected = {LATIN: "caf\\xe9"}.get(name, name)
    assert {document.file for document in found} == {
        f"{tmp_path}/{expected}.{suffix}" for suffix in ("jsonl", "jsonl.zst", "parquet", "txt")
    }
    for suffix in ("jsonl", "jsonl.gz", "jsonl.xz", "parquet", "txt"):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        (tmp_path / f"{name}.{suffix}").write_bytes(b"\xff{")
        fails(tmp_path, str(tmp_path))


def test_ids_are_valid_utf8(tmp_path):
    ids = ["a\ud800b", "\udc00", 7, None, 1.5, float("nan"), True, ["\ud800"], {"k": 1}, 10**400]
    (tmp_path / "a.jsonl").write_bytes(b"".join(line(f"text {i}", id=value) for i, value in enumerate(ids)))
    found = [document.id for document in documents(files(tmp_path))]
    assert found == ["a\ufffdb", "\ufffd", "7", "", "1.5", "nan", "True", "['\\ud800']", "{'k': 1}", str(10**400)]


def test_column_names(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"te\\udc00xt\\n": "a"}\n')
    fails(path, r"has no column as text_column='text' says (te\udc00xt\n)")
    path.write_text(json.dumps({f"column {i}": 0 for i in range(5000)}))
    fails(path, "(column 0, column 1,", "column 19 and 4,980 more)")
    path = tmp_path / "b.parquet"
    parquet.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "text", "a.b\n"]), path)
    fails(path, "b.parquet: has 2 columns 'text'; rename all but one")
    assert read(path, text_column="a.b\n")[0] == ["c"]
    parquet.write_table(pa.table([["a"], ["b"]], names=["text", "xxyyzz"]), path)
    path.write_bytes(path.read_bytes().replace(b"xxyyzz", b"\xe9\xe9\xe9\xe9\xe9\xe9"))
    fails(path, "b.parquet: the name of a column is not UTF-8; rename the column")


def test_values_that_python_has_none_for(tmp_path):
    ids = pa.array([0, 253402300800000000], pa.timestamp("us"))  # the second is of the year 10,000
    parquet.write_table(pa.table({"text": ["a", "b"], "id": ids}), tmp_path / "a.parquet")
    fails(tmp_path, "a.parquet, row 1: a value that cannot be read (date value out of range)", "other than text, id")
    assert read(tmp_path)[0] == ["a"]


# --- content ---


@pytest.mark.parametrize("nested", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_json_nested_deep_is_one_bad_line(tmp_path, nested):
    (tmp_path / "a.jsonl").write_bytes(line("one") + b'{"text": "two", "meta": ' + nested + b"}\n" + line("three"))
    fails(tmp_path, "a.jsonl:2: JSON nested deeper than can be read", "remove the line")
    found, rejected = read(tmp_path)
    assert found == ["one", "three"] and len(rejected) == 1


def test_numbers_and_keys_of_json(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "one", "score": NaN}\n{"text": "two", "score": Infinity}\n{"text": "other", "text": "three"}\n'
        b'{"text": "four", "score": 1e999}\n{"text": "five", "n": ' + b"9" * 5000 + b"}\n"
    )
    found, [rejected] = read(tmp_path)
    assert found == ["one", "two", "three", "four"]  # the last of equal keys counts
    assert rejected.reason == "an integer of more than 4,300 digits"


def test_zstd_with_a_long_window_is_not_called_truncated(tmp_path):
    path = tmp_path / "a b.jsonl.zst"
    path.write_bytes(zstd_frame(31, line("one")))
    fails(path, "compressed with too long a window (zstd --long); decompress it: zstd -d --rm --long=31 '")
    path.write_bytes(zstd_frame(20, line("one")) + zstd_frame(31, line("two")))
    _, [rejected] = read(tmp_path)
    assert "window" in rejected.reason and "truncated" not in rejected.reason
    if shutil.which("zstd"):  # run the printed remedy
        subprocess.run(rejected.remedy.split(": ", 1)[1], shell=True, check=True, capture_output=True)
        assert read(tmp_path) == (["one", "two"], [])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(("name", "pack"), [("a.txt", bytes), ("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)])
def test_utf_16_and_32_are_named(tmp_path, encoding, name, pack):
    """Without a byte order mark, UTF-16 is valid UTF-8 with a NUL before or after each letter."""
    (tmp_path / name).write_bytes(pack('{"text": "one"}\n{"text": "two"}\n'.encode(encoding)))
    shown = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    fails(tmp_path, f"{name}: {shown}, not UTF-8; convert it: iconv -f {shown} -t UTF-8")
    found, rejected = read(tmp_path)
    assert not found and len(rejected) == 1


def test_lines_that_end_with_cr_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\r{"text": "two"}\r')
    fails(tmp_path, "a.jsonl:1: not valid JSON", r"CR alone: tr '\r' '\n'")
    path = tmp_path / "b.txt"
    path.write_bytes(b"one\rof two lines\r\rtwo\r\r\rthree\r")
    assert read(path)[0] == ["one\nof two lines", "two", "three"]


# --- hashes of content ---


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(20, 4000))
def test_the_pieces_of_a_file_have_all_its_bytes(tmp_path_factory, rows, target):
    folder = tmp_path_factory.mktemp("pieces")
    texts = [f"row {i}\n\n" for i in range(rows)]
    parquet.write_table(pa.table({"text": texts, "id": range(rows)}), folder / "a.parquet", row_group_size=7)
    (folder / "b.txt").write_text("".join(texts))
    (folder / "c.jsonl").write_bytes(b"".join(map(line, texts)))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b"".join(map(line, texts))))
    for path in folder.iterdir():
        read = hashlib.sha256()
        for start, stop, _ in readers.pieces(path, files(path), target):
            readers.hash_piece(path, start, stop, read.update)
        assert read.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest(), path


def test_what_cannot_be_read_has_no_bytes(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.parquet").symlink_to("gone")
    for path in tmp_path.iterdir():
        assert list(readers.pieces(path, files(path), 10)) == [(0, None, 0)]
        readers.hash_piece(path, 0, None, pytest.fail)


def test_tables_without_rows_or_without_a_footer_are_one_piece(tmp_path):
    path = tmp_path / "a.parquet"
    with parquet.ParquetWriter(path, pa.schema([("text", pa.string())])):
        pass
    size = path.stat().st_size
    assert list(readers.pieces(path, files(path), 10)) == [(0, None, size)] and read(path) == ([], [])
    path.write_bytes(path.read_bytes()[: size // 2])
    assert list(readers.pieces(path, files(path), 10)) == [(0, None, size // 2)]
    readers.hash_piece(path, 0, 1, pytest.fail)
