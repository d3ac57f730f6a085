"""The three operations as one launch over all layers: tables of addresses, tile sizes, and the launch itself.

- in place:      all planes, from a slot to itself
- copy:          all planes and all pieces, from slot `src` to slot `dst`
- into a buffer: planes and pieces of one layer, from the pool to `out`

A *plane* is the rotated part of one head of one layer. A *piece* is a run of bytes that every row of some layer has
at the same place and that is only copied: the MLA latent, the values, the columns past a partial rotary width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from leyline_agent.errors import UnsupportedError
from leyline_agent.kernels.layout import FP8_DTYPES, LayerKV
from leyline_agent.kernels.triton_kernel import move_rows_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from leyline_agent.kernels.rope import RopeDescriptor

__all__ = ["Table", "Tiles", "TritonForm", "launch"]

KEY_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.uint8: tl.float8e4nv,
    torch.float8_e4m3fn: tl.float8e4nv,
}
WORD_DTYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
PIECE_BYTES = 1024  # longer pieces are cut; a bf16 MLA latent of 512 is exactly one
WIDEST = 16  # bytes of the widest load, so no larger alignment helps


@dataclass(frozen=True)
class Tiles:
    """How much one program takes. Measured on an H200; docs/kernels.md has the variants."""

    chunk: int  # planes of a program: they share one computation of cosines and sines
    planes: int  # ... of which so many at a time
    pairs: int  # pairs of each plane; pairs / (R / 2) slots
    stages: int  # how many times `planes` are on their way at once
    piece_bytes: int
    num_warps: int = 4


LARGE = Tiles(chunk=9, planes=1, pairs=1024, stages=3, piece_bytes=16384)
SMALL = Tiles(chunk=2, planes=2, pairs=512, stages=1, piece_bytes=4096)  # a short span: spread over the whole GPU
FULL_GRID = 512  # programs that fill a large GPU


class TritonForm:
    """Rotates, copies and reads rows of `layers`. Arguments are checked by PoolRotator."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        keys = layers[0].keys
        if keys.dtype in FP8_DTYPES and keys.is_cuda and torch.cuda.get_device_capability(keys.device) < (8, 9):
            raise UnsupportedError(
                "Triton has no fp8 e4m3 arithmetic below compute capability 8.9, and this GPU has "
                f'{torch.cuda.get_device_capability(keys.device)}; use form="torch"'
            )
        self.layers = layers
        self.tables = list(_tables([_Move(layer, layer.keys, layer.values) for layer in layers]))

    def rotate_inplace(self, slots: Tensor, shifts: Tensor) -> None:
        for table in self.tables:
            launch(table, slots, slots, shifts, pieces=False)

    def copy_rotate(self, src: Tensor, dst: Tensor, shifts: Tensor) -> None:
        for table in self.tables:
            launch(table, src, dst, shifts, pieces=True)

    def rotated_keys(self, layer: int, slots: Tensor, shifts: Tensor, out: Tensor) -> None:
        rows = torch.arange(len(slots), device=slots.device)
        for table in _tables([_Move(self.layers[layer], out, None)]):
            launch(table, slots, rows, shifts, pieces=True)


@dataclass(frozen=True, eq=False)
class _Move:
    """One layer's rows, and where they go: the same tensors, or a buffer."""

    layer: LayerKV
    keys: Tensor
    values: Tensor | None


class _Plane(NamedTuple):
    rotation: int  # which of the pool's distinct rotations
    src: int  # address of slot 0's first rotated column
    dst: int


class _Piece(NamedTuple):
    """All in bytes."""

    src: int  # address of slot 0's first byte
    dst: int
    src_stride: int  # between slots
    dst_stride: int
    width: int


@dataclass(frozen=True)
class _Geometry:
    """What the kernel needs of a plane as compile-time constants. Most pools have one geometry, and so one launch."""

    rotary_dim: int
    interleaved: bool
    src_stride: int
    dst_stride: int


@dataclass(eq=False)
class Table:
    """What one launch works through."""

    geometry: _Geometry
    key: tl.dtype
    key_align: int
    planes: Tensor  # [P, 2] int64, planes of one rotation side by side
    plane_steps: list[int]  # row of `steps` of each plane
    steps: Tensor  # [N, R / 2] int64, one row a distinct rotation
    pieces: Tensor  # [Q, 5] int64, addresses in bytes, the rest in words
    piece_align: int
    piece_words: int  # power of two from the widest piece
    word: int  # bytes
    chunks: dict[int, Tensor] = field(default_factory=dict)

    def chunks_of(self, size: int) -> Tensor:
        """[C, 3] int32: runs of at most `size` planes with the same steps, as first plane, end, row of `steps`."""
        if size not in self.chunks:
            runs, start = [], 0
            for end in range(1, len(self.plane_steps) + 1):
                run_ends = end == len(self.plane_steps) or self.plane_steps[end] != self.plane_steps[start]
                if run_ends or end - start == size:
                    runs.append((start, end, self.plane_steps[start]))
                    start = end
            self.chunks[size] = _table_of(runs, 3, self.planes.device, torch.int32)
        return self.chunks[size]


