"""`tftctl config`: what is shown is what a job gets, and what is refused is refused with the same words."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from mindspeed_tft import arguments
from mindspeed_tft.cli.main import app
from mindspeed_tft.engine.types import Deadlines
from mindspeed_tft.settings import Settings, flag_of, schema


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HIGH_AVAILABILITY", "TTP_ADDR", "TTP_OT"):
        monkeypatch.delenv(name, raising=False)


def tftctl(*words: str) -> Result:
    return CliRunner().invoke(app, ["config", *words])


def data(*words: str) -> dict[str, Any]:
    result = tftctl("--json", *words)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_each_value_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("enable-high-availability: true\ntft-platform: cpu\n")
    monkeypatch.setenv("TTP_OT", "40")
    found = data("--tft-config", str(mine), "--", "--micro-batch-size", "2", "--tft-deadline", "200")
    shown = {key: (row["value"], row["origin"]) for key, row in found["settings"].items()}
    assert list(shown) == list(Settings.model_fields)
    assert shown["tft_platform"] == ("cpu", f"file {mine}")
    assert shown["tft_deadline"] == (200.0, "flag")
    assert shown["tft_dump_seconds"] == (40.0, "environment TTP_OT")
    assert shown["optimizer_replica_num"] == (2, "default")
    assert found["strategies"] == ["dump"] and found["refused"] == []
    monkeypatch.setenv("HIGH_AVAILABILITY", "recover")
    assert data()["settings"]["enable_worker_reboot"]["origin"] == "environment HIGH_AVAILABILITY"
    assert data("--tft-config", "retry")["settings"]["enable_hbmfault_repair"]["origin"] == "preset retry"


def test_every_timeout_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {row["name"]: row for row in data("--tft-config", "recover")["timeouts"]}
    # hang_fixed is no timeout: it tells how `hang` is meant, which the formula does here.
    assert set(shown) == {"deadline", *(field.name for field in fields(Deadlines))} - {"hang_fixed"}
    assert shown["deadline"]["seconds"] == 120 and shown["dump"]["formula"] == "deadline - stop - exit"
    short = {row["name"]: row for row in data("--tft-config", "recover", "--patience", "30")["timeouts"]}
    assert short["deadline"]["seconds"] == 27 and "patience" in short["deadline"]["formula"]
    monkeypatch.setenv("TTP_OT", "50")
    given = {row["name"]: row for row in data("--tft-config", "recover")["timeouts"]}
    assert (given["dump"]["seconds"], given["dump"]["formula"]) == (50, "TTP_OT")


def test_the_tables_say_the_same() -> None:
    result = tftctl("--tft-config", "large-cluster")
    assert result.exit_code == 0 and result.stderr == ""
    for key in Settings.model_fields:
        assert re.search(rf"^ *{re.escape(flag_of(key))} ", result.stdout, re.MULTILINE), key
    assert re.search(r"--tft-deadline +600 +preset large-cluster ", result.stdout)
    assert re.search(r"dump +555 +deadline - stop - exit ", result.stdout)
    assert "not in use" in tftctl().stdout


@pytest.mark.parametrize(
    ("words", "environ", "reasons"),
    [
        (["--tft-config", "elastic"], {}, ["--enable-elastic-training: ", "asked for by preset elastic"]),
        (["--tft-config", "no-such-preset"], {}, ["--tft-config: ", "large-cluster"]),
        (
            ["--", "--tft-dedline", "3"],
            {},
            ["--tft-dedline: there is no such flag. Remedy: did you mean --tft-deadline"],
        ),
        (["--", "--tft-deadline", "soon"], {}, ["--tft-deadline: invalid float value: 'soon'"]),
        (["--", "--tft-deadline", "3"], {}, ["--tft-deadline: ", "greater than or equal to 10"]),
        (["--", "--enable-worker-reboot"], {}, ["--enable-worker-reboot: it needs the master switch"]),
        ([], {"HIGH_AVAILABILITY": "dmup"}, ["HIGH_AVAILABILITY: unknown word 'dmup'"]),
        (["--tft-config", "dump"], {"TTP_OT": "110"}, ["TTP_OT: ", "--tft-deadline to at least 155."]),
        (
            ["--", "--enable-high-availablity"],
            {},
            ["--enable-high-availablity: there is no such flag. Remedy: did you mean --enable-high-availability."],
        ),
        (["--", "--enable_worker_reboot"], {}, ["--enable_worker_reboot: ", "did you mean --enable-worker-reboot."]),
        (["--", "--no-tft-warm-stanby"], {}, ["did you mean --no-tft-warm-standby."]),
        (["--", "--tft-dump-seconds", "3"], {}, ["--tft-dump-seconds: ", "set TTP_OT, or tft-dump-seconds in"]),
        (["--", "--tft-zzzz"], {}, ["--tft-zzzz: ", "use one of --tft-config, --enable-high-availability, "]),
        (["--tft-config", ""], {}, ["--tft-config: it is empty"]),
        (["--", "--tft-config="], {}, ["--tft-config: it is empty"]),
        (["--", "--enable-high-availability", "--tft-fault-rules", "/nonexistent"], {}, ["--tft-fault-rules: "]),
        (
            ["--patience", "30", "--", "--enable-high-availability"],
            {"TTP_OT": "20"},
            ["TTP_OT: a dump of 20 s does not fit: the launcher kills", "start with tftrun", "TTP_OT to at most 16."],
        ),
        (
            [
                "--patience=30",
                "--tft-config=dump",
                "--",
                "--tft-clusterd=http://127.0.0.1:8899",
                "--tft-clusterd-job=x",
            ],
            {"TTP_OT": "70"},
            ["TTP_OT: a dump of 70 s", "27 s are left", "6.75 s for a decision of ClusterD"],
        ),
        # several at once
        (
            ["--tft-config", "elastic", "--", "--tft-hang-seconds", "1"],
            {"TTP_OT": ""},
            ["--enable-elastic-training: ", "--tft-hang-seconds: "],
        ),
        (
            ["--", "--enable-high-availability", "--distributed-optimizer-no-replica"],
            {},
            ["--distributed-optimizer-no-replica: ", "add --enable-hbmfault-repair"],
        ),
    ],
)
def test_refusals(
    words: list[str], environ: dict[str, str], reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for mode in ([], ["--check"], ["--json"]):
        result = tftctl(*mode, *words)
        assert result.exit_code == 2
        for reason in reasons:
            assert reason in result.stderr
        assert result.stderr.count("Remedy: ") == result.stderr.count("\n")
        if mode == ["--check"]:
            assert result.stdout == ""
        if mode == ["--json"]:
            refused = json.loads(result.stdout)["refused"]
            assert refused and all(set(each) == {"flag", "reason", "remedy"} for each in refused)


def test_flags_of_others_are_not_ours_misspelt() -> None:
    words = ["--use-distributed-optimizer", "--distributed-backend", "nccl", "--num-distributed-optimizer-instances=2"]
    result = tftctl("--check", "--tft-config", "recover", "--", *words, "--lr", "-1", "--enable-ft-package", "-x")
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("value", ["-5", "0", "nan", "inf"])
def test_a_patience_that_is_no_time_is_refused(value: str) -> None:
    result = tftctl("--check", "--tft-config", "dump", f"--patience={value}")
    assert result.exit_code == 2 and "--patience" in result.stderr and "seconds above 0" in result.stderr


def test_the_share_of_the_dump_follows_from_the_name_that_the_user_wrote(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("enable-high-availability: true\ntft-dump-seconds: 50\n")
    shown = {row["name"]: row for row in data("--tft-config", str(mine))["timeouts"]}
    assert (shown["dump"]["seconds"], shown["dump"]["formula"]) == (50, "tft-dump-seconds")


def test_words_between_colons_are_no_pictures() -> None:
    result = tftctl("--", "--tft-clusterd-job", "training:train:")
    assert re.search(r"--tft-clusterd-job +training:train: ", result.stdout)


def test_every_console_shows_what_users_wrote(root: Path) -> None:
    """rich makes pictures of `:train:` unless each console is told not to."""
    places = 0
    for path in [*(root / "mindspeed_tft").rglob("*.py"), *(root / "patches").glob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) == "Console":
                places += 1
                assert "emoji" in {word.arg for word in call.keywords}, f"{path}:{call.lineno}"
    assert places >= 2


def test_check_says_nothing_when_all_is_well() -> None:
    result = tftctl("--check", "--tft-config", "recover", "--", "--num-layers", "2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_what_is_off_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without fault tolerance must not fail because of a variable that was set for another one."""
    monkeypatch.setenv("TTP_OT", "1000")
    assert tftctl("--check").exit_code == 0
    assert tftctl("--check", "--tft-config", "dump").exit_code == 2


