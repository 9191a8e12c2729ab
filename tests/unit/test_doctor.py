"""`tftctl doctor`: what each check says, and that it says something else where the thing it looks at is broken."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ports import free_port
from typer.testing import CliRunner, Result

from mindspeed_tft.cli.doctor import serve
from mindspeed_tft.cli.main import app
from mindspeed_tft.control import certificates, tls
from mindspeed_tft.control.authority import Authority
from mindspeed_tft.doctor import __main__ as by_torchrun
from mindspeed_tft.doctor import clocks, meeting, names, probe, software, storage, system
from mindspeed_tft.doctor.certificates import check_tls
from mindspeed_tft.doctor.channel import Channel, ChannelError
from mindspeed_tft.doctor.findings import Finding, Level
from mindspeed_tft.doctor.job import Job, describe, option
from mindspeed_tft.doctor.meeting import Host, Met
from mindspeed_tft.doctor.peer import Peer, greet
from mindspeed_tft.doctor.probe import Failed, Listener, Target, Why
from mindspeed_tft.doctor.survey import Report, Survey

if TYPE_CHECKING:
    from tests.conftest import Processes

LLAMA2_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --swiglu --vocab-size 32000 --untie-embeddings-and-output-weights --bf16"
).split()
TIMEOUT = 0.5


def job(*words: str, environ: dict[str, str] | None = None, **options: Any) -> Job:
    return describe(words, environ or {}, timeout=TIMEOUT, bind="127.0.0.1", **options)


def levels(findings: Iterator[Finding]) -> list[str]:
    return [f"{finding.level.name.lower()} {finding.text} / {finding.remedy}" for finding in findings]


def doctor(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HIGH_AVAILABILITY", "TTP_ADDR", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "SLURM_NODEID", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine_is_green(no_training: None, tmp_path: Path) -> None:
    flags = ("--", "--enable-high-availability", "--save", str(tmp_path), "--bf16", "--num-layers", "2",
             "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "128")  # fmt: skip
    result = doctor("--json", *flags)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"]) == (0, "green"), found
    checks = {finding["check"] for finding in found["findings"]}
    wanted = "python torch megatron flags environment launcher processes tls directories ports".split()
    assert checks >= {*wanted, "host name", "open files", "shared memory", "disk space", "dump time"}
    shown = doctor(*flags)
    assert shown.exit_code == 0 and "green: " in shown.stdout
    steady = [finding for finding in found["findings"] if finding["check"] not in ("disk space", "shared memory")]
    assert steady and all(finding["text"] in shown.stdout for finding in steady)
    assert not list(tmp_path.iterdir()), "nothing stays"


def test_a_blocked_port_is_red(no_training: None) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        result = doctor("--port", str(port))
    assert result.exit_code == 1
    assert f"--tft-controller-port: port {port} is taken (by process" in result.stdout
    assert "stop what listens there, or choose another port" in result.stdout
    assert doctor("--port", str(port)).exit_code == 0, "the control: with the listener gone it is free"


def test_several_hosts_need_the_port_of_torchruns_rendezvous(no_training: None) -> None:
    with socket.create_server(("", 0)) as blocker:
        port = blocker.getsockname()[1]
        found = levels(
            names.check_ports(job(environ={"MASTER_PORT": str(port)}, nodes=2), controller=False, rendezvous=True)
        )
        metrics = job("--tft-metrics-port", str(port))
        found += levels(names.check_ports(metrics, controller=True, rendezvous=True))
    assert [text.partition(" is taken (by process ")[0] for text in found] == [
        f"red --master-port: port {port}",
        f"red --tft-metrics-port: port {port}",
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--hosts", "a,b", "--rendezvous", "a"], "two ways to find the hosts"),
        (["--hosts", "a,b"], "give --tls-dir"),
        (["--rendezvous", "127.0.0.1"], "Give --nodes N"),
        (["--hosts", "127.0.0.1:none"], "is no port"),
        (["sevre"], "expected `serve`"),
        (["serve"], "--insecure on a network that you trust"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_bad_arguments_have_a_status_of_their_own(no_training: None, words: list[str], reason: str) -> None:
    result = doctor(*words)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    "way", [["--hosts", "a,b"], ["serve"], ["--rendezvous", "a", "--nodes", "2", "--node-rank", "1"]]
)
def test_certificates_that_are_missing_are_red(no_training: None, way: list[str]) -> None:
    result = doctor(*way, "--tls-dir", "/nowhere")
    assert result.exit_code == 1
    assert "/nowhere/ca.crt cannot be read" in result.stdout + result.stderr


def test_refused_flags_are_red_and_yellow_counts_if_it_is_to(no_training: None) -> None:
    result = doctor("--", "--tft-dedline", "3")
    assert result.exit_code == 1 and "did you mean --tft-deadline" in result.stdout
    assert doctor("--", "--num-layers", "2").exit_code == 0
    assert doctor("--strict", "--", "--num-layers", "2").exit_code == 1, "unprotected is yellow"


def test_a_name_without_an_address_is_red(no_training: None) -> None:
    result = doctor("--hosts", f"127.0.0.1,no-such-host.invalid:{free_port()}", "--insecure", "--timeout", "1")
    assert result.exit_code == 1
    assert "no-such-host.invalid has no address" in result.stdout


# ---------------------------------------------------------------------------------------------- one host


def test_options_of_the_training_are_found() -> None:
    words = ["--save", "a", "--save=b", "--num-layers", "80"]
    assert (option(words, "--save"), option(words, "--load"), job(*words).number("--num-layers", 1)) == ("b", None, 80)
    assert job("--save", "/ckpt").incidents == "/ckpt/tft_incidents"


def test_what_a_dump_takes() -> None:
    """Llama 2 70B has 68,976,648,192 parameters, of which 161 * 8192 are those of its norms."""
    assert storage.parameters(job(*LLAMA2_70B)) == 68_976_648_192 - 161 * 8192
    assert storage.dump_bytes(job(*LLAMA2_70B)) == 14 * (68_976_648_192 - 161 * 8192)
    # GPT-2 small: 124,439,808 parameters, of which norms and biases, and the 1024 positions, are not counted.
    gpt2 = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257".split()
    assert storage.parameters(job(*gpt2)) == 124_439_808 - 12 * (4 * 768 + 9 * 768) - 2 * 768 - 1024 * 768
    assert storage.dump_bytes(job(*gpt2)) == 16 * (storage.parameters(job(*gpt2)) or 0)
    experts = [*gpt2, "--num-experts", "8"]
    assert storage.parameters(job(*experts)) == (storage.parameters(job(*gpt2)) or 0) + 7 * 12 * 8 * 768 * 768
    assert storage.parameters(job("--hidden-size", "768")) is None


def test_a_disk_that_is_too_small_and_storage_that_is_too_slow(tmp_path: Path) -> None:
    huge = [word.replace("80", "8000000") for word in LLAMA2_70B]
    found = levels(storage.check_space(job("--save", str(tmp_path), *huge)))
    assert found[0].startswith("red a dump takes about") and "make room" in found[0]
    protected = job("--enable-high-availability", "--save", str(tmp_path), *LLAMA2_70B)
    assert levels(storage.check_deadline(protected))[0].startswith("yellow 899 GiB within 37.5 s")
    assert "GB/s of storage / raise --tft-deadline" in levels(storage.check_deadline(protected))[0]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    found = levels(storage.check_writable(job("--save", str(tmp_path / "file" / "below"))))
    assert found[0].startswith("red --save ") and "is not writable" in found[0]
    assert levels(storage.check_writable(job("--enable-high-availability")))[0].startswith(
        "red --save: there is no place"
    )


def test_marks_are_files_of_ours_and_nothing_else(tmp_path: Path) -> None:
    name = f"{storage.MARK}0123"
    storage.mark(str(tmp_path), name)
    assert storage.sees(str(tmp_path), name)
    storage.unmark(str(tmp_path), name)
    assert not storage.sees(str(tmp_path), name) and not list(tmp_path.iterdir())
    for wrong in ("other", f"{storage.MARK}../x", storage.MARK):
        with pytest.raises(ValueError, match="is no mark"):
            storage.mark(str(tmp_path), wrong)


def test_interfaces_that_variables_name() -> None:
    assert levels(names.check_interfaces(job(environ={"GLOO_SOCKET_IFNAME": "lo"}))) == [
        "green GLOO_SOCKET_IFNAME=lo is up / "
    ]
    (found,) = levels(names.check_interfaces(job(environ={"GLOO_SOCKET_IFNAME": "lo,eth77"})))
    assert found.startswith("red GLOO_SOCKET_IFNAME=lo,eth77: there is no interface eth77 / use one of ")
    (found,) = levels(names.check_interfaces(job(environ={"NCCL_SOCKET_IFNAME": "=eth77"})))
    assert found.startswith("red NCCL_SOCKET_IFNAME==eth77: no interface fits")
    assert levels(names.check_interfaces(job(environ={"NCCL_SOCKET_IFNAME": "^eth77"})))[0].startswith("green")
    assert names.data_address(describe((), {"GLOO_SOCKET_IFNAME": "lo"})) == "127.0.0.1"


def test_a_name_that_leads_to_loopback(tmp_path: Path) -> None:
    several = describe((), {}, nodes=2)
    (found,) = levels(names.check_own_name(several))
    expected = "red" if all(map(names.is_loopback, names.addresses_of(names.own_name()))) else "green"
    assert found.startswith(expected)
    assert levels(names.check_own_name(job()))[0].startswith("green")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.0.0.1 node\n127.0.1.1 node # a comment\n")
    assert names._hosts_line("node", hosts) == f"{hosts}:3: 127.0.1.1 node # a comment"
    assert names._hosts_line("other", hosts) == f"not from {hosts}"


def test_variables_that_contradict() -> None:
    caching = {"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}
    words = ("--enable-high-availability", "--enable-hbmfault-repair")
    assert levels(software.check_environment(job(*words, environ=caching)))[0].startswith("red PYTORCH_NO_NPU_MEMORY")
    assert levels(software.check_environment(job(environ=caching)))[0].startswith("green no variable")
    places = {"TTP_ADDR": "a", "MASTER_ADDR": "b"}
    assert levels(software.check_environment(job(environ=places)))[0].startswith(
        "yellow TTP_ADDR=a is not MASTER_ADDR=b"
    )
    assert levels(software.check_flags(job(environ={"HIGH_AVAILABILITY": "dmup"})))[0].startswith(
        "red HIGH_AVAILABILITY"
    )
    assert any(text.startswith("red --distributed-backend hccl") for text in levels(
        software.check_flags(job("--enable-high-availability", "--distributed-backend", "hccl"))))  # fmt: skip


def test_a_dump_that_the_launcher_would_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.launcher, "words", lambda: ["torchrun", "x.py"])
    monkeypatch.delenv(software.launcher.ENV_SHUTDOWN, raising=False)
    told = levels(software.check_launcher(job("--enable-high-availability", environ={"TTP_OT": "20"})))
    assert told[0].startswith("red TTP_OT: a dump of 20 s does not fit") and "start with tftrun" in told[0]
    for words, environ in ((("--enable-high-availability",), {"TTP_OT": "16"}), ((), {"TTP_OT": "20"})):
        told = levels(software.check_launcher(job(*words, environ=environ)))
        assert told[0].startswith("yellow this torchrun kills the survivors of a fault after 30 s")


def test_limits_of_this_host(tmp_path: Path) -> None:
    assert levels(system.check_shared_memory(tmp_path / "none"))[0].startswith("yellow")
    assert [text.partition(" ")[0] for text in levels(system.check_processes())] == ["green"]
    assert system.gib(3 * 2**30) == "3 GiB" and system.gib(20 * 2**40) == "20 TiB"


# ---------------------------------------------------------------------------------------------- clocks


def test_round_trips_prove_bounds() -> None:
    trips = [clocks.RoundTrip(0.0, 5.1, 0.4), clocks.RoundTrip(1.0, 6.02, 1.04), clocks.RoundTrip(2.0, 7.3, 2.9)]
    found = clocks.offset(trips)
    assert found.seconds - found.bound == pytest.approx(4.98) and found.seconds + found.bound == pytest.approx(5.02)
    stepped = clocks.offset([clocks.RoundTrip(0.0, 5.0, 0.1), clocks.RoundTrip(1.0, 2.0, 1.1)])
    assert stepped.bound >= 3.9, "a clock that was set meanwhile is not known better than that"
    apart = clocks.farthest({"a": found, "b": clocks.Offset(0.0, 0.5)})
    assert apart is not None and (apart.ahead, apart.behind) == ("a", "b")
    assert apart.surely == pytest.approx(5.0 - 0.02 - 0.5)
    assert clocks.farthest({"a": found}) is None


# ---------------------------------------------------------------------------------------------- ways


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority")


def with_tls(directory: Path) -> probe.Secure:
    found = probe.secure(job(tls_dir=str(directory)))
    assert found is not None
    return found


@contextlib.contextmanager
def listening(contexts: probe.Secure | None = None, word: str = "word") -> Iterator[int]:
    listener = Listener(word, contexts, TIMEOUT, 0, "127.0.0.1")
    try:
        yield listener.port
    finally:
        listener.close()


def attempt(port: int, contexts: probe.Secure | None = None, *named: str, word: str = "word") -> probe.Outcome:
    return probe.attempt(Target("there", "127.0.0.1", port, named), word, contexts, TIMEOUT)


def test_ways_without_certificates() -> None:
    with listening() as port:
        assert attempt(port).why is Why.OK and attempt(port, word="").why is Why.OK
        assert attempt(port, word="other").why is Why.BROKEN, "who listens does not answer strangers"
    assert attempt(port).why is Why.REFUSED
    name = probe.attempt(Target("there", "no-such-host.invalid", 1), "word", None, TIMEOUT)
    assert name.why is Why.NAME and "no-such-host.invalid" in name.text
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes the connection into its backlog, and nothing else
        found = attempt(mute.getsockname()[1])
    assert found.why is Why.MUTE and f"within {TIMEOUT:g} s" in found.text
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        thread = threading.Thread(target=lambda: stranger.accept()[0].sendall(b"220 mail.example ESMTP\n"))
        thread.start()
        assert attempt(stranger.getsockname()[1]).why is Why.STRANGER
        thread.join()


def test_ways_with_certificates(authority: Authority, tmp_path: Path) -> None:
    here, there = with_tls(authority.node("here")), with_tls(authority.node("there"))
    with listening(there) as port:
        assert attempt(port, here, "there").why is Why.OK
        found = attempt(port, here, "elsewhere")
        assert found.why is Why.WRONG_NAME and found.text.endswith("is for there, not for elsewhere")
        assert attempt(port).why is Why.BROKEN, "without a certificate nobody is answered"
    with listening() as port:
        assert attempt(port, here, "there").why in (Why.NO_TLS, Why.MUTE, Why.BROKEN)
    stranger = Authority.create(tmp_path / "stranger")
    with listening(with_tls(stranger.node("there"))) as port:
        found = attempt(port, here, "there")
        assert found.why is Why.AUTHORITY and "is not signed by our ca.crt" in found.text
    # Who trusts both authorities, and is trusted by one.
    both = tmp_path / "both"
    both.mkdir()
    for name in ("node.crt", "node.key"):
        (both / name).write_bytes((stranger.directory / "there" / name).read_bytes())
    trusted = [(place / "there" / "ca.crt").read_bytes() for place in (authority.directory, stranger.directory)]
    (both / "ca.crt").write_bytes(b"".join(trusted))
    with listening(there) as port:
        found = attempt(port, with_tls(both), "there")
        assert found.why is Why.REJECTED and "does not accept our certificate" in found.text
    gone, reads = with_tls(authority.node("gone")), with_tls(authority.metrics("prometheus"))
    authority.revoke("gone")
    with listening(with_tls(authority.directory / "there")) as port:
        for who in (gone, reads):
            assert attempt(port, who, "there").why is Why.BROKEN, "it may not ask"
    authority.revoke("there")
    with listening(there) as port:
        assert attempt(port, with_tls(authority.directory / "here"), "there").why is Why.REVOKED


def test_every_reason_has_a_remedy() -> None:
    assert set(probe.REMEDIES) == set(Why)
    assert all(text.format(here="a", there="b") for why, text in probe.REMEDIES.items() if why is not Why.OK)


def test_certificates_of_this_host(authority: Authority) -> None:
    own = names.own_name()
    good = authority.node(own)
    assert [text.partition(" ")[0] for text in levels(check_tls(job(tls_dir=str(good), nodes=2)))] == ["green"]
    other = levels(check_tls(job(tls_dir=str(authority.node("another")), nodes=2)))
    assert any(text.startswith("red ") and f"this host calls itself {own}" in text for text in other)
    known = tls.load(good)
    late = certificates.now() + datetime.timedelta(days=400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "now", lambda: late)
        ended = levels(check_tls(job(tls_dir=str(good), nodes=2), known))
    assert ended[0].startswith("red ") and "it expired at" in ended[0], "while the doctor waited"
    soon = levels(check_tls(job(tls_dir=str(authority.node(own, days=3, force=True)), nodes=2)))
    assert any(text.startswith("yellow ") and "tftctl certs rotate" in text for text in soon)
    (good / "node.key").chmod(0o644)
    assert any(
        "can be read by others (mode 644)" in text for text in levels(check_tls(job(tls_dir=str(good), nodes=2)))
    )
    (good / "ca.crt").unlink()
    assert levels(check_tls(job(tls_dir=str(good), nodes=2)))[0].startswith("red --tft-tls-dir: ")


# ---------------------------------------------------------------------------------------------- several hosts


def survey(jobs: dict[str, Job]) -> Report:
    """Of hosts that are threads of this process."""
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(meeting.this_host(job, None, name)) for name, job in jobs.items()]
        asks = next(iter(jobs.values()))
        return Survey(asks, Met(hosts), lambda text: None, rendezvous=False).run()


def of(report: Report, check: str) -> list[tuple[str, str]]:
    return [(f.level.name.lower(), f.text) for f in report.findings if f.check == check]


def test_a_survey_of_hosts_on_loopback(tmp_path: Path) -> None:
    words = ("--enable-high-availability", "--save", str(tmp_path))
    report = survey({"a": job(*words, nodes=3), "b": job(*words, nodes=3), "c": job(*words, nodes=3)})
    assert report.level < Level.RED, report.findings
    assert of(report, "ways")[0][1].startswith("all 6 ways between 3 hosts are open")
    assert of(report, "versions") == [("green", "the same on all 3 hosts")]
    assert of(report, "clocks")[0][0] == "green"
    assert not list(tmp_path.iterdir()), "marks are gone"


@pytest.mark.parametrize(("skew", "level"), [(2.0, "yellow"), (-90.0, "red"), (0.01, "green")])
def test_clocks_that_differ(skew: float, level: str) -> None:
    report = survey({"a": job(nodes=2), "b": job(nodes=2, skew=skew)})
    ((found, text),) = of(report, "clocks")
    assert found == level
    if level != "green":
        ahead, behind = ("b", "a") if skew > 0 else ("a", "b")
        assert text.startswith(f"{ahead} is ahead of {behind} by {abs(skew):g} s (+- ")


def test_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    on = "--enable-high-availability"
    report = survey({"a": job(on, "--save", str(one), nodes=2), "b": job(on, "--save", str(other), nodes=2)})
    found = of(report, "shared")
    assert ("red", f"--save {one}: what a writes there is not seen by b") in found, found


def test_a_host_of_another_version_and_one_that_falls_silent() -> None:
    """The second host is told by hand: it has another torch, and then it is gone."""
    ours, theirs = socket.socketpair()
    other = job(nodes=2)

    def answer() -> None:
        with Channel(theirs, "who asks") as channel:
            greet(channel, other, 1, TIMEOUT)
            assert channel.receive(TIMEOUT)["do"] == "look"
            versions = {**software.versions(), "torch": "1.0"}
            channel.send({"is": {"findings": [], "versions": versions}}, TIMEOUT)

    thread = threading.Thread(target=answer)
    thread.start()
    with meeting.this_host(job(nodes=2), None, "a") as first, Channel(ours, "b") as channel:
        second = Host("b", channel, greet(channel, job(nodes=2), 0, TIMEOUT))
        report = Survey(job(nodes=2), Met([first, second]), lambda text: None, rendezvous=False).run()
    thread.join()
    ((level, text),) = of(report, "versions")
    assert level == "red" and text.startswith("torch is not the same on all hosts: ") and text.endswith("; 1.0 on b")
    assert [f.check for f in report.findings if f.host == "b" and f.level is Level.RED] == ["clocks"]


@pytest.mark.parametrize("own", [True, False])
def test_who_asks_names_no_code_and_no_keys(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A host opens its key as it was started, whatever is among the flags of the one who asks."""
    directory = authority.node(names.own_name())
    (tmp_path / "hooks_of_doctor.py").write_text(
        "calls = []\n"
        "def theirs(key):\n"
        "    calls.append('theirs')\n"
        "    return key\n"
        "def ours(key):\n"
        "    calls.append('ours')\n"
        "    return key\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ("--tft-tls-dir", str(directory), "--tft-tls-decrypt", "hooks_of_doctor:ours")
    ours, theirs = socket.socketpair()
    here = job(*flags, nodes=2) if own else job(nodes=2)
    host = Peer(here, probe.secure(here))  # which opens the key, once and for all

    def serve() -> None:
        with Channel(theirs, "who asks") as channel:
            host.serve(channel)

    thread = threading.Thread(target=serve)
    thread.start()
    (tmp_path / "elsewhere").mkdir()
    evil = ["--tft-tls-dir", str(directory), "--tft-tls-decrypt", "hooks_of_doctor:theirs"]
    if own:
        evil[1:2] = [str(tmp_path / "elsewhere"), "--tft-tls-key-password-file", "/etc/hostname"]
    with Channel(ours, "a") as channel:
        channel.send({"do": "look", "words": evil, "nodes": 2, "hosts": [], "first": False}, TIMEOUT)
        found = channel.receive(20.0)["is"]["findings"]
        channel.send({"do": "bye"}, TIMEOUT)
        thread.join()
    calls = importlib.import_module("hooks_of_doctor").calls
    del sys.modules["hooks_of_doctor"]
    assert calls == (["ours"] if own else [])
    assert [finding["level"] for finding in found if finding["check"] == "tls"] == (["green"] if own else [])


def test_who_falls_silent_does_not_hold_a_host_beyond_its_time() -> None:
    here = job(port=free_port())
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(serve(here, 1.0)), daemon=True)
    thread.start()
    target = Target("there", "127.0.0.1", here.controller_port)
    deadline = time.monotonic() + 5.0
    while True:  # it takes a moment until it listens
        try:
            connection = probe.connect(target, None, TIMEOUT)
            break
        except Failed as failure:
            assert failure.why is Why.REFUSED and time.monotonic() < deadline
    with Channel(connection, "there") as channel:
        greet(channel, here, None, TIMEOUT)
        thread.join(10.0)
    assert ended == [0]


