"""A job of a drill always ends, and nothing of it is left; an unbroken run is never taken when it is stale."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from mindspeed_tft.faults import jobs
from mindspeed_tft.faults.references import ReferenceCache, SourcesChanged, sources_digest

# Starts a child in a session of its own, as launchers and controllers do, and says its process id.
DETACHED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
print("child", child.pid, flush=True)
"""


def _job(tmp_path: Path, code: str, deadline: float = 30.0, **env: str) -> jobs.Job:
    return jobs.Job("test", ((sys.executable, "-c", code),), tmp_path / "log", deadline, env)


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_job_that_ends_is_reported_with_its_status_log_and_steps(tmp_path: Path) -> None:
    seen: list[int] = []
    code = "print('iteration        3/      12 | consumed')\nraise SystemExit(7)"
    ended = jobs.run(_job(tmp_path, code), seen.append)
    assert ended.returncode == 7
    assert not ended.timed_out
    assert ended.leftover == ()
    assert "iteration        3/" in ended.tail(1)


def test_the_error_of_a_rank_is_shown_beside_the_last_words_of_the_launcher(tmp_path: Path) -> None:
    code = "import sys\nprint('start')\nprint('[rank1]: ValueError: no luck')\nfor i in range(40): print('launcher', i)"
    shown = jobs.run(_job(tmp_path, code)).explanation().splitlines()
    assert shown[:3] == ["start", "[rank1]: ValueError: no luck", "..."]
    assert shown[-1] == "launcher 39"
    assert len(shown) == 18
    silent = jobs.run(_job(tmp_path, "print('only this')"))
    assert silent.explanation() == "only this"


def test_progress_follows_the_log_while_the_job_runs(tmp_path: Path) -> None:
    seen: list[int] = []
    code = (
        "import time\n"
        "for i in (1, 2, 3):\n"
        "    print(f'iteration {i:8d}/      12 | consumed', flush=True); time.sleep(0.5)"
    )
    jobs.run(_job(tmp_path, code), seen.append)
    assert seen == [1, 2, 3]


def test_at_its_deadline_a_job_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = jobs.run(_job(tmp_path, DETACHED + "time.sleep(120)", deadline=2.0))
    assert ended.timed_out
    assert time.monotonic() - began < 20
    assert _gone(int(ended.tail().split()[1]))


def test_what_outlives_its_launcher_is_named_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_GRACE", 0.5)
    ended = jobs.run(_job(tmp_path, DETACHED))
    assert ended.returncode == 0
    pid = int(ended.tail().split()[1])
    assert [int(text.split()[0]) for text in ended.leftover] == [pid]
    assert _gone(pid)


def test_an_interrupted_drill_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    code = DETACHED + "print('iteration 1/ 12 |', flush=True); time.sleep(120)"
    with pytest.raises(KeyboardInterrupt):
        jobs.run(_job(tmp_path, code), interrupt)
    pid = int((tmp_path / "log").read_text().split()[1])
    assert _gone(pid)


def test_a_job_gets_no_setting_of_an_outer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HIGH_AVAILABILITY", "TTP_OT", "TFT_DRILL_FAULTS", "RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "outer")
    code = "import os\nprint(sorted(name for name, value in os.environ.items() if value == 'outer'))"
    ended = jobs.run(_job(tmp_path, code, TFT_DRILL_SEED="5"))
    assert ended.tail().splitlines() == ["[]"]


def test_ranks_share_compiled_files_where_none_may_be_written_beside_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert jobs.bytecode_cache(tmp_path) == {}
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(jobs.importlib.util, "cache_from_source", lambda _: str(tmp_path / "not compiled"))
    code = "import sys\nprint(sys.dont_write_bytecode, sys.pycache_prefix)"
    ended = jobs.run(_job(tmp_path, code, **jobs.bytecode_cache(tmp_path / "compiled")))
    assert ended.tail() == f"False {tmp_path / 'compiled'}"


def test_the_launchers_differ_in_nothing_but_who_starts_the_ranks() -> None:
    size = jobs.Size(4)
    made = {name: launcher(size, "some.module", ("--flag",))[0] for name, launcher in jobs.LAUNCHERS.items()}
    plain = made["torchrun"]
    assert plain[-3:] == ("-m", "some.module", "--flag")
    assert [word for word in made["torchrun-logs-specs"] if word not in ("--logs-specs", "mindspeed_tft")] == [*plain]
    assert [made["tftrun"][2], made["tftrun"][3:]] == ["mindspeed_tft.agent.tftrun", plain[3:]]
    assert made.keys() - set(jobs.REBOOTING) == {"torchrun"}


def test_the_nodes_of_a_job_differ_in_their_rank_and_in_where_they_are_started() -> None:
    size = jobs.Size(4, nodes=2, master="10.0.0.1", port=29500, prefixes=(("on", "a"), ("on", "b")))
    first, second = jobs.tftrun(size, "some.module", ("--flag",))
    assert (first[:2], second[:2]) == (("on", "a"), ("on", "b"))
    assert first[first.index("--nproc-per-node") + 1] == "2"
    assert [word for one, word in zip(first, second, strict=True) if one != word] == ["b", "1"]
    assert first[first.index("--master-addr") + 1] == "10.0.0.1"


