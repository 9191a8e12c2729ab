"""The contract of the `mindio_ttp` facade: every name that adaptors import is there, takes what its call sites give,
and does what it says, or refuses with the reason."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.facade import mindio, shards, texts
from mindspeed_tft.facade.gate import Gate
from mindspeed_tft.facade.process import Process
from mindspeed_tft.facade.words import NOT_SERVED, FacadeError, NotServed, RepairType, ReportState
from mindspeed_tft.recovery import launcher
from mindspeed_tft.settings import Refused

if TYPE_CHECKING:
    from tests.conftest import Processes

FRAMEWORK, DECORATOR = "mindio_ttp.framework_ttp", "mindio_ttp.framework_ttp.ttp_decorator"
CONTROLLER, UTILS = "mindio_ttp.controller_ttp", "mindio_ttp.utils"

# Module -> name -> numbers of positional arguments with which it has to be callable; () for a class.
NAMES: dict[str, dict[str, tuple[int, ...]]] = {
    FRAMEWORK: {
        "OptimizerType": (),
        "RepairType": (),
        "Action": (),
        "ReportState": (),
        "set_mindio_export_version": (1,),
        "tft_init_controller": (3, 4, 5),
        "tft_start_controller": (2, 3, 4),
        "tft_destroy_controller": (0,),
        "tft_init_processor": (3, 4, 5, 6, 7, 8),
        "tft_start_processor": (2, 3),
        "tft_destroy_processor": (0,),
        "tft_set_optimizer_replica": (2,),
        "tft_set_dp_group_info": (2,),
        "tft_start_updating_os": (0, 1),
        "tft_end_updating_os": (1,),
        "tft_start_copy_os": (0,),
        "tft_set_step_args": (1,),
        "tft_exception_handler": (1,),
        "tft_report_error": (1, 2),
        "tft_wait_next_action": (0,),
        "tft_get_repair_step": (0,),
        "tft_get_repair_type": (0,),
        "tft_is_reboot_node": (0,),
        "tft_get_reboot_type": (0,),
        "tft_reset_limit_step": (0,),
        "tft_pause_train": (1,),
        "tft_report_load_ckpt_step": (1,),
        "tft_can_do_uce_repair": (1, 2, 3),
        "tft_register_exception_handler": (3,),
        "tft_register_decrypt_handler": (1,),
        **{
            f"tft_register_{name}_handler": (1, 2)
            for name in "stop clean rebuild_group repair rollback save_ckpt rename exit stream_sync"
            " zit_downgrade_rebuild zit_upgrade_rebuild zit_upgrade_repair zit_upgrade_rollback".split()
        },
    },
    DECORATOR: {
        "get_device": (0,),
        "get_mindio_export_version": (0,),
        "tft_get_repair_type": (0,),
        "tft_report_load_ckpt_step": (1,),
        "tft_exception_handler": (1,),
    },
    UTILS: {
        "tft_set_update_start_time": (0, 1),
        "tft_set_update_end_time": (0, 1),
        "tft_can_do_uce_repair": (1, 2, 3),
    },
    CONTROLLER: {
        "tft_init_controller": (3, 4, 5),
        "tft_start_controller": (2, 3, 4),
        "tft_destroy_controller": (0,),
        "tft_register_mindx_callback": (2,),
        "tft_notify_controller_stop_train": (1, 2, 3),
        "tft_notify_controller_on_global_rank": (1, 2),
        "tft_notify_controller_prepare_action": (1, 2),
        "tft_notify_controller_change_strategy": (1, 2),
        "tft_notify_controller_dump": (0,),
        "tft_query_high_availability_switch": (0,),
    },
}  # fmt: skip


@pytest.fixture
def facade() -> Iterator[Callable[[str, str], Any]]:
    """`facade(module, name)`, imported as an adaptor would."""
    mindio.install()
    yield lambda module, name: getattr(importlib.import_module(module), name)
    mindio.uninstall()


@pytest.mark.parametrize(("key", "value"), [("tft-clusterd", "http://127.0.0.1"), ("tft-fault-rules", "rules.yaml")])
def test_a_setting_that_nothing_here_would_heed_is_refused(key: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "facade.yaml").write_text(f"{key}: {value}\n")
    process = Process({"TFT_FACADE_CONFIG": str(tmp_path / "facade.yaml")})
    with pytest.raises(Refused, match=f"{key.replace('-', '_')}.*Remedy: leave it out"):
        process._settings()


def test_a_dump_that_the_launcher_would_cut_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launcher.ENV_SHUTDOWN, raising=False)
    monkeypatch.setattr(launcher, "words", lambda: ["torchrun", "x.py"])
    with pytest.raises(Refused, match=r"TTP_OT: a dump of 20 s does not fit: the launcher kills .*start with tftrun"):
        Process({"TTP_OT": "20"})._settings()
    assert Process({"TTP_OT": "16"})._settings().deadlines(30).dump == 16


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_the_name_is_there_and_takes_what_it_is_given(
    facade: Callable[[str, str], Any], module: str, name: str
) -> None:
    found = facade(module, name)
    counts = NAMES[module][name]
    if not counts:
        assert inspect.isclass(found)
        return
    signature = inspect.signature(found)
    for count in counts:
        signature.bind(*range(count))
    for count in {min(counts) - 1, max(counts) + 1} - {-1}:
        with pytest.raises(TypeError):
            signature.bind(*range(count))


def test_nothing_else_is_offered(facade: Callable[[str, str], Any]) -> None:
    """A name that nobody has judged is no part of the contract."""
    more = {DECORATOR: {"set_mindio_export_version", "tft_get_repair_step", "tft_register_exception_handler"}}
    for module, names in NAMES.items():
        assert set(importlib.import_module(module).__all__) == set(names) | more.get(module, set())


def test_values_of_the_enumerations(facade: Callable[[str, str], Any]) -> None:
    """Adaptors compare them with numbers."""
    assert [(one.name, one.value) for one in facade(FRAMEWORK, "OptimizerType")] == [("ATTENTION", 0), ("MOE", 1)]
    assert [one.value for one in facade(FRAMEWORK, "RepairType")] == list(range(7))
    assert facade(FRAMEWORK, "RepairType").RT_LOAD_REBUILD.value == 6
    assert [one.name for one in facade(FRAMEWORK, "Action")] == ["RETRY", "EXIT"]
    assert facade(FRAMEWORK, "ReportState").RS_UNKNOWN.value == 8


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_says_why(facade: Callable[[str, str], Any], root: Path, name: str) -> None:
    module = next(module for module, names in NAMES.items() if name in names)
    arguments = {"tft_start_copy_os": 0, "tft_notify_controller_dump": 0}.get(name, 1)
    call = facade(module, name)
    needed = max(arguments, min(NAMES[module][name]))
    with pytest.raises(NotServed) as refused:
        call(*[lambda: None] * needed)
    reason, remedy = NOT_SERVED[name]
    assert str(refused.value) == f"{name} is not served by the mindspeed_tft facade: {reason}; {remedy}"
    assert f"`{name}`" in (root / "docs" / "mindio-facade.md").read_text()


def test_the_page_names_everything(root: Path) -> None:
    text = (root / "docs" / "mindio-facade.md").read_text()
    missing = [name for names in NAMES.values() for name in names if f"`{name}`" not in text]
    assert not missing


# ------------------------------------------------------------------------------------------ real adaptors


def uses(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each `from mindio_ttp... import name` in a source, wherever it stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == mindio.NAME:
            for name in node.names:
                yield node.module or "", name.name


def calls(text: str) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Name, number of positional arguments and keywords of each call of a name that is imported from there."""
    known = {name for _, name in uses(text)}
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known):
            continue
        if not any(isinstance(one, ast.Starred) for one in node.args):
            yield node.func.id, len(node.args), tuple(one.arg for one in node.keywords if one.arg)


