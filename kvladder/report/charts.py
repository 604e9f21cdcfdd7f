"""Draws what the commands print as JSON: a replay, a plan, a bench; and runs of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log2
from typing import Any, Final

from kvladder.report.page import Plot, figure, page, plotly
from kvladder.units import Size

COLOURS: Final = ("#4c8bf5", "#e8833a", "#2ca58d", "#a66bd4", "#d6578c", "#8a8f98")
LIMIT: Final = "#8a8f98"
MIB: Final = 1 << 20
GIB: Final = 1 << 30
Data = Mapping[str, Any]


def replay_page(data: Data, rows: Sequence[Sequence[str]]) -> str:
    """Return the page of a replay."""
    go, results = plotly(), data["results"]
    names = [one["policy"] for one in results]
    hits = figure("policy", "fraction of blocks found", barmode="stack")
    largest = max((size for one in results for size in one["written_bytes"].values()), default=0)
    scale, unit = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    written = figure("policy", f"{unit} written", barmode="group")
    saved = figure("policy", "seconds of computing saved", barmode="stack")
    for level, colour in zip(results[0]["hits"], COLOURS * 9, strict=False):
        parts = [one["hits"][level] / one["asked"] for one in results]
        hits.add_trace(go.Bar(name=level, x=names, y=parts, marker_color=colour))
        if level in results[0]["written_bytes"]:
            sizes = [one["written_bytes"][level] / scale for one in results]
            written.add_trace(go.Bar(name=level, x=names, y=sizes, marker_color=colour))
        if results[0]["saved_s"] is not None:
            times = [one["saved_s"][level] for one in results]
            saved.add_trace(go.Bar(name=level, x=names, y=times, marker_color=colour))
    for (name, ratio), dash in zip(data["bounds"].items(), ("dash", "dot"), strict=True):
        hits.add_trace(
            go.Scatter(
                name=name, x=names, y=[ratio] * len(names), mode="lines+markers",
                line={"dash": dash, "color": LIMIT},
            )
        )  # fmt: skip
    plots = [Plot("Hits by level", hits, "Belady's optimum knows the future.")]
    plots.append(Plot("Bytes written by level", written))
    if results[0]["saved_s"] is not None:
        plots.append(Plot("Computing saved by level", saved))
    return page(f"Replay of {data['trace']['name']}", [_trace(data)], plots, rows)


def plan_page(data: Data, promise: Sequence[str]) -> str:
    """Return the page of a plan."""
    go = plotly()
    hits = figure("GiB", "fraction of blocks found", xaxis_type="log")
    money = figure("GiB", "left of a month", xaxis_type="log")
    rows = [["medium", "size", "hits", "s saved", "cost/month", "left/month"]]
    for name, colour in zip(("memory", "disk"), COLOURS, strict=False):
        points, knee = data[name], data[f"{name}_knee"]
        if not points:
            continue
        sizes = [one[f"{name}_bytes"] / GIB for one in points]
        line = {"color": colour}
        ratios = [one["ratio"] for one in points]
        hits.add_trace(go.Scatter(name=name, x=sizes, y=ratios, line=line, mode="lines+markers"))
        if knee is not None:
            marker = {"color": colour, "size": 14, "symbol": "diamond-open"}
            hits.add_trace(
                go.Scatter(
                    name=f"knee of {name}", x=[knee[f"{name}_bytes"] / GIB], y=[knee["ratio"]],
                    mode="markers", marker=marker,
                )
            )  # fmt: skip
        if points[0]["net_a_month"] is not None:
            nets = [one["net_a_month"] for one in points]
            money.add_trace(go.Scatter(name=name, x=sizes, y=nets, line=line, mode="lines+markers"))
        for one in points:
            figures = [one[key] for key in ("saved_s", "cost_a_month", "net_a_month")]
            size = Size(max(1, one[f"{name}_bytes"])).about()
            rows.append([name, size, f"{one['ratio']:.4f}", *map(_figure, figures)])
    plots = [Plot("Hits by size", hits, f"Hits: {data['method']}.")]
    if money.data:
        plots.append(Plot("Money left by size", money, "Time saved, less the price of the size."))
    facts = [_trace(data), "\n".join(promise).strip()]
    least, most = _range(data)
    ticks = [2.0**n for n in range(floor(log2(least)), ceil(log2(most)) + 1)]
    for drawn in (hits, money):
        drawn.update_xaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    return page(f"Plan for {data['trace']['name']}", facts, plots, rows)


def _range(data: Data) -> tuple[float, float]:
    """Return the least and the largest size of a plan, in GiB."""
    sizes = [one[f"{name}_bytes"] / GIB for name in ("memory", "disk") for one in data[name]]
    return min(sizes), max(sizes)


def bench_page(data: Data, facts: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the page of a bench."""
    go, plots = plotly(), list[Plot]()
    sizes = sorted({one["block_bytes"] for one in data["cases"]})
    for way in ("read", "write"):
        drawn = figure("blocks in one call", "GB/s", xaxis_type="log")
        ticks = sorted({one["blocks"] for one in data["cases"]})
        drawn.update_xaxes(tickvals=ticks, ticktext=[*map(str, ticks)])
        for size, colour in zip(sizes, COLOURS * 9, strict=False):
            cases = [one for one in data["cases"] if one["block_bytes"] == size]
            for what, name, dash in ((way, "", "solid"), (f"limit {way}", " limit", "dot")):
                drawn.add_trace(
                    go.Scatter(
                        name=f"{Size(size).about()}{name}", x=[one["blocks"] for one in cases],
                        mode="lines+markers", line={"color": colour, "dash": dash},
                        **_spread(cases, what),
                    )
                )  # fmt: skip
        says = f"Limit: {data['limit']}. Bars are from the slowest to the fastest round."
        plots.append(Plot(way.capitalize(), drawn, says))
    return page(f"Bench of {data['medium']}", [fact for fact in facts if fact], plots, rows)


