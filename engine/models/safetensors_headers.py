"""Reads and checks the headers of a model folder's safetensors files.

A header is a length (eight bytes, little-endian), followed by JSON of that length. The JSON has
each tensor's dtype, shape and place in the data after the header (huggingface.co/docs/safetensors).
"""

import json
import math
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

# Limits of the bytes to parse, far above the needs of models: Qwen3-235B has 4 MB of headers.
MAX_HEADER_BYTES = 16 << 20
MAX_JSON_BYTES = 32 << 20
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U32": 4, "U8": 1}
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A model folder cannot be served. The message names the file and the field."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's file, dtype and shape, as the file's header states them."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file."""

    file: Path
    entries: dict[str, Any]
    """The unchecked entries of the tensors, by name."""
    data_bytes: int


def read_tensors(path: Path) -> dict[str, Tensor]:
    return tensors_of_files(map(read_header, weight_files(path)))


def tensors_of_files(headers: Iterable[Header], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    for header in headers:
        for name, entry in header.entries.items():
            if not name.startswith(prefix):
                continue
            if name in tensors:
                other = tensors[name].file
                raise CheckpointError(f"{header.file}: the tensor {name} is also in {other}")
            tensors[name] = _parse_tensor(header.file, name, entry, header.data_bytes)
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """Return the index, which maps tensors' names to files. Without an index, return {}."""
    index = path / INDEX_FILE
    if not index.exists():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is missing")
    return {name: str(file) for name, file in weight_map.items()}


def weight_files(path: Path) -> list[Path]:
    """Return all model*.safetensors and all files that the index names. Raises CheckpointError."""
    files = set(path.glob("model*.safetensors"))
    for shard in sorted(set(read_index(path).values())):
        if Path(shard).name != shard or not os.path.exists(path / shard):
            raise CheckpointError(
                f"{path / shard}: this shard is named in {INDEX_FILE}, but it does not exist here"
            )
        files.add(path / shard)
    if not files:
        raise CheckpointError(f"{path}: there is no model*.safetensors file")
    return sorted(files)


def read_header(file: Path) -> Header:
    """Read a file's header. Raises CheckpointError."""
    try:
        size = regular_size(file)
        with file.open("rb") as stream:
            text = _header_text(file, stream, size)
    except OSError as error:
        raise CheckpointError(f"{file}: the file cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not an object")
    header.pop("__metadata__", None)
    return Header(file, header, size - 8 - len(text))


def _header_text(file: Path, stream: BinaryIO, size: int) -> bytes:
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{file}: the file has {size} bytes; its header needs 8 at least")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        raise CheckpointError(f"{file}: the header claims {length} bytes, but the file has {size}")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: the header has {length} bytes; quire reads {MAX_HEADER_BYTES} at most"
        )
    return stream.read(length)


def _parse_tensor(file: Path, name: str, entry: Any, data_bytes: int) -> Tensor:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: {name} needs dtype, shape and data_offsets in the header"
        ) from error
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file}: {name} has the dtype {dtype}, which quire does not serve")
    tensor = Tensor(file.name, dtype, shape)
    if min(shape, default=1) < 0 or end - begin != tensor.stored_bytes:
        raise CheckpointError(
            f"{file}: {name} has data_offsets {begin} to {end}, but {dtype} {list(shape)} takes "
            f"{tensor.stored_bytes} bytes"
        )
    if begin < 0 or end > data_bytes:
        raise CheckpointError(
            f"{file}: {name} ends at byte {end} of the data, but the file has {data_bytes}: it was "
            "cut off"
        )
    return tensor


def read_floats(header: Header, name: str) -> npt.NDArray[np.floating[Any]]:
    """Read the numbers of a tensor of floats that ``tensors_of_files`` has checked."""
    entry = header.entries[name]
    begin, end = (int(n) for n in entry["data_offsets"])
    with header.file.open("rb") as stream:
        stream.seek(begin - header.data_bytes, os.SEEK_END)
        data = stream.read(end - begin)
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, "<f4" if entry["dtype"] == "F32" else "<f2")


def read_json(file: Path) -> dict[str, Any]:
    return dict(_load(file, dict, "object"))


def read_json_list(file: Path) -> list[Any]:
    return list(_load(file, list, "array"))


def _load(file: Path, kind: type, what: str) -> Any:
    try:
        if (size := regular_size(file)) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{file}: the file has {size} bytes; of JSON quire reads {MAX_JSON_BYTES} at most"
            )
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: the file does not exist") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the file is not readable JSON") from error
    if not isinstance(values, kind):
        raise CheckpointError(f"{file}: the file is not a JSON {what}")
    return values


def regular_size(file: Path) -> int:
    """Return a file's size. Raises CheckpointError for a pipe or device, which might never end, and
    OSError if the size cannot be read."""
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: this is no regular file")
    return status.st_size
