"""The report of a comparison of methods: its numbers, its words, and that its pictures can be read."""

from __future__ import annotations

import base64
import html
import math
import re
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from helpers.report_runs import names
from mixwell.lab import tables
from mixwell.lab.tables import Row
from mixwell.report import compare, compare_figures, compare_rows, compare_words, standings, style
from mixwell.utils import environment
from unit.report.test_report_figures import trouble

METHODS = (
    ("uniform", "static"), ("proportional", "static"), ("hypergradient", "online"), ("doge", "online"),
    ("regmix", "offline"), ("doremi", "offline"), ("temperature", "static"), ("dogml", "online"),
    ("aioli", "online"), ("chameleon", "offline"), ("data-mixing-laws", "offline"), ("ODM", "online"),
    ("skill-it", "online"), ("tiki$taka$", "online"), ("pike", "online"), ("fixed", "static"),
)  # fmt: skip
HORIZONS: tuple[tuple[str, int], ...] = (
    ("", 84),
    (" T=1", 1),
    (", with a floor of half a percent, T=1,000", 1000),
    (" T=5", 5),
)
"""What is added to a method's name, and T: some names are long."""
SIZES = ((5, 3), (20, 8), (45, 60))
BOTH = ("test_loss", "validation_loss")
T_OF_2 = 4.302652729911275  # the 97.5% quantile of Student's t with two degrees of freedom, from tables


def write_tables(
    folder: Path, *, arms: int = 5, domains: int = 3, seeds: int = 3, columns: tuple[str, ...] = BOTH
) -> Path:
    """Tables as the command writes them, with losses made up; the last arm is far off."""
    chance = np.random.default_rng(arms)
    rows, curves, weights = list[Row](), list[Row](), list[Row]()
    every = ((*one, *of) for one, of in product(HORIZONS, METHODS) if not one[0] or of[1] != "static")
    for place, (more, horizon, method, kind) in enumerate(islice(every, arms)):
        arm = method + more
        level = 2.0 + 0.3 * chance.random() + (7.2 if place == arms - 1 else 0.0)
        spent = {"online": 120, "offline": 600, "static": 0}[kind]
        for seed in range(seeds):
            loss = level + 0.03 * seed + 0.02 * chance.normal()
            share = np.full(domains, 1 / domains)
            if kind != "static":
                share = chance.dirichlet(np.full(domains, 0.5))
            losses = {column: loss + 0.01 * i for i, column in enumerate(columns)}
            made = {
                "steps": 1000 - spent,
                "compute": 1000.0,
                "seconds": 60.0 + spent,
                "memory": spent * 2**16,
            }
            rows.append(run(arm, method, kind, horizon, seed, **made, **losses))
            before = spent if kind == "offline" else 0
            for done in np.linspace(0, 1, 20):
                fall = level + 0.03 * seed + 3.5 * math.exp(-12 * done)
                step, at = round(done * (1000 - spent)), before + done * (1000 - before)
                curves.append(
                    {"arm": arm, "seed": seed, "step": step, "validation_loss": fall, "compute": at}
                )
            for name, one in zip(names(domains), share.tolist(), strict=True):
                row: Row = {"arm": arm, "seed": seed, "domain": name}
                weights.append({**row, "initial": 1 / domains, "average": one, "last": one})
    if "validation_loss" in columns:
        tables.write(folder / compare.CURVES, curves)
    tables.write(folder / compare.WEIGHTS, weights)
    tables.write(folder / compare.RUNS, rows)
    environment.write(folder)
    return folder


def run(arm: str, method: str, kind: str, horizon: int, seed: int, **more: Any) -> Row:
    """A row of the table of runs."""
    plain: Row = {"arm": arm, "entry": arm.partition(" ")[0], "method": method, "kind": kind}
    plain["horizon"] = "" if kind == "static" else horizon
    spent: Row = {"steps": 100, "compute": 100.0, "budget": 1000, "seconds": 1.5, "memory": 0}
    return {**plain, "seed": seed, **spent, "budget": more.get("compute", 100.0), **more}


def arm(name: str, losses: list[float], *, horizon: int = 84, kind: str = "online", **more: Any) -> list[Row]:
    """The runs of an arm with these losses, by seed; the method is the first word of its name."""
    method = name.partition(" ")[0]
    return [run(name, method, kind, horizon, seed, test_loss=one, **more) for seed, one in enumerate(losses)]


