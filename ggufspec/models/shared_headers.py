"""Reading the headers of many files in one repository while downloading only a fraction of their bytes.

A header is nearly all vocabulary: 8 of 8.2 MB in Llama 3's. Files in one repository have the same vocabulary, so it is
read once, from one file. From every other file, only the parts before and after the vocabulary are read; they are
parsed as if the vocabulary's arrays did not exist. Two checks confirm that the file has these arrays: they begin and
end with the same bytes, and the weights that follow end exactly at the end of the file. If a check fails, the header is
read completely (:mod:`ggufspec.models.headers`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ggufspec.llamacpp import gguf
from ggufspec.models.hub.ranges import RemoteFile
from ggufspec.models.locate import LocalFile

FIRST_BYTES = 64 << 10  # number of bytes to read first; the part before a vocabulary takes about 2 kB
_SLACK_BYTES = 64 << 10  # maximum number of extra bytes after the vocabulary, relative to the file read completely
_SEAM_BYTES = 4 << 10  # number of bytes to compare at each end of the shared part
_LEAST_BYTES = 64 << 10  # size of the smallest value that is worth skipping
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes of a header that other files repeat: the large arrays and everything between them.

    ``parsed`` is the whole header, ``keys`` are the keys in the shared part, ``after`` is the number of bytes after it.
    """

    data: bytes
    parsed: gguf.Gguf
    keys: frozenset[str]
    after: int

    @classmethod
    def of(cls, parsed: gguf.Gguf, data: bytes) -> SharedBytes | None:
        """Return the shared part of a header, given its parsed form and bytes; None if it has no large values."""
        extent = gguf.extent(data)
        large = [place for place in extent[0].values() if place[1] - place[0] >= _LEAST_BYTES] if extent else []
        if extent is None or not large:
            return None
        begin, end = min(large)[0], max(large)[1]
        keys = frozenset(key for key, place in extent[0].items() if begin <= place[0] < end)
        return cls(data[begin:end], parsed, keys, extent[1] - end)

    def parse(self, file: LocalFile | RemoteFile, first: bytes) -> tuple[gguf.Gguf | None, int]:
        """Parse a file's header; return (header, or None if it lacks the shared part; bytes read beyond ``first``).

        Raises:
            ModelError: llama.cpp refuses the header.
        """
        begin = first.find(self.data[:_SEAM_BYTES])
        start = begin + len(self.data) - _SEAM_BYTES
        if begin < 0 or start >= file.size_bytes:
            return None, 0
        after = file.read(start, min(_SEAM_BYTES + self.after + _SLACK_BYTES, file.size_bytes - start))
        cut = first[:begin] + after[_SEAM_BYTES:]
        keys = int.from_bytes(cut[16:24], "little") - len(self.keys)
        if keys < 0 or not after.startswith(self.data[-_SEAM_BYTES:]):
            return None, len(after)
        cut = cut[:16] + keys.to_bytes(8, "little") + cut[24:]
        extent = gguf.extent(cut)
        return self._joined(gguf.parse_header(cut), extent[1] + len(self.data), file) if extent else None, len(after)

    def _joined(self, cut: gguf.Gguf, header_bytes: int, file: LocalFile | RemoteFile) -> gguf.Gguf | None:
        """Return the header ``cut`` with the shared part inserted, or None if the file's length does not match."""
        alignment = cut.metadata.get("general.alignment", gguf.ALIGNMENT)
        assert isinstance(alignment, int)  # llama.cpp's parser has checked the type
        cut = replace(cut, data_offset=header_bytes + -header_bytes % alignment)
        if not cut.end <= file.size_bytes <= cut.end + -cut.end % alignment:
            return None
        own = {key: value for key, value in self.parsed.metadata.items() if key in self.keys}
        lengths = {key: value for key, value in self.parsed.lengths.items() if key in self.keys}
        return replace(
            cut,
            metadata=cut.metadata | own,
            lengths=cut.lengths | lengths,
            tokens_digest=self.parsed.tokens_digest if _TOKENS in self.keys else cut.tokens_digest,
        )
