"""Peak memory of each way to train, by kind of object."""

from anabranch.tools.report.documents import MemoryDocument
from anabranch.tools.report.formatting import size
from anabranch.tools.report.html.chart import Chart, Series, pattern
from anabranch.tools.report.html.escaping import hover_text, plotly_text
from anabranch.tools.report.memory import unit

ROW_PX, EDGE_PX = 56, 170


def memory_chart(key: str, found: MemoryDocument) -> Chart:
    """A stacked bar per mode, a part per kind of object; a cross where a peak was measured."""
    modes = list(found.modes)
    kinds = list(dict.fromkeys(kind for mode in found.modes.values() for kind in mode.kinds))
    rows = list(range(len(modes)))
    peaks = [max(mode.predicted_nbytes, mode.measured_nbytes or 0) for mode in found.modes.values()]
    name, one = unit(max(peaks, default=0))
    data: list[Series] = []
    for index, kind in enumerate(kinds):
        held = [found.modes[mode].kinds.get(kind, 0) for mode in modes]
        if not any(held):
            continue
        hover = [
            hover_text(f"<b>{plotly_text(kind)}</b>: {size(nbytes)}",
                  f"of {size(found.modes[mode].predicted_nbytes)}, {plotly_text(mode, 30)}")
            for nbytes, mode in zip(held, modes, strict=True)
        ]  # fmt: skip
        data.append({
            "type": "bar", "orientation": "h", "name": plotly_text(kind, 40), "x": [nbytes / one for nbytes in held],
            "y": rows, "width": 0.7, "marker": pattern(index), "customdata": hover,
            "hovertemplate": "%{customdata}<extra></extra>",
        })  # fmt: skip
    arrow_key_series = list(range(len(data)))
    measured = [(row, found.modes[mode].measured_nbytes) for row, mode in zip(rows, modes, strict=True)]
    known = [(row, nbytes) for row, nbytes in measured if nbytes]
    if known:
        data.append({
            "type": "scatter", "mode": "markers", "name": "measured peak", "x": [n / one for _, n in known],
            "y": [row for row, _ in known], "marker": {"symbol": "x", "size": 12, "color": "--ink"},
            "customdata": [f"measured peak: {size(n)}" for _, n in known],
            "hovertemplate": "%{customdata}<extra></extra>",
        })  # fmt: skip
    layout = {
        "barmode": "stack",
        "hovermode": "closest",
        "xaxis": {"title": {"text": f"{name} at the peak of a step"}, "rangemode": "tozero"},
        "yaxis": {"tickvals": rows, "ticktext": [plotly_text(mode, 18) for mode in modes], "autorange": "reversed",
                  "fixedrange": True, "showgrid": False, "zeroline": False},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    }  # fmt: skip
    label = f"Predicted memory of {found.model} by kind of object"
    caption = f"Assumed: {'; '.join(found.assumptions)}." if found.assumptions else ""
    return Chart(key, label, data, layout, ROW_PX * len(modes) + EDGE_PX, caption, arrow_key_series)
