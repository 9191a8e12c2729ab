"""Settings: precedence, refusals that name flag, reason and remedy, and the order of all timeouts."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mindspeed_tft import arguments, settings
from mindspeed_tft.engine.types import Deadlines
from mindspeed_tft.settings import Refused


def resolve(words: list[str], environ: dict[str, str] | None = None) -> tuple[settings.Settings, dict[str, str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_flags(parser)
    return arguments.resolve(parser.parse_args(words), environ or {})


def test_everything_is_off_by_default() -> None:
    found, origin = resolve([])
    assert not found.enable_high_availability
    assert set(origin.values()) == {"default"}


def test_environment_beats_flag_beats_yaml_beats_default(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("enable-high-availability: true\noptimizer-replica-num: 4\ntft-deadline: 50\n")
    found, origin = resolve(
        ["--tft-config", str(preset), "--optimizer-replica-num", "3"], {"HIGH_AVAILABILITY": "dump", "TTP_OT": "20"}
    )
    assert (found.enable_high_availability, origin["enable_high_availability"]) == (
        True,
        "environment HIGH_AVAILABILITY",
    )
    assert (found.optimizer_replica_num, origin["optimizer_replica_num"]) == (3, "flag")
    assert (found.tft_deadline, origin["tft_deadline"]) == (50.0, f"file {preset}")
    assert (found.tft_platform, origin["tft_platform"]) == ("auto", "default")
    assert found.deadlines().dump == 20.0


PRESETS = sorted(path.stem for path in arguments.presets().glob("*.yaml"))


def test_these_presets_are_there() -> None:
    assert PRESETS == ["cpu-demo", "dump", "elastic", "large-cluster", "recover", "retry"]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "elastic"])
def test_presets_load(name: str) -> None:
    found, origin = resolve(["--tft-config", name])
    assert found.enable_high_availability and origin["enable_high_availability"] == f"preset {name}"
    assert found.strategies() == {
        "retry": ("retry", "dump"),
        "recover": ("retry", "recover", "dump"),
        "large-cluster": ("retry", "recover", "dump"),
    }.get(name, ("dump",))


def test_the_preset_of_what_is_not_built_is_refused() -> None:
    with pytest.raises(
        Refused, match=r"--enable-elastic-training: elastic training is not in this version yet \(asked"
    ):
        resolve(["--tft-config", "elastic"])
    with pytest.raises(Refused, match="asked for by environment HIGH_AVAILABILITY"):
        resolve([], {"HIGH_AVAILABILITY": "elastic-training"})


ON = ["--enable-high-availability"]
MINDCLUSTER = {"PROCESS_RECOVER": "on", "MINDX_TASK_ID": "j", "MINDX_SERVER_IP": "10.0.0.1"}

# For each setting values that it can take, other than its default.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "optimizer_replica_num": st.integers(3, 64),
    "tft_platform": st.sampled_from(["cpu", "cuda", "npu"]),
    "tft_shard_hash": st.sampled_from(["step", "stop", "never"]),
    "tft_log_format": st.sampled_from(["text", "json"]),
    "tft_deadline": st.floats(10, 86400),
    "tft_reboot_wait": st.floats(0.5, 86400),
    "tft_hang_seconds": st.floats(-10, 86400),
    "tft_dump_seconds": st.floats(0.5, 86400),
    "tft_clusterd_wait": st.floats(0.5, 3600),
    "tft_controller_port": st.integers(1, 65535),
    "tft_metrics_port": st.integers(1, 65535),
    **dict.fromkeys(
        (
            "tft_controller_address",
            "tft_tls_dir",
            "tft_tls_key_password_file",
            "tft_tls_decrypt",
            "tft_incident_dir",
            "tft_fault_rules",
            "tft_metrics_host",
            "tft_otel_endpoint",
            "tft_clusterd",
            "tft_clusterd_job",
        ),
        st.text("abcdefgh./", min_size=1).map(lambda text: f"x{text}"),
    ),
}
STRATEGY_OF = {key: word for word, key in settings.STRATEGIES.items()}


def as_flag(key: str, value: object) -> str:
    flag = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


@pytest.mark.parametrize("key", list(settings.Settings.model_fields))
@hypothesis_settings(deadline=None)  # it writes a file, and the disk may be slow
@given(data=st.data())
def test_precedence_of_every_setting(key: str, data: st.DataObject) -> None:
    """environment > flag > YAML > default, whichever of them speak."""
    expected, where = settings.Settings.model_fields[key].default, "default"
    words: list[str] = []
    environ: dict[str, str] = {}
    yaml_values = VALUES.get(key, st.booleans())
    # A switch can only be switched on by its flag, but where argparse knows its opposite.
    flag_values = VALUES.get(key, st.booleans() if key == "tft_warm_standby" else st.just(True))
    with tempfile.TemporaryDirectory() as folder:
        if data.draw(st.booleans(), "in YAML"):
            expected, where = data.draw(yaml_values, "YAML"), "file"
            path = Path(folder, "mine.yaml")
            spelling = key.replace("_", "-") if data.draw(st.booleans(), "dashes") else key
            path.write_text(yaml.safe_dump({spelling: expected}))
            words += ["--tft-config", str(path)]
        if key not in settings.VARIABLES and data.draw(st.booleans(), "as a flag"):
            expected, where = data.draw(flag_values, "flag"), "flag"
            words.append(as_flag(key, expected))
        if (key in settings.VARIABLES or key in STRATEGY_OF) and data.draw(st.booleans(), "in the environment"):
            where = "environment"
            if key in STRATEGY_OF:
                expected, environ["HIGH_AVAILABILITY"] = True, STRATEGY_OF[key]
            else:
                expected = data.draw(VALUES[key], "environment")
                environ[settings.VARIABLES[key]] = str(expected)
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_flags(parser)
        found, origin = arguments.collect(parser.parse_args(words), environ)
    assert getattr(found, key) == expected
    assert origin[key].partition(" ")[0] == where


def test_every_setting_has_a_flag_or_a_variable_and_a_meaning() -> None:
    flags = {flag for flag, _ in arguments.FLAGS} - {arguments.CONFIG}
    names = {settings.flag_of(key) for key in settings.Settings.model_fields}
    assert names == flags | set(settings.VARIABLES.values())
    assert all(len(settings.meaning(key)) > 20 for key in settings.Settings.model_fields)
    assert dict(arguments.FLAGS)["--tft-deadline"]["help"] == settings.meaning("tft_deadline")


def test_clusterd_is_asked_in_its_own_jobs_and_the_user_has_the_last_word() -> None:
    found, origin = resolve(ON, {**MINDCLUSTER, "LOCAL_PROXY_ENABLE": "on"})
    assert (found.clusterd, found.tft_clusterd_job) == ("http://127.0.0.1:8899", "j")
    assert origin["tft_clusterd"].startswith("environment PROCESS_RECOVER=on")
    assert found.deadlines().consult == found.tft_clusterd_wait == 60.0
    for words, environ in (
        (["--tft-clusterd", "none"], MINDCLUSTER),
        ([], {**MINDCLUSTER, "PROCESS_RECOVER": "off"}),
        ([], {}),
    ):
        alone, _ = resolve([*ON, *words], environ)
        assert (alone.clusterd, alone.deadlines().consult) == ("", 0.0)


def test_beside_a_real_taskd_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "taskd" / "python" / "cython_api" / "libs" / "libtaskd.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "taskd" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "taskd", raising=False)
    environ = {**MINDCLUSTER, "LOCAL_PROXY_ENABLE": "on"}
    with pytest.raises(Refused, match=r"TaskD is installed in .*there can only be one.*TASKD_PROCESS_ENABLE=off"):
        resolve(ON, environ)
    monkeypatch.setenv("TASKD_PROCESS_ENABLE", "off")
    assert resolve(ON, environ)[0].clusterd


def test_high_availability_words_are_stripped_and_imply_the_dump() -> None:
    found, _ = resolve([], {"HIGH_AVAILABILITY": " Retry , dump "})
    assert found.enable_high_availability and found.enable_hbmfault_repair


@pytest.mark.parametrize(
    ("words", "environ", "flag", "remedy"),
    [
        (["--enable-hbmfault-repair"], {}, "--enable-hbmfault-repair", "--enable-high-availability"),
        (["--enable-worker-reboot"], {}, "--enable-worker-reboot", "--enable-high-availability"),
        (["--enable-elastic-training"], {}, "--enable-elastic-training", "--enable-high-availability"),
        ([], {"HIGH_AVAILABILITY": "dump,retri"}, "HIGH_AVAILABILITY", "dump, retry and recover"),
        ([], {"TTP_OT": "soon"}, "TTP_OT", "seconds"),
        (["--optimizer-replica-num", "1"], {}, "--optimizer-replica-num", "--help"),
        (["--tft-deadline", "3"], {}, "--tft-deadline", "--help"),
        (["--tft-deadline", "0"], {}, "--tft-deadline", "--help"),
        (["--optimizer-replica-num", "0"], {}, "--optimizer-replica-num", "--help"),
        (["--tft-controller-port", "0"], {}, "--tft-controller-port", "--help"),
        ([*ON, "--tft-clusterd", "http://127.0.0.1"], {}, "--tft-clusterd", "--tft-clusterd-job"),
        ([*ON, "--tft-clusterd", "clusterd:8899"], {"MINDX_TASK_ID": "j"}, "--tft-clusterd", "http://HOST"),
        ([*ON, "--tft-clusterd", "http://clusterd"], {"MINDX_TASK_ID": "j"}, "--tft-clusterd", "--tft-insecure"),
        ([*ON, "--tft-clusterd", "https://clusterd"], {"MINDX_TASK_ID": "j"}, "--tft-clusterd", "--tft-tls-dir"),
        (ON, MINDCLUSTER, "--tft-clusterd", "--tft-clusterd none"),
        ([], {"MINDIO_WAIT_MINDX_TIME": "0"}, "--tft-clusterd-wait", "--help"),
        (["--tft-config", "no-such-preset"], {}, "--tft-config", "cpu-demo"),
        (["--tft-config", ""], {}, "--tft-config", "leave it out"),
        (["--tft-config="], {}, "--tft-config", "leave it out"),
        (["--tft-config", " "], {}, "--tft-config", "leave it out"),
        (["--tft-incident-dir", ""], {}, "--tft-incident-dir", "leave it out"),
        (["--tft-tls-dir="], {}, "--tft-tls-dir", "leave it out"),
        ([], {"TTP_ADDR": " "}, "TTP_ADDR", "leave it out"),
        ([], {"HIGH_AVAILABILITY": " , "}, "HIGH_AVAILABILITY", "dump, retry and recover"),
        ([*ON, "--tft-fault-rules", "/nonexistent"], {}, "--tft-fault-rules", "correct the file"),
    ],
)
def test_refusals_name_flag_and_remedy(words: list[str], environ: dict[str, str], flag: str, remedy: str) -> None:
    with pytest.raises(Refused) as caught:
        resolve(words, environ)
    message = str(caught.value)
    assert message.startswith(flag) and "Remedy" in message and remedy in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer-replicas-num: 2", "optimizer-replica-num"),
        ("- a list", "mapping"),
        ("a: [1", "YAML"),
        ("optimizer-replica-num: two", "--optimizer-replica-num"),
        ("optimizer-replica-num: 2\noptimizer_replica_num: 3", "two spellings"),
        ("tft-hang-seconds: yes", "--tft-hang-seconds: .*truth value"),
        ("tft-deadline: .inf", "--tft-deadline: .*finite"),
        ("tft-hang-seconds: .nan", "--tft-hang-seconds: .*finite"),
        ("tft-deadline:", "--tft-deadline"),
        ("tft-platform: tpu", "--tft-platform: .*'auto', 'cpu', 'cuda' or 'npu'"),
        ("tft-deadline: 60\ntft-insecure: true\ntft-deadline: 600", r"the key 'tft-deadline' is there twice \(line 3"),
        ("tft-deadline: 0123", "--tft-deadline: .*leading zero may be octal .*'0123' from file .*plain decimal"),
        ("tft-deadline: 1:30", "--tft-deadline: .*minutes and seconds .*'1:30'.*plain decimal"),
        ("optimizer-replica-num: 1:30", "--optimizer-replica-num: .*minutes and seconds"),
        ("tft-deadline: 2001-99-99", "--tft-deadline: .*got '2001-99-99'"),
        ("tft-deadline: !!timestamp 2001-99-99", r"cannot be read as timestamp \(line 1, column 15\)"),
        (f"tft-deadline: {'9' * 5000}", r"cannot be read as int \(line 1"),
        ("tft-deadline: !!int foo", r"cannot be read as int \(line 1"),
        ("[" * 5000, "nested too deeply"),
        ("tft-deadline: \0", "character 15 is not allowed"),
        ("a: &a [*a]", "too long once its aliases are written out"),
        (f"tft-deadline: {'x' * 100_000}", "--tft-deadline: .*got 'xxx"),
        (f"tft-deadline: [{'x, ' * 5000}]", "--tft-deadline: .*got \\['x'"),
        (f"{'x' * 900}: 1", "unknown key 'xxx"),
        ("tft-deadline: &a [x, x]\n--- 1", "several documents"),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(Refused, match=expected) as refused:
        resolve(["--tft-config", str(path)])
    assert len(str(refused.value)) < 1500, "what is quoted may be of any size"


def test_an_alias_that_grows_is_refused_before_it_has_grown(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    path.write_text("\n".join(lines))
    with pytest.raises(Refused, match="too long once its aliases are written out"):
        resolve(["--tft-config", str(path)])


def test_yaml_keys_that_are_merged_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("<<: {tft-deadline: 60, tft-insecure: true}\ntft-deadline: 0x50\ntft-clusterd-job: 0123\n")
    values = settings.load_yaml(str(path), tmp_path)[1]
    assert values == {"tft_deadline": 80, "tft_insecure": True, "tft_clusterd_job": "0123"}


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(Refused, match=r"^--tft-config: 'xxx.*cannot be looked for .*use one of cpu-demo") as refused:
        resolve(["--tft-config", "x" * 300])
    assert len(str(refused.value)) < 500


def test_what_is_no_yaml_is_placed_but_not_quoted(tmp_path: Path) -> None:
    """The refusal may be told to other hosts (`tftctl doctor`), and the file may be anything."""
    file = tmp_path / "node.key"
    file.write_text("secret: [1\nsecret: 2}\n")
    with pytest.raises(Refused, match=r"line 2, column \d+") as refused:
        settings.load_yaml(str(file), tmp_path)
    assert "secret" not in str(refused.value)


def test_a_dump_that_does_not_fit_into_the_deadline_is_refused() -> None:
    with pytest.raises(Refused, match=r"TTP_OT: .*TTP_OT to at most 18, or --tft-deadline to at least 48\."):
        resolve(["--enable-high-availability", "--tft-deadline", "30"], {"TTP_OT": "30"})


def test_a_dump_too_short_for_an_order_is_refused() -> None:
    with pytest.raises(Refused, match=r"TTP_OT: .*two heartbeats.*at least 4, or leave it out for 75"):
        resolve(["--enable-high-availability"], {"TTP_OT": "1"})


DEADLINES = st.floats(min_value=10, max_value=86400)
HANGS = st.one_of(st.just(0.0), st.floats(-1, 86400))


def in_order(total: float, found: Deadlines) -> None:
    assert 0 < found.heartbeat < found.heartbeat_lost < found.stop < total
    assert 2 * found.heartbeat <= found.order < found.dump < total
    assert 0 < found.exit < found.stop
    assert found.stop + found.dump + found.exit <= total + 1e-9
    assert 2 * found.order <= found.dump, "a second attempt fits"
    assert not found.hang_fixed or found.hang >= 2 * found.heartbeat


@given(DEADLINES, HANGS, st.booleans())
def test_all_timeouts_follow_from_one_knob_in_order(total: float, hang: float, reboot: bool) -> None:
    chosen = settings.Settings(tft_deadline=total, tft_hang_seconds=hang, enable_worker_reboot=reboot)
    try:
        found = chosen.deadlines()
    except Refused as refusal:
        assert refusal.flag == "--tft-hang-seconds" and 0 < hang < 2
        return
    in_order(total, found)
    assert found.stop + found.dump + found.exit == pytest.approx(total), "nothing of the deadline is left over"


@given(DEADLINES, st.floats(min_value=0.01, max_value=86400))
def test_ttp_ot_sets_the_share_of_the_dump_or_is_refused_with_a_remedy_that_works(total: float, dump: float) -> None:
    chosen = settings.Settings(tft_deadline=total, tft_dump_seconds=dump)
    try:
        found = chosen.deadlines()
    except Refused as refusal:
        assert refusal.flag == "TTP_OT"
        better = [
            settings.Settings(**{**chosen.model_dump(), key: float(number[1])})
            for key, number in (
                ("tft_dump_seconds", re.search(r"set (?:it|TTP_OT) to at (?:least|most) ([\d.]+)", refusal.remedy)),
                ("tft_deadline", re.search(r"--tft-deadline to at least (\d+)", refusal.remedy)),
            )
            if number is not None
        ]
        assert better
        for each in better:
            in_order(each.tft_deadline, each.deadlines())
        return
    assert found.dump == dump
    in_order(total, found)


@given(DEADLINES, st.none() | st.floats(4, 80000), st.none() | st.floats(5, 500), HANGS, st.booleans())
def test_the_formulas_that_are_shown_are_those_that_count(
    total: float, dump: float | None, patience: float | None, hang: float, reboot: bool
) -> None:
    chosen = settings.Settings(
        tft_deadline=total, tft_dump_seconds=dump, tft_hang_seconds=hang, enable_worker_reboot=reboot
    )
    shown = chosen.derivation(patience)
    try:
        found = chosen.deadlines(patience)
    except Refused:
        return
    values = {"deadline": chosen.deadline(patience), **dataclasses.asdict(found)}
    assert set(shown) == set(values) - {"hang_fixed"}
    for name, (formula, _) in shown.items():
        given_values = {"--tft-deadline": total, "--tft-reboot-wait": chosen.tft_reboot_wait, "TTP_OT": dump,
                        "--tft-hang-seconds": hang, "launcher patience": patience}  # fmt: skip
        for word, value in given_values.items():
            formula = formula.replace(word, repr(value))
        computed = eval(formula, {"min": min, "max": max}, values)
        assert computed == pytest.approx(values[name]), name


def test_a_launcher_that_kills_earlier_shortens_every_deadline() -> None:
    found = settings.Settings().deadlines(patience=30)
    assert found.stop + found.dump + found.exit == pytest.approx(27)
    assert 2 * found.order <= found.dump  # a second attempt fits
    assert settings.Settings(tft_deadline=20).deadlines(patience=30) == settings.Settings(tft_deadline=20).deadlines()


@given(st.floats(10, 86400), st.floats(0.01, 80000), st.floats(1, 90000), st.booleans(), st.floats(0.5, 3600))
def test_ttp_ot_fits_into_the_launchers_patience_or_is_refused_with_remedies_that_work(
    total: float, dump: float, patience: float, asks: bool, wait: float
) -> None:
    """Survivors must not be killed before the dump that TTP_OT gives time for."""
    chosen = settings.Settings(
        tft_deadline=total, tft_dump_seconds=dump, tft_clusterd="http://x" if asks else None, tft_clusterd_wait=wait
    )

    def check(each: settings.Settings, patience: float) -> None:
        found = each.deadlines(patience)
        assert found.dump == each.tft_dump_seconds
        assert found.consult + found.stop + found.dump + found.exit <= max(10.0, patience - 3) + 1e-9

    try:
        check(chosen, patience)
        return
    except Refused as refusal:
        assert refusal.flag == "TTP_OT"
        reason, remedy = refusal.reason, refusal.remedy
    if "two heartbeats" in reason:
        return
    if at_most := re.search(r"set TTP_OT to at most (\d+)", remedy):
        check(chosen.model_copy(update={"tft_dump_seconds": float(at_most[1])}), patience)
    longer = re.search(r"--shutdown-timeout to at least (\d+)", remedy)
    deadline = re.search(r"--tft-deadline to (?:at least )?(\d+)", remedy)
    if longer or deadline:  # else no launcher may wait for so long
        more = chosen.model_copy(update={"tft_deadline": float(deadline[1]) if deadline else total})
        check(more, float(longer[1]) if longer else patience)
    assert at_most


def test_a_launcher_that_kills_before_the_dump_that_ttp_ot_asks_for_is_refused() -> None:
    """What users of MindIO bring along: TTP_OT, and torchrun, which waits for 30 s."""
    found, origin = resolve(ON, {"TTP_OT": "20"})
    with pytest.raises(Refused) as caught:
        found.deadlines(30, origin)
    assert caught.value.flag == "TTP_OT"
    assert "a dump of 20 s does not fit: the launcher kills the survivors of a fault after 30 s" in caught.value.reason
    assert "27 s are left for everything, of which 6.75 s for stopping" in caught.value.reason
    for word in ("tftrun", "--logs-specs mindspeed_tft", "--shutdown-timeout to at least 123", "TTP_OT to at most 16"):
        assert word in caught.value.remedy
    assert [refusal.flag for refusal in arguments.conflicts(found, origin, 30)] == ["TTP_OT"]
    assert not list(arguments.conflicts(found, origin))
    found, _ = resolve(ON, {"TTP_OT": "16"})
    assert found.deadlines(30).dump == 16 and found.deadline(30) == 27


def test_a_share_of_the_dump_is_named_as_the_user_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("enable-high-availability: true\ntft-dump-seconds: 200\n")
    with pytest.raises(Refused, match=r"^tft-dump-seconds: .*set tft-dump-seconds to at most 75") as caught:
        resolve(["--tft-config", str(file)])
    assert "TTP_OT" not in str(caught.value)
    with pytest.raises(Refused, match=r"^TTP_OT: .*set TTP_OT to at most 75"):
        resolve(["--tft-config", str(file)], {"TTP_OT": "100"})
    file.write_text("tft-dump-seconds: -1\n")
    with pytest.raises(Refused, match=r"^tft-dump-seconds: .*greater than 0"):
        resolve(["--tft-config", str(file)])


def test_replicas_and_none_of_them_from_one_place_are_refused(tmp_path: Path) -> None:
    none = ["--enable-high-availability", "--enable-hbmfault-repair", "--distributed-optimizer-no-replica"]
    with pytest.raises(Refused, match=r"^--optimizer-replica-num: 3 contradicts .*from the command line.* one of them"):
        resolve([*none, "--optimizer-replica-num", "3"])
    file = tmp_path / "mine.yaml"
    file.write_text("optimizer-replica-num: 3\n")
    assert resolve([*none, "--tft-config", str(file)])[0].replicas == 1, "the command line has the last word"
    lines = ["enable-high-availability", "enable-hbmfault-repair", "distributed-optimizer-no-replica"]
    file.write_text("".join(f"{line}: true\n" for line in lines) + "optimizer-replica-num: 3\n")
    with pytest.raises(Refused, match=r"^--optimizer-replica-num: 3 contradicts .*both from file"):
        resolve(["--tft-config", str(file)])


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("TTP_OT", "Remedy: write tft-dump-seconds."),
        ("TTP_ADDR", "Remedy: write tft-controller-address."),
        ("MINDIO_WAIT_MINDX_TIME", "Remedy: write tft-clusterd-wait."),
        ("HIGH_AVAILABILITY", "Remedy: write 'enable-high-availability: true'"),
        ("tft-config", "Remedy: a file cannot name another one"),
        ("tft_config", "Remedy: a file cannot name another one"),
        ("--tft-deadline", "Remedy: did you mean tft-deadline."),
        ("optimizer_replicas_num", "Remedy: did you mean optimizer-replica-num."),
        ("learning-rate", "Remedy: use one of enable-high-availability, "),
    ],
)
def test_an_unknown_key_has_the_remedy_that_was_meant(tmp_path: Path, key: str, remedy: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"{key}: 20\n")
    with pytest.raises(Refused) as refused:
        resolve(["--tft-config", str(file)])
    assert f"has an unknown key '{key}'" in refused.value.reason and remedy in str(refused.value)


def test_the_platform_is_known_before_megatron_parses(tmp_path: Path) -> None:
    """The adaptor takes the platform that the settings will name, wherever they name it."""
    file = tmp_path / "mine.yaml"
    file.write_text("tft-platform: npu\n")
    for words in (
        [],
        ["--micro-batch-size", "2", "-x"],
        ["--tft-platform", "cuda"],
        ["--tft-platform=cuda", "--tft-platform=cpu"],
        ["--tft-config", "cpu-demo"],
        ["--tft-config=dump"],
        [f"--tft-config={file}", "--seed", "1"],
        ["--tft-config", str(file), "--tft-platform", "cuda"],
        ["--tft-platform", "auto", "--tft-config", str(file)],
    ):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_flags(parser)
        settled, _ = arguments.collect(parser.parse_known_args(words)[0], {})
        assert arguments.early_platform(words) == settled.tft_platform
    assert arguments.early_platform(["--tft-config", str(file)]) == "npu"
    assert arguments.early_platform(["--tft-platform"]) == "auto", "Megatron's parser refuses it"
    for words, flag in (
        (["--tft-config", ""], "--tft-config"),
        (["--tft-config", "no-such"], "--tft-config"),
        (["--tft-platform", "tpu"], "--tft-platform"),
    ):
        with pytest.raises(Refused, match=f"^{flag}: "):
            arguments.early_platform(words)


def test_flags_are_added_only_if_absent() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-high-availability", action="store_true", help="somebody else's")
    arguments.add_flags(parser)
    assert parser.parse_args(["--enable-high-availability"]).enable_high_availability is True


@pytest.mark.parametrize(
    ("words", "hang", "fixed"),
    [
        ([], settings.HANG_DUMPED, False),
        (["--enable-worker-reboot"], settings.HANG_RESTARTED, False),
        (["--tft-hang-seconds", "7.5"], 7.5, True),
        (["--tft-hang-seconds", "-1"], 0.0, False),
    ],
)
def test_how_long_a_rank_may_stand_still(words: list[str], hang: float, fixed: bool) -> None:
    found, _ = resolve(["--enable-high-availability", *words])
    deadlines = found.deadlines()
    assert (deadlines.hang, deadlines.hang_fixed) == (hang, fixed)


def test_a_hang_cannot_be_found_faster_than_ranks_are_heard() -> None:
    with pytest.raises(Refused, match=r"--tft-hang-seconds.*two heartbeats.*set it to at least 2"):
        resolve(["--enable-high-availability", "--tft-hang-seconds", "1"])
