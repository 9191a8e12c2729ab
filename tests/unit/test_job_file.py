"""What a Kubernetes job file turns on, and what of it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mindspeed_tft.cli import job_file
from mindspeed_tft.cli.main import app
from mindspeed_tft.settings import Refused

PYTORCH, MINDSPORE = "ascendjob-pytorch.yaml", "ascendjob-mindspore.yaml"


@pytest.fixture
def examples(root: Path) -> Path:
    return root / "examples" / "kubernetes"


def test_a_pytorch_job(examples: Path) -> None:
    found = job_file.read(examples / PYTORCH)
    assert (found.framework, found.refusals) == ("pytorch", ())
    assert found.environ["HIGH_AVAILABILITY"] == "retry,recover,dump"
    assert found.environ["PROCESS_RECOVER"] == "on" and found.environ["LOCAL_PROXY_ENABLE"] == "on"
    assert "--tft-reboot-wait" in found.words
    assert {item.where for item in found.items} == {"label", "annotation", "environment", "port", "operator"}


def test_a_mindspore_job(examples: Path) -> None:
    found = job_file.read(examples / MINDSPORE)
    assert (found.framework, found.refusals) == ("mindspore", ())
    assert found.environ["MS_ENABLE_TFT"] == "{TTP:1,TSP:1}", "what the file says stays"
    assert "HIGH_AVAILABILITY" not in found.environ


def test_a_job_of_another_kind_asks_nobody(examples: Path) -> None:
    found = job_file.read(examples / "volcano.yaml")
    assert found.refusals == () and "PROCESS_RECOVER" not in found.environ


@pytest.mark.parametrize(
    ("right", "wrong", "flag", "remedy"),
    [
        ("retry,recover-in-place", "retry,inplace", "annotation recover-strategy", "recover-in-place"),
        ("retry,recover-in-place", "elastic-training,retry", "annotation recover-strategy", "leave elastic-training"),
        ('wait-reschedule-timeout: "270"', 'wait-reschedule-timeout: "300"', "annotation wait-", "from 30 to 270"),
        ('fault-scheduling: "force"', "fault-scheduling: off", "label fault-scheduling", "force or grace"),
        ('process-recover-enable: "on"', 'process-recover-enable: "off"', "annotation recover-strategy", "to on"),
        ('process-recover-enable: "on"', 'process-recover-enable: "yes"', "label process-recover-", "on, pause, off"),
        ('fault-retry-times: "3"', 'retries: "3"', "label fault-retry-times", "a number"),
        ('fault-retry-times: "3"', 'fault-retry-times: "3"\n    subHealthyStrategy: hotSwitch', "label subHe", "out"),
        ('fault-retry-times: "3"', 'fault_retry_times: "3"', "label fault_retry_times", "did you mean fault-retry"),
        (
            'fault-retry-times: "3"',
            'fault-retry-times: "3"\n    recover-strategy: dump',
            "label recover-",
            "annotation",
        ),
        ('value: "off"}', 'value: "no"}', "environment TASKD_PROCESS_ENABLE", "on, off"),
        ("containerPort: 9601", "containerPort: 9605", "port taskd-port", "9601"),
        ("restartPolicy: Never  #", "restartPolicy: Always  #", "restartPolicy", "Never"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    examples: Path, tmp_path: Path, right: str, wrong: str, flag: str, remedy: str
) -> None:
    text = (examples / PYTORCH).read_text()
    assert right in text
    (tmp_path / "job.yaml").write_text(text.replace(right, wrong))
    found = job_file.read(tmp_path / "job.yaml").refusals
    assert any(each.flag.startswith(flag) and remedy in each.remedy for each in found), found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kind: Service\n", "holds 0 jobs"),
        ("a: [\n", r"not readable YAML: .*\(line 2"),
        ("kind: Job\nkind: Job\n", r"the key 'kind' is there twice \(line 2"),
        ("a: !!int foo\n", r"cannot be read as int \(line 1"),
        ("[" * 5000, "nested too deeply"),
        ("a: &a [*a]\n", "too long once its aliases are written out"),
        ("{spec: {template: {}}}\n---\n{spec: {template: {}}}\n", "holds 2 jobs"),
    ],
)
def test_a_file_without_a_job(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(Refused, match=reason):
        job_file.read(tmp_path / "job.yaml")


def test_the_command(examples: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["config", "--from-job", str(examples / PYTORCH), "--json"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["strategies"] == ["retry", "recover", "dump"]
    assert data["settings"]["tft_clusterd"]["value"] == "http://127.0.0.1:8899"
    assert data["settings"]["tft_reboot_wait"]["value"] == 300
    assert {"where": "label", "name": "fault-retry-times", "value": "3"}.items() <= data["job"][0].items()

    text = (examples / PYTORCH).read_text().replace('{name: LOCAL_PROXY_ENABLE, value: "on"}', "{name: X, value: y}")
    (tmp_path / "job.yaml").write_text(text)
    plain = CliRunner().invoke(app, ["config", "--from-job", str(tmp_path / "job.yaml"), "--check"])
    assert plain.exit_code == 2 and "that port is not encrypted" in plain.output
    trusted = ["config", "--from-job", str(tmp_path / "job.yaml"), "--check", "--", "--tft-insecure"]
    assert CliRunner().invoke(app, trusted).exit_code == 0
    missing = CliRunner().invoke(app, ["config", "--from-job", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 2 and "give the path of a file" in missing.output


@pytest.mark.parametrize(
    "text",
    [
        "kind: Job\nspec: {template: {spec: {containers: [{ports: [{name: p}]}]}}}\n",
        "kind: Job\nmetadata: {labels: [a]}\nspec: {template: {spec: {}}}\n",
        "kind: Job\nspec: {template: {spec: {containers: [{env: [{value: 1}]}]}}}\n",
        "kind: Job\nspec: text\n",
    ],
)
def test_what_is_no_job_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(Refused, match="--from-job"):
        job_file.read(tmp_path / "job.yaml")


def test_a_document_of_another_kind_beside_a_job_is_no_hindrance(tmp_path: Path) -> None:
    job = "kind: Job\nspec: {template: {spec: {containers: []}}}\n"
    (tmp_path / "job.yaml").write_text(f"kind: Note\nspec: text\n---\n{job}")
    assert job_file.read(tmp_path / "job.yaml").framework == "pytorch"
