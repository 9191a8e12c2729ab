"""Texts of errors are told apart in whole words, and what nobody knows is never taken for repairable."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_tft.faults.classify import (
    KINDS,
    MEMORY_ERROR,
    NO_LIVE_TENSOR,
    PLATFORMS,
    RuleError,
    Window,
    classify,
    load_rules,
)

GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:534]"
NPU_TIMED = "RuntimeError: HBM MULTI BIT ECC, time us= 5000."


@pytest.mark.parametrize(
    ("platform", "text", "kind"),
    [
        ("npu", "RuntimeError: UCE ERROR", "memory"),
        ("npu", "RuntimeError: Uce  Error on device 3", "memory"),
        ("npu", "runtime result = 507053, error code is 507053", "memory"),
        ("npu", f"UCE ERROR: {NO_LIVE_TENSOR}", "memory-low"),
        ("npu", "[PTA]: FORCE STOP.", "stopped"),
        ("npu", "FORCE STOP. reason: SUSPECT REMOTE ERROR", "stopped"),
        ("npu", "FORCE STOP. reason: UCE ERROR", "memory"),
        ("npu", "HCCL OP RETRY FAILED, error code 507904", "link"),
        ("npu", "hccl op retry failed", "link"),
        ("npu", "SUSPECT REMOTE ERROR", "link"),
        ("npu", "UB LINK ERROR", "link"),
        ("npu", "HCCS LINK ERROR", "link"),
        ("npu", "RuntimeError: LINK ERROR", "link"),
        ("npu", "LINK\nERROR", "link"),
        ("npu", "error code: 507057", "link"),
        ("npu", "PRECISION ERROR at step 9", "precision"),
        ("cuda", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "memory"),
        ("cuda", "CUDA_ERROR_ECC_UNCORRECTABLE", "memory"),
        ("cuda", "NVRM: Xid (PCI:0000:41:00): 48, pid=1, An uncorrectable double bit error", "memory"),
        ("cuda", "Xid 94: Contained memory error", "memory"),
        ("cuda", "NVRM: Xid (PCI:0000:41:00): 95, pid=1", "corrupted"),
        ("cuda", "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", "device"),
        ("cuda", "NVRM: Xid (PCI:0000:41:00): 74, pid=1, NVLink", "link"),
        ("cuda", "torch.distributed.DistBackendError: NCCL error ...\nncclRemoteError: A call failed", "link"),
        ("cuda", "NET/IB : Got completion with error 12: IBV_WC_RETRY_EXC_ERR", "link"),
        ("cuda", "NCCL WARN socketProgress: Connection closed by remote peer node1<41234>", "link"),
        ("cuda", "NCCL communicator was aborted on rank 3.", "stopped"),
        ("cpu", "RuntimeError: UCE ERROR (drill: uce@1:7:forward)", "memory"),
        ("cpu", f"RuntimeError: {GLOO} Connection closed by peer [127.0.0.1]:4711", "link"),
        ("cpu", f"RuntimeError: {GLOO} Read error [127.0.0.1]:4711: Connection reset by peer", "link"),
        ("cpu", f"RuntimeError: {GLOO} writev [127.0.0.1]:4711: Broken pipe", "link"),
        ("cpu", "mindspeed_tft.groups.process_group.CommunicationAborted: group 3: stopped (epoch 1: x)", "stopped"),
    ],
)
def test_a_known_text_has_its_kind(platform: str, text: str, kind: str) -> None:
    found = classify(text, platform)
    assert found.kind == kind, found
    assert found.rule.startswith("any: ")
    assert KINDS[kind] in found.reason


@pytest.mark.parametrize(
    ("platform", "text"),
    [
        ("npu", ""),
        ("npu", "ValueError: shapes do not match"),
        ("npu", "RuntimeError: REDUCE ERROR"),
        ("npu", "RuntimeError: the kernel did PRODUCE ERROR values"),
        ("npu", "UCE ERRORS were looked for, none was found"),
        ("npu", "UCE: no ERROR"),
        ("npu", "FORCE STOPPED by the user"),
        ("npu", "ENFORCE STOP"),
        ("npu", "BLINK ERROR"),
        ("npu", "HYPERLINK ERROR"),
        ("npu", "OSError: symbolic link error"),
        ("npu", "NON-HBM MULTI BIT"),
        ("npu", "error code is 5070531"),
        ("npu", "step 507053 failed"),
        ("npu", "CUDA error: uncorrectable ECC error encountered"),  # the words of another platform
        ("cuda", "UCE ERROR"),
        ("cuda", "CUDA error: an illegal memory access was encountered"),
        ("cuda", "NVRM: Xid (PCI:0000:41:00): 13, Graphics Engine Exception"),
        ("cuda", "NVRM: Xid (PCI:0000:48:00): 31, MMU Fault"),
        ("cuda", "NVRM: Xid (PCI:0000:41:00): 480, x"),
        ("cuda", "a taxid 48"),
        ("cuda", "correctable ECC error"),
        ("cuda", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
        ("cuda", "ncclInternalError: Internal check failed."),
        ("cuda", "Watchdog caught collective operation timeout"),
        ("cuda", "redis: Connection reset by peer"),
        ("cpu", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("cpu", "requests: Connection reset by peer"),
        ("cpu", "[gloo/transport/tcp/pair.cc:1] op.preamble.length <= op.nbytes. 8 vs 4"),
        ("cpu", f"{GLOO} a bug\nin another line: Broken pipe"),
        ("cpu", "Timed out waiting 1800000ms for recv operation to complete"),
        ("cpu", "CommunicationAborted: group 3: Connection closed"),
        ("tpu", "UCE ERROR"),
    ],
)
def test_an_unknown_text_is_never_repairable(platform: str, text: str) -> None:
    found = classify(text, platform)
    assert (found.kind, found.rule) == ("exception", "")
    assert platform in found.reason


@pytest.mark.parametrize(
    ("text", "window", "kind", "reason"),
    [
        (NPU_TIMED, Window(4000, 4500), "memory", "after the last update began"),  # forward and backward after it
        (NPU_TIMED, Window(4000, 6000), "memory", "after the last update began"),  # inside it
        (NPU_TIMED, Window(4000, 3000), "memory", "after the last update began"),  # inside one that did not end
        (NPU_TIMED, Window(5000, 6000), "corrupted", "not after"),
        (NPU_TIMED, Window(5001, 4000), "corrupted", "not after"),
        (NPU_TIMED, Window(0, 4000), "corrupted", "not known when"),
        (NPU_TIMED, None, "corrupted", "not known when"),
        ("HBM MULTI BIT ECC", Window(4000, 4500), "corrupted", "without a time"),
        ("hbm multi bit ecc, Time us=4001", Window(4000, 4500), "memory", "4001 us"),
        ("error code is 507054", Window(4000, 4500), "corrupted", "without a time"),
        ("HBM MULTI BIT ECC, uptime us=9000", Window(4000, 4500), "corrupted", "without a time"),
    ],
)
def test_a_late_memory_error_counts_only_if_it_is_proved_young(
    text: str, window: Window | None, kind: str, reason: str
) -> None:
    found = classify(text, "npu", window=window)
    assert found.kind == kind
    assert reason in found.reason


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_fault_injection_raises_is_understood(platform: str) -> None:
    assert classify(f"RuntimeError: {MEMORY_ERROR[platform]} (drill)", platform).kind == "memory"
    assert classify(f"RuntimeError: {MEMORY_ERROR[platform]}: {NO_LIVE_TENSOR}", platform).kind == "memory-low"
    assert classify(f"RuntimeError: {NO_LIVE_TENSOR}", platform).kind == "exception"


def _rules(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return path


def test_rules_of_the_user_come_first_and_know_their_platform(tmp_path: Path) -> None:
    rules = load_rules(
        _rules(
            tmp_path,
            "- {pattern: 'port \\d+ flapped', kind: link}\n"
            "- {pattern: 'UCE ERROR 0x7', kind: exception, platform: npu}\n",
        )
    )
    assert classify("PORT 7 flapped", "cuda", rules).kind == "link"
    assert "port" in classify("port 7 flapped", "cpu", rules).rule
    assert classify("UCE ERROR 0x7", "npu", rules).kind == "exception"
    assert classify("UCE ERROR 0x7", "cpu", rules).kind == "memory"
    assert load_rules(_rules(tmp_path, "")) == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pattern: x", "holds a dict; write a list"),
        ("- x", "rule 1 is a str"),
        ("- {pattern: x, kind: link}\n- {patern: x}", "rule 2: unknown key 'patern'; the nearest is 'pattern'"),
        ("- {pattern: x, kind: links}", "unknown kind 'links'; the nearest is 'link'"),
        ("- {pattern: x, kind: memory_low}", "the nearest is 'memory-low'"),
        ("- {pattern: x, kind: link, platform: cudaa}", "unknown platform 'cudaa'; the nearest is 'cuda'"),
        ("- {pattern: x}", "needs a text for 'kind'"),
        ("- {pattern: 5, kind: link}", "needs a text for 'pattern'"),
        ("- {pattern: '(', kind: link}", "no regular expression"),
        ("- {pattern: 'x*', kind: link}", "fits every text"),
        ("- {pattern: '', kind: link}", "fits every text"),
        ("- [", "is not readable YAML: "),
        ("- {pattern: x, pattern: y, kind: link}", "the key 'pattern' is there twice (line 1, column 16)"),
        ("- !!int foo", "cannot be read as int (line 1, column 3)"),
        ("- 2001-99-99", "rule 1 is a str"),
        ("[" * 5000, "nested too deeply"),
        ("- {pattern: 'x{99999999999}', kind: link}", "no regular expression"),
        (f"- {{pattern: x, kind: {'y' * 100_000}}}", "unknown kind 'yyy"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_with_what_would_be_right(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(RuleError) as refused:
        load_rules(_rules(tmp_path, text))
    assert named in str(refused.value)
    assert "rules.yaml" in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"none\.yaml cannot be read"):
        load_rules(tmp_path / "none.yaml")
