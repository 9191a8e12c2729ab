"""`tftctl patches`, and what it stands on: targets looked up in sources, and strangers found in a chain of patches."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wrapt

from mindspeed_tft.registry import PatchError, Registry, Sources
from mindspeed_tft.registry.targets import Target, Unfit
from mindspeed_tft.registry.versions import version_in

HA = "high-availability"


def tftctl(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the command declares and activates in the registry of its process."""
    command = [Path(sys.executable).with_name("tftctl"), "patches", *words]
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A Megatron with next to nothing in it."""
    for part in ("core", "training"):
        (tmp_path / "megatron" / part).mkdir(parents=True)
        (tmp_path / "megatron" / part / "__init__.py").touch()
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 7\n")
    return tmp_path


# --------------------------------------------------------------------------------------------- the command


def test_every_patch_with_target_state_versions_and_origin(root: Path) -> None:
    result = tftctl("--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    every = answer["patches"]
    assert answer["troubles"] == []
    rows = {(row["target"], row["group"]): row for row in every if row["state"] != "skipped"}  # of other releases
    train = rows["megatron.training.training:train", HA]
    assert (train["state"], train["kind"], train["needs"]) == ("declared", "wrap", "--enable-high-availability")
    assert train["versions"] and train["host_version"].startswith("0.19")
    origin, line = train["origin"].rsplit(":", 1)
    written = Path(origin).read_text().splitlines()[int(line) - 1 :]
    assert Path(origin) == root / "patches" / "megatron_training.py" and "wrap" in written[0]
    place, line = train["place"].rsplit(":", 1)
    assert "def train(" in Path(place).read_text().splitlines()[int(line) - 1]
    assert {row["group"] for row in every} == {HA, "parser", "mended", "drill", "torch-elastic", "mindspeed"}
    # Active already, and waits for a MindSpeed that may come.
    manager = rows["mindspeed.patch_utils:MindSpeedPatchesManager.apply_patches", "mindspeed"]
    assert manager["state"] == "waiting" and "has not been imported" in manager["detail"]


def test_another_checkout_is_read_and_not_imported(checkout: Path) -> None:
    (checkout / "megatron" / "training" / "training.py").write_text("raise SystemExit(9)\ndef train(): ...\n")
    result = tftctl("--megatron", str(checkout))
    assert result.returncode == 1, result.stderr  # patches are missing
    lines = result.stdout.splitlines()
    every = [line for line in lines if " megatron.training.training:train " in line]
    (train,) = [line for line in every if line.split()[0] != "skipped"]  # as those of other releases are
    assert train.split()[0] == "declared" and "(here 0.19.7)" in train and "patches/megatron_training.py:" in train
    assert (
        "missing: megatron.training.training:train_step: module megatron.training.training has no 'train_step'" in lines
    )
    assert any(line.startswith("skipped: megatron.core.optimizer.distrib_optimizer:") for line in lines)


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    for part in ("core", "training"):  # which, empty, an import would take from the Megatron that is installed
        (tmp_path / "megatron" / part).mkdir(parents=True)
    result = tftctl("--megatron", str(tmp_path))
    assert result.returncode == 2 and "holds no" in result.stderr and "__init__.py" in result.stderr


def test_what_a_checkout_lacks_is_not_looked_up_in_the_installed_megatron(checkout: Path) -> None:
    (checkout / "megatron" / "core" / "package_info.py").unlink()
    result = tftctl("--megatron", str(checkout), "--json")
    assert result.returncode == 1, result.stderr
    rows = [row for row in json.loads(result.stdout)["patches"] if row["target"].startswith("megatron.")]
    assert rows and not any(row["place"] or row["state"] in ("declared", "applied") for row in rows)
    assert any("this is of an unknown version" in row["detail"] for row in rows)


NOISE = """
import logging, os, sys
print("printed"), os.write(1, b"written"), os.system("echo a child")
logging.basicConfig(stream=sys.stdout)
def train(): ...
evaluate = None
raise SystemExit(3)
"""


def test_only_the_answer_is_on_stdout_and_it_holds_the_troubles(checkout: Path) -> None:
    (checkout / "megatron" / "training" / "training.py").write_text(NOISE)
    result = tftctl("--megatron", str(checkout), "--apply", "--json")
    assert result.returncode == 1
    answer = json.loads(result.stdout)
    assert all(word in result.stderr for word in ("printed", "written", "a child"))
    assert all(trouble in result.stderr for trouble in answer["troubles"])
    assert any("training.training cannot be imported: SystemExit: 3" in trouble for trouble in answer["troubles"])


def test_a_group_that_was_refused_is_not_shown_as_if_it_were_fit(checkout: Path) -> None:
    source = NOISE.replace("raise SystemExit(3)", "def evaluate_and_print_results(): ...")
    (checkout / "megatron" / "training" / "training.py").write_text(source)
    result = tftctl("--megatron", str(checkout), "--apply")
    assert result.returncode == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    states = {line[2]: line[0] for line in lines if len(line) > 3 and line[0] not in ("skipped", "state")}
    assert states["megatron.training.training:evaluate"] == "missing"
    assert states["megatron.training.training:train"] == "waiting"
    assert any(line[:2] == ["missing:", "megatron.training.training:evaluate:"] for line in lines)
    assert "declared" not in lines[-1] and "missing," in lines[-1]


WITHOUT_MEGATRON = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "megatron" else find(name, *rest)
"""


