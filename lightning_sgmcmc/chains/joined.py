"""Tensors of all chains in one file, to which each process gives its own chains, so that none holds another one's.

The first process writes the checkpoint with gaps in place of these tensors. Processes of its machine write their rows
into the gaps of the same file, and others send theirs in messages of bounded size.
"""

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_MESSAGE = 2**26
"""Bytes of a message, of which a process holds one."""
Piece = tuple[int, int, int]
"""A column's row by its number among all, and the first and the last byte of it."""


@dataclass(frozen=True)
class Column:
    """A tensor of all chains of a run: where it is in the checkpoint, and this process's rows of it, one a chain."""

    path: tuple[Any, ...]
    own: Tensor
    rows: Sequence[Tensor]


def column(path: tuple[Any, ...], own: Tensor, has_axis: bool) -> Column:
    """Return the column of a tensor that has a chain axis, or is one chain's."""
    return Column(path, own, own.detach().unbind(0) if has_axis else [own.detach()])


class GappyFile:
    """A file for `torch.save` that leaves a gap for the bytes of some tensors, and notes where; their memory is never
    touched. An error of the disk is raised by `check`, since the caller cannot pass it on."""

    def __init__(self, file: BinaryIO, gaps: Sequence[Tensor]) -> None:
        self._file = file
        self._gaps = {(tensor.data_ptr(), tensor.nbytes): index for index, tensor in enumerate(gaps) if tensor.nbytes}
        self.offsets: dict[int, int] = {}
        """Where the gap of a tensor begins in the file, by the tensor's index."""
        self.size = 0
        self._error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write bytes, or move over them."""
        size = memoryview(content).nbytes
        address = np.frombuffer(content, np.uint8).__array_interface__["data"][0] if size else 0
        gap = self._gaps.get((address, size))
        if gap is not None:
            self.offsets[gap] = self.size
        self.size += size
        try:
            if gap is not None:
                self._file.seek(size, os.SEEK_CUR)
            elif self._error is None:
                self._file.write(content)
        except OSError as error:
            self._error = error
        return size

    def flush(self) -> None:
        """Do nothing; `check` flushes."""

    def check(self) -> None:
        """Flush the file, and raise what went wrong."""
        if self._error is not None:
            raise self._error
        self._file.flush()

    @property
    def has_all_gaps(self) -> bool:
        """Whether all tensors were written from their own memory, as torch does at present."""
        return len(self.offsets) == len(self._gaps)


class JoinedRows:
    """The columns of one checkpoint; each group's first process has one of these, and the processes of a run call
    `write` or `fill` on the first and `serve` on the others.

    Args:
        columns: the same ones in the same order in all processes, with each one's own rows.
        group: the processes that take part.
        place: this process's place among them, 0 for the first.
        ranks: the ranks of all of them.
    """

    def __init__(self, columns: Sequence[Column], group: Any, place: int, ranks: Sequence[int]) -> None:
        self._columns = list(columns)
        self._group = group
        self._place = place
        self._ranks = ranks
        self._chosen: list[int] = []
        self._count: list[int] = []
        """The rows of each column in this process."""
        self.wholes: list[Tensor] = []
        """The tensors of all chains, in place of which the file has gaps, on the first process."""
        self._rows: list[tuple[int, int, Tensor]] = []
        """Of each row of the columns that are written: the column's place among them, the row's in it, and the row."""

    # -- first process ------------------------------------------------------------------------------------------------

    def take(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with a tensor of all chains in place of each column, of memory that is not used yet."""
        taken, copied, wanted = dict(checkpoint), set[tuple[Any, ...]](), []
        for index, one in enumerate(self._columns):
            holder: Any = taken
            for depth, key in enumerate(one.path[:-1], 1):
                if not _has(holder, key):
                    break
                if one.path[:depth] not in copied:
                    copied.add(one.path[:depth])
                    holder[key] = list(holder[key]) if isinstance(holder[key], list) else dict(holder[key])
                holder = holder[key]
            else:
                if not _has(holder, one.path[-1]):
                    continue  # a hook has dropped it
                if holder[one.path[-1]] is not one.own:
                    where = ".".join(map(str, one.path))
                    raise ValueError(
                        f"an on_save_checkpoint hook has replaced '{where}', of which this process has only its own "
                        "chains: add entries, or remove some, and change none"
                    )
                shape = (len(self._ranks) * len(one.rows), *one.rows[0].shape)
                holder[one.path[-1]] = torch.empty(shape, dtype=one.own.dtype)
                self.wholes.append(holder[one.path[-1]])
                wanted.append(index)
        self._choose(wanted)
        return taken

    def write(self, path: Path, offsets: Mapping[int, int]) -> None:
        """Fill the gaps of a file, which begin at `offsets`, by the index of `wholes`."""
        places = [offsets.get(index, 0) for index in range(len(self.wholes))]
        self._announce(str(path.absolute()), _identity(path), places)
        with open(path, "r+b", buffering=0) as file:
            self._write_own(file, places)
            self._receive(lambda piece, place, content: _write(file, self._where(piece, place, places), content))

    def fill(self) -> None:
        """Fill the tensors of all chains themselves, for what cannot be written with gaps."""
        self._announce(None, None, [])
        flat = [whole.reshape(-1).view(torch.uint8) for whole in self.wholes]
        starts = [0] * len(flat)

        def put(piece: Piece, place: int, content: np.ndarray[Any, Any]) -> None:
            start = self._where(piece, place, starts)
            flat[self._rows[piece[0]][0]][start : start + len(content)] = torch.from_numpy(content)

        for piece in itertools.chain.from_iterable(self._messages()):
            put(piece, 0, self._content(piece))
        self._receive(put)

    def _announce(self, *task: Any) -> None:
        dist.broadcast_object_list([(self._chosen, *task)], src=self._ranks[0], group=self._group)

    def _receive(self, put: Callable[[Piece, int, Any], None]) -> None:
        """Take the rows of the processes that have not written theirs, one process after another."""
        found: list[Any] = [None] * len(self._ranks)
        dist.gather_object((True, None), found, dst=self._ranks[0], group=self._group)
        failed = next(((r, error) for r, (_, error) in zip(self._ranks, found, strict=True) if error), None)
        for place, (rank, (is_written, _)) in enumerate(zip(self._ranks, found, strict=True)):
            for message in () if is_written else self._messages():
                buffer = torch.empty(sum(stop - start for _, start, stop in message), dtype=torch.uint8)
                dist.recv(buffer, src=rank, group=self._group)
                content, begin = buffer.numpy(), 0
                for piece in message:
                    size = piece[2] - piece[1]
                    put(piece, place, content[begin : begin + size])
                    begin += size
        if failed is not None:
            rank, (number, text) = failed
            raise OSError(number, f"{text}, on rank {rank}")

    # -- other processes ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Write this process's rows to the file that the first one has begun, or send them."""
        task: list[Any] = [None]
        dist.broadcast_object_list(task, src=self._ranks[0], group=self._group)
        wanted, path, identity, places = task[0]
        self._choose(wanted)
        is_written, error = False, None
        if path is not None and identity == _identity(Path(path)):
            is_written = True
            try:
                with open(path, "r+b", buffering=0) as file:
                    self._write_own(file, places)
            except OSError as raised:
                error = raised.errno, raised.strerror
        dist.gather_object((is_written, error), None, dst=self._ranks[0], group=self._group)
        for message in () if is_written else self._messages():
            sent = torch.cat([torch.from_numpy(self._content(piece)) for piece in message])
            dist.send(sent, dst=self._ranks[0], group=self._group)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _choose(self, wanted: list[int]) -> None:
        """Keep only columns of these indices, those that the checkpoint still has."""
        self._chosen = wanted
        chosen = [self._columns[index] for index in wanted]
        self._rows = [(place, i, row) for place, one in enumerate(chosen) for i, row in enumerate(one.rows)]
        self._count = [len(one.rows) for one in chosen]

    def _where(self, piece: Piece, place: int, starts: Sequence[int]) -> int:
        """Return where a piece of the process at a place begins, in a file with the columns at `starts`."""
        place_of_column, index, row = self._rows[piece[0]]
        return starts[place_of_column] + (place * self._count[place_of_column] + index) * row.nbytes + piece[1]

    def _content(self, piece: Piece) -> np.ndarray[Any, Any]:
        number, start, stop = piece
        content = self._rows[number][2].contiguous().reshape(-1).view(torch.uint8)[start:stop]
        found: np.ndarray[Any, Any] = content.cpu().numpy()
        return found

    def _write_own(self, file: BinaryIO, places: Sequence[int]) -> None:
        for piece in itertools.chain.from_iterable(self._messages()):
            _write(file, self._where(piece, self._place, places), self._content(piece))

    def _messages(self) -> Iterator[list[Piece]]:
        """Yield what is sent together, of at most `LARGEST_MESSAGE` bytes, the same in all processes."""
        message: list[Piece] = []
        room = LARGEST_MESSAGE
        for number, (_, _, row) in enumerate(self._rows):
            start, size = 0, row.nbytes
            while start < size:
                stop = min(size, start + room)
                message.append((number, start, stop))
                room, start = room - (stop - start), stop
                if not room:
                    yield message
                    message, room = [], LARGEST_MESSAGE
        if message:
            yield message


def _write(file: BinaryIO, start: int, content: np.ndarray[Any, Any]) -> None:
    file.seek(start)
    rest = content.data
    while rest.nbytes:  # a system writes at most 2 GB at a time
        rest = rest[file.write(rest) :]


def _has(holder: Any, key: Any) -> bool:
    return key < len(holder) if isinstance(holder, list) else isinstance(holder, Mapping) and key in holder


def _identity(path: Path) -> tuple[str, int, int] | None:
    """Return what two processes see alike if a path is the same file of one machine's kernel to both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        boot = socket.gethostname()
    try:
        status = os.stat(path)
    except OSError:
        return None
    return boot, status.st_dev, status.st_ino
