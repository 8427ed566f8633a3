"""Formats the message about ranks that wait: in what, for whom, and what the ranks waited for are doing."""

from __future__ import annotations

from collections.abc import Mapping

from whale.launcher.job.ranks import RankLink


def report_stalls(links: Mapping[int, RankLink], now_s: float) -> str:
    """Formats the ranks' reports of their longest waits as text, and clears them.

    For example::

        ranks 0 and 2 have waited 60 s in AllReduce 'dense/kernel' for rank 1
          rank 1 (node2) is running, but waits in no operation; look at what its script does

    Args:
        links: the connections of all ranks; their reports are cleared.
        now_s: monotonic time.
    """
    waits: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    longest_s: dict[tuple[str, tuple[int, ...]], float] = {}
    for rank, link in sorted(links.items()):
        if link.stall is not None:
            key = link.stall["what"], tuple(link.stall["missing"])
            waits.setdefault(key, []).append(rank)
            longest_s[key] = max(longest_s.get(key, 0.0), link.stall["seconds"])
            link.stall = None
    waiting = {rank for members in waits.values() for rank in members}
    lines = [
        f"{_format_ranks(members)} {'has' if len(members) == 1 else 'have'} waited {longest_s[key]:.0f} s in {key[0]}"
        + (f" for {_format_ranks(key[1])}" if key[1] else "")
        for key, members in waits.items()
    ]
    for rank in sorted({rank for _, missing in waits for rank in missing} - waiting):
        if rank in links:
            lines.append(f"  rank {rank} {_format_state(links[rank], now_s)}")
    return "\n".join(lines)


def _format_ranks(numbers: tuple[int, ...] | list[int]) -> str:
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _format_state(link: RankLink, now_s: float) -> str:
    if link.exited:
        return f"({link.host}) has ended"
    if link.stopped_s is not None:
        return f"({link.host}) is stopped since {now_s - link.stopped_s:.0f} s"
    if link.joining is not False:
        return f"({link.host}) is running, but has not finished wh.init"
    return f"({link.host}) is running, but waits in no operation; look at what its script does"
