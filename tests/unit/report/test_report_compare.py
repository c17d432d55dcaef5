"""The report of a comparison of methods: its numbers, its verdict, and that its figures are legible."""

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

from helpers.figure_checks import trouble
from helpers.report_runs import names
from mixwell.lab import tables
from mixwell.lab.compare import results, standings
from mixwell.lab.compare.summary import summary, verdict
from mixwell.lab.tables import Row
from mixwell.report import compare, compare_figures
from mixwell.utils import environment

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
    folder: Path, *, variants: int = 5, domains: int = 3, seeds: int = 3, columns: tuple[str, ...] = BOTH
) -> Path:
    """Tables as the command writes them, with losses made up; the last variant is far off."""
    chance = np.random.default_rng(variants)
    rows, curves, weights = list[Row](), list[Row](), list[Row]()
    every = ((*one, *of) for one, of in product(HORIZONS, METHODS) if not one[0] or of[1] != "static")
    for place, (more, horizon, method, kind) in enumerate(islice(every, variants)):
        variant = method + more
        level = 2.0 + 0.3 * chance.random() + (7.2 if place == variants - 1 else 0.0)
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
            rows.append(run(variant, method, kind, horizon, seed, **made, **losses))
            before = spent if kind == "offline" else 0
            for done in np.linspace(0, 1, 20):
                fall = level + 0.03 * seed + 3.5 * math.exp(-12 * done)
                step, at = round(done * (1000 - spent)), before + done * (1000 - before)
                curves.append(
                    {"variant": variant, "seed": seed, "step": step, "validation_loss": fall, "compute": at}
                )
            for name, one in zip(names(domains), share.tolist(), strict=True):
                row: Row = {"variant": variant, "seed": seed, "domain": name}
                weights.append({**row, "initial": 1 / domains, "average": one, "last": one})
    if "validation_loss" in columns:
        tables.write(folder / results.CURVES, curves)
    tables.write(folder / results.WEIGHTS, weights)
    tables.write(folder / results.RUNS, rows)
    environment.write(folder)
    return folder


def run(variant: str, method: str, kind: str, horizon: int, seed: int, **more: Any) -> Row:
    """A row of the table of runs."""
    plain: Row = {"variant": variant, "entry": variant.partition(" ")[0], "method": method, "kind": kind}
    plain["horizon"] = "" if kind == "static" else horizon
    spent: Row = {"steps": 100, "compute": 100.0, "budget": 1000, "seconds": 1.5, "memory": 0}
    return {**plain, "seed": seed, **spent, "budget": more.get("compute", 100.0), **more}


def variant(
    name: str, losses: list[float], *, horizon: int = 84, kind: str = "online", **more: Any
) -> list[Row]:
    """The runs of a variant with these losses, by seed; the method is the first word of its name."""
    method = name.partition(" ")[0]
    return [run(name, method, kind, horizon, seed, test_loss=one, **more) for seed, one in enumerate(losses)]


def uniform(losses: list[float]) -> list[Row]:
    return variant("uniform", losses, kind="static")


def across(line: Any) -> float:
    """Where a line begins."""
    return float(line.get_xdata()[0])


def up(line: Any) -> float:
    """How high it begins."""
    return float(line.get_ydata()[0])


def means(axis: Any) -> list[str]:
    """The labels at the right of the rows."""
    return [text.get_text() for text in axis.child_axes[0].get_yticklabels()]