def test_that_megatron_is_not_installed_is_said(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MEGATRON)
    result = tftctl(path=tmp_path)
    assert result.returncode == 0, result.stderr
    assert any(line.startswith("megatron: not installed: ") for line in result.stdout.splitlines())


def test_a_file_that_cannot_be_read_is_named(checkout: Path) -> None:
    file = checkout / "megatron" / "training" / "training.py"
    file.write_bytes(b"\nx = '\xff'\n")
    result = tftctl("--megatron", str(checkout))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"missing: megatron.training.training:train: {file} cannot be read: " in result.stdout

    file.write_text("\ndef train(:\n")
    result = tftctl("--megatron", str(checkout), "--apply")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"training.training cannot be imported: SyntaxError: invalid syntax (training.py, line 2) ({file}:2)" in (
        result.stderr
    )


def test_a_torch_that_cannot_be_imported_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("\nraise RuntimeError('no driver')\n")
    result = tftctl("--json", path=tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (trouble,) = json.loads(result.stdout)["troubles"]
    assert f"RuntimeError: no driver ({tmp_path}/torch/__init__.py:2)" in trouble and "Remedy" in trouble


@pytest.mark.full
def test_all_patches_are_applied_to_the_real_megatron() -> None:
    result = tftctl("--apply", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["patches"]
    states = {row["state"] for row in rows if row["group"] != "mindspeed" and "and this is" not in row["detail"]}
    assert states == {"applied"}
    # Megatron's own decorators (torch.no_grad and others) are not taken for somebody else's patches.
    assert not any(row["others"] for row in rows)


# ------------------------------------------------------------------------------------- looked up in sources

SOURCES = {
    "tiny/__init__.py": "from .a import f as exported\nfrom . import a\n",
    "tiny/a.py": """
        from typing import TYPE_CHECKING
        from elsewhere import thing
        if TYPE_CHECKING:
            def only_types(): ...
        def f(): ...
        g = f
        try:
            from missing_package import fast
        except ImportError:
            def fast(): ...
        try:
            from missing_package import maybe
        except ImportError:
            maybe = None
        if len("x") > 1:
            def branch(): ...
        nothing = None
        number = 3
        class Base:
            def inherited(self): ...
            @staticmethod
            @functools.cache
            def static(): ...
        class Child(Base):
            class Inner:
                def deep(self): ...
            async def own(self): ...
    """,
    "tiny/b.py": """
        from tiny.a import *
        from . import a
        import tiny.a as renamed
        import tiny.sub.module
        class Grandchild(a.Child): ...
        class Other(renamed.Child): ...
        class Loop(Loop): ...
    """,
    "tiny/sub/module.py": "from ..a import f\n",
}


@pytest.fixture
def tiny(tmp_path: Path) -> Sources:
    for name, source in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return Sources(lambda package: [tmp_path / "tiny"] if package == "tiny" else [])


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("tiny.a:f", "tiny.a"),
        ("tiny.a:g", "tiny.a"),  # another name of it
        ("tiny.a:fast", "tiny.a"),
        ("tiny.a:branch", "tiny.a"),
        ("tiny:exported", "tiny.a"),
        ("tiny.b:f", "tiny.a"),  # import *
        ("tiny.sub.module:f", "tiny.a"),  # a folder without an __init__.py
        ("tiny.a:maybe", "missing_package"),
        ("tiny.a:Base.inherited", "tiny.a"),
        ("tiny.a:Child.inherited", "tiny.a"),
        ("tiny.a:Child.own", "tiny.a"),
        ("tiny.a:Child.Inner.deep", "tiny.a"),
        ("tiny.b:Grandchild.static", "tiny.a"),
        ("tiny.b:Other.own", "tiny.a"),
    ],
)
def test_found_in_the_sources(tiny: Sources, target: str, module: str) -> None:
    place = tiny.find(Target.parse(target))
    assert place.module == module and place.file.is_file()
    assert "tiny" not in sys.modules


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("tiny.a:none", "module tiny.a has no 'none'"),
        ("tiny.a:only_types", "has no 'only_types'"),
        ("tiny.a:nothing", "is None"),
        ("tiny.a:number", "is 3"),
        ("tiny.a:Base", "is a class"),
        ("tiny.a:Base.none", "class tiny.a.Base has no 'none'"),
        ("tiny.a:f.x", "'f' in .* is not a class"),
        ("tiny.a:No.x", "module tiny.a has no 'No'"),
        ("tiny.b:Loop.x", "has no 'x'"),
        ("tiny.c:f", "no source of a module tiny.c"),
        ("tiny.a.b:f", "no source of a module tiny.a.b"),
        ("large:f", "no source of a module large"),
    ],
)
def test_not_found_in_the_sources(tiny: Sources, target: str, reason: str) -> None:
    with pytest.raises(Unfit, match=reason):
        tiny.find(Target.parse(target))