def test_the_port_of_the_meeting_is_taken_or_elsewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as blocker, pytest.raises(ValueError, match="is taken"):
        meeting.gather(job(nodes=2), None, ("127.0.0.1", blocker.getsockname()[1]), 1.0, print)
    with pytest.raises(ValueError, match="is no address of this host"):
        meeting.gather(job(nodes=2), None, ("192.0.2.1", free_port()), 1.0, print)
    with pytest.raises(Failed, match="nobody listens there"):
        meeting.come(job(nodes=2), None, ("127.0.0.1", free_port()), 1, 0.0, print)


def test_who_does_not_come_is_counted_and_who_says_nonsense_is_named() -> None:
    port = free_port()
    said: list[str] = []

    def visit() -> None:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.recv(1 << 16)

    def say(text: str) -> None:
        said.append(text)
        threading.Thread(target=visit).start()  # the port is open by now

    met = meeting.gather(job(nodes=3), None, ("127.0.0.1", port), TIMEOUT, say)
    assert said == [f"waiting at 127.0.0.1:{port} for 2 more hosts"]
    texts = [finding.text for finding in met.findings]
    assert texts[0] == "2 of 3 hosts did not come within 0.5 s (node 1, 2)"
    assert texts[1].startswith("127.0.0.1 came and said nothing sensible: ")


