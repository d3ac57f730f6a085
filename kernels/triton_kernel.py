# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)
"""The one kernel: rows move from slot to slot, and the keys in them turn on the way.

It works through two tables of addresses (triton_form.py builds them): *planes*, the rotated part of one head of one
layer, [S, R] with a fixed stride between slots; and *pieces*, runs of bytes that are only copied. README.md in this
folder draws the tables and says why the kernel is shaped like this.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["move_rows_kernel"]


@triton.jit
def cos_sin_of_phase(phase):
    """Cosine and sine of a fixed-point phase (phase.py), to about one unit in the last place of fp32.

    The nearest quarter turn is split off in integers, where that is exact; polynomials serve the rest, within 1/8 turn.
    """
    b_quarter = (phase + (1 << 61)) >> 62
    b_rest = ((phase - (b_quarter << 62)) >> 32).to(tl.int32)
    x = b_rest.to(tl.float32) * 1.4629180792671596e-09  # tau / 2**32
    z = x * x
    s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    c = 1 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    m_odd = (b_quarter & 1) != 0
    cos = tl.where(m_odd, s, c)
    sin = tl.where(m_odd, c, s)
    return tl.where(((b_quarter + 1) & 2) != 0, -cos, cos), tl.where((b_quarter & 2) != 0, -sin, sin)


@triton.jit
def turn(b_x1, b_x2, b_cos, b_sin, m_still, FP8: tl.constexpr):
    """One rotation of pairs in fp32, rounded once; a pair that does not turn keeps its bits."""
    x1 = b_x1.to(tl.float32)
    x2 = b_x2.to(tl.float32)
    y1 = x1 * b_cos - x2 * b_sin
    y2 = x2 * b_cos + x1 * b_sin
    if FP8:  # beyond e4m3's range a component would become NaN
        y1 = tl.clamp(y1, -448.0, 448.0)
        y2 = tl.clamp(y2, -448.0, 448.0)
    return tl.where(m_still, b_x1, y1.to(b_x1.dtype)), tl.where(m_still, b_x2, y2.to(b_x2.dtype))


@triton.jit
def rotate_planes(
    i_t, i_c, src, dst, shifts, planes, chunks, steps, num_slots,
    KEY: tl.constexpr, SRC_STRIDE: tl.constexpr, DST_STRIDE: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BT slots of one chunk of planes, which share one computation of cosines and sines; BP planes at a time."""
    o_t = i_t * BT + tl.arange(0, BT)
    m_t = o_t < num_slots
    b_src = tl.load(src + o_t, mask=m_t, other=0)
    b_dst = tl.load(dst + o_t, mask=m_t, other=0)
    b_shift = tl.load(shifts + o_t, mask=m_t, other=0).to(tl.int64)
    i_p = tl.load(chunks + 3 * i_c)
    end_p = tl.load(chunks + 3 * i_c + 1)
    i_s = tl.load(chunks + 3 * i_c + 2)

    o_r = tl.arange(0, BR)
    b_step = tl.load(steps + i_s * HALF + o_r, mask=o_r < HALF, other=0)
    b_phase = b_shift[:, None] * b_step[None, :]  # [BT, BR], wraps: whole turns do not count
    b_cos, b_sin = cos_sin_of_phase(b_phase)
    b_cos = b_cos[None]
    b_sin = b_sin[None]
    m_still = (b_phase == 0)[None]
    o_src = (b_src * SRC_STRIDE)[None, :, None]
    o_dst = (b_dst * DST_STRIDE)[None, :, None]

    for i in tl.range(0, CHUNK, BP, num_stages=STAGES):
        o_p = i_p + i + tl.arange(0, BP)
        m_p = o_p < end_p
        p_src = tl.multiple_of(tl.load(planes + 2 * o_p, mask=m_p, other=0).to(tl.pointer_type(KEY)), [ALIGN])
        p_dst = tl.multiple_of(tl.load(planes + 2 * o_p + 1, mask=m_p, other=0).to(tl.pointer_type(KEY)), [ALIGN])
        p_src = p_src[:, None, None] + o_src
        p_dst = p_dst[:, None, None] + o_dst
        m = m_p[:, None, None] & m_t[None, :, None]
        if INTERLEAVED:
            o_x = tl.arange(0, 2 * BR)[None, None, :]
            m = m & (o_x < 2 * HALF)
            b_x = tl.load(p_src + o_x, mask=m)  # [BP, BT, 2 * BR]
            b_x1, b_x2 = tl.split(tl.reshape(b_x, (BP, BT, BR, 2)))
            b_y1, b_y2 = turn(b_x1, b_x2, b_cos, b_sin, m_still, KEY.is_fp8())
            tl.store(p_dst + o_x, tl.reshape(tl.join(b_y1, b_y2), (BP, BT, 2 * BR)), mask=m)
        else:
            o_x = o_r[None, None, :]
            m = m & (o_x < HALF)
            b_x1 = tl.load(p_src + o_x, mask=m)  # [BP, BT, BR]
            b_x2 = tl.load(p_src + o_x + HALF, mask=m)
            b_y1, b_y2 = turn(b_x1, b_x2, b_cos, b_sin, m_still, KEY.is_fp8())
            tl.store(p_dst + o_x, b_y1, mask=m)
            tl.store(p_dst + o_x + HALF, b_y2, mask=m)


