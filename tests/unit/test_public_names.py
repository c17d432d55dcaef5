"""What `import mixwell` promises."""

from __future__ import annotations

import subprocess
import sys

import mixwell

PUBLIC = {
    "Cap", "ConstantWeights", "Constraint", "Curvature", "DenseTraces", "DeterministicHorizon", "DomainBatch",
    "EpochCap", "EpochPace", "ExactCurvature", "Fidelity", "FixedHorizon", "Floor", "ForwardModeTraces",
    "Horizon", "Hypergradient", "IsotropicCurvature", "MirrorDescent", "Mixer", "MixtureBatch",
    "MixtureDataset", "MixtureLoader", "PriorPull", "Probes", "ProjectedDescent", "ProjectedTraces",
    "RoundRecord", "Signal", "SketchedTraces", "SoftmaxWeights", "StochasticHorizon", "Traces",
    "UniformSmoothing", "Update", "Weights", "__version__", "measure_fidelity", "train",
}  # fmt: skip


def test_public_names() -> None:
    assert set(mixwell.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(mixwell, name) is not None


def imported_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print('\\n'.join(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_package_and_command_line_import_fast() -> None:
    assert "torch" not in imported_by("import mixwell.cli, mixwell.training.template")
    assert not {"torch", "numpy", "rich"} & imported_by(
        "from mixwell.cli import app; app(['run', '--help'], standalone_mode=False)"
    )
    assert not {"matplotlib", "transformers", "pandas", "ray"} & imported_by(
        "import mixwell, mixwell.lab.compare.command; mixwell.Mixer"
    )
