"""Files of settings: sections, versions, and what is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlgm.check import check_file
from fedlgm.errors import ConfigError

SVT = {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {"epsilon": 0.1}}


def test_further_settings_add_to_a_file_and_do_not_replace_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("version = 1\nnoise_multiplier = 1.0\nsampler = 'all'\nrounds = 1\n")
    report = check_file(file, delta=1e-5, steps=1)
    for name, value in (("rounds", 5), ("sampler", "poisson"), ("noise_multiplier", 2.0)):
        with pytest.raises(ConfigError, match="in what was read, and"):
            check_file(file, **{name: value})
    assert report.epsilon == pytest.approx(4.377, abs=1e-3)
    assert report.missing == ("clipping", "denominator", "population")


def test_a_configuration_of_nvflare(tmp_path: Path) -> None:
    file = tmp_path / "config_fed_client.json"
    file.write_text(json.dumps({"task_result_filters": [{"tasks": ["train"], "filters": [SVT]}]}))
    report = check_file(file, rounds=10)
    assert (report.status, report.epsilon, report.settings.epsilon) == ("broken", None, 0.1)
    file.write_text(json.dumps({"task_result_filters": [{"tasks": "train", "filters": [SVT]}]}))
    assert check_file(file, rounds=10).settings.mechanism == "svt"


def test_a_trainers_own_noise_is_not_read(tmp_path: Path) -> None:
    trainer = {"path": "site.Trainer", "args": {"noise_multiplier": 1.0}}
    file = tmp_path / "config_fed_client.json"
    for key, status in (("executors", "conditional"), ("components", "broken")):
        file.write_text(json.dumps({key: [{"tasks": ["train"], "executor": trainer}]}))
        report = check_file(file, rounds=10, delta=1e-5)
        assert (report.status, report.epsilon) == (status, None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "delta = 1e-5\ndelta = 1e-6", "not valid TOML"),
        ("a.toml", "delta = 1e400", "delta must lie in"),
        ("a.toml", "noise_multiplier = nan", "noise_multiplier must be finite"),
        ("a.toml", "version = 2", "version 2 is not known"),
        ("a.toml", "version = true", "version True is not known"),
        ("a.toml", "[opacus]\n[flower]", "one run, but has sections opacus, flower"),
        ("a.toml", "opacus = 1", "opacus must be a section"),
        ("a.toml", "[flower]\nclass = 1", "flower.class must be the name"),
        ("a.toml", "[flower]\nclass = 'FedAvg'", "unknown class 'FedAvg'"),
        ("a.toml", "[tensorflow-privacy]\nepoch = 1", "unknown setting 'epoch'"),
        ("a.toml", "[tensorflow-privacy]\nn = 5\npopulation = 6", "population is 6 in what was read, and 5"),
        ("a.toml", "[opacus]\nsigma = 1", "unknown argument 'sigma'"),
        ("a.toml", "[opacus]\nclipping = 'flatt'", "unknown clipping"),
        ("a.toml", "[opacus]\npoisson_sampling = 2", "must be true or false"),
        ("a.json", '{"a": 1, "a": 2}', "the key 'a' is repeated"),
        ("a.json", '{"a": NaN}', "NaN is not a number of JSON"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.json", "[1]", "must be a mapping"),
        ("a.json", '{"task_result_filters": [{"tasks": null}]}', "tasks must be a list"),
        ("a.json", '{"num_rounds": 3, "job": [{"num_rounds": 4}]}', "several values: 3, 4"),
        ("a.json", '{"task_result_filters": [{"path": "x", "args": 3}]}', "args of x must be"),
        ("a.json", '{"task_result_filters": [{"path": "x", "args": {"noise_multiplier": 1e400}}]}',
         "noise_multiplier must be finite"),
        ("a.txt", "", "must be a .toml, .json or .py file"),
        ("a.py", "\udc80", "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words) as error:
        check_file(file)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for name in ("a.toml", "a.json", "a.py"):
        with pytest.raises(ConfigError, match="cannot be read"):
            check_file(tmp_path / name)