def fits(value: Any, rule: dict[str, Any]) -> bool:
    """As much of JSON schema as ours uses."""
    if "anyOf" in rule:
        return any(fits(value, each) for each in rule["anyOf"])
    kinds = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "null": type(None)}
    known = {"type", "enum", "default", "description", "minimum", "maximum", "exclusiveMinimum"}
    assert set(rule) <= known, f"this test does not know {set(rule) - known}"
    if not isinstance(value, kinds[rule["type"]]) or (isinstance(value, bool) and rule["type"] != "boolean"):
        return False
    if "enum" in rule and value not in rule["enum"]:
        return False
    if isinstance(value, str) or value is None:
        return True
    lowest, highest = rule.get("minimum", value), rule.get("maximum", value)
    return bool(lowest <= value <= highest and value > rule.get("exclusiveMinimum", value - 1))


def rule_of(key: str, found: dict[str, Any]) -> dict[str, Any] | None:
    rules = [found["properties"][key]] if key in found["properties"] else []
    rules += [rule for pattern, rule in found["patternProperties"].items() if re.search(pattern, key)]
    return rules[0] if rules else None


def test_the_schema_takes_every_preset_and_refuses_what_the_loader_refuses() -> None:
    result = tftctl("--schema")
    found = json.loads(result.stdout)
    assert found == schema() and found["additionalProperties"] is False and "$schema" in found
    assert all(rule["description"] for rule in found["properties"].values())
    for preset in arguments.presets().glob("*.yaml"):
        for key, value in yaml.safe_load(preset.read_text()).items():
            rule = rule_of(key, found)
            assert rule is not None and fits(value, rule), (preset, key)
    assert rule_of("optimizer_replica_num", found) == rule_of("optimizer-replica-num", found)
    assert rule_of("optimizer-replica-nmu", found) is None
    for key, wrong in [("optimizer-replica-num", 1), ("tft-deadline", True), ("tft-platform", "tpu"),
                       ("tft-dump-seconds", 0), ("tft-controller-port", 65536), ("tft-insecure", 1)]:  # fmt: skip
        rule = rule_of(key, found)
        assert rule is not None and not fits(wrong, rule), key


def test_the_page_of_all_flags_is_up_to_date(root: Path) -> None:
    printed = tftctl("--markdown").stdout
    assert (root / "docs" / "flags.md").read_text() == printed, "run tftctl config --markdown > docs/flags.md"
    for flag, _ in arguments.FLAGS:
        assert f"`{flag}`" in printed
