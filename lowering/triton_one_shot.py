"""One-shot all_reduce + bias + scale + residual + RMSNorm, in Triton: the second kernel.

`one_shot` is that, `local` the part after the sum, `probe` tells that Triton works at all.

Imported only where Triton is there. The numbers are those of the CUDA kernel, the protocol is
another one, so each is a check of the other. Here a row is one tile of one program, and flags
say that a row has come:

    turn = this row's state, which is marked as busy; slot = turn mod 2
    every peer's place [slot][this rank][row] = x's row
    every peer's flag [slot][row][this rank] = turn + 1            (release, system scope)
    wait until own flags [slot][row][every peer] are turn + 1      (acquire, system scope)
    total = sum over ranks in rank order, from +0.0, in fp32

`turn` counts a row's uses modulo 4 and its lowest bit is the slot. Two slots are enough: a peer
writes a slot again two uses later, after it has had this rank's flag of the use in between, which
this rank raised when the launch that read the slot had ended. A flag that is left over in a slot
is two turns old, so modulo 4 it differs from the one awaited. The state is in device memory, so
that a CUDA graph replays; its place, like all others, depends on the row and on the size class
alone, never on a call's tokens.
"""

# Triton's dialect is no typed Python: parameters are pointers, tiles or constants.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

#: Clocks: Triton's interpreter has none and counts polls.
COUNTED, NVIDIA, AMD = 0, 1, 2
#: Entries of the table: the addresses of the ranks' memories, then what else a workspace knows.
TABLE_RANK, TABLE_TIMEOUT, TABLE_HOST, TABLE_ENTRIES = 16, 17, 18, 19
_RANK, _TIMEOUT, _HOST = tl.constexpr(16), tl.constexpr(17), tl.constexpr(18)
#: `Cause` of the CUDA kernel.
_TIMED_OUT, _OVERLAPPED = tl.constexpr(1), tl.constexpr(2)
#: State of a row that a launch is at work on.
_BUSY = tl.constexpr(-1)
#: Flags of a row and slot, one for each rank there may be.
_FLAGS = tl.constexpr(16)


@triton.jit
def probe(answer):
    """Write 1."""
    tl.store(answer, 1)


@triton.jit
def _now(MACHINE: tl.constexpr, polls):
    """Nanoseconds, or polls where there is no clock."""
    if MACHINE == 1:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    elif MACHINE == 2:  # noqa: RET505, for Triton; 100 MHz
        return 10 * tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)",
            "=s",
            [],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        return polls.to(tl.int64)


