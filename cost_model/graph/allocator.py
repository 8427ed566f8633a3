"""Simulates TensorFlow's best-fit allocator with coalescing, as far as sizes go (xla/tsl/framework/bfc_allocator.cc).

It takes the smallest free piece that is large enough, and splits it only if it is at least twice as large as asked for
(or 128 MiB larger): so a tensor may occupy nearly twice its bytes. Memory comes from the system in regions, each twice
as large as the one before; neighbours within a region that are free become one.
"""

from __future__ import annotations

from bisect import bisect_left, insort

FIRST_REGION_BYTES = 2 << 20
LARGEST_WASTE_BYTES = 128 << 20


class Allocator:
    """Simulates an allocator; pieces are numbered; `live_bytes` counts whole pieces, as the allocator's own figures do.

    `peak_asked_bytes` is the peak of requested bytes, which does not depend on where pieces are.

    `at_peak` has the bytes at the peak by kind, a small number that callers give to each piece.
    """

    def __init__(self, kinds: int = 1) -> None:
        self.live_bytes = self.peak_bytes = 0
        self.at_peak = [0] * kinds
        self._live = [0] * kinds
        self.peak_asked_bytes = self._asked_bytes = 0
        self._asked: list[int] = []
        self._kind: list[int] = []
        self._region_bytes = FIRST_REGION_BYTES
        self._sizes: list[int] = []
        self._before: list[int] = []  # neighbours within the region, -1 at its ends
        self._behind: list[int] = []
        self._used: list[bool] = []
        self._free: list[tuple[int, int]] = []  # (bytes, piece), sorted

    def take(self, size: int, kind: int = 0) -> int:
        """Allocates a piece of at least `size` bytes and returns its number."""
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            grown = False
            while self._region_bytes < size:
                self._region_bytes *= 2
                grown = True
            insort(self._free, (self._region_bytes, self._piece(self._region_bytes, -1, -1)))
            if not grown:
                self._region_bytes *= 2
            at = bisect_left(self._free, (size, -1))
        whole, piece = self._free.pop(at)
        if whole >= 2 * size or whole - size >= LARGEST_WASTE_BYTES:
            rest = self._piece(whole - size, piece, self._behind[piece])
            if self._behind[piece] >= 0:
                self._before[self._behind[piece]] = rest
            self._behind[piece] = rest
            self._sizes[piece] = size
            insort(self._free, (whole - size, rest))
        self._used[piece] = True
        self.live_bytes += self._sizes[piece]
        self._live[kind] += self._sizes[piece]
        self._kind[piece] = kind
        self._asked[piece] = size
        self._more(size)
        return piece

    def lend(self, size: int) -> None:
        """Allocates bytes of kind 0 in many pieces, of which only the sum is known; a negative size frees them."""
        self.live_bytes += size
        self._live[0] += size
        self._more(size)

    def _more(self, asked: int) -> None:
        self._asked_bytes += asked
        self.peak_asked_bytes = max(self.peak_asked_bytes, self._asked_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.live_bytes, self._live.copy()

    def become(self, piece: int, kind: int) -> None:
        """Changes the kind of an allocated piece."""
        self._live[self._kind[piece]] -= self._sizes[piece]
        self._live[kind] += self._sizes[piece]
        self._kind[piece] = kind

    def forget_peak(self) -> None:
        """Resets the peaks to the present values."""
        self.peak_asked_bytes = self._asked_bytes
        self.peak_bytes, self.at_peak = self.live_bytes, self._live.copy()

    def give(self, piece: int) -> None:
        """Frees a piece."""
        self._asked_bytes -= self._asked[piece]
        self.live_bytes -= self._sizes[piece]
        self._live[self._kind[piece]] -= self._sizes[piece]
        self._used[piece] = False
        behind, before = self._behind[piece], self._before[piece]
        if behind >= 0 and not self._used[behind]:
            self._merge(piece, behind)
        if before >= 0 and not self._used[before]:
            self._merge(before, piece, free=False)
            piece = before
        insort(self._free, (self._sizes[piece], piece))

    def _piece(self, size: int, before: int, behind: int) -> int:
        self._sizes.append(size)
        self._before.append(before)
        self._behind.append(behind)
        self._used.append(False)
        self._kind.append(0)
        self._asked.append(0)
        return len(self._sizes) - 1

    def _merge(self, one: int, other: int, free: bool = True) -> None:
        """Merges the free piece `other`, which follows `one`, into it, and updates the list of free pieces."""
        gone = other if free else one
        del self._free[bisect_left(self._free, (self._sizes[gone], gone))]
        self._sizes[one] += self._sizes[other]
        self._behind[one] = self._behind[other]
        if self._behind[other] >= 0:
            self._before[self._behind[other]] = one
        self._sizes[other] = 0
