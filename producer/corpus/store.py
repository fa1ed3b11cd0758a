"""The tokenised corpus on disk: arrays that grow while documents come, memory-mapped afterwards.

    ids.npy      int32 [sum n]     all documents end to end
    mask.npy     uint8 [sum n]     1 = supervised
    offsets.npy  int64 [D + 1]     document d is [offsets[d], offsets[d + 1])
    rows.npy     int64 [R + 1]     documents of usable row r are rows[r] .. rows[r + 1]
    digests.npy  uint8 [R, 16]     identity of each usable row
    sources.npy  uint16 [R]        source of each usable row
    counts.npy   int64 [2, V]      how often each token id occurs, and occurs supervised

A run's data folder holds a `view` of such a corpus: which documents are trained on (kept.npy), and where it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VIEW_FILE = "view.json"


class GrowingArray:
    """A one-dimensional .npy file that is appended to; its header is completed by `close`."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self.size = 0
        self._file: BufferedWriter = path.open("wb")
        self._write_header()

    def append(self, values: NDArray[Any]) -> None:
        """Add elements at the end."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self.size += len(values)

    def close(self) -> None:
        """Complete the file and bring it to the disk."""
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, header)  # numpy leaves room for a growing first axis


class CorpusWriter:
    """Writes a corpus into `folder`; what it keeps in memory is a few bytes per document."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids, self._mask = GrowingArray(folder / "ids.npy", "<i4"), GrowingArray(folder / "mask.npy", "|u1")
        self._lengths: list[NDArray[np.int32]] = []
        self._row_sizes: list[NDArray[np.int32]] = []
        self._digests: list[bytes] = []
        self._sources: list[NDArray[np.uint16]] = []
        self._counts = np.zeros((2, 0), dtype=np.int64)

    def append(
        self,
        ids: list[NDArray[np.int32]],
        mask: list[NDArray[np.uint8]],
        row_sizes: list[int],
        row_digests: list[bytes],
        source: int,
    ) -> None:
        """Add the documents of some usable rows."""
        if not ids:
            return
        all_ids, all_mask = np.concatenate(ids), np.concatenate(mask)
        self._ids.append(all_ids)
        self._mask.append(all_mask)
        self._lengths.append(np.asarray([len(document) for document in ids], dtype=np.int32))
        self._row_sizes.append(np.asarray(row_sizes, dtype=np.int32))
        self._digests.append(b"".join(row_digests))
        self._sources.append(np.full(len(row_sizes), source, dtype=np.uint16))
        size = max(self._counts.shape[1], int(all_ids.max()) + 1)
        self._counts = np.pad(self._counts, ((0, 0), (0, size - self._counts.shape[1])))
        self._counts[0] += np.bincount(all_ids, minlength=size)
        self._counts[1] += np.bincount(all_ids[all_mask == 1], minlength=size)

    def close(self) -> None:
        """Write what was gathered beside the tokens, and bring everything to the disk."""
        self._ids.close()
        self._mask.close()
        digests = np.frombuffer(b"".join(self._digests), dtype=np.uint8).reshape(-1, 16)
        small: dict[str, NDArray[Any]] = {
            "offsets": _ends(self._lengths),
            "rows": _ends(self._row_sizes),
            "digests": digests,
            "sources": np.concatenate(self._sources or [np.zeros(0, dtype=np.uint16)]),
            "counts": self._counts,
        }
        for name, array in small.items():
            with (self._folder / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())


class Corpus:
    """A whole tokenised corpus, memory-mapped read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids: NDArray[np.int32] = _mapped(folder / "ids.npy")
        self.mask: NDArray[np.uint8] = _mapped(folder / "mask.npy")
        self.offsets: NDArray[np.int64] = np.load(folder / "offsets.npy")

    def rows(self) -> NDArray[np.int64]:
        """First document of each usable row, and the end, [R + 1]."""
        return np.load(self.folder / "rows.npy")  # type: ignore[no-any-return]

    def digests(self) -> NDArray[np.uint8]:
        """Identity of each usable row, [R, 16]."""
        return np.load(self.folder / "digests.npy")  # type: ignore[no-any-return]

    def sources(self) -> NDArray[np.uint16]:
        """Source of each usable row, [R]."""
        return np.load(self.folder / "sources.npy")  # type: ignore[no-any-return]

    def counts(self) -> NDArray[np.int64]:
        """How often each token id occurs, and occurs supervised, [2, V]; V is one more than the largest id."""
        return np.load(self.folder / "counts.npy")  # type: ignore[no-any-return]

    def place(self, document: int) -> slice:
        """Where a document's tokens stand in `ids` and `mask`."""
        return slice(int(self.offsets[document]), int(self.offsets[document + 1]))


def write_view(folder: Path, corpus: Path, kept: NDArray[np.int64], facts: dict[str, Any]) -> None:
    """Write which documents of a corpus a run trains on; `facts` are kept beside it."""
    np.save(folder / "kept.npy", kept)
    (folder / VIEW_FILE).write_text(json.dumps({"corpus": str(corpus.absolute()), **facts}, indent=1))


def read_view(folder: Path) -> tuple[Corpus, NDArray[np.int64]]:
    """Open the corpus of a run's data folder, and which of its documents are trained on.

    A folder without a view is itself a corpus, trained on as a whole. Raises FileNotFoundError that says what to do.
    """
    view = folder / VIEW_FILE
    if not view.exists():
        corpus = Corpus(folder)
        return corpus, np.arange(len(corpus.offsets) - 1)
    place = Path(json.loads(view.read_text())["corpus"])
    if not place.is_dir():
        raise FileNotFoundError(
            f"the tokenised data {place} of {folder} is gone; 'python launch.py prepare' makes it again"
        )
    return Corpus(place), np.load(folder / "kept.npy")


def _mapped(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except ValueError:  # a file without elements cannot be mapped
        return np.load(path)


def _ends(sizes: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.concatenate(sizes or [np.zeros(0, np.int32)]), dtype=np.int64)])