def test_with_a_c10d_rendezvous_all_nodes_are_started_with_the_same_command() -> None:
    first, second = jobs.tftrun(jobs.Size(4, nodes=2, port=29500, rendezvous="c10d"), "some.module", ("--flag",))
    assert first == second
    assert first[first.index("--rdzv-endpoint") + 1] == "127.0.0.1:29500"
    assert "--node-rank" not in first


_DIES_ONCE = """
import os, signal, sys
from pathlib import Path
mark = Path(sys.argv[1])
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("again")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("replacements", "status", "expected"), [(1, 0, 0), (1, 3, 3), (0, 0, 0)])
def test_a_killed_node_is_replaced_as_often_as_it_is_told(
    tmp_path: Path, replacements: int, status: int, expected: int
) -> None:
    """What counts is how those nodes end that nobody killed."""
    steady = (sys.executable, "-c", "print('steady')")
    dies = (sys.executable, "-c", _DIES_ONCE, str(tmp_path / "mark"), str(status))
    job = jobs.Job("test", (steady, dies), tmp_path / "job.log", 30, {}, replacements)
    ended = jobs.run(job)
    assert ended.returncode == expected
    text = ended.log.read_text()
    assert "steady" in text and "----- node 1 -----" in text
    assert ("again" in text) == bool(replacements)


_LEAVES_ONCE = """
import pathlib, sys, time
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.write_text("")
    sys.exit(1)
print("again")
mark.with_suffix(".again").write_text("")
"""
_WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def test_a_node_that_leaves_comes_back_while_others_go_on(tmp_path: Path) -> None:
    """As a cluster does that took it away. In any other job it is a failure."""
    leaves = (sys.executable, "-c", _LEAVES_ONCE, str(tmp_path / "mark"))
    waits = (sys.executable, "-c", _WAITS, str(tmp_path / "mark.again"))
    ended = jobs.run(jobs.Job("test", (waits, leaves), tmp_path / "job.log", 30, {}, 1, rescheduled=True))
    assert (ended.returncode, "again" in ended.log.read_text()) == (0, True)
    (tmp_path / "mark").unlink()
    both = jobs.Job("test", (leaves, leaves), tmp_path / "job.log", 30, {}, 0, rescheduled=True)
    assert jobs.run(both).returncode == 1


def test_a_job_whose_every_node_was_killed_did_not_end_well(tmp_path: Path) -> None:
    dies = (sys.executable, "-c", _DIES_ONCE, str(tmp_path / "mark"), "0")
    assert jobs.run(jobs.Job("test", (dies,), tmp_path / "job.log", 30)).returncode == -signal.SIGKILL


# -------------------------------------------------------------------------------------------- references


class _Maker:
    def __init__(self) -> None:
        self.made = 0

    def __call__(self, entry: Path) -> None:
        self.made += 1
        (entry / "save").mkdir()
        (entry / "save" / "weights.pt").write_bytes(b"weights")


def test_an_unbroken_run_is_made_once_for_the_same_key(tmp_path: Path) -> None:
    make, cache = _Maker(), ReferenceCache(tmp_path)
    first, kept = cache.get(lambda: {"layout": "dp4", "flags": ("a", 1)}, make)
    assert not kept
    assert cache.get(lambda: {"layout": "dp4", "flags": ("a", 1)}, make) == (first, True)
    assert make.made == 1
    other, kept = cache.get(lambda: {"layout": "dp4", "flags": ("a", 2)}, make)
    assert (kept, make.made) == (False, 2)
    assert other != first


@pytest.mark.parametrize("damage", ["change", "remove", "add", "entry"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, damage: str) -> None:
    make, cache = _Maker(), ReferenceCache(tmp_path)
    entry, _ = cache.get(lambda: {"layout": "dp4"}, make)
    weights = entry / "save" / "weights.pt"
    if damage == "change":
        weights.write_bytes(b"wEights")
    elif damage == "remove":
        weights.unlink()
    elif damage == "add":
        (entry / "save" / "more.pt").touch()
    else:
        (entry / "entry.json").write_text("{")
    again, kept = cache.get(lambda: {"layout": "dp4"}, make)
    assert (again, kept, make.made) == (entry, False, 2)
    assert weights.read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_a_run_that_fails_is_not_kept(tmp_path: Path) -> None:
    def fail(entry: Path) -> None:
        (entry / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ReferenceCache(tmp_path).get(dict, fail)
    assert list(tmp_path.iterdir()) == []


def test_sources_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    keys = iter([{"program": "old"}, {"program": "new"}])
    with pytest.raises(SourcesChanged):
        ReferenceCache(tmp_path).get(lambda: next(keys), _Maker())
    assert list(tmp_path.iterdir()) == []


def test_the_digest_of_sources_sees_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = sources_digest(tmp_path)
    assert sources_digest(tmp_path) == before
    os.rename(tmp_path / "a.py", tmp_path / "b.py")
    renamed = sources_digest(tmp_path)
    (tmp_path / "b.py").write_text("x = 2\n")
    assert len({before, renamed, sources_digest(tmp_path)}) == 3