def _spread(cases: Sequence[Data], what: str) -> dict[str, Any]:
    """Return the speeds of the median round, and the bars to the slowest and the fastest."""

    def speed(case: Data, which: str) -> float:
        size: int = case["block_bytes"] * case["blocks"]
        return size / float(case["seconds"][what][which]) / 1e9

    middle = [speed(one, "median_s") for one in cases]
    above = [speed(one, "least_s") - at for one, at in zip(cases, middle, strict=True)]
    below = [at - speed(one, "most_s") for one, at in zip(cases, middle, strict=True)]
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {"y": middle, "error_y": {**bars, "thickness": 1}}


def runs_page(runs: Sequence[Data]) -> str:
    """Return the page of runs of the benchmarks, the oldest first; the last is shown whole."""
    go, last, plots = plotly(), runs[-1], list[Plot]()
    rows = [["name", "unit", "limit", "peer", "ours", "ratio", "goal"]]
    by_unit: dict[str, list[Data]] = {}
    for row in last["rows"]:
        by_unit.setdefault(row["unit"], []).append(row)
        figures = [row[key] for key in ("limit", "peer", "ours", "ratio")]
        rows.append([row["name"], row["unit"], *map(_figure, figures), row["goal"]])
    for unit, some in by_unit.items():
        drawn = figure(unit, "", xaxis_type="log")
        drawn.update_layout(height=160 + 34 * len(some))
        drawn.update_yaxes(autorange="reversed", tickfont={"size": 11})
        names = [_short(row["name"]) for row in some]
        for key, symbol, colour in (
            ("limit", "line-ns-open", LIMIT),
            ("peer", "diamond-open", COLOURS[1]),
            ("ours", "circle", COLOURS[0]),
        ):
            marker = {"symbol": symbol, "size": 11, "color": colour}
            more = {} if key != "ours" else {"error_x": _over(runs, some)}
            drawn.add_trace(
                go.Scatter(
                    name=key, x=[row[key] for row in some], y=names, mode="markers",
                    marker=marker, hovertext=[row["name"] for row in some], **more,
                )
            )  # fmt: skip
        plots.append(Plot(unit, drawn, "Bars are from the least to the most of all runs."))
    if len(runs) > 1:
        plots.append(Plot("Ratio over the runs", _history(runs), "Ours to the limit or the peer."))
    about = [f"{name}: {value}" for name, value in last["about"].items()]
    return page("Benchmarks", about, plots, rows)


def _over(runs: Sequence[Data], rows: Sequence[Data]) -> dict[str, Any]:
    """Return the bars of ours over all runs, by row."""
    every: dict[str, list[float]] = {}
    for run in runs:
        for row in run["rows"]:
            every.setdefault(row["name"], []).append(row["ours"])
    above = [max(every[row["name"]]) - row["ours"] for row in rows]
    below = [row["ours"] - min(every[row["name"]]) for row in rows]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}


def _history(runs: Sequence[Data]) -> Any:
    """Return the figure of the ratios of each row, by the date of its run."""
    drawn, points = figure("run", "ratio"), dict[str, tuple[list[str], list[float]]]()
    for run in runs:
        for row in run["rows"]:
            if row["ratio"] is not None:
                dates, ratios = points.setdefault(row["name"], ([], []))
                dates.append(run["about"]["date"].removesuffix(" UTC"))
                ratios.append(row["ratio"])
    for name, (dates, ratios) in points.items():
        trace = plotly().Scatter(name=_short(name), x=dates, y=ratios, mode="lines+markers")
        drawn.add_trace(trace)
    return drawn


def _short(name: str) -> str:
    return name if len(name) <= 36 else f"{name[:20]}…{name[-14:]}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _trace(data: Data) -> str:
    trace = data["trace"]
    return (
        f"{trace['requests']} requests in {trace['seconds']:.0f} s, {trace['blocks']} blocks of"
        f" {trace['block_tokens']} tokens, {trace['unique']} different; a block is"
        f" {Size(data['block_bytes']).about()}"
    )