def adaptor_sources() -> list[Path]:
    given = os.environ.get("TFT_MINDSPEED_LLM_PATH")
    if not given:
        pytest.skip("needs a checkout of MindSpeed-LLM: set TFT_MINDSPEED_LLM_PATH")
    found = [path for path in sorted(Path(given).rglob("*.py")) if mindio.NAME in path.read_text()]
    assert found, f"nothing below {given} imports {mindio.NAME}"
    return found


def test_a_checkout_imports_nothing_that_is_missing(facade: Callable[[str, str], Any]) -> None:
    seen = set()
    for path in adaptor_sources():
        text = path.read_text()
        for module, name in uses(text):
            facade(module, name)
            assert name in NAMES[module], f"{path}: {name} is in no list here"
            seen.add(name)
        for name, positional, keywords in calls(text):
            module = next(module for module, found in uses(text) if found == name)
            inspect.signature(facade(module, name)).bind(*range(positional), **dict.fromkeys(keywords))
    assert {"tft_exception_handler", "tft_set_optimizer_replica", "tft_register_repair_handler"} <= seen


def test_the_search_finds_what_is_wrong() -> None:
    """The control of the search above."""
    text = "def f():\n    from mindio_ttp.utils import tft_new_thing\n    tft_new_thing(1, 2, a=3)\n"
    assert list(uses(text)) == [("mindio_ttp.utils", "tft_new_thing")]
    assert list(calls(text)) == [("tft_new_thing", 2, ("a",))]