def uniform(losses: list[float]) -> list[Row]:
    return arm("uniform", losses, kind="static")


def across(line: Any) -> float:
    """Where a line begins."""
    return float(line.get_xdata()[0])


def up(line: Any) -> float:
    """How high it begins."""
    return float(line.get_ydata()[0])


def texts(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.texts]


def read(folder: Path) -> list[standings.Standing]:
    return standings.standings(*(tables.read(folder / name) for name in (compare.RUNS, compare.WEIGHTS)))


# ------------------------------------------------------------------------------------------------- numbers

FOUR = [
    *uniform([2.0, 2.2, 2.4]),
    *arm("a", [1.9, 2.0, 2.1]),  # less than uniform by 0.1, 0.2 and 0.3
    *arm("b", [1.81, 2.0, 2.19]),  # by 0.19, 0.20 and 0.21; the same mean as a
    *arm("c T=1", [2.5, 2.7, 2.95], horizon=1),  # more by 0.5, 0.5 and 0.55
]


def test_ranks_and_paired_intervals_by_hand() -> None:
    found = {one.arm: one for one in standings.standings(FOUR)}
    assert list(found) == ["a", "b", "uniform", "c T=1"]
    assert [one.rank for one in found.values()] == [1, 1, 3, 4]
    assert [one.beside_best for one in found.values()] == [
        "best",
        "within its noise",
        "within its noise",
        "worse",
    ]
    assert found["uniform"].mean == pytest.approx(2.2)
    assert found["uniform"].spread == pytest.approx(0.2)  # of a sample: n - 1
    assert found["uniform"].to_uniform is None
    for name, mean, spread in (("a", -0.2, 0.1), ("b", -0.2, 0.01), ("c T=1", 31 / 60, 0.05 / math.sqrt(3))):
        against, reach = found[name].to_uniform, T_OF_2 * spread / math.sqrt(3)
        assert against is not None
        assert (against.mean, against.low, against.high) == pytest.approx((mean, mean - reach, mean + reach))


def test_paired_intervals_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    chance = np.random.default_rng(0)
    base, other = chance.normal(2.0, 0.1, 6), chance.normal(2.1, 0.1, 6)
    found = standings.standings([*uniform(base.tolist()), *arm("a", other.tolist())])
    against = next(one.to_uniform for one in found if one.arm == "a")
    expected = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert against is not None
    assert (against.low, against.high) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_summary_has_a_text_for_every_heading() -> None:
    weights: list[Row] = [
        {"arm": "a", "seed": seed, "domain": name, "initial": 0.25, "average": value + shift, "last": 0.0}
        for seed, shift in ((0, 0.02), (1, -0.02))
        for name, value in (
            ("web", 0.1),
            ("a-very-long-name-of-a-domain", 0.62),
            ("code", 0.2),
            ("law", 0.08),
        )
    ]
    weights += [{**row, "arm": "uniform", "average": 0.25} for row in weights]
    rows = [
        *FOUR,
        *arm("d", [9.0] * 3, kind="offline", memory=3 * 2**20, seconds=1234.5, steps=40, compute=1e5),
    ]
    made = compare_words.summary(rows, weights)
    assert all(len(row) == len(compare.HEADINGS) for row in made)
    by_name = {row[0]: dict(zip(compare.HEADINGS, row, strict=True)) for row in made}
    assert by_name["a"] == {
        "arm": "a", "rank": "1", "beside the best": "best", "kind": "online", "T": "84", "loss": "2.0000 ± 0.1000",
        "against uniform": "-0.2000 [-0.4484, +0.0484]", "compute": "100", "steps": "100", "seconds": "1.5",
        "MiB": "0", "weights": "a-very-…-domain 62%, code 20%, web 10%",
    }  # fmt: skip
    assert (by_name["uniform"]["T"], by_name["uniform"]["against uniform"]) == ("", "")
    assert by_name["uniform"]["weights"] == "all 25.0%"
    assert [by_name["d"][name] for name in ("compute", "steps", "seconds", "MiB")] == [
        "100,000",
        "40",
        "1,234",
        "3.0",
    ]


def test_the_loss_is_that_of_the_test_set_where_there_is_one() -> None:
    rows = arm("a", [1.0])
    assert standings.loss_column(rows) == ("test_loss", "test loss")
    without: list[Row] = [{**row, "validation_loss": 3.0, "test_loss": ""} for row in rows]
    assert standings.loss_column(without) == ("validation_loss", "validation loss")
    assert standings.standings(without)[0].mean == 3.0
    with pytest.raises(ValueError, match=r"test_loss or validation_loss with numbers, got \['arm'\]"):
        standings.loss_column([{"arm": "a"}])


