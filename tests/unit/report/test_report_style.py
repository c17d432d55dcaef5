"""Colors that color-blind readers can tell apart, names that fit, lines that are short enough."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mixwell.report import run_summary, style

Array = NDArray[np.float64]

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency"
# (2009), severity 1: matrices for linear RGB.
VISIONS: dict[str, Array] = {
    "all colors": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# CIEDE2000 is made so that about 1 can just be seen on large fields side by side. Lines are thin and apart, so
# they need many times that: 10 where dashes differ too, and 40 where the color alone tells lines apart.
WITH_DASHES, ALONE = 10.0, 40.0


def lab(color: str, vision: Array) -> Array:
    """CIELAB of an sRGB color as somebody sees it."""
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )  # IEC 61966-2-1
    seen = to_xyz @ np.clip(vision @ linear, 0, 1) / to_xyz.sum(axis=1)
    f = np.where(seen > (6 / 29) ** 3, np.cbrt(seen), seen / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one: Array, other: Array) -> float:
    """The distance of two colors (Sharma, Wu and Dalal 2005 write it out)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    grey = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(grey**7 / (grey**7 + 25.0**7))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    hue = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2

    def cos(degrees: float) -> float:
        return float(np.cos(np.radians(degrees)))

    t = 1 - 0.17 * cos(hue - 30) + 0.24 * cos(2 * hue) + 0.32 * cos(3 * hue + 6) - 0.2 * cos(4 * hue - 63)
    dl = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2))
    dc = (c2 - c1) / (1 + 0.045 * chroma)
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    twist = 60 * np.exp(-(((hue - 275) / 25) ** 2))
    r = -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(np.radians(twist))
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + r * dc * dh))


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0000),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_color_distance_matches_published_pairs(
    one: tuple[float, ...], other: tuple[float, ...], distance: float
) -> None:
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("vision", VISIONS)
def test_line_colors_are_distinguishable(vision: str) -> None:
    matrix = VISIONS[vision]
    assert matrix.sum(axis=1) == pytest.approx(np.ones(3), abs=1e-5)  # white stays white
    styles = style.line_styles(len(style.COLORS))
    for one, other in combinations(styles, 2):
        distance = ciede2000(lab(one.color, matrix), lab(other.color, matrix))
        assert distance >= (ALONE if one.dashes == other.dashes else WITH_DASHES), (one, other)
    for own in styles:  # the lines that are not named are thinner, too
        distance = ciede2000(lab(own.color, matrix), lab(style.FAINT, matrix))
        assert distance >= WITH_DASHES, own


def test_more_lines_than_colors_differ_in_color_or_dashes() -> None:
    pairs = [(own.color, own.dashes) for own in style.line_styles(28)]
    assert len(set(pairs)) == 28


def test_many_domains_have_few_named_lines() -> None:
    weights = {f"d{i}": float(i) for i in range(60)}
    assert list(style.style_largest(weights)) == ["d59", "d58", "d57", "d56", "d55", "d54"]
    few = {name: weights[name] for name in ("d3", "d50", "d1")}
    assert list(style.style_largest(few)) == ["d3", "d50", "d1"]


@pytest.mark.parametrize(
    "text", ["web", "stackexchange-mathematics-answers-and-comments" * 3, "a" * 500, "_hidden", "$_$"]
)
def test_labels_are_literal_and_short(text: str) -> None:
    made = style.label(text, 20)
    shown = made.replace(r"\$", "$").removeprefix(" ")
    assert len(shown) <= 20
    assert (shown == text) == (len(text) <= 20)
    assert (shown[:3], shown[-3:]) == (text[:3], text[-3:])
    assert not made.startswith("_")  # which matplotlib would leave out of a legend


def test_thinned_lines_keep_ends_and_means() -> None:
    steps, values = list(range(1, 5001)), [float(i % 7) for i in range(5000)]
    for named, most in ((True, 120), (False, 40)):
        across, up = style.thin(steps, values, named=named)
        assert len(across) == len(up) == most
        assert (across[0], across[-1], up[0], up[-1]) == (1, 5000, values[0], values[-1])
        assert set(up) <= set(values)
        across, up = style.thin(steps, values, named=named, mean=True)
        assert across[-1] == 5000
        widths = np.diff(np.concatenate([[0], across]))
        assert float(widths @ up) == pytest.approx(sum(values))  # every value is in one mean


def test_means_ignore_missing_values() -> None:
    values = [None if i < 3000 else 2.0 if i % 2 else None for i in range(5000)]
    _, up = style.thin(list(range(5000)), values, mean=True)
    assert np.isnan(up[:60]).all()
    assert up[-40:] == pytest.approx(np.full(40, 2.0))


def test_axis_limits_exclude_initial_drop() -> None:
    falling = style.thin(list(range(101)), [100.0 if i <= 5 else 2.0 - i / 100 for i in range(101)])
    limits = style.late_limits([falling], 100)
    assert limits is not None
    low, high = limits
    assert 0.9 < low < 1.0
    assert 1.89 < high < 2.0
    assert style.late_limits([style.thin([0], [5.0])], 100) is None


def test_runs_with_same_name_are_labeled_by_parent(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "learned", tmp_path / "b" / "learned", tmp_path / "b" / "other"]
    assert run_summary.names(folders[1:]) == ["learned", "other"]
    assert run_summary.names(folders) == [
        str(Path("a/learned")),
        str(Path("b/learned")),
        str(Path("b/other")),
    ]


def test_figures_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    for suffix in ("png", "svg"):
        (tmp_path / f"figure.{suffix}").symlink_to(tmp_path / "elsewhere")
    written = style.save(Figure(), tmp_path / "figure")
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert not any(path.is_symlink() for path in written)