# ------------------------------------------------------------------------------------------ turned on, or refused


def test_it_is_off_unless_it_is_imported(processes: Processes) -> None:
    code = "import importlib.util; import mindspeed_tft.facade; print(importlib.util.find_spec('mindio_ttp'))"
    assert processes.python(code).strip() == "None"
    code = "import mindspeed_tft.facade.mindio, importlib.util as u; print(u.find_spec('mindio_ttp').name)"
    assert processes.python(code).strip() == "mindio_ttp"


def test_beside_the_real_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "mindio_ttp"
    real.mkdir()
    (real / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    mindio.uninstall()
    with pytest.raises(FacadeError, match=f"{real}.*pip uninstall mindio_ttp"):
        mindio.install()
    assert not mindio.installed()


def test_beside_our_own_adaptor_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspeed_tft.adaptor", sys)
    with pytest.raises(FacadeError, match="keep one of the two imports"):
        Process({}).init_processor(0, 1, False, True, False, False)


def test_options_that_are_not_built_are_refused() -> None:
    with pytest.raises(NotServed, match="local"):
        Process({}).init_processor(0, 2, True, True, False, False)
    with pytest.raises(NotServed, match="elastic"):
        Process({}).init_controller(0, 2, False, True)
    with pytest.raises(NotServed, match="MINDX_TASK_ID"):
        Process({}).init_controller(-1, 2, False, False)


def test_reboot_without_our_launcher_is_told_and_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    Process({}).init_processor(0, 2, False, True, True, False)
    assert "enable_arf: reboot is not available" in capfd.readouterr().out


def test_calls_in_a_wrong_order_name_the_right_one() -> None:
    process = Process({})
    with pytest.raises(FacadeError, match="call tft_init_controller before"):
        process.start_controller(8000)
    with pytest.raises(FacadeError, match="call tft_init_processor before"):
        process.start_processor("127.0.0.1", 8000)
    with pytest.raises(FacadeError, match="call tft_set_optimizer_replica before"):
        process.run(lambda: None, (), {})
    with pytest.raises(FacadeError, match="port 80;"):
        process.start_controller(80)


# ------------------------------------------------------------------------------------------ pure parts


def test_holders_as_an_adaptor_cuts_them() -> None:
    """8 ranks in 2 replicas: chunks of 4, so that ranks 1 and 5 of the list hold the same slice."""
    ranks = [0, 2, 4, 6, 8, 10, 12, 14]
    entry = {"rank_list": ranks, "replica_cnt": 2, "replica_shift": 0}
    held = {rank: shards.read(rank, [entry])[0].holds for rank in ranks}
    assert held[2] == held[10] == "ranks0/dense/1" and len(set(held.values())) == 4
    everything = {"rank_list": ranks, "replica_cnt": 8, "replica_shift": 0}
    assert {shards.read(rank, [everything])[0].holds for rank in ranks} == {"ranks0/dense/0"}
    moe = {"rank_list": [2, 10], "replica_cnt": 2, "replica_shift": 0}
    info = shards.info(10, "a", 7, shards.read(10, [entry, moe]))
    assert isinstance(info, RankInfo) and info.holds == ("ranks0/dense/1", "ranks2/expert/0")
    assert (info.part, info.dp_rank, len(info.needs)) == ("ranks0", 5, 5)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"rank_list": [0, 1, 2], "replica_cnt": 2, "replica_shift": 0}, "do not divide 3 ranks"),
        ({"rank_list": [1, 2], "replica_cnt": 2, "replica_shift": 0}, "with rank 0 in it"),
        ({"rank_list": [1, 0], "replica_cnt": 2, "replica_shift": 0}, "no ascending list"),
        ({"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 1}, "shift of 1"),
        ({"rank_list": [0, 1], "replica_cnt": 2}, "no replica_shift"),
    ],
)
def test_replicas_that_cannot_be_are_refused(entry: dict[str, Any], why: str) -> None:
    with pytest.raises(FacadeError, match=why):
        shards.read(0, [entry])


