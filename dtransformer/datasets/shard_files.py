"""The files of token shards, while they are written: arrays that grow."""

import os
import pathlib

import numpy as np

from dtransformer.datasets.shard_manifest import KINDS, shard_file


class ShardFiles:
    """Writes documents, shard after shard.

    Args:
        folder: where to.
        dtype: of ids.
        shard_tokens: a shard ends with the document that reaches this number of tokens.

    Attributes:
        shards: what the manifest says of each shard that is complete.
        num_left_out: number of documents without a token, or with a part that has none.
    """

    def __init__(self, folder: pathlib.Path, dtype: str, shard_tokens: int):
        self.shards, self.num_left_out = [], 0
        self._folder, self._dtype, self._limit = folder, dtype, shard_tokens
        self._arrays = {}

    def add(self, ids: np.ndarray, lengths: np.ndarray, counts: np.ndarray | None) -> None:
        """Add documents; those without a token, or with a part that has none, are left out.

        Args:
            ids: int [n], of all parts, one after the other.
            lengths: int [P], the number of tokens of each part.
            counts: int [D], the number of parts of each document; None where they have none.
        """
        has_parts = counts is not None
        counts = np.asarray(counts) if has_parts else np.ones(len(lengths), np.int64)
        document_of = np.repeat(np.arange(len(counts)), counts)
        is_kept = counts > 0
        is_kept[document_of[lengths == 0]] = False
        self.num_left_out += int(np.count_nonzero(~is_kept))
        of_kept = is_kept[document_of]
        ids, lengths = ids[np.repeat(of_kept, lengths)], lengths[of_kept]
        part_ends, token_ends = np.cumsum(counts[is_kept]), np.cumsum(lengths)
        document_ends = token_ends[part_ends - 1]
        done = tokens_done = parts_done = 0
        while done < len(document_ends):
            room = self._limit - self._length("tokens")
            end = np.searchsorted(document_ends, tokens_done + room) + 1
            last, end_of_parts = document_ends[:end][-1], part_ends[:end][-1]
            self._append("documents", document_ends[done:end] - tokens_done)
            if has_parts:
                self._append("parts", token_ends[parts_done:end_of_parts] - tokens_done)
            self._append("tokens", ids[tokens_done:last])
            done, tokens_done, parts_done = end, last, end_of_parts
            if self._length("tokens") >= self._limit:
                self.close()

    def close(self) -> None:
        """End the shard that is being written, if any."""
        if not self._arrays:
            return
        for array in self._arrays.values():
            array.close()
        says = {kind: array.length - (kind != "tokens") for kind, array in self._arrays.items()}
        self.shards.append({kind: says.get(kind) for kind in KINDS})
        self._arrays = {}

    def _length(self, kind):
        return self._arrays[kind].length if kind in self._arrays else 0

    def _append(self, kind, numbers):
        """Append ids, or ends of what begins behind the ids that are there."""
        if kind not in self._arrays:
            path = self._folder / shard_file(len(self.shards), kind)
            self._arrays[kind] = _GrowingArray(path, self._dtype if kind == "tokens" else "int64")
            if kind != "tokens":
                self._arrays[kind].append(np.zeros(1, np.int64))
        before = 0 if kind == "tokens" else self._length("tokens")
        self._arrays[kind].append(numbers + before if before else numbers)


class _GrowingArray:
    """A `.npy` file of one dimension that grows.

    Args:
        path: the file.
        dtype: of its numbers.
    """

    def __init__(self, path: str | os.PathLike, dtype: str):
        self._file, self._dtype, self.length = open(path, "wb"), np.dtype(dtype), 0
        self._write_header()

    def append(self, numbers):
        """Add numbers at the end."""
        self._file.write(np.ascontiguousarray(numbers, self._dtype).data)
        self.length += len(numbers)

    def close(self):
        """Write how many there are; NumPy's header has room for any number."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self):
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