@pytest.mark.parametrize("source", [b"def f(:\n", b"x = '\xff'\n", b"\0\n"], ids=["syntax", "utf-8", "null"])
def test_a_source_that_cannot_be_read_is_named(tiny: Sources, tmp_path: Path, source: bytes) -> None:
    file = tmp_path / "tiny" / "a.py"
    file.write_bytes(source)
    for target in ("tiny.a:f", "tiny.b:f", "tiny:exported"):  # itself, and what imports from it
        with pytest.raises(Unfit, match=f"{file} cannot be read: "):
            tiny.find(Target.parse(target))
    with pytest.raises(PatchError, match=f"the version in {file} cannot be read: .* Remedy"):
        version_in(file)


def test_where_exactly(tiny: Sources) -> None:
    place = tiny.find(Target.parse("tiny.a:Base.static"))
    assert place.decorators == ("staticmethod", "functools.cache")
    assert "def static" in place.file.read_text().splitlines()[place.line - 1]
    assert tiny.has("tiny") and not tiny.has("large")


def never(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    raise AssertionError("nothing is called in these tests")


def states(registry: Registry, sources: Sources, version: str = "1.0") -> dict[str, str]:
    return {row.target: row.state for row in registry.survey(sources, lambda _: version)}


def test_states_of_a_survey(tiny: Sources) -> None:
    registry = Registry()
    registry.wrap("tiny.a:f", group="g", versions=">=1")(never)
    registry.wrap("tiny.a:no", group="g")(never)
    registry.wrap("tiny.a:may_miss", group="g", missing="skip")(never)
    registry.wrap("tiny.a:old", "tiny.a:fast", group="g")(never)
    registry.wrap("tiny.a:branch", group="g", versions=">=2", one_of="x")(never)
    registry.wrap("tiny.a:g", group="g", versions="<2", one_of="x")(never)
    registry.wrap("large:f", group="g")(never)
    assert states(registry, tiny) == {
        "tiny.a:f": "declared",
        "tiny.a:no": "missing",
        "tiny.a:may_miss": "skipped",
        "tiny.a:fast": "declared",  # the first of several that is there
        "tiny.a:branch": "skipped",  # its alternative serves
        "tiny.a:g": "declared",
        "large:f": "declared",  # its package is not installed: nothing speaks against it
    }
    assert states(registry, tiny, "0.9")["tiny.a:f"] == "missing"
    assert states(registry, tiny, "2.0")["tiny.a:branch"] == "declared"


# ---------------------------------------------------------------------------------------------- strangers


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Packages `tiny` (the host), `helper` (whose decorators it uses) and `stranger`, who patches."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {
        "helper": """
            import functools
            def decorated(function):
                @functools.wraps(function)
                def inner(*args): return function(*args)
                return inner
        """,
        "stranger": """
            import functools
            def over(function):
                @functools.wraps(function)
                def theirs(*args): return function(*args)
                return theirs
            def silent(function): return lambda *args: function(*args)
            def instead(*args): return "instead"
        """,
        "tiny": """
            import functools, helper
            def f(): return "f"
            @helper.decorated
            def g(): return "g"
            class C:
                @helper.decorated
                def m(self): return "m"
                @staticmethod
                def s(): return "s"
        """,
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(textwrap.dedent(source))
    importlib.invalidate_caches()
    yield tmp_path
    for name in sources:
        sys.modules.pop(name, None)


@pytest.fixture
def registry() -> Iterator[Registry]:
    found = Registry()
    yield found
    found.undo()


def passing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


TARGETS = ("tiny:f", "tiny:g", "tiny:C.m", "tiny:C.s")


def test_the_hosts_own_decorators_are_no_strangers(host: Path, registry: Registry) -> None:
    importlib.import_module("tiny")
    for target in TARGETS:
        registry.wrap(target, group="g")(passing)
    registry.activate("g")
    assert registry.verify("g") == ()
    assert not any(row.others for row in registry.list())


def patch_over(tiny: Any, stranger: Any) -> dict[str, str]:
    """What the stranger puts on each target; returns the name that has to be told."""
    tiny.f = stranger.over(tiny.f)
    tiny.g = functools.partial(stranger.silent(tiny.g))
    tiny.C.m = wrapt.FunctionWrapper(vars(tiny.C)["m"], stranger.instead)
    tiny.C.s = staticmethod(stranger.instead)
    renamed = "over.<locals>.theirs" if sys.version_info >= (3, 11) else "theirs"
    return dict(zip(TARGETS, (renamed, "silent.<locals>.<lambda>", "instead", "instead"), strict=True))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stranger_is_told_by_name(
    host: Path, registry: Registry, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    tiny, stranger = importlib.import_module("tiny"), importlib.import_module("stranger")
    for target in TARGETS:
        registry.wrap(target, group="g")(passing)
    names = patch_over(tiny, stranger) if when == "before" else {}
    registry.activate("g")
    if when == "after":
        names = patch_over(tiny, stranger)
        shown = {row.target: row for row in registry.list()}
        assert {row.state for row in shown.values()} == {"conflict"}
        assert all(f"stranger.{name} was put over ours" in shown[target].detail for target, name in names.items())
    with caplog.at_level(logging.WARNING):
        rows = {row.target: row for row in registry.verify("g")}
    assert set(rows) == set(TARGETS)
    file = Path(stranger.__file__ or "")
    for target, name in names.items():
        assert rows[target].state == "applied", "ours is on top again"
        (told,) = rows[target].others
        assert told.startswith(f"stranger.{name} ({file}:"), told
        assert f"{target} is patched by others too" in caplog.text
    assert (tiny.f(), tiny.C.s()) == ("f", "instead"), "what they do is left in place"


def test_a_package_that_is_left_alone_is_no_warning(
    host: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    tiny, stranger = importlib.import_module("tiny"), importlib.import_module("stranger")
    registry.leave_alone("stranger")
    tiny.f = stranger.over(tiny.f)
    registry.wrap("tiny:f", group="g")(passing)
    registry.activate("g")
    with caplog.at_level(logging.INFO):
        (row,) = registry.verify("g")
    assert row.others and [record.levelname for record in caplog.records] == ["INFO"]


def test_what_was_refused_goes_on_telling_why(host: Path, registry: Registry) -> None:
    tiny = importlib.import_module("tiny")
    f, tiny.f = tiny.f, None
    registry.wrap("tiny:f", group="g")(passing)
    registry.wrap("tiny:g", group="g")(passing)
    for _ in range(2):
        with pytest.raises(PatchError, match="is None"):
            registry.activate("g")
        for rows in (registry.list(), registry.survey()):
            told = {row.target: row for row in rows}
            assert told["tiny:f"].state == "missing" and "is None" in told["tiny:f"].detail
            assert told["tiny:g"].state == "waiting" and "refused because of tiny:f" in told["tiny:g"].detail
    tiny.f = f
    registry.activate("g")
    assert {row.state for row in registry.list()} == {"applied"}


def test_control_verify_still_refuses_what_does_not_fit(host: Path, registry: Registry) -> None:
    importlib.import_module("tiny")
    registry.wrap("tiny:nothing", group="g")(passing)
    with pytest.raises(PatchError, match="tiny has no 'nothing'"):
        registry.activate("g")
