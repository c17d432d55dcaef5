"""The MNIST experiment: its data, its runs and their results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mixwell.lab.mnist.curves import curves_of, verdict
from mixwell.lab.mnist.experiment import (
    NOISY,
    ROTATED,
    VALIDATION,
    VANILLA,
    Domains,
    MnistResult,
    MnistSettings,
    build,
    rotate,
    train,
    with_wrong_labels,
)
from mixwell.lab.mnist.mnist_data import Mnist
from mixwell.lab.mnist.sweep import Results, default_horizons, name_of, settings_of
from mixwell.training.engines import StoppedError

TINY = MnistSettings(budget=7, horizon=3, seed=0, channels=2, batch_size=4, train_size=50, validation_size=40)


@pytest.fixture(scope="module")
def images() -> Mnist:
    """Random pictures in the shape of MNIST."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.randint(0, 256, (count, 28, 28), generator=generator).to(torch.uint8)
        return pixels, torch.randint(0, 10, (count,), generator=generator)

    return Mnist(*part(300), *part(100))


def test_rotation_is_counterclockwise() -> None:
    image = torch.zeros(1, 1, 28, 28)
    image[0, 0, 13:15, 24:27] = 1.0  # a mark at the right ...
    turned = rotate(image, torch.tensor([90.0]))
    assert turned[0, 0, 1:4, 13:15].min() > 0.99  # ... is at the top after a quarter turn
    assert turned.sum() == pytest.approx(image.sum().item(), rel=1e-4)
    torch.testing.assert_close(rotate(image, torch.tensor([0.0])), image)


def test_noise_rate_is_fraction_of_wrong_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (20_000,), generator=generator)
    for rate in (0.0, 0.5, 1.0):
        wrong = (with_wrong_labels(labels, rate, generator) != labels).float().mean().item()
        assert wrong == pytest.approx(rate, abs=0.015)
    replaced = with_wrong_labels(torch.zeros(20_000, dtype=torch.long), 1.0, generator)
    shares = torch.bincount(replaced, minlength=10) / 20_000
    assert shares[0] == 0
    assert shares[1:].min() > 0.09


def test_domains_are_disjoint_and_streams_independent(images: Mnist) -> None:
    one, other = Domains(images, TINY), Domains(images, TINY)
    for _ in range(3):
        other.draw(VALIDATION)
        other.draw(NOISY)
    for a, b in zip(one.draw(ROTATED), other.draw(ROTATED), strict=True):
        assert torch.equal(a, b)
    sets = [{tuple(x.flatten().tolist()[:50]) for x in one._pixels[n]} for n in (VANILLA, ROTATED, NOISY)]
    assert all(len(s) == 50 for s in sets)
    assert len(set.union(*sets)) == 150
    validation, rest = one.validation(), one.test()
    assert (len(validation[1]), len(rest[1])) == (40, 60)


def test_rotated_images_get_new_angle_per_draw(images: Mnist) -> None:
    domains = Domains(images, replace(TINY, train_size=1))
    pixels, _ = domains.draw(ROTATED, 2)
    assert not torch.equal(pixels[0], pixels[1])
    pixels, _ = domains.draw(VANILLA, 2)
    assert torch.equal(pixels[0], pixels[1])


def run(settings: MnistSettings, images: Mnist, **options: Any) -> MnistResult:
    return train(*build(settings), Domains(images, settings), budget=settings.budget, **options)