def named(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def read(folder: Path) -> list[standings.Standing]:
    return standings.standings(*(tables.read(folder / name) for name in (results.RUNS, results.WEIGHTS)))


# ------------------------------------------------------------------------------------------------- numbers

FOUR = [
    *uniform([2.0, 2.2, 2.4]),
    *variant("a", [1.9, 2.0, 2.1]),  # less than uniform by 0.1, 0.2 and 0.3
    *variant("b", [1.81, 2.0, 2.19]),  # by 0.19, 0.20 and 0.21; the same mean as a
    *variant("c T=1", [2.5, 2.7, 2.95], horizon=1),  # more by 0.5, 0.5 and 0.55
]


def test_ranks_and_paired_intervals_match_hand_computation() -> None:
    found = {one.name: one for one in standings.standings(FOUR)}
    assert list(found) == ["a", "b", "uniform", "c T=1"]
    assert [one.rank for one in found.values()] == [1, 1, 3, 4]
    assert [one.status for one in found.values()] == [
        "best",
        "within noise",
        "within noise",
        "worse",
    ]
    assert found["uniform"].mean == pytest.approx(2.2)
    assert found["uniform"].deviation == pytest.approx(0.2)  # of a sample: n - 1
    assert found["uniform"].to_uniform is None
    for name, mean, spread in (("a", -0.2, 0.1), ("b", -0.2, 0.01), ("c T=1", 31 / 60, 0.05 / math.sqrt(3))):
        against, reach = found[name].to_uniform, T_OF_2 * spread / math.sqrt(3)
        assert against is not None
        assert (against.mean, against.low, against.high) == pytest.approx((mean, mean - reach, mean + reach))


def test_paired_intervals_match_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    chance = np.random.default_rng(0)
    base, other = chance.normal(2.0, 0.1, 6), chance.normal(2.1, 0.1, 6)
    found = standings.standings([*uniform(base.tolist()), *variant("a", other.tolist())])
    against = next(one.to_uniform for one in found if one.name == "a")
    expected = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert against is not None
    assert (against.low, against.high) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_summary_has_a_text_for_every_heading() -> None:
    weights: list[Row] = [
        {"variant": "a", "seed": seed, "domain": name, "initial": 0.25, "average": value + shift, "last": 0.0}
        for seed, shift in ((0, 0.02), (1, -0.02))
        for name, value in (
            ("web", 0.1),
            ("a-very-long-name-of-a-domain", 0.62),
            ("code", 0.2),
            ("law", 0.08),
        )
    ]
    weights += [{**row, "variant": "uniform", "average": 0.25} for row in weights]
    rows = [
        *FOUR,
        *variant("d", [9.0] * 3, kind="offline", memory=3 * 2**20, seconds=1234.5, steps=40, compute=1e5),
    ]
    by_name = {row["method"]: row for row in summary(standings.standings(rows, weights))}
    assert by_name["a"] == {
        "method": "a", "rank": "1", "vs. best": "best", "kind": "online", "T": "84", "loss": "2.0000 ± 0.1000",
        "vs. uniform": "-0.2000 [-0.4484, +0.0484]", "compute": "100", "steps": "100", "seconds": "1.5",
        "MiB": "0", "weights": "a-very-long-name-of-a-domain 62%, code 20%, web 10%",
    }  # fmt: skip
    assert (by_name["uniform"]["T"], by_name["uniform"]["vs. uniform"]) == ("", "")
    assert by_name["uniform"]["weights"] == "all 25.0%"
    assert [by_name["d"][name] for name in ("compute", "steps", "seconds", "MiB")] == [
        "100,000",
        "40 of 100,000",
        "1,234",
        "3.0",
    ]


def test_loss_is_test_loss_if_available() -> None:
    rows = variant("a", [1.0])
    assert standings.loss_column(rows) == ("test_loss", "test loss")
    without: list[Row] = [{**row, "validation_loss": 3.0, "test_loss": ""} for row in rows]
    assert standings.loss_column(without) == ("validation_loss", "validation loss")
    assert standings.standings(without)[0].mean == 3.0
    with pytest.raises(ValueError, match=r"test_loss or validation_loss with numbers, got \['variant'\]"):
        standings.loss_column([{"variant": "a"}])


def test_tables_of_older_versions_are_refused_with_the_cure() -> None:
    old: list[Row] = [{"arm": row["variant"], "test_loss": row["test_loss"]} for row in FOUR]
    with pytest.raises(
        ValueError, match="older versions called it arm: rename it, or call `mixwell compare` again"
    ):
        standings.standings(old)


def test_horizons_are_paired_and_sorted_by_gain() -> None:
    rows = [
        *variant("a T=1", [2.5, 2.6], horizon=1), *variant("a T=10", [1.0, 1.0], horizon=10),
        *variant("a", [2.4, 2.3]),
        *variant("b T=1", [2.0, 2.2], horizon=1), *variant("b", [2.1, 2.2]),
        *variant("c T=1", [math.nan, 2.0], horizon=1), *variant("c", [2.0, 2.0]),
        *variant("d", [1.5, 1.5]), *uniform([2.0, 2.0]),
        *(row | {"method": "a"} for row in variant("variant", [1.0, 1.0], horizon=1)),  # of a, but not a itself
    ]  # fmt: skip
    made = standings.horizon_effects(standings.standings(rows))
    assert [one.entry for one in made] == ["a", "b", "c"]
    assert [one.horizon for one in made[0].runs] == [1, 10, 84]
    assert [one.change.mean for one in made[:2]] == pytest.approx([-0.2, 0.05])


# ------------------------------------------------------------------------------------------------- verdict


def test_verdict_has_paired_interval() -> None:
    assert verdict(FOUR) == (
        "a has the lowest mean test loss of 4 methods, 2.0000 over 3 seeds; compared with uniform weights "
        "-0.2000 [-0.4484, +0.0484] (95%, paired by seed), lower in 3 of 3 seeds."
    )


def test_one_seed_gives_no_interval() -> None:
    rows = [row for row in FOUR if row["seed"] == 0]
    assert verdict(rows) == (
        "b has the lowest mean test loss of 4 methods, 1.8100 over 1 seed; compared with uniform weights -0.1900. "
        "One seed cannot tell this from chance."
    )
    cells = summary(standings.standings(rows))
    assert [row["vs. best"] for row in cells] == ["best", "", "", ""]
    assert not any("±" in cell or "[" in cell for row in cells for cell in row.values())


def test_uniform_can_be_best_or_missing() -> None:
    assert verdict([*uniform([1.0, 1.0]), *variant("a", [2.0, 2.1])]) == (
        "uniform has the lowest mean test loss of 2 methods, 1.0000 over 2 seeds."
    )
    assert verdict([*variant("a", [2.0, 2.1]), *variant("b", [1.0, 1.3])]) == (
        "b has the lowest mean test loss of 2 methods, 1.1500 over 2 seeds."
    )


def test_missing_seeds_and_nonfinite_losses() -> None:
    rows = [
        *uniform([2.0, 2.1, 2.2]),
        *variant("few", [1.0]),
        *variant("lost", [2.0, math.nan, 2.0]),
        *variant("burst", [1.9, math.inf, 2.0]),
        *variant("expensive", [3.0, 3.1, 3.2], compute=1100.0, budget=1000),
    ]
    found = standings.standings(rows)
    assert [one.name for one in found] == ["few", "uniform", "expensive", "lost", "burst"]
    assert [one.rank for one in found] == [1, 2, 3, 4, 4]
    assert [one.status for one in found] == ["best", "", "", "not finite", "not finite"]
    assert "over 1 seed; compared with uniform weights -1.0000." in verdict(rows)
    assert verdict(variant("lost", [math.nan])) == "No method has a finite test loss."
    for figure in (
        compare_figures.losses(found, "test loss"),
        compare_figures.cost(found, "seconds", "test loss"),
    ):
        assert trouble(figure) == []


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize(("variants", "domains"), SIZES)
def test_no_overlaps_and_methods_are_ordered(tmp_path: Path, variants: int, domains: int) -> None:
    found = read(write_tables(tmp_path, variants=variants, domains=domains))
    figure = compare_figures.losses(found, "test loss")
    assert trouble(figure) == []
    axis = figure.axes[0]
    low, high = axis.get_ylim()
    assert low > high  # the first is on top
    for label, one in zip(axis.get_yticklabels(), found, strict=True):
        start, _, end = label.get_text().replace(r"\$", "$").partition("…")
        assert one.name.startswith(start)
        assert one.name.endswith(end)
    assert means(axis) == [f"{one.mean:.4f}" for one in found]
    effects = standings.horizon_effects(found)
    assert len(effects) == {5: 0, 20: 4, 45: 12}[variants]
    if effects:
        assert trouble(compare_figures.horizons(effects, "test loss")) == []


def test_heights_grow_with_the_variants(tmp_path: Path) -> None:
    heights: list[float] = []
    for variants, _ in SIZES:
        (tmp_path / str(variants)).mkdir()
        found = read(write_tables(tmp_path / str(variants), variants=variants))
        heights.append(compare_figures.losses(found, "test loss").get_figheight())
    assert heights[1] - heights[0] > 2
    assert heights[2] - heights[1] == pytest.approx(25 * compare_figures.ROW)


def test_outliers_are_drawn_as_arrows() -> None:
    rows = [
        *uniform([2.0, 2.1]),
        *variant("a", [1.9, 1.95]),
        *variant("b", [2.2, 2.3]),
        *variant("c", [2.0, 2.05]),
        *variant("d", [9, 9.5]),
    ]
    found = standings.standings(rows)
    axis = compare_figures.losses(found, "test loss").axes[0]
    low, high = axis.get_xlim()
    assert (low, high) == pytest.approx((1.9 - 0.02, 2.3 + 0.02))
    arrows = [line for line in axis.lines if line.get_marker() == ">"]
    assert [up(line) for line in arrows] == [4]
    assert means(axis)[-1] == "9.2500"
    bars = [line for line in axis.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 2.2]
    assert [across(line) for line in bars] == pytest.approx([one.mean for one in found[:4]])
    assert [across(line) for line in axis.lines if line.get_linestyle() == "--"] == [2.05]  # uniform
    cloud = compare_figures.cost(found, "seconds", "test loss").axes[0]
    assert cloud.get_ylim() == (low, high)
    # A loss that is far below is what a reader looks for.
    better = standings.standings([*rows[:-2], *variant("d", [0.1, 0.2])])
    assert compare_figures.limits(better)[0] < 0.1
    same = standings.standings([*uniform([2.0, 2.0]), *variant("a", [2.0, 2.0])])
    assert compare_figures.limits(same) == pytest.approx((1.9, 2.1))


def test_bands_mark_methods_within_noise() -> None:
    axis = compare_figures.losses(standings.standings(FOUR), "test loss").axes[0]
    bands = [patch for patch in axis.patches if to_hex(patch.get_facecolor()) == compare_figures.BAND]
    assert [patch.get_y() + patch.get_height() / 2 for patch in bands] == [0, 1, 2]


def test_weights_in_cells_sum_to_100(tmp_path: Path) -> None:
    for domains, columns in ((3, 3), (8, 8), (60, 11)):
        (tmp_path / str(domains)).mkdir()
        found = read(write_tables(tmp_path / str(domains), domains=domains))
        table = compare._weights_table(found)
        assert len(table.columns) == columns + 1
        assert (table.columns[-1] == "50 others") == (domains == 60)
        numbers = np.array([list(map(float, row[1:])) for row in table.rows])
        assert numbers.sum(axis=1) == pytest.approx(np.full(5, 100), abs=0.05 * columns)
        assert [len(row) for row in table.shades] == [columns] * 5
        if domains == 60:  # those that are large somewhere
            shown = table.columns[1:-1]
            largest = {name: max(one.weights[name] for one in found) for name in names(60)}
            assert set(shown) == set(sorted(largest, key=largest.__getitem__)[-10:])
            assert list(shown) == [name for name in names(60) if name in shown]


def test_missing_domain_is_empty_cell() -> None:
    weights: list[Row] = [
        {"variant": "a", "seed": 0, "domain": "web", "average": 1.0},
        {"variant": "b", "seed": 0, "domain": "web", "average": 0.25},
        {"variant": "b", "seed": 0, "domain": "law", "average": 0.75},
    ]
    table = compare._weights_table(standings.standings([*variant("a", [1.0]), *variant("b", [2.0])], weights))
    assert table.rows == [["a", "100.0", ""], ["b", "25.0", "75.0"]]


def test_equal_costs_are_not_drawn() -> None:
    cheap = [*variant("a", [2.0], steps=100, compute=100.0), *uniform([2.1])]
    assert compare_figures.costs(standings.standings(cheap)) == ["seconds"]
    other = [*variant("a", [2.0], steps=50, compute=100.0, seconds=90.0), *uniform([2.1])]
    found = standings.standings(other)
    assert compare_figures.costs(found) == ["seconds", "steps"]
    assert compare_figures.cost(found, "seconds", "test loss").axes[0].get_xscale() == "log"
    dear = [
        *variant("a", [2.0], compute=300.0, budget=400),
        *(row | {"budget": 400} for row in uniform([2.1])),
    ]
    found = standings.standings(dear)
    assert compare_figures.costs(found) == ["seconds", "compute"]
    figure = compare_figures.cost(found, "compute", "test loss")
    assert trouble(figure) == []
    dotted = [
        across(line) for line in figure.axes[0].lines if len(set(line.get_xdata())) < len(line.get_xdata())
    ]
    assert dotted == [400]


@pytest.mark.parametrize("variants", [5, 20, 45])
def test_legend_names_best_and_baselines(tmp_path: Path, variants: int) -> None:
    found = read(write_tables(tmp_path, variants=variants))
    for name in ("seconds", "steps"):
        figure = compare_figures.cost(found, name, "test loss")
        assert trouble(figure) == []
        labels = named(figure)
        assert labels[0].startswith(found[0].name[:4])
        assert {"uniform", "proportional"} <= set(labels)
        assert len(labels) in (5, 6)
        assert (labels[-1] == f"{variants - len(labels) + 1} others") == (variants > 5)
        assert len(figure.axes[0].lines) == variants


def test_training_curves_show_best_and_baselines(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, variants=45)
    found = read(folder)
    rows = tables.read(folder / results.CURVES)
    made = compare_figures.curves(rows, found)
    shown = list(made)
    assert shown[:6] == [one.name for one in found[:6]]
    assert set(shown[6:]) <= {"uniform", "proportional"}
    assert {"uniform", "proportional"} <= set(shown)
    own = [row for row in rows if row["variant"] == shown[0]]
    last = [float(row["validation_loss"]) for row in own if row["step"] == own[-1]["step"]]
    assert made[shown[0]][1][-1] == pytest.approx(np.mean(last))
    assert made[shown[0]][0][-1] == 1000  # compute, not the steps of the last run
    offline = next(one for one in found if one.kind == "offline")
    assert compare_figures.curves(rows, [offline])[offline.name][0][0] == 600
    figure = compare_figures.over_training(made)
    assert trouble(figure) == []
    low, high = figure.axes[0].get_ylim()
    assert 1.9 < low < high < 3.0  # the initial drop, from 5.5, is outside
    # If one seed stopped early, the mean would jump.
    short = [row for row in own if not (row["seed"] == 0 and float(row["step"]) > 400)]
    assert max(compare_figures.curves(short, found)[shown[0]][0]) < 600


def test_outlier_has_no_curve(tmp_path: Path) -> None:
    folder = write_tables(tmp_path)
    found = read(folder)
    assert found[-1].mean > 9
    lines = compare_figures.curves(tables.read(folder / results.CURVES), found)
    assert list(lines) == [one.name for one in found[:-1]]


# ------------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize(
    ("variants", "domains", "seeds", "columns"), [(45, 60, 2, BOTH), (5, 3, 1, ("validation_loss",))]
)
def test_page_is_complete_and_self_contained(
    tmp_path: Path, variants: int, domains: int, seeds: int, columns: tuple[str, ...]
) -> None:
    folder = write_tables(tmp_path, variants=variants, domains=domains, seeds=seeds, columns=columns)
    written = compare.write_report(folder, tmp_path / "out")
    drawn = ["losses", "curves", *(["horizons"] if variants == 45 else []), "cost-seconds", "cost-steps"]
    assert [path.name for path in written] == [
        *(f"{name}.{kind}" for name in drawn for kind in ("png", "svg")),
        "report.html",
    ]
    assert all(path.stat().st_size > 1000 for path in written)
    page = written[-1].read_text(encoding="utf-8")
    told = html.unescape(page)
    rows, weights = tables.read(folder / results.RUNS), tables.read(folder / results.WEIGHTS)
    for cells in summary(standings.standings(rows, weights)):
        for cell in cells.values():
            assert f"<td>{cell}</td>" in told
    assert f"<p>{verdict(rows)}</p>" in told
    assert ("ean test loss" in told) == ("test_loss" in columns)
    found = standings.standings(rows)
    alts = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', page)
    assert len(alts) == page.count("<img") == len(drawn)
    assert f"Lowest: {found[0].name} {found[0].mean:.4f}," in html.unescape(alts[0][1])
    addresses = re.findall(r"""(?:src|href)=["']?([^"'\s>]+)|url\(([^)]+)\)|@import""", page)
    assert all(address.startswith("data:") for address, _ in addresses)
    for picture, _ in alts:
        svg = base64.b64decode(picture).decode()
        assert not re.search(r'href="(?!#)', svg)  # nor does a picture load anything


