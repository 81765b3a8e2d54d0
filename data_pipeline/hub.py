"""Rows of a dataset that ``datasets.load_dataset`` finds: by its id on the hub, or a folder laid out like one."""

import contextlib
from collections.abc import Iterator
from functools import lru_cache

import datasets

from titans_pt.config import SourceConfig
from titans_pt.data_pipeline.files import Rejected, SourceRow, missing
from titans_pt.errors import Unreachable, UserError

SLICES = 16
"""Pieces of a streamed file. FineWeb-Edu's files are 2 GB: about 45 million tokens per piece."""
ROWS = 50_000
"""Rows of a piece of a downloaded dataset."""


def files(source: SourceConfig) -> list[str]:
    """Addresses of the dataset's files; for a dataset on the hub they contain the commit.

    Raises:
        UserError: no such dataset, configuration or split.
        Unreachable: no network; there may be a copy (:func:`cached`).
    """
    with _explained(source):
        found = _builder(source).config.data_files
        if found is None:
            raise ConnectionError("the hub cannot be reached")
        if source.split not in found:
            raise ValueError(f"no split {source.split!r}; there are {', '.join(map(str, found)) or 'none'}")
        return [str(file) for file in found[source.split]][: source.max_files]


def version(source: SourceConfig) -> list:
    """Fingerprint of the dataset: its files, with their entity tags or times. Raises as :func:`files`."""
    names = files(source)
    tags = _builder(source).config.data_files[source.split].origin_metadata[: len(names)]
    return [names, [list(tag) for tag in tags]]


def cached(source: SourceConfig) -> bool:
    """Whether only a copy in the cache of ``datasets`` can be read: the hub is down, or HF_HUB_OFFLINE is set.

    Raises:
        UserError: no such dataset. Unreachable: neither the hub nor a copy.
    """
    with _explained(source):
        return _builder(source).config.data_files is None


def cached_version(source: SourceConfig) -> list:
    """:func:`version` of the cached copy: its commit."""
    with _explained(source):
        builder = _builder(source)
        return [builder.cache_dir.removeprefix(str(datasets.config.HF_DATASETS_CACHE)), builder.hash]


def pieces(source: SourceConfig) -> Iterator[tuple[str, int, int, int]]:
    """Yields (file, start, stop, 0) of each piece: slices of a streamed file, rows of a downloaded dataset."""
    if _streams(source):
        for index, file in enumerate(files(source)):
            for piece in range(SLICES):
                yield file, index, piece, 0
    else:
        with _explained(source):
            count = len(_dataset(source, streaming=False))
        for start in range(0, count, ROWS):
            yield source.location, start, min(start + ROWS, count), 0


def rows(source: SourceConfig, file: str, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
    """Rows of one piece, in order; a missing column comes as :class:`Rejected`.

    Raises:
        UserError: the network failed for good, a file is broken.
    """
    streaming = _streams(source)
    with _explained(source):
        data = _dataset(source, streaming)
        if not streaming:
            place, first, data = file, start, data.select(range(start, stop))
        else:
            data = data.shard(num_shards=data.num_shards, index=start).reshard()  # one file, by row groups if it can
            slices = min(SLICES, data.num_shards)
            if stop >= slices:
                return
            place, first = f"{file}#{stop}/{slices}", 0
            data = data.shard(num_shards=slices, index=stop)
        if data.column_names:
            wanted = {*source.columns, *source.optional_columns, *source.minimum}
            for column in (*source.columns, *source.minimum):
                if column not in data.column_names:
                    yield missing(place, column, source, data.column_names)
                    return
            data = data.select_columns([column for column in data.column_names if column in wanted])
        for number, values in enumerate(data, first):
            yield SourceRow(f"{place}, row {number}", place, number, values)


def _streams(source: SourceConfig) -> bool:
    """Whether a source is streamed over the network.

    Raises:
        UserError: it should be streamed, but the hub cannot be reached and the cached copy is not the requested data.
    """
    if source.streaming and cached(source):
        if source.max_files:
            raise Unreachable(
                f"data.sources: kind=hub path={source.path!r}: the hub cannot be reached, and the copy "
                "in the cache of datasets has all files; leave out "
                f"max_files={source.max_files}, or wait"
            )
        return False
    return source.streaming


# Both are cached: otherwise each piece of a dataset would ask the hub again.


@lru_cache(8)
def _load_builder(path: str, name: str | None, revision: str | None):
    return datasets.load_dataset_builder(path, name, revision=revision)


def _builder(source: SourceConfig):
    return _load_builder(source.path, source.name, source.revision)


@lru_cache(8)
def _load(path: str, name: str | None, split: str, revision: str | None, streaming: bool):
    builder = _load_builder(path, name, revision)  # load_dataset would make another builder, which asks the hub again
    if streaming:
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _dataset(source: SourceConfig, streaming: bool):
    return _load(source.path, source.name, source.split, source.revision, streaming)


@contextlib.contextmanager
def _explained(source: SourceConfig):
    """Turns errors of ``datasets`` and its network layers, which have no common class, into one-line errors of ours."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        kind = Unreachable if isinstance(error, ConnectionError) else UserError
        raise kind(
            f"data.sources: kind=hub path={source.path!r} name={source.name!r}: {what}; check path, name, "
            "split and revision, or the network, and run the same command again: what is finished is kept"
        ) from error
