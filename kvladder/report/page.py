"""Writes a page: facts, plots with plotly's JavaScript inside, and tables below them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvladder.errors import ConfigError

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""Content security policy: the page can ask nothing of a network."""
_STYLE: Final = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --line: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #e6e8eb; --line: #3d444d; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
       margin: 0 auto; max-width: 72rem; padding: 1rem; }
h1, p { overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0; }
pre { overflow-x: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""
_SCRIPT: Final = """
const dark = matchMedia('(prefers-color-scheme: dark)');
function paint() {
  const text = dark.matches ? '#e6e8eb' : '#1f2328', line = dark.matches ? '#3d444d' : '#d0d7de';
  for (const plot of document.querySelectorAll('.js-plotly-plot')) {
    const change = {'font.color': text};
    for (const name of Object.keys(plot._fullLayout)) {
      if (/^[xy]axis\\d*$/.test(name)) {
        change[name + '.gridcolor'] = line;
        change[name + '.linecolor'] = line;
        change[name + '.zerolinecolor'] = line;
      }
    }
    Plotly.relayout(plot, change).then(() => Plotly.Plots.resize(plot));
  }
}
dark.addEventListener('change', paint);
paint();
"""
_HINT: Final = "install kvladder[report]"


class Plot(NamedTuple):
    """A figure with its title, and a sentence about it."""

    title: str
    figure: Any
    says: str = ""


def plotly() -> Any:
    """Return plotly's module of figures.

    Raises
    ------
    ConfigError
        It is not installed.
    """
    try:
        return import_module("plotly.graph_objects")
    except ModuleNotFoundError as error:
        raise ConfigError(f"needs plotly: {error}", path="--report", hint=_HINT) from error


def figure(x: str, y: str, **layout: Any) -> Any:
    """Return an empty figure with these titles of its axes."""
    found = plotly().Figure()
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"}
    found.update_layout(
        xaxis_title=x, yaxis_title=y, legend=legend, template="none", height=380,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 60, "r": 15, "t": 60, "b": 50}, **layout,
    )  # fmt: skip
    found.update_xaxes(automargin=True)
    found.update_yaxes(automargin=True, rangemode="tozero")
    return found


def page(
    title: str,
    facts: Sequence[str],
    plots: Sequence[Plot],
    rows: Sequence[Sequence[str]] = (),
) -> str:
    """Return the page as HTML; ``rows`` are a table, its headings first."""
    offline: Any = import_module("plotly.offline")
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<script>{offline.get_plotlyjs()}</script></head><body><h1>{escape(title)}</h1>",
    ]
    for fact in facts:
        tag = "pre" if "\n" in fact else "p"
        parts.append(f"<{tag}>{escape(fact)}</{tag}>")
    for number, plot in enumerate(plots):
        drawn = plot.figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=f"plot{number}",
            config={"responsive": True, "displaylogo": False, "displayModeBar": False},
        )
        says = f"<p>{escape(plot.says)}</p>" if plot.says else ""
        parts.append(f"<h2>{escape(plot.title)}</h2>{says}{drawn}")
    parts += [_table(rows), f"<script>{_SCRIPT}</script></body></html>"]
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head, *rest = rows
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rest]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>Numbers</h2><div class='table'><table>{body}</table></div>"


def write(path: Path, text: str) -> None:
    """Write a page to a file.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "expected a file that this user may write"
        raise ConfigError(f"{path}: {error.strerror}", path="--report", hint=hint) from error