def test_horizons_are_paired_by_method_and_the_greatest_gain_is_first() -> None:
    rows = [
        *arm("a T=1", [2.5, 2.6], horizon=1), *arm("a T=10", [1.0, 1.0], horizon=10), *arm("a", [2.4, 2.3]),
        *arm("b T=1", [2.0, 2.2], horizon=1), *arm("b", [2.1, 2.2]),
        *arm("c T=1", [math.nan, 2.0], horizon=1), *arm("c", [2.0, 2.0]),
        *arm("d", [1.5, 1.5]), *uniform([2.0, 2.0]),
        *(row | {"method": "a"} for row in arm("variant", [1.0, 1.0], horizon=1)),  # of a, but not a itself
    ]  # fmt: skip
    made = standings.pairs(standings.standings(rows))
    assert [pair.entry for pair in made] == ["a", "b", "c"]
    assert [one.horizon for one in made[0].arms] == [1, 10, 84]
    assert [pair.change.mean for pair in made[:2]] == pytest.approx([-0.2, 0.05])
    assert [pair.longer_is_better for pair in made] == [True, False, True]  # what is finite is better
    said = [line for line in compare.findings(rows) if "horizon" in line]
    assert said == [
        "The longest horizon of a method had a lower mean loss than T = 1 in 2 of 3 methods; beyond the noise it "
        "was lower in 0 and higher in 0."
    ]


# --------------------------------------------------------------------------------------------------- words


def test_findings_say_what_three_seeds_can() -> None:
    assert compare.findings(FOUR) == [
        "The least mean test loss of 4 arms is 2.0000 over 3 seeds, of a; against uniform weights it is -0.2000 "
        "[-0.4484, +0.0484] (95%, paired), lower in 3 of 3 seeds, which noise can explain.",
        "Within its noise (the 95% interval of the paired difference contains zero): b, uniform.",
        "Of 3 other arms, 1 did better than uniform weights beyond the noise, 1 cannot be told from them, 1 did "
        "worse: c T=1.",
        "The best was picked by these same runs, so its lead is likely to be less in new ones.",
    ]


def test_one_seed_gives_no_interval_and_no_verdict() -> None:
    rows = [row for row in FOUR if row["seed"] == 0]
    assert compare.findings(rows) == [
        "The least test loss of 4 arms is 1.8100 in the one seed, of b; against uniform weights it is -0.1900.",
        "A greater loss than uniform weights: c T=1.",
        "One seed: any of these differences may be chance.",
    ]
    assert [row[2] for row in compare.summary(rows)] == ["best", "", "", ""]
    assert not any("±" in cell or "[" in cell for row in compare.summary(rows) for cell in row)


def test_uniform_may_be_the_best_and_may_be_missing() -> None:
    best = [*uniform([1.0, 1.0]), *arm("a", [2.0, 2.1])]
    assert compare.findings(best)[:2] == [
        "The least mean test loss of 2 arms is 1.0000 over 2 seeds, of uniform: nothing had a lower one than "
        "uniform weights.",
        "No other arm is within its noise.",
    ]
    assert compare.findings([*arm("a", [2.0, 2.1]), *arm("b", [1.0, 1.3])]) == [
        "The least mean test loss of 2 arms is 1.1500 over 2 seeds, of b.",
        "Within its noise (the 95% interval of the paired difference contains zero): a.",
    ]


def test_seeds_that_are_missing_and_losses_that_are_not_finite_are_told() -> None:
    rows = [
        *uniform([2.0, 2.1, 2.2]),
        *arm("few", [1.0]),
        *arm("lost", [2.0, math.nan, 2.0]),
        *arm("burst", [1.9, math.inf, 2.0]),
        *arm("dear", [3.0, 3.1, 3.2], compute=1100.0, budget=1000),
    ]
    found = standings.standings(rows)
    assert [one.arm for one in found] == ["few", "uniform", "dear", "lost", "burst"]
    assert [one.rank for one in found] == [1, 2, 3, 4, 4]
    assert [one.beside_best for one in found] == ["best", "", "", "not finite", "not finite"]
    said = compare.findings(rows)
    for line in (
        "Too few seeds in common with it to tell: uniform, dear.",
        "Fewer seeds, so that means are not of the same ones: few (1 of 3).",
        "A loss that is not finite: lost, burst.",
        "More compute than was allowed: dear (1.10x).",
    ):
        assert line in said
    assert "over 1 seed, of few; against uniform weights it is -1.0000." in said[0]
    assert compare.findings(arm("lost", [math.nan])) == [
        "No arm has a finite test loss.",
        "One seed: any of these differences may be chance.",
    ]
    for figure in (
        compare_rows.losses(found, "test loss"),
        compare_figures.cost(found, ["seconds"], "test loss"),
    ):
        assert trouble(figure) == []