@triton.jit
def copy_piece(
    i_t, i_q, src, dst, pieces, num_slots,
    WORD: tl.constexpr, ALIGN: tl.constexpr, CT: tl.constexpr, CW: tl.constexpr,
):  # fmt: skip
    """CT slots of one piece, as they are."""
    align_words: tl.constexpr = ALIGN // WORD.itemsize
    o_t = i_t * CT + tl.arange(0, CT)
    m_t = o_t < num_slots
    b_src = tl.load(src + o_t, mask=m_t, other=0)
    b_dst = tl.load(dst + o_t, mask=m_t, other=0)

    p_src = tl.multiple_of(tl.load(pieces + 5 * i_q).to(tl.pointer_type(WORD)), [ALIGN])
    p_dst = tl.multiple_of(tl.load(pieces + 5 * i_q + 1).to(tl.pointer_type(WORD)), [ALIGN])
    src_stride = tl.multiple_of(tl.load(pieces + 5 * i_q + 2), [align_words])
    dst_stride = tl.multiple_of(tl.load(pieces + 5 * i_q + 3), [align_words])
    width = tl.multiple_of(tl.load(pieces + 5 * i_q + 4), [align_words])

    o_w = tl.arange(0, CW)[None, :]
    m = m_t[:, None] & (o_w < width)
    b_x = tl.load(p_src + (b_src * src_stride)[:, None] + o_w, mask=m)  # [CT, CW]
    tl.store(p_dst + (b_dst * dst_stride)[:, None] + o_w, b_x, mask=m)


# Each alignment of the small tensors, and each length, would compile anew in the middle of serving, for no gain.
@triton.jit(
    do_not_specialize=["num_slots", "plane_programs"],
    do_not_specialize_on_alignment=["src", "dst", "shifts", "planes", "chunks", "steps", "pieces"],
)
def move_rows_kernel(
    src,  # [T] int64: slots that are read
    dst,  # [T] int64: slots that are written
    shifts,  # [T] int32 or int64
    planes,  # [P, 2] int64: address of slot 0's first rotated column, to read and to write
    chunks,  # [C, 3] int32: first plane, plane after the last, row of `steps`
    steps,  # [N, R / 2] int64: phase per position
    pieces,  # [Q, 5] int64: addresses to read and to write, strides between slots to read and to write, width; in words
    num_slots,  # T
    plane_programs,  # programs below this number rotate planes, the others copy pieces
    KEY: tl.constexpr,  # dtype of the keys
    SRC_STRIDE: tl.constexpr,  # elements between slots of a plane
    DST_STRIDE: tl.constexpr,
    HALF: tl.constexpr,  # R / 2
    INTERLEAVED: tl.constexpr,
    KEY_ALIGN: tl.constexpr,  # bytes that divide every address of a plane
    WORD: tl.constexpr,  # dtype in which pieces are copied
    PIECE_ALIGN: tl.constexpr,  # bytes that divide every address, stride and width of a piece
    CHUNK: tl.constexpr,  # planes of a chunk, at most
    BP: tl.constexpr,  # planes at a time
    BT: tl.constexpr,  # slots of a program that rotates
    BR: tl.constexpr,  # power of two from R / 2
    STAGES: tl.constexpr,  # planes that are on their way while one is rotated
    CT: tl.constexpr,  # slots of a program that copies
    CW: tl.constexpr,  # power of two from the widest piece, in words
):
    """Rotate every plane and copy every piece, each for T slots. Neighbouring programs take neighbouring slots."""
    i = tl.program_id(0)
    if i < plane_programs:
        tiles = tl.cdiv(num_slots, BT)
        rotate_planes(
            i % tiles, i // tiles, src, dst, shifts, planes, chunks, steps, num_slots,
            KEY, SRC_STRIDE, DST_STRIDE, HALF, INTERLEAVED, KEY_ALIGN, CHUNK, BP, BT, BR, STAGES,
        )  # fmt: skip
    else:
        i -= plane_programs
        tiles = tl.cdiv(num_slots, CT)
        copy_piece(i % tiles, i // tiles, src, dst, pieces, num_slots, WORD, PIECE_ALIGN, CT, CW)
