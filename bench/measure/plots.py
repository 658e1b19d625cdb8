"""Pictures of results. Without matplotlib there are none, and a line says so."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#31688e", "#e69f00", "#35b779", "#cc79a7", "#777777", "#d55e00")
_INCHES = 5.2, 3.4  # of one panel
_MARKERS = "osD^vPX<>"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture was made")
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def bars(
    rows: Mapping[str, Mapping[str, Mapping[str, Sequence[float | None]]]],
    labels: Mapping[str, Sequence[str]],
    path: Path,
) -> None:
    """A grid of bar charts: a row per quantity, a column per title, a colour per series.

    Args:
        rows: quantity -> title -> series -> one value per label, or None.
        labels: title -> names of the bars.
    """
    pyplot = _pyplot()
    if pyplot is None:
        return
    width, height = _INCHES
    figure, axes = pyplot.subplots(
        len(rows), len(labels), squeeze=False, figsize=(width * len(labels), height * len(rows))
    )
    for (quantity, titles), line in zip(rows.items(), axes, strict=True):
        for (title, series), axis in zip(titles.items(), line, strict=True):
            _bar_chart(axis, labels[title], series)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel(quantity)
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _bar_chart(
    axis: Any, labels: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> None:
    thickness = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [at + number * thickness for at in range(len(labels))]
        drawn = axis.barh(
            places, [v or 0 for v in values], thickness, label=name, color=_COLOURS[number]
        )
        texts = ["" if v is None else f"{v:.2f}" for v in values]
        axis.bar_label(drawn, texts, fontsize=7, padding=2)
    axis.set_yticks([at + 0.4 - thickness / 2 for at in range(len(labels))], labels, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    if any(series) and len(series) > 1:
        axis.legend(fontsize=7, frameon=False)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    labels: tuple[str, str],
    limit: tuple[float, str],
    path: Path,
) -> None:
    """Curves on two logarithmic axes, and a horizontal limit.

    Args:
        series: points of each curve; a published one is dashed.
        labels: of the axes.
        limit: its height and its name.
    """
    pyplot = _pyplot()
    if pyplot is None:
        return
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for number, (name, points) in enumerate(series.items()):
        published = name.startswith("published")
        axis.plot(
            *zip(*points, strict=True),
            "--" if published else "-",
            marker=_MARKERS[number % len(_MARKERS)],
            color="#999999" if published else _COLOURS[number % len(_COLOURS)],
            linewidth=max(1.0, 4.0 - 0.6 * number),  # curves that coincide are all seen
            label=name,
        )
    axis.axhline(limit[0], color="black", linewidth=1)
    place: Any = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "bottom"}
    axis.annotate(limit[1], (0.02, limit[0]), fontsize=8, **place)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = sorted({x for points in series.values() for x, _ in points})
    axis.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    axis.minorticks_off()
    axis.set_xlabel(labels[0])
    axis.set_ylabel(labels[1])
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
