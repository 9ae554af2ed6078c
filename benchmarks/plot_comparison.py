"""Draws the bar chart in README and docs/comparison.md from saved results.

    python benchmarks/plot_comparison.py

It reads benchmarks/results/versus_transformers.json and writes docs/drawings/comparison.svg. The chart has one bar for
each engine and workload; an engine's value in a row has the key `ENGINE_tokens_per_s`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "versus_transformers.json"
CHART: Final = ROOT / "docs" / "drawings" / "comparison.svg"

_SUFFIX: Final = "_tokens_per_s"
_NAMES: Final = {"graftlm": "graftlm", "transformers": "Transformers", "vllm": "vLLM (CPU build)"}
_COLOURS: Final = ("#0f766e", "#9aa5b1", "#b45309", "#4338ca")
_STYLE: Final = """<style>
  text { font: 13px system-ui, sans-serif; fill: #1f2933 }
  .head { font-weight: 600 } .small { font-size: 11px; fill: #52606d }
</style>"""

_WIDTH: Final = 730
_LEFT: Final = 190
_BAR_WIDTH: Final = 360
_BAR_HEIGHT: Final = 16
_TOP: Final = 58


def engines_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the measured engines, graftlm first."""
    found = [key.removesuffix(_SUFFIX) for key in rows[0] if key.endswith(_SUFFIX)]
    return sorted(found, key=lambda name: (name != "graftlm", name))


def chart(rows: Sequence[Mapping[str, object]], caption: str) -> str:
    """Return an SVG drawing with one group of bars for each workload.

    Args:
        rows: one mapping per workload, with `workload`, `ratio` and one `ENGINE_tokens_per_s` for each engine.
        caption: the line below the bars.
    """
    engines = engines_of(rows)
    rates = [[_number(row[engine + _SUFFIX]) for engine in engines] for row in rows]
    scale = _BAR_WIDTH / max(map(max, rates))
    group_height = len(engines) * (_BAR_HEIGHT + 2) + 16
    height = _TOP + len(rows) * group_height + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">',
        f"<title>Output tokens per second of {', '.join(_name(engine) for engine in engines)}</title>",
        _STYLE,
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff" rx="6"/>',
        '<text x="20" y="26" class="head">Output tokens per second (more is better)</text>',
    ]
    for i, engine in enumerate(engines):
        x = _LEFT + i * 130
        parts.append(f'<rect x="{x}" y="36" width="10" height="10" fill="{_COLOURS[i]}"/>')
        parts.append(f'<text x="{x + 15}" y="45" class="small">{_name(engine)}</text>')
    for group, (row, row_rates) in enumerate(zip(rows, rates, strict=True)):
        y = _TOP + group * group_height
        middle = y + (len(engines) * (_BAR_HEIGHT + 2)) / 2 + 4
        parts.append(f'<text x="{_LEFT - 12}" y="{middle:.0f}" text-anchor="end">{escape(str(row["workload"]))}</text>')
        for i, rate in enumerate(row_rates):
            top = y + i * (_BAR_HEIGHT + 2)
            label = f"{rate:.1f}" + (f" ({_number(row['ratio']):.2f} times)" if i == 0 and "ratio" in row else "")
            end = _LEFT + scale * rate
            parts.append(
                f'<rect x="{_LEFT}" y="{top}" width="{scale * rate:.1f}" height="{_BAR_HEIGHT}" fill="{_COLOURS[i]}"/>'
            )
            parts.append(f'<text x="{end + 6:.1f}" y="{top + 12}" class="small">{label}</text>')
    parts.append(f'<text x="20" y="{height - 12}" class="small">{escape(caption)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def drawn_from(results: Path = RESULTS) -> str:
    """Return the chart of the results in a file."""
    saved = json.loads(results.read_text(encoding="utf-8"))
    threads = saved["machine"]["threads"]
    caption = (
        f"Random Llama of {saved['layers']} layers, {saved['dtype']}, greedy, {threads} CPU threads; "
        f"medians of {saved['rounds']} alternating rounds."
    )
    return chart(saved["rows"], caption)


def _name(engine: str) -> str:
    return _NAMES.get(engine, engine)


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"got {value!r}, expected a number")
    return float(value)


if __name__ == "__main__":
    CHART.write_text(drawn_from(), encoding="utf-8")
    print(CHART.relative_to(ROOT))
