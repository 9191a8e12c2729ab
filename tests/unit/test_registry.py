"""The patch registry against small packages written for each test: when a patch lands, where, and what undo leaves."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import inspect
import pickle
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wrapt

from mindspeed_tft.registry import PatchError, Registry, Row, version_of

Snapshot = dict[tuple[str, str], object]


class Host:
    """A package `tiny` in a folder of its own, which the tests fill module by module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("tiny", "")

    def write(self, name: str, source: str) -> None:
        path = self.folder.joinpath(*name.split("."))
        if "." in name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path = path.with_suffix(".py")
        else:
            path.mkdir(exist_ok=True)
            path = path / "__init__.py"
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    def load(self, name: str) -> Any:
        return importlib.import_module(name)

    def modules(self) -> list[ModuleType]:
        found = []
        for module in list(sys.modules.values()):
            if str(getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                found.append(module)
        return found

    def snapshot(self) -> Snapshot:
        """Every object under every name of every module and class of the host, in the order of the names."""
        taken: Snapshot = {}
        for module in self.modules():
            for name, value in vars(module).items():
                taken[module.__name__, name] = value
                if isinstance(value, type) and value.__module__ == module.__name__:
                    # An attribute set and deleted again leaves these two behind, which are made anew at each look-up.
                    members = {k: v for k, v in vars(value).items() if k not in ("__dict__", "__weakref__")}
                    taken.update({(f"{module.__name__}:{name}", key): member for key, member in members.items()})
        return taken


def same(left: Snapshot, right: Snapshot) -> bool:
    return list(left) == list(right) and all(left[key] is right[key] for key in left)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.syspath_prepend(str(tmp_path))
    world = Host(tmp_path)
    yield world
    for module in world.modules():
        sys.modules.pop(module.__name__, None)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tiny", "friend", "foreign", "foreign2")]:
        del sys.modules[name]


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.undo()


def marking(word: str, log: list[str]) -> Callable[..., Any]:
    def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        log.append(word)
        return wrapped(*args, **kwargs)

    return mark


def row(registry: Registry, target: str) -> Row:
    (found,) = [entry for entry in registry.list() if entry.target == target]
    return found


# --------------------------------------------------------------------------------------------- when it lands


def test_lands_when_the_module_is_first_imported_and_imports_nothing(host: Host, registry: Registry) -> None:
    host.write("tiny.train", "def step(x): return x + 1")
    log: list[str] = []
    registry.wrap("tiny.train:step", group="g")(marking("ours", log))
    registry.activate("g")
    assert "tiny" not in sys.modules and "tiny.train" not in sys.modules
    assert row(registry, "tiny.train:step").state == "waiting"

    train = host.load("tiny.train")
    assert row(registry, "tiny.train:step").state == "applied"
    assert train.step(1) == 2 and log == ["ours"]


def test_lands_at_once_when_the_module_is_imported_already(host: Host, registry: Registry) -> None:
    host.write("tiny.train", "def step(x): return x + 1")
    train = host.load("tiny.train")
    log: list[str] = []
    registry.wrap("tiny.train:step", group="g")(marking("ours", log))
    assert train.step(1) == 2 and log == []  # declared is not applied
    registry.activate("g")
    registry.activate("g")  # idempotent
    assert train.step(1) == 2 and log == ["ours"]


def test_what_is_declared_but_not_active_changes_nothing(host: Host, registry: Registry) -> None:
    host.write("tiny.train", "def step(x): return x + 1\ndef other(): pass")
    host.load("tiny.train")
    before = host.snapshot()
    registry.wrap("tiny.train:step", group="off")(marking("off", []))
    assert same(host.snapshot(), before)
    registry.wrap("tiny.train:other", group="on")(marking("on", []))
    registry.activate("on")
    assert not same(host.snapshot(), before), "the comparison must see a patch"
    assert row(registry, "tiny.train:step").state == "waiting"
    assert "not active" in row(registry, "tiny.train:step").detail


@pytest.mark.parametrize("loaded_first", [True, False])
def test_names_in_other_modules_are_followed(host: Host, registry: Registry, loaded_first: bool) -> None:
    host.write("tiny.train", "def step(): return 'step'")
    host.write("tiny.before", "from tiny.train import step\nfrom tiny.train import step as renamed\nother = len")
    host.write("friend", "import tiny.train\nfrom tiny.train import step as mine")
    host.write("tiny.after", "from tiny.train import step as late")
    if loaded_first:
        host.load("tiny.before"), host.load("friend")
    log: list[str] = []
    registry.wrap("tiny.train:step", group="g")(marking("ours", log))
    registry.activate("g")
    before, friend, after = host.load("tiny.before"), host.load("friend"), host.load("tiny.after")
    for call in (before.step, before.renamed, friend.mine, friend.tiny.train.step, after.late):
        log.clear()
        assert call() == "step" and log == ["ours"]
    assert before.other is len


def test_names_inside_other_patchers_and_inside_ours_are_left_alone(host: Host, registry: Registry) -> None:
    host.write("tiny.train", "def step(): return 'step'")
    host.write("foreign", "from tiny.train import step")
    host.write("friend", "from tiny.train import step")
    foreign, friend = host.load("foreign"), host.load("friend")
    original = foreign.step
    ours = ModuleType("mindspeed_tft.of_a_test")
    vars(ours)["step"] = original
    sys.modules[ours.__name__] = ours
    try:
        registry.leave_alone("foreign")
        registry.wrap("tiny.train:step", group="g")(marking("ours", []))
        registry.activate("g")
        assert foreign.step is original and vars(ours)["step"] is original
        assert friend.step is not original, "the comparison must see a patch"
    finally:
        del sys.modules[ours.__name__]


def test_one_stand_in_under_two_names_ties_no_targets_together(host: Host, registry: Registry) -> None:
    host.write("tiny.stub", "def do_nothing(): return None")
    host.write("tiny.a", "from tiny.stub import do_nothing\nsync = do_nothing")
    host.write("tiny.b", "from tiny.stub import do_nothing\nlog_all = do_nothing")
    host.write("tiny.c", "from tiny.a import sync")
    a, b, c = host.load("tiny.a"), host.load("tiny.b"), host.load("tiny.c")
    log: list[str] = []
    registry.wrap("tiny.a:sync", group="g")(marking("ours", log))
    registry.activate("g")
    b.log_all(), b.do_nothing(), a.do_nothing()
    assert log == []
    a.sync(), c.sync()
    assert log == ["ours", "ours"]


def test_in_a_circular_import_the_patch_lands_after_the_body(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'first'\nimport tiny.b\ndef f(): return 'second'\ndef g(): return 'g'")
    host.write("tiny.b", "from tiny.a import f\nimport tiny.a as a\ndef call(): return a.f(), a.g()")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("f", log))
    registry.wrap("tiny.a:g", group="g")(marking("g", log))
    registry.activate("g")
    a, b = host.load("tiny.a"), host.load("tiny.b")
    assert b.call() == ("second", "g") and log == ["f", "g"]
    assert b.f() == "first" and log == ["f", "g"]  # another object than the target: not ours
    assert a.f.__wrapped__() == "second"


def test_a_module_that_is_being_imported_is_patched_after_its_end(
    host: Host, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activated from within the target's own body, where wrapt's hook would fire at once on half a module."""
    host.write("tiny.a", "def f(): return 'first'\nimport tiny.trigger\ndef f(): return 'second'")
    host.write("tiny.trigger", "import sys\nsys.of_a_test()")
    host.write("tiny.other", "")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    monkeypatch.setattr(sys, "of_a_test", lambda: registry.activate("g"), raising=False)
    finders = len(sys.meta_path)
    a = host.load("tiny.a")
    assert row(registry, "tiny.a:f").state == "waiting"
    assert a.f() == "second" and log == []
    host.load("tiny.other")  # any import
    assert a.f() == "second" and log == ["ours"]
    registry.undo()
    assert len(sys.meta_path) <= finders + 1  # wrapt's finder may have come, ours is gone
    assert not any(type(finder).__module__.startswith("mindspeed_tft") for finder in sys.meta_path)


def test_verify_also_applies_what_was_being_imported(
    host: Host, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.write("tiny.a", "import tiny.trigger\ndef f(): return 'f'")
    host.write("tiny.trigger", "import sys\nsys.of_a_test()")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    monkeypatch.setattr(sys, "of_a_test", lambda: registry.activate("g"), raising=False)
    a = host.load("tiny.a")
    registry.verify("g")
    assert a.f() == "f" and log == ["ours"]


def test_an_import_goes_on_while_another_thread_works_with_the_registry(
    host: Host, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import system asks finders under its own lock: one that waits for ours there can wait for ever."""
    host.write("tiny.a", "import tiny.trigger\ndef f(): return 'f'")
    host.write("tiny.trigger", "import sys\nsys.of_a_test()")
    host.write("tiny.other", "")
    registry.wrap("tiny.a:f", group="g")(marking("ours", []))
    monkeypatch.setattr(sys, "of_a_test", lambda: registry.activate("g"), raising=False)
    host.load("tiny.a")  # waits for its end, so that every import is asked about
    inside, leave = threading.Event(), threading.Event()

    def slow_version() -> str:
        inside.set()
        leave.wait()
        return "1"

    registry.host("tiny", slow_version)
    busy = threading.Thread(target=registry.list)
    busy.start()
    inside.wait()
    imports = threading.Thread(target=host.load, args=("tiny.other",), daemon=True)
    imports.start()
    imports.join(timeout=30)
    finished = not imports.is_alive()
    leave.set()
    busy.join()
    imports.join()
    assert finished
    registry.verify("g")


def test_an_import_that_fails_and_is_tried_again(host: Host, registry: Registry) -> None:
    host.write(
        "tiny.a", "def f(): return 'f'\nimport sys\nif not hasattr(sys, 'of_a_test'): raise ImportError('not yet')"
    )
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.activate("g")
    with pytest.raises(ImportError, match="not yet"):
        host.load("tiny.a")
    sys.of_a_test = True  # type: ignore[attr-defined]
    try:
        assert host.load("tiny.a").f() == "f" and log == ["ours"]
    finally:
        del sys.of_a_test  # type: ignore[attr-defined]


def test_many_threads_import_while_the_group_is_activated(host: Host, registry: Registry) -> None:
    names = [f"tiny.m{number}" for number in range(16)]
    for name in names:
        host.write(name, "def f(): return 'f'")
        registry.wrap(f"{name}:f", group="g")(marking(name, []))
    start = threading.Barrier(len(names) + 1)

    def bring(name: str) -> None:
        start.wait()
        host.load(name)

    def activate() -> None:
        start.wait()
        registry.activate("g")

    threads = [threading.Thread(target=bring, args=(name,)) for name in names] + [threading.Thread(target=activate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    registry.verify("g")
    assert {entry.state for entry in registry.list()} == {"applied"}


# ------------------------------------------------------------------------------------------------- what it is


MEMBERS = """
    class Base:
        def __init__(self, x): self.x = x
        def method(self, y): return ("method", self.x, y)
        @classmethod
        def of_class(cls, y): return ("of_class", cls.__name__, y)
        @staticmethod
        def static(y): return ("static", y)
        @property
        def value(self): return self.x
        number = 7
    class Made:
        def __new__(cls, x): return super().__new__(cls)
        def __init__(self, x): self.x = x
    class Derived(Base): pass
    class Empty: pass
"""


@pytest.mark.parametrize("owner", ["Base", "Derived"])
def test_methods_keep_their_kind(host: Host, registry: Registry, owner: str) -> None:
    host.write("tiny.m", MEMBERS)
    m = host.load("tiny.m")
    before = host.snapshot()
    cls = getattr(m, owner)
    seen: list[Any] = []

    def watch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append((wrapped.__name__, instance, args, kwargs))
        return wrapped(*args, **kwargs)

    for name in ("method", "of_class", "static", "__init__"):
        registry.wrap(f"tiny.m:{owner}.{name}", group="g")(watch)
    registry.activate("g")
    thing = cls(3)
    assert thing.x == 3 and seen == [("__init__", thing, (3,), {})]
    seen.clear()
    assert thing.method(y=1) == ("method", 3, 1) and cls.method(thing, 2) == ("method", 3, 2)
    assert seen == [("method", thing, (), {"y": 1}), ("method", thing, (2,), {})]
    seen.clear()
    assert cls.of_class(4) == ("of_class", owner, 4) and thing.of_class(4) == ("of_class", owner, 4)
    assert [entry[:3] for entry in seen] == [("of_class", cls, (4,))] * 2
    seen.clear()
    assert cls.static(5) == ("static", 5) and thing.static(5) == ("static", 5)
    assert seen == [("static", None, (5,), {})] * 2
    assert isinstance(vars(cls)["static"], staticmethod) and isinstance(vars(cls)["of_class"], classmethod)
    assert inspect.signature(cls.method) == inspect.signature(before["tiny.m:Base", "method"])  # type: ignore[arg-type]

    assert registry.undo() == ()
    assert same(host.snapshot(), before)
    assert owner == "Base" or "method" not in vars(cls)


def test_a_subclass_called_through_an_inherited_patch_is_seen_as_itself(host: Host, registry: Registry) -> None:
    host.write("tiny.m", MEMBERS + "\n    class Leaf(Derived): pass\n")
    m = host.load("tiny.m")
    log: list[str] = []
    registry.wrap("tiny.m:Derived.of_class", group="g")(marking("ours", log))
    registry.activate("g")
    assert m.Leaf.of_class(1) == ("of_class", "Leaf", 1) and log == ["ours"]
    assert m.Base.of_class(1) == ("of_class", "Base", 1) and log == ["ours"]  # the base class is not patched


@pytest.mark.parametrize("order", [("Base", "Derived"), ("Derived", "Base")])
def test_base_and_inherited_run_once_each_whatever_the_order(
    host: Host, registry: Registry, order: tuple[str, str]
) -> None:
    host.write("tiny.m", MEMBERS)
    m = host.load("tiny.m")
    before = host.snapshot()
    log: list[str] = []
    for owner in order:
        registry.wrap(f"tiny.m:{owner}.method", group=owner)(marking(owner, log))
        registry.activate(owner)
    assert m.Derived(1).method(2) == ("method", 1, 2) and log == ["Derived", "Base"]
    log.clear()
    m.Base.method = lambda self, y: "patched later by another"
    assert m.Derived(1).method(2) == "patched later by another"
    m.Base.method = before["tiny.m:Base", "method"]
    registry.undo("Base"), registry.undo("Derived")
    assert same(host.snapshot(), before)


def test_new_can_be_wrapped_and_comes_back(host: Host, registry: Registry) -> None:
    host.write("tiny.m", MEMBERS)
    m = host.load("tiny.m")
    before = host.snapshot()
    log: list[str] = []
    registry.wrap("tiny.m:Made.__new__", group="g")(marking("new", log))
    registry.activate("g")
    assert m.Made(4).x == 4 and log == ["new"]
    registry.undo()
    assert same(host.snapshot(), before) and m.Made(5).x == 5 and log == ["new"]


def test_two_wrappers_compose_in_one_proxy_in_a_defined_order(host: Host, registry: Registry) -> None:
    host.write("tiny", "from tiny.train import step")
    host.write("tiny.train", "def step(x): return x")
    log: list[str] = []
    registry.wrap("tiny.train:step", group="a")(marking("declared first", log))
    registry.wrap("tiny.train:step", group="b", order=1)(marking("ordered", log))
    registry.wrap("tiny:step", group="a")(marking("by another path", log))
    registry.activate("b")
    registry.activate("a")
    train = host.load("tiny.train")
    original = train.step.__wrapped__
    assert type(original) is type(marking), "one proxy, and the function beneath it"
    assert sys.modules["tiny"].step is train.step
    assert train.step(5) == 5 and log == ["ordered", "by another path", "declared first"]
    log.clear()
    registry.undo("a")
    assert train.step(5) == 5 and log == ["ordered"]
    registry.undo("b")
    assert train.step is original and sys.modules["tiny"].step is original


def test_inner_wrappers_see_what_looks_like_the_target(host: Host, registry: Registry) -> None:
    host.write("tiny.m", MEMBERS)
    m = host.load("tiny.m")
    names: list[str] = []

    def watch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        names.append(f"{wrapped.__name__}{inspect.signature(wrapped)}")
        return wrapped(*args, **kwargs)

    for group in ("a", "b"):
        registry.wrap("tiny.m:Base.method", group=group)(watch)
        registry.activate(group)
    assert m.Base(1).method(y=2) == ("method", 1, 2) and names == ["method(y)"] * 2


def test_replace(host: Host, registry: Registry) -> None:
    host.write("tiny.m", MEMBERS + "\n    def free(x): return ('free', x)\n")
    m = host.load("tiny.m")
    before = host.snapshot()
    log: list[str] = []
    registry.wrap("tiny.m:free", group="g")(marking("around", log))
    registry.replace("tiny.m:free", group="g")(lambda x: ("new", x))
    registry.replace("tiny.m:Base.method", group="g")(lambda self, y: ("new", self.x, y))
    registry.replace("tiny.m:Base.of_class", group="g")(lambda cls, y: ("new", cls.__name__, y))
    registry.replace("tiny.m:Derived.static", group="g")(lambda y: ("new", y))
    registry.activate("g")
    assert m.free(1) == ("new", 1) and log == ["around"]
    assert m.Derived(1).method(2) == ("new", 1, 2) and m.Base.method(m.Base(1), 2) == ("new", 1, 2)
    assert m.Derived.of_class(3) == ("new", "Derived", 3)
    assert m.Derived.static(4) == ("new", 4) == m.Derived(0).static(4) and m.Base.static(4) == ("static", 4)
    assert m.free.__name__ == "free"
    assert {entry.kind for entry in registry.list()} == {"wrap", "replace"}
    registry.undo()
    assert same(host.snapshot(), before)


def test_two_replacements_of_one_target_are_refused(host: Host, registry: Registry) -> None:
    host.write("tiny.m", "def f(): return 1")
    m = host.load("tiny.m")
    registry.replace("tiny.m:f", group="a")(lambda: 2)
    registry.replace("tiny.m:f", group="b")(lambda: 3)
    registry.activate("a")
    with pytest.raises(PatchError, match=r"tiny\.m:f.*replaced already by the patch declared at .*test_registry"):
        registry.activate("b")
    assert m.f() == 2


def test_exceptions_pass(host: Host, registry: Registry) -> None:
    host.write("tiny.m", "def f(): raise KeyError('of the host')")

    def deny(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except KeyError as error:
            raise ValueError("of ours") from error

    registry.wrap("tiny.m:f", group="g")(deny)
    registry.activate("g")
    with pytest.raises(ValueError, match="of ours") as caught:
        host.load("tiny.m").f()
    assert "of the host" in str(caught.value.__cause__)


def test_copies_and_pickles_as_the_function_itself(host: Host, registry: Registry) -> None:
    host.write("tiny.m", MEMBERS + "\n    def free(x): return ('free', x)\n")
    m = host.load("tiny.m")
    for name in ("free", "Base.method", "Base.static", "Base.of_class", "Base.__init__"):
        registry.wrap(f"tiny.m:{name}", group="g")(marking("ours", []))
    registry.activate("g")
    thing = m.Base(1)
    held = {"free": m.free, "bound": thing.method, "static": m.Base.static, "class": m.Derived.of_class}
    assert copy.deepcopy(m.free) is m.free and copy.copy(m.free) is m.free
    deep = copy.deepcopy(held)
    assert deep["bound"](2) == ("method", 1, 2) and deep["bound"].__self__ is not thing
    pickled = pickle.dumps(held)
    assert b"mindspeed_tft" not in pickled, "it must load where we are not installed"
    registry.undo()
    plain = pickle.loads(pickled)
    assert plain["free"] is m.free and plain["bound"](2) == ("method", 1, 2)
    assert plain["static"](3) == ("static", 3) and plain["class"](4) == ("of_class", "Derived", 4)

    for refuse in (copy.copy, copy.deepcopy, pickle.dumps):  # why ours need it
        with pytest.raises(NotImplementedError):
            refuse(wrapt.FunctionWrapper(m.free, marking("", [])))


def test_looks_like_the_function_itself(host: Host, registry: Registry) -> None:
    host.write("tiny.m", 'def free(x: int, *, y: str = "a") -> str:\n    "What it does."\n    return y * x')
    m = host.load("tiny.m")
    original = m.free
    registry.wrap("tiny.m:free", group="g")(marking("ours", []))
    registry.activate("g")
    assert m.free is not original and m.free == original and hash(m.free) == hash(original)
    assert (m.free.__name__, m.free.__qualname__, m.free.__module__) == ("free", "free", "tiny.m")
    assert m.free.__doc__ == "What it does." and inspect.signature(m.free) == inspect.signature(original)
    assert inspect.isfunction(m.free) and m.free(2, y="b") == "bb"


# ---------------------------------------------------------------------------------------- what does not fit


def test_a_missing_target_is_an_error_that_says_all(
    host: Host, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    host.write("tiny.m", MEMBERS + "\n    gone = None\n    def here(): return 'here'\n")
    m = host.load("tiny.m")
    before = host.snapshot()
    registry.host("tiny", lambda: "1.2.3")
    registry.wrap("tiny.m:here", group="g", needs="--enable-x")(marking("", []))
    for name in ("nowhere", "Nobody.f", "Base.nothing", "here.f", "gone", "Base.value", "Base.number", "Derived"):
        registry.wrap(f"tiny.m:{name}", group="g", needs="--enable-x")(marking("", []))
    registry.wrap("tiny.m:Empty.__init__", group="g")(marking("", []))
    registry.wrap("tiny.m:optional", group="g", missing="skip")(marking("", []))
    with pytest.raises(PatchError) as caught:
        registry.activate("g")
    text = str(caught.value)
    for part in (
        "9 patch(es) of group 'g'",
        "tiny.m:nowhere [tiny 1.2.3]: module tiny.m has no 'nowhere'",
        "tiny.m:Nobody.f [tiny 1.2.3]: module tiny.m has no 'Nobody'",
        "class tiny.m.Base has no 'nothing'",
        "'here' in module tiny.m is not a class",
        "'gone' in module tiny.m is None",
        "'value' in class tiny.m.Base is a property",
        "'number' in class tiny.m.Base is a int",
        "'Derived' in module tiny.m is a class: wrap its __init__",
        "class tiny.m.Empty has no '__init__'",
        "test_registry.py:",
        "for --enable-x",
        "Remedy: install a version",
        "or leave out --enable-x",
    ):
        assert part in text, part
    assert "tiny.m:optional" not in text and "tiny.m:here [" not in text
    assert caplog.records == [], "raised, so not logged as well"
    assert same(host.snapshot(), before), "a group that does not fit is not applied in part"
    assert m.here() == "here"


def test_a_target_found_missing_at_import_breaks_no_import_and_is_told_by_verify(
    host: Host, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    host.write("tiny.m", "def here(): return 'here'")
    log: list[str] = []
    registry.wrap("tiny.m:here", group="g")(marking("ours", log))
    registry.wrap("tiny.m:nowhere", group="g")(marking("ours", log))
    registry.wrap("tiny.m:optional", group="g", missing="skip")(marking("ours", log))
    registry.wrap("tiny.never:f", group="g")(marking("ours", log))
    registry.activate("g")
    assert host.load("tiny.m").here() == "here" and log == ["ours"]
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "nowhere" in caplog.text
    states = {entry.target: entry.state for entry in registry.list()}
    assert states == {
        "tiny.m:here": "applied",
        "tiny.m:nowhere": "missing",
        "tiny.m:optional": "missing",
        "tiny.never:f": "waiting",
    }
    with pytest.raises(PatchError, match=r"(?s)2 patch.*tiny\.m:nowhere.*tiny\.never:f.*has not been imported"):
        registry.verify("g")


@pytest.mark.parametrize(
    ("specifier", "version", "fits"),
    [
        ("", "0.1", True),
        (">=0.12", "0.12.0", True),
        (">=0.12", "0.11.9", False),
        (">=0.12,<0.17", "0.16.3", True),
        (">=0.12,<0.17", "0.17", False),
        (">0.12", "0.12.0", False),
        ("<=0.12.1", "v0.12.1", True),
        ("==0.12.*", "0.12.7", True),
        ("==0.12.*", "0.13.0", False),
        ("==0.12", "0.12.0", True),
        ("!=0.12.*", "0.12.1", False),
        ("!=0.12.1", "0.12.2", True),
        ("~=0.12.1", "0.12.9", True),
        ("~=0.12.1", "0.13.0", False),
        ("~=0.12.1", "0.12.0", False),
        (">=0.9", "0.10.0", True),  # numbers, not text
        (">=0.16", "0.16.0rc0+g1234", True),  # a development branch counts as what it will be
        (">=0.12", "unknown", False),
    ],
)
def test_versions(host: Host, registry: Registry, specifier: str, version: str, fits: bool) -> None:
    host.write("tiny.m", "def f(): return 'f'")
    m = host.load("tiny.m")
    original = m.f
    registry.host("tiny", lambda: version)
    registry.wrap("tiny.m:f", group="g", versions=specifier)(marking("ours", []))
    if fits:
        registry.activate("g")
        assert m.f is not original and row(registry, "tiny.m:f").host_version == version
    else:
        with pytest.raises(PatchError) as caught:
            registry.activate("g")
        assert f"made for tiny {specifier}, and this is {version}" in str(caught.value)
        assert m.f is original


def test_a_wrong_version_is_known_before_the_host_is_imported(host: Host, registry: Registry) -> None:
    host.write("tiny.about", "MAJOR = 0\nMINOR = 11\nPATCH = 2\nPRE_RELEASE = 'rc1'\nraise ImportError('executed')")
    registry.host("tiny", version_of("tiny", file="about.py"))
    registry.wrap("tiny.m:f", group="g", versions=">=0.12")(marking("ours", []))
    with pytest.raises(PatchError, match=r"tiny\.m:f \[tiny 0\.11\.2rc1\]: made for tiny >=0\.12"):
        registry.activate("g")
    assert "tiny" not in sys.modules


def test_an_unknown_version_is_an_error_once_the_module_is_there(host: Host, registry: Registry) -> None:
    host.write("tiny.m", "def f(): return 'f'")
    registry.host("tiny", lambda: None)
    registry.wrap("tiny.m:f", group="g", versions=">=1")(marking("ours", []))
    registry.activate("g")  # the host may not be installed at all
    host.load("tiny.m")
    with pytest.raises(PatchError, match="the version of tiny is unknown, and >=1 is needed"):
        registry.verify("g")
    registry.wrap("friend:f", group="h", versions=">=1")(marking("ours", []))
    with pytest.raises(PatchError, match="no source for the version of 'friend'"):
        registry.activate("h")


def test_version_of(host: Host) -> None:
    host.write("tiny.literal", "__version__ = '2.1.0+cpu'")
    host.write("tiny.nothing", "x = 1")
    assert version_of("tiny", file="literal.py")() == "2.1.0+cpu"
    assert version_of("tiny", file="nothing.py", distribution="wrapt")() == importlib.metadata.version("wrapt")
    assert version_of("tiny", file="nothing.py")() is None
    assert version_of("no_such_package", file="a.py", distribution="no-such-package-anywhere")() is None
    assert "tiny" not in sys.modules
    host.load("tiny")
    assert version_of("tiny", file="literal.py")() == "2.1.0+cpu"


def test_alternatives_for_two_versions(host: Host, registry: Registry) -> None:
    host.write("tiny.m", "def f(): return 'f'")
    m = host.load("tiny.m")
    registry.host("tiny", lambda: "0.12")
    log: list[str] = []
    registry.wrap("tiny.m:f", group="g", versions=">=0.12", one_of="f")(marking("new", log))
    registry.wrap("tiny.old:f", group="g", versions="<0.12", one_of="f")(marking("old", log))
    registry.activate("g")
    registry.verify("g")
    assert m.f() == "f" and log == ["new"]
    old = row(registry, "tiny.old:f")
    assert old.state == "missing" and old.detail == "made for tiny <0.12, and this is 0.12"

    registry.wrap("tiny.old:g", group="h", versions="<0.12", one_of="g")(marking("old", log))
    registry.wrap("tiny.m:g", group="h", versions=">=0.12", one_of="g")(marking("new", log))
    with pytest.raises(PatchError, match="2 patch"):
        registry.activate("h")


def test_what_another_version_does_not_need_is_no_error_there(host: Host, registry: Registry) -> None:
    host.write("tiny.m", "def f(): return 'f'")
    host.load("tiny.m")
    registry.host("tiny", lambda: "0.12")
    assert registry.version("tiny") == "0.12" and registry.version("large") is None
    registry.wrap("tiny.m:f", group="g", versions=">=0.12")(marking("ours", []))
    registry.wrap("tiny.m:new", group="g", versions=">=0.17", elsewhere="skip")(marking("new", []))
    registry.activate("g")
    registry.verify("g")
    assert [each.state for each in registry.survey()] == ["applied", "skipped"]
    # In its own range the target has to be there.
    registry.wrap("tiny.m:gone", group="h", versions="<0.17", elsewhere="skip")(marking("gone", []))
    with pytest.raises(PatchError, match="has no 'gone'"):
        registry.activate("h")
    assert registry.survey()[2].state == "missing"
    with pytest.raises(PatchError, match="elsewhere='ignore' is unknown"):
        registry.wrap("tiny.m:f", group="i", elsewhere="ignore")(marking("x", []))  # type: ignore[arg-type]


@pytest.mark.parametrize("imports", [("tiny.new", "tiny.old"), ("tiny.old", "tiny.new")])
def test_of_several_targets_the_first_that_exists_is_taken(
    host: Host, registry: Registry, imports: tuple[str, str]
) -> None:
    host.write("tiny.new", "def moved(): return 'new'")
    host.write("tiny.old", "def moved(): return 'old'")
    log: list[str] = []
    registry.wrap("tiny.nowhere:moved", "tiny.new:moved", "tiny.old:moved", group="g")(marking("ours", log))
    registry.activate("g")
    for name in imports:
        host.load(name)
    registry.verify("g")
    assert row(registry, "tiny.new:moved").state == "applied"
    assert host.load("tiny.old").moved() == "old" and log == []
    assert host.load("tiny.new").moved() == "new" and log == ["ours"]


def test_of_several_targets_none_exists(host: Host, registry: Registry) -> None:
    host.write("tiny.new", "")
    host.load("tiny.new")
    registry.wrap("tiny.new:f", "tiny.old:f", group="g")(marking("ours", []))
    registry.activate("g")
    with pytest.raises(
        PatchError, match=r"tiny\.new:f: module tiny\.new has no 'f'; tiny\.old:f: module tiny\.old has not"
    ):
        registry.verify("g")


@pytest.mark.parametrize("name", ["step_wrapper", "step_decorator", "wrapper"])
def test_names_that_other_patchers_take_for_theirs_are_refused(registry: Registry, name: str) -> None:
    function = marking("ours", [])
    function.__name__ = name
    with pytest.raises(
        PatchError, match=rf"tiny\.m:f declared at .*test_registry\.py:\d+: .*{name!r}.*Name it by what it"
    ):
        registry.wrap("tiny.m:f", group="g")(function)
    assert registry.list() == ()


@pytest.mark.parametrize("target", ["tiny.m.f", "tiny.m:", ":f", "tiny m:f", "tiny.m:f:g", ""])
def test_targets_that_are_none_are_refused(registry: Registry, target: str) -> None:
    with pytest.raises(PatchError, match="is no target"):
        registry.wrap(target, group="g")(marking("ours", []))


@pytest.mark.parametrize("versions", ["0.12", ">=0.12;<1", ">=0.12.*", "=>1"])
def test_specifiers_that_are_none_are_refused(registry: Registry, versions: str) -> None:
    with pytest.raises(PatchError, match="is no version clause"):
        registry.wrap("tiny.m:f", group="g", versions=versions)(marking("ours", []))


def test_an_unknown_group_is_an_error_that_names_the_known(registry: Registry) -> None:
    registry.wrap("tiny.m:f", group="parser")(marking("ours", []))
    for call in (registry.activate, registry.verify, registry.undo):
        with pytest.raises(PatchError, match=r"'high' \(known groups: parser\)"):
            call("high")
    with pytest.raises(PatchError, match="not active"):
        registry.verify("parser")


def test_a_patch_module_that_is_loaded_twice_declares_once(host: Host, registry: Registry) -> None:
    host.write("tiny.m", "def f(): return 'f'")

    def declare() -> None:
        @registry.wrap("tiny.m:f", group="g")
        def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return ["ours", wrapped(*args, **kwargs)]

    declare()
    declare()
    registry.activate("g")
    assert host.load("tiny.m").f() == ["ours", "f"]
    with pytest.raises(PatchError, match="a second time"):
        declare()


def test_declared_after_its_group_was_activated(host: Host, registry: Registry) -> None:
    host.write("tiny.m", "def f(): return 'f'\ndef g(): return 'g'")
    log: list[str] = []
    registry.wrap("tiny.m:f", group="g")(marking("f", log))
    registry.activate("g")
    m = host.load("tiny.m")
    registry.wrap("tiny.m:g", group="g")(marking("g", log))
    assert (m.f(), m.g(), log) == ("f", "g", ["f", "g"])


# ------------------------------------------------------------------------------------------ others, and undo


@pytest.mark.parametrize("lifted_between", [False, True])
def test_undo_leaves_every_name_as_it_was(host: Host, registry: Registry, lifted_between: bool) -> None:
    host.write("tiny.train", MEMBERS + "\n    def step(): return 'step'\n    def untouched(): pass\n")
    host.write("tiny.user", "from tiny.train import *\nfrom tiny.train import step as z, Base as B")
    host.write("foreign", "from tiny.train import step, untouched")
    for name in ("tiny.train", "tiny.user", "foreign"):
        host.load(name)
    before = host.snapshot()
    registry.leave_alone("foreign")
    targets = ("step", "Base.method", "Base.static", "Base.of_class", "Derived.method", "Derived.of_class")
    for name in targets:
        registry.wrap(f"tiny.train:{name}", group="g")(marking("ours", []))
    registry.activate("g")
    assert sum(before[key] is not value for key, value in host.snapshot().items() if key in before) >= len(targets) - 2
    host.write("tiny.late", "from tiny.train import step as s")
    late = host.load("tiny.late")

    def without_late() -> Snapshot:
        taken = host.snapshot()
        return {key: value for key, value in taken.items() if key[0] != "tiny.late" and key != ("tiny", "late")}

    if lifted_between:
        registry.peel()
        assert same(without_late(), before)
        registry.reassert()
        assert not same(without_late(), before)
    assert registry.undo() == ()
    assert same(without_late(), before) and late.s is before["tiny.train", "step"]
    assert {entry.state for entry in registry.list()} == {"undone"}

    registry.activate("g")
    assert {entry.state for entry in registry.list()} == {"applied"}


def test_another_patcher_that_imported_our_proxy_gets_the_original_back(host: Host, registry: Registry) -> None:
    host.write("tiny.train", "def step(): return 'step'")
    host.write("foreign", "from tiny.train import step")
    registry.leave_alone("foreign")
    registry.wrap("tiny.train:step", group="g")(marking("ours", []))
    registry.activate("g")
    train, foreign = host.load("tiny.train"), host.load("foreign")
    original = train.step.__wrapped__
    assert foreign.step is train.step
    registry.peel()
    assert foreign.step is original
    registry.reassert()
    assert foreign.step is original and train.step is not original


def test_while_peeled_the_world_is_without_us_and_imports_wait(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    host.write("tiny.b", "def g(): return 'g'")
    host.write("friend", "from tiny.a import f")
    a, friend = host.load("tiny.a"), host.load("friend")
    before = host.snapshot()
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("f", log))
    registry.wrap("tiny.b:g", group="g")(marking("g", log))
    registry.activate("g")
    with pytest.raises(RuntimeError, match="of the other"), registry.peeled():
        assert same(host.snapshot(), before)
        assert [entry.state for entry in registry.list()] == ["waiting", "waiting"]
        b = host.load("tiny.b")
        with registry.peeled():
            pass
        a.f(), friend.f(), b.g()
        assert log == []
        raise RuntimeError("of the other")
    a.f(), friend.f(), b.g()
    assert log == ["f", "f", "g"]


def test_put_back_in_the_middle_of_an_import(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    host.write("tiny.other", "")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.activate("g")
    registry.peel()
    wrapt.register_post_import_hook(lambda module: registry.reassert(), "tiny.a")
    a = host.load("tiny.a")
    host.load("tiny.other")
    assert a.f() == "f" and log == ["ours"]


def test_two_targets_that_another_made_one_object_stay_two(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'a'")
    host.write("tiny.b", "def f(): return 'b'")
    a, b = host.load("tiny.a"), host.load("tiny.b")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("on a", log))
    registry.wrap("tiny.b:f", group="g")(marking("on b", log))
    registry.activate("g")
    with registry.peeled():
        a.f = b.f = over(a.f, log)
    assert a.f() == "a" and log == ["on a", "theirs"]
    log.clear()
    assert b.f() == "a" and log == ["on b", "theirs"]


def test_a_new_patch_does_not_follow_its_function_to_the_place_of_another(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'a'")
    host.write("tiny.b", "def f(): return 'b'")
    a, b = host.load("tiny.a"), host.load("tiny.b")
    log: list[str] = []
    registry.wrap("tiny.b:f", group="b")(marking("on b", log))
    registry.activate("b")
    b.f = a.f  # somebody else's patch
    registry.wrap("tiny.a:f", group="a")(marking("on a", log))
    registry.activate("a")
    registry.verify("b")
    assert b.f() == "a" and log == ["on b"]


def test_a_reference_survives_a_peel_that_changed_nothing(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    a = host.load("tiny.a")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.activate("g")
    held = a.f
    with registry.peeled():
        pass
    assert held() == "f" and log == ["ours"] and a.f is held


def over(function: Any, log: list[str]) -> Any:
    """A wrapper as others write it, without functools.wraps."""

    def theirs(*args: Any, **kwargs: Any) -> Any:
        log.append("theirs")
        return function(*args, **kwargs)

    return theirs


def test_wrapped_by_another_over_us(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'\nclass C:\n    def m(self): return 'm'")
    host.write("friend", "from tiny.a import f as renamed")
    a, friend = host.load("tiny.a"), host.load("friend")
    original, method = a.f, vars(a.C)["m"]
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.wrap("tiny.a:C.m", group="g")(marking("ours", log))
    registry.activate("g")
    a.f, a.C.m = over(a.f, log), over(vars(a.C)["m"].__get__(None, a.C), log)
    theirs = a.f
    assert a.f() == "f" and log == ["theirs", "ours"]
    found = row(registry, "tiny.a:f")
    assert found.state == "conflict" and "over.<locals>.theirs was put over ours" in found.detail

    registry.verify("g")  # outermost again, and once
    for _ in range(2):
        log.clear()
        assert a.f() == "f" and log == ["ours", "theirs"]
        log.clear()
        assert a.C().m() == "m" and log == ["ours", "theirs"]
        log.clear()
        assert friend.renamed() == "f" and log == ["ours"], "a name that they did not follow is none of theirs"
        registry.reassert()
    assert row(registry, "tiny.a:f").state == "applied" and "theirs" in row(registry, "tiny.a:f").detail
    with registry.peeled():
        log.clear()
        assert a.f() == "f" and friend.renamed() == "f" and log == ["theirs"]

    conflicts = registry.undo()
    assert [entry.state for entry in conflicts] == ["conflict", "conflict"] == [e.state for e in registry.list()]
    log.clear()
    assert a.f is theirs and a.f() == "f" and a.C().m() == "m" and log == ["theirs", "theirs"]
    assert friend.renamed is original and vars(a.C)["m"] is not method


THIRD = """
    import tiny.a
    _orig = tiny.a.f
    def patched(x): return ("theirs", _orig(x))
    tiny.a.f = patched
"""


@pytest.fixture
def ran(host: Host, registry: Registry) -> list[str]:
    """What ours logged at `tiny.a:f`, which calls itself by its name, and once more by that of a friend."""
    host.write(
        "tiny.a",
        """
        def f(x):
            if x == "friend":
                import friend
                return friend.f("last")
            return f(x - 1) if isinstance(x, int) and x > 0 else x
        """,
    )
    host.write("friend", "from tiny.a import f")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.activate("g")
    host.load("friend")
    return log


def count(log: list[str], call: Callable[[], Any]) -> int:
    log.clear()
    call()
    return len(log)


def test_ours_runs_once_a_call_when_another_kept_the_original_in_its_module(
    host: Host, registry: Registry, ran: list[str]
) -> None:
    a, friend = host.load("tiny.a"), host.load("friend")
    host.write("foreign", THIRD)
    third = host.load("foreign")
    assert count(ran, lambda: a.f("x")) == 1
    registry.verify("g")
    for _ in range(2):
        assert a.f("x") == ("theirs", "x")
        assert [count(ran, lambda call=call: call("x")) for call in (a.f, friend.f, third._orig)] == [1, 1, 1]
        with registry.peeled():
            pass


def test_ours_runs_once_a_call_between_two_others_and_when_one_keeps_it_on_the_host(
    host: Host, registry: Registry, ran: list[str]
) -> None:
    host.write("foreign", THIRD)
    host.write("foreign2", THIRD.replace("_orig = ", "tiny.a.saved = ").replace("_orig(x)", "tiny.a.saved(x)"))
    a = host.load("tiny.a")
    for name in ("foreign", "foreign2"):
        host.load(name)
        registry.verify("g")
        assert count(ran, lambda: a.f("x")) == 1
    assert a.f("x") == ("theirs", ("theirs", "x"))
    registry.undo()
    assert count(ran, lambda: a.f("x")) == 0


def test_a_target_that_calls_itself_goes_through_ours_each_time(host: Host, registry: Registry, ran: list[str]) -> None:
    a = host.load("tiny.a")
    alone = count(ran, lambda: a.f(2)), count(ran, lambda: a.f("friend"))
    host.write("foreign", THIRD)
    host.load("foreign")
    registry.verify("g")
    assert (count(ran, lambda: a.f(2)), count(ran, lambda: a.f("friend"))) == alone == (3, 2)
    with pytest.raises(TypeError):
        a.f(1, 2)
    assert count(ran, lambda: a.f("x")) == 1, "an error leaves nothing behind"


def test_a_name_that_another_wrapped_before_us_is_told(
    host: Host, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    host.write("tiny.a", "def f(): return 'f'\ndef g(): return 'g'\ndef h(): return 'h'")
    host.write("friend", "from tiny.a import f, g\nfrom tiny import a\ndef h(): return a.h()\nclass g2: pass")
    a, friend = host.load("tiny.a"), host.load("friend")
    friend.f = functools.wraps(friend.f)(over(friend.f, []))
    log: list[str] = []
    for name in "fgh":
        registry.wrap(f"tiny.a:{name}", group="g")(marking("ours", log))
    registry.activate("g")
    (told,) = registry.verify("g")
    assert friend.f() == "f" and log == [] and (told.target, told.state) == ("tiny.a:f", "conflict")
    for text in (told.detail, caplog.text):
        assert "friend.f " in text and "Remedy" in text
    assert row(registry, "tiny.a:g").state == row(registry, "tiny.a:h").state == "applied"

    friend.f = functools.wraps(a.f)(over(a.f, []))  # the remedy
    assert registry.verify("g") == () and row(registry, "tiny.a:f").state == "applied"
    assert friend.f() == "f" and log == ["ours"]


def test_a_name_that_another_did_not_follow_before_us_is_told(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    host.write("friend", "from tiny.a import f")
    host.write(
        "foreign",
        """
        import functools, tiny.a
        from tiny.a import f
        @functools.wraps(f)
        def patched(): return f()
        tiny.a.f = patched
        """,
    )
    host.load("friend"), host.load("foreign")
    registry.wrap("tiny.a:f", group="g")(marking("ours", []))
    registry.activate("g")
    (told,) = registry.verify("g")
    assert "friend.f " in told.detail and "foreign.f" not in told.detail, "its own name is beneath ours"
    registry.leave_alone("friend")
    registry.verify("g")
    assert row(registry, "tiny.a:f").state == "applied"


@pytest.mark.parametrize("back", ["by hand", "what it found"])
@pytest.mark.parametrize("seen", [True, False])
def test_undo_after_another_has_gone_again_is_complete(host: Host, registry: Registry, back: str, seen: bool) -> None:
    host.write("tiny.a", "def f(): return 'f'\nclass C:\n    def m(self): return 'm'")
    a = host.load("tiny.a")
    original, method = a.f, vars(a.C)["m"]
    for name in ("f", "C.m"):
        registry.wrap(f"tiny.a:{name}", group="g")(marking("ours", []))
    registry.activate("g")
    found = a.f, vars(a.C)["m"]
    a.f, a.C.m = over(a.f, []), over(a.C.m, [])
    registry.verify("g")
    assert "over.<locals>.theirs" in row(registry, "tiny.a:f").detail
    a.f, a.C.m = (original, method) if back == "by hand" else found
    if seen:
        registry.verify("g")
        assert {(entry.state, entry.detail) for entry in registry.list()} == {("applied", "")}
    assert registry.undo() == ()
    assert a.f is original and vars(a.C)["m"] is method
    assert {entry.state for entry in registry.list()} == {"undone"}


def test_undo_beneath_another_passes_through(host: Host, registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    host.write("friend", "from tiny.a import f")
    a, friend = host.load("tiny.a"), host.load("friend")
    original = a.f
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.activate("g")
    a.f = over(a.f, log)
    (conflict,) = registry.undo()
    assert conflict.state == "conflict" and "passes through" in conflict.detail and "tiny.a:f" in caplog.text
    assert a.f() == "f" and log == ["theirs"] and friend.f is original
    log.clear()
    registry.activate("g")
    assert a.f() == "f" and log == ["ours", "theirs"] and friend.f is original  # as for any patch that comes later


def test_replaced_by_another_is_seen_and_put_right(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    a = host.load("tiny.a")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.activate("g")
    a.f = lambda: "replaced"
    assert a.f() == "replaced" and log == []
    assert row(registry, "tiny.a:f").state == "conflict"
    registry.reassert()
    assert a.f() == "replaced" and log == ["ours"]


def test_put_back_by_hand_is_no_conflict(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    a = host.load("tiny.a")
    original = a.f
    registry.wrap("tiny.a:f", group="g")(marking("ours", []))
    registry.activate("g")
    a.f = original
    assert registry.undo() == () and a.f is original


def test_a_class_that_was_replaced_is_patched_and_the_old_one_released(host: Host, registry: Registry) -> None:
    host.write("tiny.m", MEMBERS)
    m = host.load("tiny.m")
    old, method = m.Base, vars(m.Base)["method"]
    log: list[str] = []
    registry.wrap("tiny.m:Base.method", group="g")(marking("ours", log))
    registry.activate("g")

    class Other:
        def method(self, y: int) -> int:
            return y

    m.Base = Other
    assert row(registry, "tiny.m:Base.method").state == "conflict"
    registry.verify("g")
    assert Other().method(1) == 1 and log == ["ours"]
    assert vars(old)["method"] is method


def test_a_module_that_was_reloaded_is_patched_again(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    a = host.load("tiny.a")
    log: list[str] = []
    registry.wrap("tiny.a:f", group="g")(marking("ours", log))
    registry.activate("g")
    importlib.reload(a)
    assert a.f() == "f" and log == []
    registry.verify("g")
    assert a.f() == "f" and log == ["ours"]


def test_a_target_that_vanishes_is_told(host: Host, registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    a = host.load("tiny.a")
    registry.wrap("tiny.a:f", group="g")(marking("ours", []))
    registry.activate("g")
    del a.f
    with pytest.raises(PatchError, match=r"module tiny\.a has no 'f'"):
        registry.verify("g")
    assert "has lost its target" in caplog.text and row(registry, "tiny.a:f").state == "missing"


def test_the_list_tells_all(host: Host, registry: Registry) -> None:
    host.write("tiny.a", "def f(): return 'f'")
    registry.host("tiny", lambda: "0.19.2")
    function = marking("ours", [])
    registry.wrap("tiny.a:f", group="g", versions=">=0.12", needs="--enable-x")(function)
    registry.activate("g")
    host.load("tiny.a")
    code = function.__code__
    assert registry.list("g") == (
        Row(
            target="tiny.a:f",
            group="g",
            kind="wrap",
            state="applied",
            versions=">=0.12",
            host_version="0.19.2",
            needs="--enable-x",
            origin=f"{code.co_filename}:{code.co_firstlineno}",
            detail="",
        ),
    )
    assert registry.list("other") == ()