def _tables(moves: Sequence[_Move]) -> Iterator[Table]:
    """One table a geometry; the pieces go with the first."""
    keys = moves[0].layer.keys
    item = keys.element_size()
    planes, ropes = _planes(moves)
    pieces = [piece for move in moves for piece in _pieces(move)]
    for geometry, unsorted in planes.items():
        rows = sorted(unsorted)
        used = sorted({plane.rotation for plane in rows})
        steps = [ropes[rotation].steps for rotation in used] or [torch.zeros(1, dtype=torch.int64)]
        plane_addresses = [address for plane in rows for address in plane[1:]]
        piece_align = math.gcd(WIDEST, *(number for piece in pieces for number in piece))
        word = min(max(WORD_DTYPES), piece_align)
        in_words = [(*piece[:2], *(number // word for number in piece[2:])) for piece in pieces]
        yield Table(
            geometry=geometry,
            key=KEY_DTYPES[keys.dtype],
            key_align=math.gcd(WIDEST, geometry.src_stride * item, geometry.dst_stride * item, *plane_addresses),
            planes=_table_of([plane[1:] for plane in rows], 2, keys.device),
            plane_steps=[used.index(plane.rotation) for plane in rows],
            steps=torch.stack(steps).to(keys.device),
            pieces=_table_of(in_words, 5, keys.device),
            piece_align=piece_align,
            piece_words=triton.next_power_of_2(max((piece.width for piece in pieces), default=word) // word),
            word=word,
        )
        pieces = []


def _planes(moves: Sequence[_Move]) -> tuple[dict[_Geometry, list[_Plane]], list[RopeDescriptor]]:
    """The planes of each geometry, and the distinct rotations that they number."""
    planes: dict[_Geometry, list[_Plane]] = defaultdict(list)
    ropes: list[RopeDescriptor] = []
    for move in moves:
        src, dst, rope = move.layer.keys, move.keys, move.layer.rope
        if rope is None:
            continue
        rotation = next((i for i, known in enumerate(ropes) if known.same_rotation(rope)), len(ropes))
        if rotation == len(ropes):
            ropes.append(rope)
        geometry = _Geometry(rope.rotary_dim, rope.interleaved, src.stride(0), dst.stride(0))
        for head in range(src.shape[1]):
            a, b = (rows.data_ptr() + _offset(rows, head, move.layer.rope_offset) for rows in (src, dst))
            planes[geometry].append(_Plane(rotation, a, b))
    if not planes:  # no layer has positions: all is copied
        planes[_Geometry(2, False, 0, 0)] = []
    return planes, ropes


def _pieces(move: _Move) -> Iterator[_Piece]:
    """What a row has besides its planes, neighbouring columns joined, then cut to PIECE_BYTES."""
    rotated = move.layer.rotated
    for src, dst, skipped in ((move.layer.keys, move.keys, rotated), (move.layer.values, move.values, slice(0, 0))):
        if src is None or dst is None:
            continue
        runs: list[list[int]] = []  # offset to read, offset to write, width
        for head in range(src.shape[1]):
            for start, stop in ((0, skipped.start), (skipped.stop, src.shape[2])):
                a, b = _offset(src, head, start), _offset(dst, head, start)
                width = (stop - start) * src.element_size()
                if runs and runs[-1][0] + runs[-1][2] == a and runs[-1][1] + runs[-1][2] == b:
                    runs[-1][2] += width
                elif width:
                    runs.append([a, b, width])
        strides = (src.stride(0) * src.element_size(), dst.stride(0) * dst.element_size())
        for a, b, width in runs:
            for cut in range(0, width, PIECE_BYTES):
                addresses = (src.data_ptr() + a + cut, dst.data_ptr() + b + cut)
                yield _Piece(*addresses, *strides, min(PIECE_BYTES, width - cut))


def _offset(rows: Tensor, head: int, column: int) -> int:
    """Bytes from the start of a row to a column of a head."""
    return (head * rows.stride(1) + column) * rows.element_size()


def _table_of(
    rows: Sequence[tuple[int, ...]], columns: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    return torch.tensor(rows, dtype=dtype).reshape(-1, columns).to(device)


def launch(table: Table, src: Tensor, dst: Tensor, shifts: Tensor, *, pieces: bool, tiles: Tiles | None = None) -> None:
    """Move rows from `src` to `dst`. [T] each, T > 0; one launch, and none if the table has nothing to do."""
    half = table.geometry.rotary_dim // 2
    block_pairs = triton.next_power_of_2(half)
    if tiles is None:
        large = triton.cdiv(len(table.planes), LARGE.chunk) * triton.cdiv(len(src) * block_pairs, LARGE.pairs)
        tiles = LARGE if large >= FULL_GRID else SMALL
    block_slots = max(1, tiles.pairs // block_pairs)
    copy_slots = max(1, tiles.piece_bytes // (table.piece_words * table.word))
    chunks = table.chunks_of(tiles.chunk)
    plane_programs = len(chunks) * triton.cdiv(len(src), block_slots)
    piece_programs = len(table.pieces) * triton.cdiv(len(src), copy_slots) if pieces else 0
    if plane_programs + piece_programs == 0:
        return
    with torch.cuda.device_of(src):  # type: ignore[no-untyped-call]
        move_rows_kernel[(plane_programs + piece_programs,)](
            src.contiguous(),
            dst.contiguous(),
            shifts.contiguous(),
            table.planes,
            chunks,
            table.steps,
            table.pieces,
            len(src),
            plane_programs,
            KEY=table.key,
            SRC_STRIDE=table.geometry.src_stride,
            DST_STRIDE=table.geometry.dst_stride,
            HALF=half,
            INTERLEAVED=table.geometry.interleaved,
            WORD=WORD_DTYPES[table.word],
            KEY_ALIGN=table.key_align,
            PIECE_ALIGN=table.piece_align,
            CHUNK=tiles.chunk,
            BP=tiles.planes,
            BT=block_slots,
            BR=block_pairs,
            STAGES=tiles.stages,
            CT=copy_slots,
            CW=table.piece_words,
            num_warps=tiles.num_warps,
        )
