"""Config files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from helpers.text_configs import write_config
from mixwell.data.sources.arrays import PythonSourceConfig
from mixwell.data.sources.base import SOURCES
from mixwell.data.sources.text import TextFilesConfig
from mixwell.training import config_io, template
from mixwell.training.config import BatchConfig, Config, OutputConfig, mixer_section
from mixwell.training.constraints import CONSTRAINTS
from mixwell.training.logging.base import LOGGERS
from mixwell.training.models.base import MODELS
from mixwell.training.optimization import OPTIMIZERS
from mixwell.training.parallel import ParallelConfig

SMALL = {"domains": {"a": "a.txt", "b": ["x", "y"]}, "validation": {"files": "v.txt"}}


def test_config_round_trip(tmp_path: Path) -> None:
    config = config_io.read_config(
        write_config(tmp_path),
        ["optimizer.clip_norm=null", "mixer.floor={letters: 0.1}", "model.dropout=0.2", "precision=bfloat16"],
    )
    assert config.optimizer.clip_norm is None
    config_io.write_config(config, tmp_path / "elsewhere" / "config.yaml")
    assert config_io.read_config(tmp_path / "elsewhere" / "config.yaml") == config


def test_toml_equals_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**SMALL, "steps": 7}))
    (tmp_path / "c.toml").write_text(
        'steps = 7\n[domains]\na = "a.txt"\nb = ["x", "y"]\n[validation]\nfiles = "v.txt"\n'
    )
    assert config_io.read_config(tmp_path / "c.yaml") == config_io.read_config(tmp_path / "c.toml")


def test_template_comments_match_defaults(tmp_path: Path) -> None:
    template.write_template(tmp_path / "mixwell.yaml")
    text = (tmp_path / "mixwell.yaml").read_text()
    given = config_io.read_config(tmp_path / "mixwell.yaml")
    assert set(given.domains) == {"web", "code", "books"}
    shown, changed = [], []
    for line in text.splitlines():
        key, colon, value = line.lstrip("# ").partition(":")
        setting = colon and key.isidentifier() and (value.strip() or key in ("output", "loggers"))
        if line.lstrip().startswith("#") and setting and key not in ("test", "name"):
            shown.append(key)
            line = line.replace("# ", "", 1)
        changed.append(line)
    (tmp_path / "all.yaml").write_text("\n".join(changed))
    assert len(shown) > 20
    assert config_io.read_config(tmp_path / "all.yaml") == given
    with pytest.raises(ValueError, match="already exists"):
        template.write_template(tmp_path / "mixwell.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stepz=3", "stepz is not a setting; did you mean steps?"),
        ("zzz=3", "zzz is not a setting; there are domains, validation, test, steps"),
        ("mixer.horizn=3", "mixer.horizn is not a setting; did you mean horizon?"),
        ("domains.a={jsonl: b, feild: x}", "domains.a.feild is not a setting; did you mean field?"),
        ("model.layer=3", "model.layer is not a setting"),
        ("steps=0", "steps must be greater than or equal to 1, got 0"),
        ("steps=many", "steps must be a valid integer, got 'many'"),
        ("optimizer.lr=-1", "optimizer.lr must be greater than 0, got -1"),
        ("optimizer.schedule=foo", "optimizer.schedule: unknown schedule 'foo'; available: cosine, linear,"),
        ("mixer.horizon=1.5", "mixer.horizon must be a valid integer or 'auto' or 'long', got 1.5"),
        ("mixer.horizon=3000", "mixer.horizon is 3000, more than the 2000 steps of the run; lower it"),
        ("mixer.floor={c: 0.1}", "mixer.floor names unknown domains c; there are a, b"),
        ("mixer.floor=2", "mixer.floor must be less than or equal to 1"),
        ("model.kind=gtp", "model: unknown model 'gtp'; did you mean gpt? available: gpt, cnn, python,"),
        ("domains.a={}", "domains.a: give exactly one of dataset, files, given, jsonl, parquet"),
        ("domains.a={files: x, jsonl: y}", "got files, jsonl"),
        ("domains={}", "domains must not be empty"),
        (
            "validation=null",
            "mixer.method: mixwell needs a validation set, and there is none: give `validation`",
        ),
        ("mixer.method=dogge", "there is no method 'dogge'; did you mean doge?"),
        (
            "mixer={method: doge, options: {nu: 1}}",
            "mixer.options.nu: doge has no such option; it has transfer, ",
        ),
        ("mixer={method: doge, options: {mu: -1}}", "mixer.options.mu must be greater than 0, got -1"),
        ("domains={a: a.txt}", "mixwell needs 2 domains or more, and there is 1; with one, `mixer: {method"),
        (
            "mixer={method: implicit-cg}\ncompile=true",
            "implicit-cg differentiates twice, which a compiled model",
        ),
        ("domains={validation: x}", "the name 'validation' is taken"),
        (
            "batch={rows: 3, min_rows_per_domain: 2}",
            "batch.rows is 3, too few for batch.min_rows_per_domain = 2",
        ),
        ("precision=float16", "precision must be 'float32' or 'bfloat16', got 'float16'"),
        ("nothing", "--set takes key=value, such as --set optimizer.lr=0.001; got 'nothing'"),
        ("steps.more=3", "--set steps.more: steps is 2000, which has nothing inside"),
        ("steps=[", "--set steps: the value is not YAML"),
    ],
)
def test_messages_name_key_value_and_allowed_values(change: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "steps": 2000}))
    with pytest.raises(ValueError, match=re.escape(message)):
        config_io.read_config(path, change.split("\n"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "domains: [", "is not YAML"),
        ("c.toml", "domains = ", "is not TOML"),
        ("c.yaml", "just words", "must have keys such as domains and validation; got 'just words'"),
        ("c.yaml", "", "must have keys"),
    ],
)
def test_invalid_config_files_raise(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        config_io.read_config(tmp_path / name)


def test_missing_config_explains_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`mixwell init` writes one"):
        config_io.read_config(tmp_path / "none.yaml")


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "steps": 0, "optimizer": {"lr": -1}}))
    with pytest.raises(ValueError, match="steps must be .*\n.*optimizer.lr must be"):
        config_io.read_config(path)


def test_defaults_are_documented() -> None:
    """Every setting that is not a plain number of a model has a sentence."""
    registered = (LOGGERS, SOURCES, MODELS, OPTIMIZERS, CONSTRAINTS)
    components = [registry.get(name) for registry in registered for name in registry.names()]
    undocumented = [
        f"{section.__name__}.{name}"
        for section in (Config, BatchConfig, mixer_section(), OutputConfig, ParallelConfig, *components)
        for name, field in section.model_fields.items()
        if field.description is None and section.__name__ not in ("GptConfig", "CnnConfig")
    ]
    expected = {f"Config.{name}" for name in ("model", "optimizer", "batch", "mixer", "output", "parallel")}
    assert {one for one in undocumented if not one.endswith(".kind")} <= expected


def test_overrides_of_unset_sections_and_paths(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("domains: {a: a.txt, b: b.txt}\nvalidation: v.txt\nmixer:\n  # horizon: auto\n")
    config = config_io.read_config(
        path, ["mixer.horizon=5", "domains.a.encoding=latin-1", "validation.errors=replace"]
    )
    assert config.mixer.horizon == 5
    assert config.domains["a"] == TextFilesConfig(files="a.txt", encoding="latin-1")
    assert config.validation == TextFilesConfig(files="v.txt", errors="replace")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("domains={no: a.txt}", "the name False is not text; put it into quotes"),
        (
            "domains.a={jsonl: a.jsonl, limit: 2}",
            "domains.a.limit is not a setting; there are jsonl, field, encoding, errors",
        ),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer.betas=[0.9, 1.0]", "less than 1, got 1.0"),
        ("mixer.weights={a: 1}", "mixer.weights must name every domain; b is missing"),
        ("mixer.prior={a: 1, b: 1}", "mixer.prior and mixer.prior_strength belong together"),
        ("seed=99999999999999999999", "seed must be"),
    ],
)
def test_other_error_messages(override: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("domains: {a: a.txt, b: b.txt}\nvalidation: v.txt\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        config_io.read_config(path, [override])


def test_source_arguments_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("domains: {a: {python: 'm:f', arguments: {day: 2024-01-01}}}\nmixer: {method: fixed}\n")
    config = config_io.read_config(path)
    config_io.write_config(config, tmp_path / "again.yaml")
    again = config_io.read_config(tmp_path / "again.yaml")
    assert config.domains["a"] == again.domains["a"]
    assert again.domains["a"] == PythonSourceConfig(python="m:f", arguments={"day": "2024-01-01"})
    assert config_io.differences(config, again) == []