@triton.jit
def _rounded(value, DTYPE: tl.constexpr):
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _finish(
    total,
    row,
    columns,
    inside,
    added,
    factor,
    offset,
    eps,
    scale,
    eps_tensor,
    scale_tensor,
    norm,
    residual_out,
    reduced,
    rstd,
    HIDDEN: tl.constexpr,
    X: tl.constexpr,
    CAST: tl.constexpr,
    BIASED: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    SCALED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """From the sum over ranks in fp32 to the results, rounded at each step as in eager."""
    at = row * HIDDEN + columns
    h = _rounded(total, X)
    if reduced is not None:
        tl.store(reduced + at, h.to(X), mask=inside)
    h = _rounded(h, CAST)
    if offset is not None:
        h = _rounded(h + offset.to(tl.float32), BIASED)
    if SCALED:
        if scale_tensor is not None:
            scale = tl.load(scale_tensor)
        h = _rounded(h * scale, BIASED)
    if added is not None:
        h = _rounded(added.to(tl.float32) + h, SUM)
    if residual_out is not None:
        tl.store(residual_out + at, h.to(SUM), mask=inside)
    if eps_tensor is not None:
        eps = tl.load(eps_tensor)
    squares = tl.sum(tl.where(inside, h * h, 0.0))
    root = tl.sqrt_rn(squares * (1.0 / HIDDEN) + eps)
    inverse = tl.div_rn(1.0, root)
    if rstd is not None:
        tl.store(rstd + row, inverse)
    if norm is not None:
        if DIVIDE:
            n = tl.div_rn(h, tl.zeros_like(h) + root)
        else:
            n = h * inverse
        n = _rounded(n, NORM)
        if factor is not None:
            w = factor.to(tl.float32)
            if ONE_PLUS:
                w = 1.0 + w
            n = _rounded(n * w, PRODUCT)
        tl.store(norm + at, n.to(OUT), mask=inside)


@triton.jit(do_not_specialize=["first", "rows"])
def one_shot(
    x,
    residual,
    weight,
    bias,
    eps_tensor,
    scale_tensor,
    norm,
    residual_out,
    reduced,
    rstd,
    table,
    first,
    rows,
    eps,
    scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    X: tl.constexpr,
    CAST: tl.constexpr,
    BIASED: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    SCALED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    DIVIDE: tl.constexpr,
    WORLD: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DATA: tl.constexpr,
    FLAGS: tl.constexpr,
    STATES: tl.constexpr,
    CONTROL: tl.constexpr,
    RING_ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    MACHINE: tl.constexpr,
):
    """Rows [first, first + rows) of a call; `rows` is at most RING_ROWS.

    Pointers that are None are absent. Dtypes: X of x, CAST after the cast, BIASED after bias and
    scale, SUM after the residual, NORM, PRODUCT and OUT of the norm before the weight, after it
    and as returned. Parts of AT_ONCE ranks are read at once. Offsets are in bytes from the start of a
    rank's memory.
    """
    PULL: tl.constexpr = ".cg" if MACHINE == 1 else ".cv"
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    ranks = tl.arange(0, _FLAGS)
    rank = tl.load(table + _RANK).to(tl.int32)
    size = tl.full([], WORLD, tl.int32)  # WORLD as a value: comparisons with it are masks
    own = tl.load(table + rank)
    bases = tl.load(table + ranks, mask=ranks < WORLD, other=0)
    timeout = tl.load(table + _TIMEOUT)
    host = tl.load(table + _HOST).to(tl.pointer_type(tl.int32))
    control = (own + CONTROL).to(tl.pointer_type(tl.int32))
    states = (own + STATES).to(tl.pointer_type(tl.int32))
    peers = (ranks < WORLD) & (ranks != rank)

    ring_row = tl.program_id(0)
    while ring_row < rows:
        row = (first + ring_row).to(tl.int64)
        at = row * HIDDEN + columns
        part = tl.load(x + at, mask=inside, other=0.0)
        added, factor, offset = residual, weight, bias
        if residual is not None:
            added = tl.load(residual + at, mask=inside, other=0.0)
        if weight is not None:
            factor = tl.load(weight + columns, mask=inside, other=0.0)
        if bias is not None:
            offset = tl.load(bias + columns, mask=inside, other=0.0)

        turn = tl.atomic_xchg(states + ring_row, _BUSY, sem="relaxed", scope="gpu")
        going = turn != _BUSY
        cause = tl.where(going, 0, _OVERLAPPED)
        turn = tl.where(going, turn, 0)
        slot = turn & 1
        for group in range(1, WORLD, AT_ONCE):
            for number in tl.static_range(AT_ONCE):
                distance = group + number
                peer = (rank + distance) % WORLD
                place = (slot * (WORLD - 1) + rank - (rank > peer).to(tl.int32)) * RING_ROWS
                start = tl.load(table + peer) + DATA
                address = start + (place + ring_row).to(tl.int64) * ROW_BYTES
                target = tl.multiple_of(address.to(tl.pointer_type(X)), 16)
                wanted = inside & going & (distance < size)
                tl.store(target + columns, part, mask=wanted, cache_modifier=".wt")
        flag = (slot * RING_ROWS + ring_row) * _FLAGS
        theirs = (bases + FLAGS + (flag + rank) * 4).to(tl.pointer_type(tl.int32))
        ours = own + FLAGS + (flag + ranks) * 4
        tl.debug_barrier()  # all of the program's stores are ahead of the flags
        raised = tl.zeros_like(ranks) + turn + 1
        tl.atomic_xchg(theirs, raised, mask=peers & going, sem="release", scope="sys")

        # Where this rank's own flag would be, the control word is watched and, once it is too
        # late, written. Flags aren't negative, so the maximum with 0 only reads them.
        watched = tl.where(ranks == rank, own + CONTROL, ours).to(tl.pointer_type(tl.int32))
        pending = going.to(tl.int32)
        polls = pending * 0
        began = _now(MACHINE, polls)
        expired = polls != 0
        while pending > 0:
            verdict = tl.where((ranks == rank) & expired, _TIMED_OUT, 0)
            seen = tl.atomic_max(
                watched, verdict, mask=ranks < WORLD, sem="acquire", scope="sys"
            )
            late = peers & (seen != turn + 1)
            cause = tl.max(tl.where(ranks == rank, seen, 0))
            pending = tl.where(cause == 0, tl.sum(late.to(tl.int32)), 0)
            tl.store(host + 1 + ranks, 1, mask=late & (cause != 0) & expired)
            polls += 1
            expired = _now(MACHINE, polls) - began > timeout
        tl.debug_barrier()
        if cause != 0:
            earlier = tl.atomic_cas(control, 0, cause, sem="acq_rel", scope="sys")
            tl.store(host, tl.where(earlier == 0, cause, earlier))

        total = tl.zeros([BLOCK], dtype=tl.float32)
        for group in range(0, WORLD, AT_ONCE):
            for number in tl.static_range(AT_ONCE):
                source = group + number
                place = (slot * (WORLD - 1) + source - (source > rank).to(tl.int32)) * RING_ROWS
                address = own + DATA + (place + ring_row).to(tl.int64) * ROW_BYTES
                target = tl.multiple_of(address.to(tl.pointer_type(X)), 16)
                wanted = inside & (source != rank) & (source < size) & (cause == 0)
                got = tl.load(target + columns, mask=wanted, other=part, cache_modifier=PULL)
                total = tl.where(source < size, total + got.to(tl.float32), total)
        total = tl.where(cause == 0, total, float("nan"))
        _finish(
            total,
            row,
            columns,
            inside,
            added,
            factor,
            offset,
            eps,
            scale,
            eps_tensor,
            scale_tensor,
            norm,
            residual_out,
            reduced,
            rstd,
            HIDDEN,
            X,
            CAST,
            BIASED,
            SUM,
            NORM,
            PRODUCT,
            OUT,
            SCALED,
            ONE_PLUS,
            DIVIDE,
        )
        tl.store(states + ring_row, (turn + 1) & 3, mask=cause == 0)
        ring_row += tl.num_programs(0)


@triton.jit(do_not_specialize=["rows"])
def local(
    x,
    residual,
    weight,
    bias,
    eps_tensor,
    scale_tensor,
    norm,
    residual_out,
    reduced,
    rstd,
    rows,
    eps,
    scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    X: tl.constexpr,
    CAST: tl.constexpr,
    BIASED: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    SCALED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """The same without an exchange: x is the sum over ranks already."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    number = tl.program_id(0)
    while number < rows:
        row = number.to(tl.int64)
        at = row * HIDDEN + columns
        part = tl.load(x + at, mask=inside, other=0.0)
        added, factor, offset = residual, weight, bias
        if residual is not None:
            added = tl.load(residual + at, mask=inside, other=0.0)
        if weight is not None:
            factor = tl.load(weight + columns, mask=inside, other=0.0)
        if bias is not None:
            offset = tl.load(bias + columns, mask=inside, other=0.0)
        _finish(
            part.to(tl.float32),
            row,
            columns,
            inside,
            added,
            factor,
            offset,
            eps,
            scale,
            eps_tensor,
            scale_tensor,
            norm,
            residual_out,
            reduced,
            rstd,
            HIDDEN,
            X,
            CAST,
            BIASED,
            SUM,
            NORM,
            PRODUCT,
            OUT,
            SCALED,
            ONE_PLUS,
            DIVIDE,
        )
        number += tl.num_programs(0)