def test_run_reports_steps_stops_and_is_deterministic(images: Mnist) -> None:
    steps: list[int] = []
    whole = run(TINY, images, report=steps.append)
    assert steps == list(range(1, TINY.budget + 1))
    assert [step for step, _ in whole.history] == [0, 3, 7]
    with pytest.raises(StoppedError):
        run(TINY, images, stopping=lambda: True)
    assert replace(run(TINY, images), seconds=0.0) == replace(whole, seconds=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 8}, "at most the budget of 7"),
        ({"horizon": 0}, "horizon must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"noise_rate": 1.5}, "noise_rate must be between 0 and 1"),
        ({"train_size": 20_001}, "60,000 training images"),
        ({"validation_size": 10_001}, "10,000 test images"),
        ({"rotation": float("nan")}, "rotation must be finite"),
    ],
)
def test_invalid_settings_raise(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_default_horizons_include_theoretical() -> None:
    assert default_horizons(1000) == [1, 2, 5, 10, 20, 50, 84, 100, 200, 500, 1000]
    assert default_horizons(5000) == [1, 2, 5, 10, 20, 50, 100, 207, 500, 1000, 2000, 5000]
    assert default_horizons(1) == [1]


def test_names_depend_on_settings() -> None:
    settings = [TINY, replace(TINY, seed=1), replace(TINY, rotation=30.0), replace(TINY, noise_rate=0.1)]
    assert len({name_of(setting) for setting in settings}) == 4


def test_results_are_saved_once_and_read_back(images: Mnist, tmp_path: Path) -> None:
    settings = settings_of(
        budgets=[4],
        horizons=[1, 4, 9],
        batch_sizes=[4],
        seeds=2,
        channels=2,
        train_size=50,
        validation_size=40,
    )
    assert [(s.horizon, s.seed) for s in settings] == [(1, 0), (4, 0), (1, 1), (4, 1)]
    results = Results(tmp_path)
    outcomes = {setting: run(setting, images) for setting in settings}
    for setting in (settings[2], settings[0]):
        results.add(setting, outcomes[setting])
    again = Results(tmp_path)
    assert again.missing(settings) == [settings[1], settings[3]]
    (tmp_path / "runs.csv").write_text((tmp_path / "runs.csv").read_text().splitlines()[0] + "\n")
    cut = Results(tmp_path)  # as after a crash between the two tables
    cut.add(settings[0], outcomes[settings[0]])
    cut.add(settings[2], outcomes[settings[2]])
    assert cut.weights == again.weights
    row = next(r for r in again.runs if r["run"] == name_of(settings[0]))
    assert row["validation_loss"] == outcomes[settings[0]].validation_loss
    assert row["last_rotated"] == outcomes[settings[0]].last["rotated"]
    for setting in again.missing(settings):
        again.add(setting, outcomes[setting])
    (curve,) = curves_of(Results(tmp_path).runs)
    assert (curve.horizons, curve.seeds, curve.theory) == ([1, 4], 2, 3)
    losses = [outcomes[s].validation_loss for s in settings if s.horizon == 4]
    assert curve.mean("validation_loss")[1] == pytest.approx(sum(losses) / 2)
    assert curve.deviation("validation_loss")[1] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    assert "N = 4" in verdict(curve)


def test_curve_labels_show_differing_settings(images: Mnist, tmp_path: Path) -> None:
    results = Results(tmp_path)
    for changes in ({}, {"rotation": 30.0}, {"rotation": 30.0, "batch_size": 8}):
        setting = replace(TINY, **changes)
        results.add(setting, run(setting, images))
    labels = [curve.label for curve in curves_of(results.runs)]
    assert labels == [
        "c = 2, batch 4, rotation 90",
        "c = 2, batch 4, rotation 30",
        "c = 2, batch 8, rotation 30",
    ]


def test_runs_with_other_validation_sets_are_other_curves(images: Mnist, tmp_path: Path) -> None:
    results = Results(tmp_path)
    for angle in (45.0, 30.0):
        setting = replace(TINY, validation_angle=angle)
        results.add(setting, run(setting, images))
    curves = curves_of(results.runs)
    assert [curve.label for curve in curves] == [
        "c = 2, batch 4, validation angle 45",
        "c = 2, batch 4, validation angle 30",
    ]
    assert [curve.seeds for curve in curves] == [1, 1]


def test_missing_runs_or_horizons_raise() -> None:
    with pytest.raises(ValueError, match="no finished runs"):
        curves_of([])
    with pytest.raises(ValueError, match="within a budget of"):
        settings_of(budgets=[4], horizons=[9], batch_sizes=[4], seeds=1)
    with pytest.raises(ValueError, match="at least 1 seed"):
        settings_of(budgets=[4], horizons=None, batch_sizes=[4], seeds=0)