def test_many_names_are_counted() -> None:
    assert compare_words.some(["a", "b"]) == "a, b"
    assert compare_words.some(list("abcdefg")) == "a, b, c, d, e, f, g"
    assert compare_words.some(list("abcdefgh")) == "a, b, c, d, e, f and 2 others"
    assert compare_words.some(["a, floor", "b"]) == "a, floor; b"


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize(
    ("arms", "domains", "width"), [*((*size, style.PANEL) for size in SIZES), (20, 8, compare.WIDE)]
)
def test_nothing_overlaps_and_arms_are_in_order(
    tmp_path: Path, arms: int, domains: int, width: float
) -> None:
    found = read(write_tables(tmp_path, arms=arms, domains=domains))
    losses, weights = (
        compare_rows.losses(found, "test loss", width=width),
        compare_rows.weights(found, width=width),
    )
    assert weights is not None
    for figure in (losses, weights):
        assert trouble(figure) == []
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        low, high = figure.axes[0].get_ylim()
        assert low > high  # the first is above
        for label, one in zip(labels, found, strict=True):
            begin, _, end = label.replace(r"\$", "$").partition("…")
            assert one.arm.startswith(begin)
            assert one.arm.endswith(end)
    axis = losses.axes[0]
    assert texts(axis) == ["mean", *(f"{one.mean:.4f}" for one in found)]
    made = standings.pairs(found)
    assert len(made) == {5: 0, 20: 4, 45: 12}[arms]
    if made:
        assert trouble(compare_rows.horizons(made, "test loss", width=width)) == []


def test_heights_grow_with_the_arms(tmp_path: Path) -> None:
    heights: list[float] = []
    for arms, _ in SIZES:
        (tmp_path / str(arms)).mkdir()
        found = read(write_tables(tmp_path / str(arms), arms=arms))
        heights.append(compare_rows.losses(found, "test loss").get_figheight())
    assert heights[1] - heights[0] > 2
    assert heights[2] - heights[1] == pytest.approx(25 * compare_rows.ROW)


def test_what_is_far_off_is_an_arrow_and_does_not_squeeze_the_others() -> None:
    rows = [
        *uniform([2.0, 2.1]),
        *arm("a", [1.9, 1.95]),
        *arm("b", [2.2, 2.3]),
        *arm("c", [2.0, 2.05]),
        *arm("d", [9, 9.5]),
    ]
    found = standings.standings(rows)
    axis = compare_rows.losses(found, "test loss").axes[0]
    low, high = axis.get_xlim()
    assert (low, high) == pytest.approx((1.9 - 0.02, 2.3 + 0.02))
    arrows = [line for line in axis.lines if line.get_marker() == ">"]
    assert [up(line) for line in arrows] == [4]
    assert texts(axis)[-1] == "9.2500"
    bars = [line for line in axis.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 2.2]
    assert [across(line) for line in bars] == pytest.approx([one.mean for one in found[:4]])
    assert [across(line) for line in axis.lines if line.get_linestyle() == "--"] == [2.05]  # uniform
    cloud = compare_figures.cost(found, ["seconds"], "test loss").axes[0]
    assert cloud.get_ylim() == (low, high)
    assert "d 9.25" in texts(cloud)
    # A loss that is far below is what a reader looks for.
    better = standings.standings([*rows[:-2], *arm("d", [0.1, 0.2])])
    assert compare_rows.limits(better)[0] < 0.1
    same = standings.standings([*uniform([2.0, 2.0]), *arm("a", [2.0, 2.0])])
    assert compare_rows.limits(same) == pytest.approx((1.9, 2.1))


def test_bands_are_behind_those_within_the_noise() -> None:
    axis = compare_rows.losses(standings.standings(FOUR), "test loss").axes[0]
    bands = [patch for patch in axis.patches if to_hex(patch.get_facecolor()) == compare_rows.BAND]
    assert [patch.get_y() + patch.get_height() / 2 for patch in bands] == [0, 1, 2]


