"""Which rows are drawn."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mixwell
from mixwell.data.sampler import Sampler
from mixwell.data.shuffle import ShuffledCursor, shuffled
from mixwell.simplex.repetition import EpochCap


@settings(deadline=None)
@given(st.integers(1, 300), st.text(max_size=8))
def test_shuffle_is_a_permutation(size, key) -> None:
    assert sorted(shuffled(np.arange(size), size, key).tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 3000), st.text(max_size=8))
def test_several_orders_at_once_are_those_of_single_keys(size, key) -> None:
    order = shuffled(np.arange(size), size, key)
    assert shuffled(np.arange(size), size, "other", key)[size:].tolist() == order.tolist()


def test_all_orders_of_four_are_equally_frequent() -> None:
    """Chi-squared with 23 degrees of freedom; 60 is exceeded once in 30,000."""
    seen = Counter(tuple(shuffled(np.arange(4), 4, f"key {i}").tolist()) for i in range(2400))
    assert len(seen) == 24
    assert sum((n - 100) ** 2 / 100 for n in seen.values()) < 60


def test_shuffle_separates_neighbors() -> None:
    orders = [shuffled(np.arange(500), 500, f"key {i}") for i in range(60)]
    kept = np.mean([(np.abs(np.diff(order)) == 1).sum() for order in orders])
    assert 1.3 < kept < 2.7  # two are to be expected
    assert abs(np.mean([np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders])) < 0.02


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(0, 30), max_size=20))
def test_no_row_repeats_within_epoch(size, counts) -> None:
    cursor = ShuffledCursor(size, "any")
    taken = np.concatenate([cursor.take(count) for count in counts] or [np.empty(0, int)])
    assert cursor.taken == sum(counts)
    for begin in range(0, len(taken), size):
        epoch = taken[begin : begin + size].tolist()
        assert len(set(epoch)) == len(epoch)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 900), st.lists(st.integers(0, 30), max_size=10))
def test_cursor_resumes_from_any_position(size, before, counts) -> None:
    whole, later = ShuffledCursor(size, "any"), ShuffledCursor(size, "any", taken=before)
    whole.take(before)
    for count in counts:
        assert whole.take(count).tolist() == later.take(count).tolist()


@pytest.mark.parametrize("size", [1, 40, 3_000, 20_000, 10**6, 2**40])
def test_rows_do_not_depend_on_prefetching(size: int) -> None:
    cursor = ShuffledCursor(size, "any", taken=7)
    taken = np.concatenate([cursor.take(count) for count in (3, 900, 5_000, 1, 30_000, 200, 40_000)])
    for place in (7, 909, 5_910, 40_000, 76_000):
        epoch, first = divmod(place, size)
        expected = shuffled(np.array([first]), size, f"any, epoch {epoch}")
        assert taken[place - 7] == expected[0]
        cursor.taken = place  # back to it, as a loaded state does
        assert cursor.take(1)[0] == expected[0]


def weights(m: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.floats(1e-9, 1), min_size=m, max_size=m).map(lambda v: np.array(v) / sum(v))


@settings(deadline=None)
@given(st.data(), st.sampled_from(["weight", "equal"]))
def test_sampler_resumes_with_changing_weights(data, rule) -> None:
    sizes = {"a": 7, "b": 40, "c": 300}
    one, other = (Sampler(sizes, 16, rule=rule, seed=3) for _ in range(2))
    for w in data.draw(st.lists(weights(3), max_size=12)):
        one.draw(w)
    other.load_state(one.state())
    for w in data.draw(st.lists(weights(3), min_size=1, max_size=6)):
        drawn, again = one.draw(w), other.draw(w)
        assert {k: v.tolist() for k, v in drawn.items()} == {k: v.tolist() for k, v in again.items()}
        assert sum(len(v) for v in drawn.values()) == 16
        assert all(name in drawn for name in sizes)  # the default floor gives each a row


def test_counts_follow_changing_weights() -> None:
    sampler, w = Sampler({"a": 100, "b": 100}, 10, least=1), np.array([0.25, 0.75])
    assert sampler.shares(w).tolist() == pytest.approx([0.25, 0.75])
    w[:] = [0.5, 0.5]  # in place
    assert sampler.shares(w).tolist() == pytest.approx([0.5, 0.5])
    sampler.shares(w)[:] = 7.0
    sampler.inclusion(w)["a"] = 7.0
    assert sampler.shares(w).tolist() == pytest.approx([0.5, 0.5])
    assert sampler.inclusion(w) == {}


def test_equal_counts_do_not_follow_the_weights() -> None:
    sampler = Sampler({"a": 100, "b": 100, "c": 100}, 9, rule="equal")
    assert [len(rows) for rows in sampler.draw(np.array([0.98, 0.01, 0.01])).values()] == [3, 3, 3]


@settings(deadline=None)
@given(weights(6))
def test_domains_appear_with_stated_probability(w) -> None:
    sizes = dict.fromkeys("abcdef", 50)
    sampler = Sampler(sizes, 3)
    said = sampler.inclusion(w)
    batches = 400
    seen = Counter(name for _ in range(batches) for name in sampler.draw(w))
    for name in sizes:
        assert abs(seen[name] - batches * said.get(name, 1.0)) <= 1 + 1e-6


def test_epoch_cap_is_never_exceeded() -> None:
    sizes = {"small": 40, "large": 10_000}
    cap = EpochCap(sizes, {"small": 2.0}, batch_size=8, budget=100)
    sampler = Sampler(sizes, 8, least=1, cap=cap)
    late = 0
    for step in range(100):
        drawn = sampler.draw(np.array([0.5, 0.5]))
        assert sum(len(rows) for rows in drawn.values()) == 8
        late += step >= 90 and "small" in drawn
    assert sampler.taken["small"] <= 80
    assert late  # its rows are spread over the run


def test_too_few_rows_for_budget_raise_before_run() -> None:
    with pytest.raises(
        ValueError, match="need 1,000 rows, but with their caps on epochs the domains give 150"
    ):
        EpochCap({"a": 100, "b": 50}, 1, batch_size=10, budget=100)


def test_state_of_other_data_raises() -> None:
    state = Sampler({"a": 10}, 2).state()
    with pytest.raises(ValueError, match="rows by domain were {'a': 10}, are {'a': 11}"):
        Sampler({"a": 11}, 2).load_state(state)


def test_loader_follows_mixer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    rows = {name: (torch.randn(40, 3), torch.randn(40, 1)) for name in "abc"}
    mixer = mixwell.Mixer(model, torch.optim.SGD(model.parameters(), lr=0.1), tuple(rows), budget=20)
    loader = mixwell.MixtureLoader(rows, 12)
    seen = 0
    for batch in loader.follow(mixer):
        seen += len(batch)
        for part in batch.by_domain():
            inputs, targets = part.rows
            with mixer.domain(part):
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model(torch.ones(4, 3)).square().mean().backward()
    assert mixer.steps_done == 20
    assert seen == 240


def test_mixed_batch_matches_batches_by_domain() -> None:
    rows = {"a": torch.arange(30), "b": torch.arange(100, 150)}
    one, other = (mixwell.MixtureLoader(rows, 10, seed=4) for _ in range(2))
    w = np.array([0.6, 0.4])
    for _ in range(7):
        [whole] = one.next_step(w)
        batch, labels = whole.rows, whole.labels
        parts = {part.domain: part.rows for part in other.next_step(w)[0].by_domain()}
        assert torch.equal(batch, torch.cat(list(parts.values())))
        assert torch.equal(batch[labels == 1], parts["b"])
        assert (batch[labels == 0] < 100).all()


def test_loader_matches_domains_by_name() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = mixwell.Mixer(model, optimizer, ["web", "code"], budget=10, weights={"web": 9, "code": 1})
    loader = mixwell.MixtureLoader({"code": torch.zeros(50), "web": torch.zeros(50)}, 10, least=0)
    assert next(loader.follow(mixer)).counts == {"web": 9, "code": 1}
    with pytest.raises(ValueError, match="the loader has the domains web, books, the mixer web, code"):
        next(mixwell.MixtureLoader({"web": torch.zeros(5), "books": torch.zeros(5)}, 2).follow(mixer))


def test_list_rows_and_text_columns() -> None:
    class Pair(NamedTuple):
        number: int
        text: str

    loader = mixwell.MixtureLoader({"a": [torch.full((3,), i) for i in range(20)]}, 6)
    assert loader.next_step(np.ones(1))[0].rows.shape == (6, 3)
    loader = mixwell.MixtureLoader({name: [Pair(i, f"{name}{i}") for i in range(20)] for name in "ab"}, 6)
    [made] = loader.next_step(np.array([0.5, 0.5]))
    batch, labels = made.rows, made.labels
    assert isinstance(batch, Pair)
    assert [text[0] for text in batch.text] == ["ab"[label] for label in labels.tolist()]
    assert [int(text[1:]) for text in batch.text] == batch.number.tolist()


def test_loader_respects_epoch_cap() -> None:
    rows = {"few": torch.arange(10), "many": torch.arange(500)}
    cap = EpochCap({name: len(one) for name, one in rows.items()}, {"few": 2}, batch_size=8, budget=30)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = mixwell.Mixer(model, optimizer, list(rows), budget=30, constraints=[cap])
    loader = mixwell.MixtureLoader(rows, 8, cap=cap)
    for batch in loader.follow(mixer):
        for part in batch.by_domain():
            with mixer.domain(part):
                model(torch.ones(1, 1)).square().mean().backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model(torch.ones(1, 1)).square().mean().backward()
    assert mixer.steps_done == 30
    assert loader.sampler.taken == {"few": 20, "many": 220}


SIZES = {
    "few": {"a": 1, "b": 7, "c": 40, "d": 300},
    "many": {"a": 5_000, "b": 70_000, "c": 1_000_000, "d": 2**40},
    "16": {f"domain {i}": 10 + 37 * i**3 for i in range(16)},
}


@pytest.mark.parametrize(
    ("sizes", "batch", "rule", "capped", "expected"),
    [
        ("few", 16, "weight", False, "77cdf4820f9b1523"),
        ("few", 32, "weight", True, "1ed1995d7188fdff"),
        ("many", 256, "weight", False, "c98b07d5f4bfa1cc"),
        ("many", 24, "equal", False, "044d662470f13c76"),
        ("16", 5, "weight", False, "4b0500a1c8b82ef7"),
        ("16", 32, "weight", True, "44d19607c26b6267"),
    ],
)
def test_rows_of_a_seed_are_golden(sizes, batch, rule, capped, expected) -> None:
    """A run that is resumed with a later version goes on with the rows it would have had."""
    rows, steps = SIZES[sizes], 60
    caps = dict.fromkeys(list(rows)[: len(rows) // 2], 4.0)
    cap = EpochCap(rows, caps, batch_size=batch, budget=steps) if capped else None
    sampler = Sampler(rows, batch, rule=rule, cap=cap, seed=11)
    rng, seen = np.random.default_rng(5), hashlib.blake2b(digest_size=8)
    w = np.empty(0)
    for step in range(steps):
        if step % 7 == 0:
            w = rng.dirichlet(np.full(len(rows), 0.5)) + 1e-12
            rng.integers(len(rows))
            rng.random()
        drawn = {name: chosen.tolist() for name, chosen in sampler.draw(w).items()}
        seen.update(json.dumps(drawn).encode())
    assert seen.hexdigest() == expected