def test_variants_that_could_not_be_run_are_listed_with_the_reason(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, columns=("test_loss",))
    reason = "needs <lightgbm>: pip install 'mixwell[methods]'"
    tables.write(
        folder / results.FAILURES,
        [
            *({"variant": "regmix T=1", "seed": seed, "reason": reason} for seed in (0, 1)),
            {"variant": "doge", "seed": 2, "reason": "the loss is not finite"},
        ],
    )
    written = compare.write_report(folder, tmp_path / "out")
    assert "curves.png" not in [path.name for path in written]  # there is no validation loss to draw
    page = written[-1].read_text(encoding="utf-8")
    assert "<lightgbm>" not in page
    assert "alidation loss" not in page
    told = html.unescape(page)
    assert "Not all methods could be run" in told
    for seed in (0, 1):
        assert f"<tr><td>regmix T=1</td><td>{seed}</td><td>{reason}</td></tr>" in told
    assert "<tr><td>doge</td><td>2</td><td>the loss is not finite</td></tr>" in told


def test_folder_without_runs_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compare.csv has no runs; a report needs at least one"):
        compare.write_report(tmp_path, tmp_path)


def test_a_single_variant_has_a_page(tmp_path: Path) -> None:
    tables.write(tmp_path / results.RUNS, variant("a", [2.0]))
    environment.write(tmp_path)
    written = compare.write_report(tmp_path, tmp_path)
    assert [path.name for path in written] == [
        "losses.png",
        "losses.svg",
        "cost-seconds.png",
        "cost-seconds.svg",
        "report.html",
    ]
    assert "Comparison of 1 method" in written[-1].read_text(encoding="utf-8")