def test_weights_in_cells_add_up_to_a_hundred(tmp_path: Path) -> None:
    for domains, columns in ((3, 3), (8, 8), (60, 9)):
        (tmp_path / str(domains)).mkdir()
        found = read(write_tables(tmp_path / str(domains), domains=domains))
        figure = compare_rows.weights(found)
        assert figure is not None
        axis = figure.axes[0]
        labels = [label.get_text() for label in axis.get_xticklabels()]
        assert len(labels) == columns
        assert (labels[-1] == "52 others") == (domains == 60)
        numbers = np.array(list(map(float, texts(axis)))).reshape(5, columns)
        assert numbers.sum(axis=1) == pytest.approx(np.full(5, 100), abs=0.5 * columns)
        if domains == 60:  # those that are great somewhere
            named, others = compare_rows.shown_domains(found)
            at_most = {name: max(one.weights[name] for one in found) for name in (*named, *others)}
            assert min(at_most[name] for name in named) >= max(at_most[name] for name in others)
            assert named == [name for name in names(60) if name in named]
        assert trouble(figure) == []
    assert compare_rows.weights(standings.standings(FOUR)) is None


def test_a_domain_that_an_arm_does_not_have_is_an_empty_cell() -> None:
    weights: list[Row] = [
        {"arm": "a", "seed": 0, "domain": "web", "average": 1.0},
        {"arm": "b", "seed": 0, "domain": "web", "average": 0.25},
        {"arm": "b", "seed": 0, "domain": "law", "average": 0.75},
    ]
    figure = compare_rows.weights(standings.standings([*arm("a", [1.0]), *arm("b", [2.0])], weights))
    assert figure is not None
    assert texts(figure.axes[0]) == ["100", "25", "75"]


def test_costs_that_are_the_same_for_all_are_not_drawn() -> None:
    cheap = [*arm("a", [2.0], steps=100, compute=100.0), *uniform([2.1])]
    assert compare_figures.costs(standings.standings(cheap)) == ["seconds"]
    other = [*arm("a", [2.0], steps=50, compute=100.0, seconds=90.0), *uniform([2.1])]
    found = standings.standings(other)
    assert compare_figures.costs(found) == ["seconds", "steps"]
    assert compare_figures.cost(found, ["seconds"], "test loss").axes[0].get_xscale() == "log"
    dear = [*arm("a", [2.0], compute=300.0, budget=400), *(row | {"budget": 400} for row in uniform([2.1]))]
    found = standings.standings(dear)
    assert compare_figures.costs(found) == ["seconds", "compute"]
    figure = compare_figures.cost(found, ["seconds", "compute"], "test loss")
    assert trouble(figure) == []
    dotted = [
        across(line) for line in figure.axes[1].lines if len(set(line.get_xdata())) < len(line.get_xdata())
    ]
    assert dotted == [400]


@pytest.mark.parametrize("arms", [5, 20, 45])
def test_points_are_named_beside_them_where_there_is_room(tmp_path: Path, arms: int) -> None:
    found = read(write_tables(tmp_path, arms=arms))
    for panels in (["seconds"], ["seconds", "steps"]):
        figure = compare_figures.cost(found, panels, "test loss")
        assert trouble(figure) == []
        for axis in figure.axes:
            assert texts(axis)[0].startswith(style.plain(found[0].arm[:5]))
            assert 2 <= len(texts(axis)) <= 6
            assert [up(line) for line in axis.lines if line.get_linestyle() == "--"] == [
                next(one.mean for one in found if one.arm == "uniform")
            ]
            points = [line for line in axis.lines if line.get_linestyle() != "--"]
            assert len(points) == arms


