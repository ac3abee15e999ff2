"""The chart of the README: what a delta costs, and how many are lost at a kill. Plain SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

ROW, TOP, LEFT, BAR, GAP, RIGHT = 24, 74, 214, 250, 96, 84
# By what a shown delta has survived, the strongest first; rows of one group compare.
GROUPS = {
    "power cut": "each delta survives a power cut",
    "kill; calls: power cut": "each delta survives a kill, each call a power cut",
    "kill": "each delta survives a kill",
    "nothing": "a delta that was shown may be lost",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.head { font-weight: 600 } .note { font-size: 12px; fill: #59636e }
.ours { fill: #1a7f64 } .other { fill: #8c959f } .lost { fill: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 }
  .ours { fill: #3fb68b } .other { fill: #6e7681 } .lost { fill: #f85149 }
}
"""


def chart(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """One SVG; `rows` as benchmarks/peers.py writes them."""
    parts: list[str] = []
    y = TOP
    costs = [float(row["turn_us_a_delta"]) for row in rows.values()]
    most = max([1, *(int(row["lost_most"]) for row in rows.values())])
    low, high = math.log10(min(costs) / 2), math.log10(max(costs))
    second = LEFT + BAR + GAP
    for survives, words in GROUPS.items():
        group = [(name, row) for name, row in rows.items() if row["survives"] == survives]
        if not group:
            continue
        parts.append(f'<text class="note" x="10" y="{y + 15}">{escape(words)}</text>')
        y += ROW
        for name, row in sorted(group, key=lambda item: float(item[1]["turn_us_a_delta"])):
            cost, lost = float(row["turn_us_a_delta"]), int(row["lost_most"])
            kind = "ours" if name.startswith("holdfast") else "other"
            width = BAR * (math.log10(cost) - low) / max(high - low, 0.1)
            parts.append(f'<text x="20" y="{y + 15}">{escape(name)}</text>')
            parts.append(_bar(kind, LEFT, y, width))
            parts.append(f'<text x="{LEFT + width + 6:.0f}" y="{y + 15}">{_short(cost)} us</text>')
            length = BAR * lost / most
            parts.append(_bar("lost", second, y, length))
            parts.append(f'<text x="{second + length + 6:.0f}" y="{y + 15}">{lost}</text>')
            y += ROW
        y += 8
    width, height = second + BAR + RIGHT, y + 8
    title = "What a turn of 500 deltas costs, and what SIGKILL in mid-stream loses"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img" aria-label="{title}">',
            f"<style>{STYLE}</style>",
            f'<text class="head" x="10" y="22">{title}</text>',
            f'<text class="note" x="{LEFT}" y="44">us a delta, whole turn (log scale)</text>',
            f'<text class="note" x="{second}" y="44">shown deltas lost, worst kill</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _bar(kind: str, x: float, y: float, width: float) -> str:
    shown = max(width, 1)
    return f'<rect class="{kind}" x="{x}" y="{y + 4}" width="{shown:.1f}" height="14" rx="2"/>'


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 20 else f"{number:.1f}"