def test_addresses_with_ports() -> None:
    assert meeting.split("node0", 1) == ("node0", 1) and meeting.split("node0:2", 1) == ("node0", 2)
    assert meeting.split("fe80::1", 1) == ("fe80::1", 1) and meeting.split("[fe80::1]:2", 1) == ("fe80::1", 2)
    assert meeting.is_here("127.0.0.1") and not meeting.is_here("192.0.2.1")
    for wrong in ("node0:", "node0:0", "node0:65536"):
        with pytest.raises(ValueError, match="is no port"):
            meeting.split(wrong, 1)


def test_a_channel_ends_what_does_not_fit() -> None:
    ours, theirs = socket.socketpair()
    with Channel(ours, "b") as channel, theirs:
        theirs.sendall(b'{"a": 1}\n[1]\n')
        assert channel.receive(TIMEOUT) == {"a": 1}
        with pytest.raises(ChannelError, match="says what is no message"):
            channel.receive(TIMEOUT)
        with pytest.raises(ChannelError, match=r"says nothing for 0\.05 s"):
            channel.receive(0.05)
        theirs.close()
        with pytest.raises(ChannelError, match="ended the connection"):
            channel.receive(TIMEOUT)


# ---------------------------------------------------------------------------------------------- by torchrun


def test_one_worker_of_each_host_looks(no_training: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert by_torchrun.main([], {}) == 2
    assert by_torchrun.main([], {"GROUP_RANK": "0", "LOCAL_RANK": "1"}) == 0
    several = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    assert by_torchrun.main(["--jsno", "--"], several) == 2
    assert by_torchrun.main(["--", "--enable-high-availability"], several) == 2
    assert "give --tls-dir" in capsys.readouterr().err
    assert by_torchrun.main(["--json", "--", "--num-layers", "2"], {"GROUP_RANK": "0", "LOCAL_RANK": "0"}) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "yellow"


@pytest.mark.full
def test_torchrun_starts_it_on_all_hosts(no_training: None, processes: Processes, tmp_path: Path) -> None:
    """Two nodes of this machine, two workers each, by the launcher of the job."""
    master, controller = free_port(), free_port()
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(master)]
    words += ["-m", "mindspeed_tft.doctor", "--json", "--", "--tft-controller-port", str(controller)]
    words += ["--enable-high-availability", "--save", str(tmp_path), "--num-layers", "2", "--hidden-size", "8"]
    torchrun = Path(sys.executable).with_name("torchrun")
    started = [processes.start([torchrun, "--node-rank", str(node), *words]) for node in (0, 1)]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    report = json.loads(said[0][said[0].index("\n{\n") : said[0].rindex("}") + 1])
    assert report["ways_tried"] == 2 and {way["why"] for way in report["ways"]} == {"ok"}
    assert any(f["check"] == "launcher" and "kills the survivors" in f["text"] for f in report["findings"])
    assert "doctor: yellow; the report is on" in said[1]