def test_lines_over_training_are_those_of_the_best_and_the_baselines(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, arms=45)
    found = read(folder)
    shown = compare_figures.shown_curves(found)
    assert shown[:6] == [one.arm for one in found[:6]]
    assert set(shown[6:]) <= {"uniform", "proportional"}
    assert {"uniform", "proportional"} <= set(shown)
    curves = tables.read(folder / compare.CURVES)
    made = compare_figures.courses(curves, shown)
    assert list(made) == shown
    own = [row for row in curves if row["arm"] == shown[0]]
    last = [float(row["validation_loss"]) for row in own if row["step"] == own[-1]["step"]]
    assert made[shown[0]][1][-1] == pytest.approx(np.mean(last))
    assert made[shown[0]][0][-1] == 1000  # compute, not the steps of the last run
    offline = next(one.arm for one in found if one.kind == "offline")
    assert compare_figures.courses(curves, [offline])[offline][0][0] == 600
    figure = compare_figures.over_training(made)
    assert trouble(figure) == []
    low, high = figure.axes[0].get_ylim()
    assert 1.9 < low < high < 3.0  # the first fall, from 5.5, is out of the picture
    # Where one seed stopped early, its mean would jump.
    short = [row for row in own if not (row["seed"] == 0 and float(row["step"]) > 400)]
    assert max(compare_figures.courses(short, shown[:1])[shown[0]][0]) < 600


def test_an_arm_that_is_far_off_has_no_line(tmp_path: Path) -> None:
    found = read(write_tables(tmp_path))
    assert found[-1].mean > 9
    assert compare_figures.shown_curves(found) == [one.arm for one in found[:-1]]


# ------------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize(
    ("arms", "domains", "seeds", "columns"), [(45, 60, 2, BOTH), (5, 3, 1, ("validation_loss",))]
)
def test_the_page_has_all_numbers_and_needs_nothing_else(
    tmp_path: Path, arms: int, domains: int, seeds: int, columns: tuple[str, ...]
) -> None:
    folder = write_tables(tmp_path, arms=arms, domains=domains, seeds=seeds, columns=columns)
    written = compare.write(folder, tmp_path / "out")
    drawn = ["losses", "weights", *(["horizons"] if arms == 45 else []), "cost", "curves"]
    assert [path.name for path in written] == [
        *(f"{name}.{kind}" for name in drawn for kind in ("png", "svg")),
        "report.html",
    ]
    assert all(path.stat().st_size > 1000 for path in written)
    page = written[-1].read_text(encoding="utf-8")
    told = html.unescape(page)
    rows, weights = tables.read(folder / compare.RUNS), tables.read(folder / compare.WEIGHTS)
    for cells in compare.summary(rows, weights):
        for cell in cells:
            assert f"<td>{cell}</td>" in told
    for line in compare.findings(rows):
        assert f"<p>{line}</p>" in told
    assert ("ean test loss" in told) == ("test_loss" in columns)
    found = standings.standings(rows)
    alts = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', page)
    assert len(alts) == page.count("<img") == len(drawn) + 1  # both costs have a picture of their own
    assert f"The least: {found[0].arm} {found[0].mean:.4f}," in html.unescape(alts[0][1])
    addresses = re.findall(r"""(?:src|href)=["']?([^"'\s>]+)|url\(([^)]+)\)|@import""", page)
    assert all(address.startswith("data:") for address, _ in addresses)
    for picture, _ in alts:
        svg = base64.b64decode(picture).decode()
        assert not re.search(r'href="(?!#)', svg)  # nor does a picture load anything


def test_arms_that_could_not_be_run_are_told_with_the_reason(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, columns=("test_loss",))
    reason = "needs <lightgbm>: pip install 'mixwell[methods]'"
    tables.write(
        folder / compare.FAILURES,
        [
            *({"arm": "regmix T=1", "seed": seed, "reason": reason} for seed in (0, 1)),
            {"arm": "doge", "seed": 2, "reason": "the loss is not finite"},
        ],
    )
    written = compare.write(folder, tmp_path / "out")
    assert "curves.png" not in [path.name for path in written]  # there is no validation loss to draw
    page = written[-1].read_text(encoding="utf-8")
    assert "<lightgbm>" not in page
    assert "alidation loss" not in page
    told = html.unescape(page)
    assert "Not all could be run: regmix T=1, doge; the reasons are at the end." in told
    assert f"<p>regmix T=1, seeds 0, 1: {reason}</p>" in told
    assert "<p>doge, seed 2: the loss is not finite</p>" in told


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compare.csv has no runs; a report needs at least one"):
        compare.write(tmp_path, tmp_path)


def test_an_arm_alone_has_a_page(tmp_path: Path) -> None:
    tables.write(tmp_path / compare.RUNS, arm("a", [2.0]))
    environment.write(tmp_path)
    written = compare.write(tmp_path, tmp_path)
    assert [path.name for path in written] == [
        "losses.png",
        "losses.svg",
        "cost.png",
        "cost.svg",
        "report.html",
    ]
    assert "One way to choose the mixture: a" in written[-1].read_text(encoding="utf-8")