def test_one_call_for_all_that_a_rank_gives_or_takes() -> None:
    transfers = ["ranks0/dense/1|5|1", "ranks0/expert/0|3|1", "ranks0/dense/0|5|4", "ranks0/small|5|1"]
    taken = shards.repair_call(1, transfers, RepairType.RT_UCE_HIGHLEVEL)
    assert taken.error_ranks == [1, 4] and taken.taken == ("ranks0/dense/1", "ranks0/expert/0")
    ranks = [1, 3, 4, 5]
    assert taken.info == {"type": [0, 1], "repair_type": 1, "src": [5, 3], "dst": [1, 1], "rank_list": ranks}
    given = shards.repair_call(5, transfers, RepairType.RT_UCE_HIGHLEVEL)
    assert given.info == {"type": [0, 0], "repair_type": 0, "src": [5, 5], "dst": [1, 4], "rank_list": ranks}
    with pytest.raises(FacadeError, match="give and take"):
        shards.repair_call(5, [*transfers, "ranks0/dense/3|1|5"], RepairType.RT_UCE_HIGHLEVEL)


def test_texts_in_their_order() -> None:
    rules, window = texts.Rules(), texts.Window(100, 200)
    said: list[str] = []
    rules.register("PRECISION ERROR", "RS_RETRY", lambda text: said.append(text) or "")

    def kind(text: str) -> str:
        return rules.kind(text, window, "cpu")

    assert kind("UCE ERROR beside FORCE STOP") == "memory"
    assert kind("FORCE STOP") == "stopped"
    assert kind("HCCS LINK ERROR") == "link"
    assert kind("PRECISION ERROR: load ckpt step=3") == "precision" and said == ["PRECISION ERROR: load ckpt step=3"]
    assert kind("HBM MULTI BIT ECC, time us=150") == "memory"
    assert kind("HBM MULTI BIT ECC, time us=250") == "memory"
    assert kind("HBM MULTI BIT ECC, time us=50") == kind("HBM MULTI BIT ECC") == "corrupted"
    assert kind("gloo: Connection closed by peer") == "link"
    assert kind("something else") == "exception"
    for wrong in ("RS_STEP_FINISH", "RS_ANYTHING"):
        with pytest.raises(FacadeError, match="none of"):
            rules.register("X", wrong, lambda text: text)
    assert not texts.repairable(150, None, 200)
    assert {state.name for state in ReportState} >= {"RS_NORMAL", "RS_RETRY"}


def test_a_stop_lets_an_update_end_and_none_begin() -> None:
    gate = Gate()
    assert gate.enter(open_since=0)
    assert not gate.close(1, within=0.05) and gate.updating  # it took too long: told, and stopped anyway
    gate.leave()
    assert not gate.enter(open_since=0) and gate.closing(0)
    gate.stopped(1)
    assert gate.wait_stopped(1, 0.0) and not gate.wait_stopped(2, 0.0)
    assert gate.enter(open_since=1)  # that stop was answered
    assert gate.arrive() and not gate.updating  # torn out of the middle
