"""Every wrong use gets one clear message."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mixwell
from helpers.toy_problems import GivenCurvature, Point, mse, names, regression_batches, train, two_layer


def make(model: nn.Module | None = None, domains: list[str] | None = None, **settings) -> mixwell.Mixer:
    model = model or two_layer(0)
    settings.setdefault("horizon", 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mixwell.Mixer(model, optimizer, domains or names(3), **settings)


def give(mixer: mixwell.Mixer, model: nn.Module, name: str, **settings) -> None:
    batches, _ = regression_batches(0, steps=1)
    with mixer.domain(name, **settings):
        mse(model, batches[0].get(name, batches[0]["d0"])).backward()


WRONG_SETTINGS = {
    r"different names; repeated: web": {"domains": ["web", "code", "web"]},
    r"non-empty list of names, got 'web'": {"domains": "web"},
    r"non-empty string, got ''": {"domains": ["web", ""]},
    r"the name 'validation' is taken": {"domains": ["web", "validation"]},
    r"must be positive and finite, got \{'d1': 0\.0\}; leave a domain out": {"weights": [0.5, 0.0, 0.5]},
    r"must be positive and finite, got \{'d2': -0\.1\}": {"weights": {"d0": 1, "d1": 1, "d2": -0.1}},
    r"must be positive and finite, got \{'d0': nan\}": {"weights": [float("nan"), 1, 1]},
    r"expected 3 initial weights, one per domain, got shape \(2,\)": {"weights": [0.5, 0.5]},
    r"missing: \['d2'\], unknown: \['d9'\]": {"weights": {"d0": 1, "d1": 1, "d9": 1}},
    r"the horizon of 20 steps \(FixedHorizon\(steps=20\)\) exceeds the budget of 10": {
        "horizon": 20,
        "budget": 10,
    },
    r"whole number of at least 1 step, got 0": {"horizon": 0},
    r"whole number of at least 1 step, got 2.5": {"horizon": 2.5},
    r"follows from the number of training steps; give budget=": {"horizon": None},
    r"budget must be a whole number of at least 1 training step, got 0": {"budget": 0},
    r"a warmup of 10 steps leaves no step of the budget of 10": {"warmup": 10, "budget": 10},
    r"warmup must be a whole number of steps, not negative, got -1": {"warmup": -1},
    r"step size of the weights must be positive and finite, got -1": {"update": -1.0},
    r"clip_norm must be positive and finite, got 0": {"clip_norm": 0.0},
    r"on_nonfinite must be 'raise' or 'skip', got 'zero'": {"on_nonfinite": "zero"},
    r"the floors of 3 domains sum to 1.2, more than 1": {"constraints": [mixwell.Floor(0.4)]},
    r"the caps of 3 domains sum to 0.9, less than 1": {"constraints": [mixwell.Cap(0.3)]},
    r"floor names unknown domains \['sea'\]": {"constraints": [mixwell.Floor({"sea": 0.1})]},
    r"floor above cap for d0": {"constraints": [mixwell.Floor({"d0": 0.5}), mixwell.Cap({"d0": 0.4})]},
}


@pytest.mark.parametrize("message", WRONG_SETTINGS)
def test_invalid_settings_raise(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**WRONG_SETTINGS[message])


@pytest.mark.parametrize(
    ("message", "curvature"),
    [
        (r"curvature gamma must be finite and not negative, got -1", lambda: mixwell.IsotropicCurvature(-1)),
        (r"no parameter is named like \['y'\]", lambda: mixwell.DenseTraces(only=["y"])),
        (r"no parameter is selected", lambda: mixwell.ProjectedTraces(only=lambda name: False)),
        (r"dtype must be torch.bfloat16, or None", lambda: mixwell.DenseTraces(dtype=torch.float16)),
        (r"size of at least 1, got 0", lambda: mixwell.SketchedTraces(0)),
    ],
)
def test_invalid_components_raise(message: str, curvature) -> None:
    def build() -> mixwell.Mixer:
        part = curvature()
        if isinstance(part, mixwell.Traces):
            return make(signal=mixwell.Hypergradient(traces=part))
        return make(signal=mixwell.Hypergradient(part))

    with pytest.raises(ValueError, match=message):
        build()


def test_exact_curvature_requirements() -> None:
    with pytest.raises(ValueError, match="ExactCurvature needs ForwardModeTraces"):
        mixwell.Hypergradient(mixwell.ExactCurvature(), mixwell.DenseTraces())
    model = two_layer(0)
    mixer = make(model, signal=mixwell.Hypergradient(mixwell.ExactCurvature()))
    with pytest.raises(ValueError, match=r"'d0': call loss.backward\(create_graph=True\)"):
        give(mixer, model, "d0")


def test_optimizer_of_other_model_raises() -> None:
    with pytest.raises(ValueError, match="no parameter of the model"):
        mixwell.Mixer(two_layer(0), torch.optim.SGD(two_layer(1).parameters(), lr=0.1), names(3), horizon=2)


def test_unknown_domain_raises() -> None:
    model = two_layer(0)
    with pytest.raises(ValueError, match="unknown domain 'sea'; the domains are d0, d1, d2"):
        give(make(model), model, "sea")


def test_repeated_domain_raises() -> None:
    model = two_layer(0)
    mixer = make(model)
    give(mixer, model, "d1")
    with pytest.raises(ValueError, match=r"'d1' is given twice in step 0: its fractions sum to 2"):
        give(mixer, model, "d1")
    with pytest.raises(ValueError, match=r"fraction of a batch must be in \(0, 1\], got 0 for 'd0'"):
        give(mixer, model, "d0", fraction=0)


def test_missing_domain_or_fraction_raises() -> None:
    model = two_layer(0)
    mixer = make(model)
    give(mixer, model, "d0")
    give(mixer, model, "d2")
    with pytest.raises(ValueError, match=r"domain 'd1' is missing in step 0: .*DomainBatch"):
        mixer.step()
    give(mixer, model, "d1", fraction=0.5)
    with pytest.raises(ValueError, match=r"fractions of domain 'd1' in step 0 sum to 0\.5, not 1"):
        mixer.step()
    give(mixer, model, "d1", fraction=0.5)
    mixer.step()


def test_domain_without_gradient_raises() -> None:
    model = two_layer(0)
    mixer = make(model)
    with (
        pytest.raises(ValueError, match=r"'d0' left no gradient .*call loss.backward\(\)"),
        mixer.domain("d0"),
    ):
        pass
    give(mixer, model, "d0")  # the failed block does not count


def test_empty_batch_names_its_domain() -> None:
    model = two_layer(0)
    mixer = make(model)
    nothing = (torch.empty(0, 6, dtype=torch.float64), torch.empty(0, 4, dtype=torch.float64))
    with (
        pytest.raises(
            FloatingPointError, match=r"non-finite loss \(nan\) in 'd1' at step 0; it was not used"
        ),
        mixer.domain("d1") as scope,
    ):
        loss = mse(model, nothing)  # the mean of nothing; PyTorch gives it a gradient of zeros
        scope.record_loss(loss)
        loss.backward()


def test_nonfinite_gradient_names_domain_and_is_not_added() -> None:
    model = two_layer(0)
    mixer = make(model, horizon=3)
    batches, validation = regression_batches(0, steps=2)
    train(mixer, model, batches[:1], validation)
    before = {name: t.clone() for name, t in mixer.state_dict()["tensors"].items()}
    x, y = batches[1]["d0"]
    with (
        pytest.raises(FloatingPointError, match=r"gradient of parameter 0.weight in 'd0' at step 1"),
        mixer.domain("d0"),
    ):
        mse(model, (x * torch.nan, y)).backward()
    for name, value in mixer.state_dict()["tensors"].items():
        assert torch.equal(value, before[name])
    train(mixer, model, batches[1:], validation)  # the run can go on with another batch


def test_nonfinite_recorded_loss_raises() -> None:
    model = two_layer(0)
    mixer = make(model)
    with (
        pytest.raises(FloatingPointError, match=r"non-finite loss \(inf\) in 'd0' at step 0"),
        mixer.domain("d0") as scope,
    ):
        loss = mse(model, regression_batches(0, steps=1)[0][0]["d0"])
        scope.record_loss(loss + torch.inf)  # its gradient is finite
        loss.backward()


def test_huge_but_finite_gradients_are_accepted() -> None:
    model = Point(torch.zeros(3))
    mixer = make(model, names(1), horizon=1)
    with mixer.domain("d0"):
        (model.theta * 3e38).sum().backward()  # their sum overflows
    mixer.step()


def test_overflowing_norm_with_clipping() -> None:
    model = Point(torch.zeros(3))
    for policy in ("raise", "skip"):
        mixer = make(model, names(1), horizon=1, clip_norm=1.0, on_nonfinite=policy)
        with mixer.domain("d0"):
            (model.theta * 1e30).sum().backward()
        if policy == "raise":
            with pytest.raises(
                FloatingPointError, match="norm of the combined gradient overflowed at step 0"
            ):
                mixer.step()
            assert model.theta.grad is None
        else:
            with pytest.warns(UserWarning, match="overflowed"):
                mixer.step()
            assert torch.equal(model.theta, torch.zeros(3))
            assert mixer.skipped == {"combined gradient": 1}


def test_calls_out_of_order_raise() -> None:
    model = two_layer(0)
    mixer = make(model)
    batches, validation = regression_batches(0, steps=2)
    not_due = r"no validation gradient is due \(step 0, round 0.*only where mixer.validation_due is true"
    with pytest.raises(RuntimeError, match=not_due), mixer.validation():
        pass
    with pytest.raises(RuntimeError, match="'d1' was called inside the `with` block of 'd0'"):
        with mixer.domain("d0"), mixer.domain("d1"):
            pass
    with pytest.raises(RuntimeError, match=r"mixer.step\(\) was called inside the `with` block of 'd0'"):
        with mixer.domain("d0"):
            mixer.step()
    for step in batches:
        for name, batch in step.items():
            with mixer.domain(name):
                mse(model, batch).backward()
        mixer.step()
    assert mixer.validation_due
    due = r"a validation gradient is due after step 2: .*`with mixer.validation\(\):`"
    with pytest.raises(RuntimeError, match=due):
        give(mixer, model, "d0")
    with pytest.raises(RuntimeError, match=due):
        mixer.step()
    with pytest.raises(RuntimeError, match=due), mixer.batch(["d0"]):
        pass
    with mixer.validation(fraction=0.5):
        mse(model, validation).backward()
    assert mixer.validation_due
    assert mixer.round_ended is None
    with pytest.raises(
        RuntimeError, match=r"due after step 2 \(fractions that sum to 0\.5 of 1 were given\)"
    ):
        mixer.step()
    with (
        pytest.raises(ValueError, match="'validation' is given twice in step 2"),
        mixer.validation(fraction=0.6),
    ):
        pass
    with mixer.validation(fraction=0.5):
        mse(model, validation).backward()
    assert mixer.round_ended is mixer.rounds[0]
    not_due = r"no validation gradient is due \(step 2, round 1"
    with pytest.raises(RuntimeError, match=not_due), mixer.validation():
        pass


def test_validation_is_never_due_without_requirement() -> None:
    model = two_layer(0)
    mixer = make(model, signal=mixwell.ConstantWeights())
    batches, validation = regression_batches(0, steps=2)
    train(mixer, model, batches, validation)
    assert not mixer.validation_due
    assert len(mixer.rounds) == 1
    with pytest.raises(RuntimeError, match="needs no validation gradient; .*mixer.validation_due"):
        with mixer.validation():
            pass


def test_stray_gradients_raise() -> None:
    model = two_layer(0)
    mixer = make(model)
    batches, _ = regression_batches(0, steps=1)
    mse(model, batches[0]["d0"]).backward()
    with pytest.raises(RuntimeError, match="parameter 0.weight has a gradient before the block of 'd0'"):
        give(mixer, model, "d0")
    model.zero_grad(set_to_none=False)  # zeros do no harm
    give(mixer, model, "d0")


def test_exception_in_block_leaves_no_gradient() -> None:
    model = two_layer(0)
    mixer = make(model)
    batches, _ = regression_batches(0, steps=1)
    with pytest.raises(KeyError, match="user"), mixer.domain("d0"):
        mse(model, batches[0]["d0"]).backward()
        raise KeyError("user")
    assert all(p.grad is None for p in model.parameters())
    give(mixer, model, "d0")


def test_sparse_gradients_raise_with_name() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    mixer = make(model, names(1))
    with pytest.raises(ValueError, match="parameter weight has a sparse gradient"), mixer.domain("d0"):
        model(torch.tensor([1, 2])).sum().backward()


def test_unknown_optimizer_warns_once_and_uses_lr() -> None:
    class Strange(torch.optim.Optimizer):
        def __init__(self, params, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad)

    scores = []
    for kind in (Strange, torch.optim.SGD):
        model = Point(torch.tensor([1.0, 2.0]))
        optimizer = kind(model.parameters(), lr=0.1)
        settings = {"horizon": 2, "update": 1.0}
        if kind is Strange:
            with pytest.warns(UserWarning, match="does not know the optimizer Strange") as warned:
                mixer = mixwell.Mixer(model, optimizer, names(2), **settings)
            assert len(warned) == 1
        else:
            mixer = mixwell.Mixer(model, optimizer, names(2), **settings)
        for _ in range(2):
            for index in range(2):
                with mixer.domain(f"d{index}"):
                    model.theta[index].square().backward()
            mixer.step()
        with mixer.validation():
            model.theta.square().sum().backward()
        scores.append(list(mixer.rounds[-1].scores.values()))
    assert scores[0] == scores[1]


def test_adam_subclass_with_own_step_is_unknown() -> None:
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = two_layer(0)
    with pytest.warns(UserWarning, match="does not know the optimizer Mine"):
        mixwell.Mixer(model, Mine(model.parameters(), lr=0.1), names(2), horizon=2)


def test_unsupported_setups_raise_before_training() -> None:
    model = two_layer(0)
    sketched = mixwell.Hypergradient(GivenCurvature({"0.weight": 1.0}), mixwell.SketchedTraces(16))
    with pytest.raises(ValueError, match="sketched traces need one decay per parameter group"):
        make(model, signal=sketched, warmup=100)
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    sketched = mixwell.Hypergradient(traces=mixwell.SketchedTraces(16))
    with pytest.raises(ValueError, match="AdamW instead of Adam with weight decay"):
        mixwell.Mixer(model, adam, names(3), horizon=2, signal=sketched)
    carried = mixwell.Hypergradient(traces=mixwell.ForwardModeTraces())
    amsgrad = torch.optim.Adam(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="do not differentiate amsgrad"):
        mixwell.Mixer(model, amsgrad, names(3), horizon=2, signal=carried)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss within a step"):
        mixwell.Mixer(model, torch.optim.LBFGS(model.parameters()), names(3), horizon=2)


def test_changed_momentum_raises() -> None:
    model = two_layer(0)
    mixer = make(model, signal=mixwell.Hypergradient(traces=mixwell.ForwardModeTraces()))
    mixer._optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="momentum was switched on after the mixer was made"):
        give(mixer, model, "d0")


def test_added_parameters_raise() -> None:
    model = nn.ModuleDict({"a": two_layer(0), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    mixer = mixwell.Mixer(model, optimizer, names(1), horizon=2)
    optimizer.add_param_group({"params": list(model["b"].parameters())})
    give(mixer, model["a"], "d0")
    with pytest.raises(RuntimeError, match="the optimizer has 6 parameters, but had 4"):
        mixer.step()


def test_signal_cannot_be_shared_by_mixers() -> None:
    signal = mixwell.Hypergradient()
    make(signal=signal)
    with pytest.raises(ValueError, match="in use by another mixer"):
        make(signal=signal)


def test_invalid_recorded_loss_raises() -> None:
    model = two_layer(0)
    mixer = make(model)
    with pytest.raises(ValueError, match=r"record_loss takes the mean loss or the losses of rows; got none"):
        with mixer.domain("d0") as scope:
            scope.record_loss(torch.zeros(0))
    with pytest.raises(ValueError, match=r"shape \(2,\), those of the reference model \(3,\)"):
        with mixer.domain("d0") as scope:
            scope.record_loss(torch.zeros(2), reference=torch.zeros(3))
    with mixer.domain("d0") as scope:  # plain numbers will do
        loss = mse(model, regression_batches(0, steps=1)[0][0]["d0"])
        scope.record_loss(loss.item())
        loss.backward()


def test_overflowing_hypergradient_can_be_skipped() -> None:
    model = Point(torch.tensor([1.0, 1.0], dtype=torch.float64))
    for policy in ("raise", "skip"):
        mixer = mixwell.Mixer(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-200),
            names(2),
            horizon=1,
            on_nonfinite=policy,
        )
        for name in names(2):
            with mixer.domain(name):
                (model.theta[0] * 1e308).backward()
        mixer._optimizer.param_groups[0]["lr"] = 1e-200
        mixer.step()
        if policy == "raise":
            with pytest.raises(FloatingPointError, match="score of d0, d1 overflowed in round 0"):
                with mixer.validation():
                    (model.theta[0] * 1e305).backward()
        else:
            with pytest.warns(UserWarning, match="overflowed"), mixer.validation():
                (model.theta[0] * 1e305).backward()
            record = mixer.rounds[-1]
            assert record.scores == {}
            assert record.points == 0
            assert mixer.weights.values == pytest.approx(0.5)
