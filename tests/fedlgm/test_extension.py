from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

import pytest

from fedlgm.errors import ConfigError
from fedlgm.extension import is_reference, load_object, source_of


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_objects_are_found_by_their_dotted_name() -> None:
    assert load_object("math:sqrt", "function") is math.sqrt
    assert load_object("pathlib:Path.cwd", "function")() == Path.cwd()
    assert is_reference("a.b:C")
    assert not any(map(is_reference, ("mlp", "a.b", 3, None)))


def test_modules_beside_the_user_are_found(here: Path) -> None:
    (here / "my_things.py").write_text("class Net:\n    depth = 3\n")
    assert load_object("my_things:Net.depth", "model") == 3
    path, digest = source_of("my_things:Net", "model")
    assert path is not None
    assert path.name == "my_things.py"
    assert digest == hashlib.sha256((here / "my_things.py").read_bytes()).hexdigest()
    assert source_of("math:sqrt", "function")[1] is None or math.__file__  # a compiled module may have no source


@pytest.mark.parametrize(
    ("source", "reference", "message"),
    [
        ("", "my_things", r"model 'my_things': an object of your own is named 'package.module:name'"),
        ("", "my_things:", r"is named 'package.module:name'"),
        ("", "my things:Net", r"is named 'package.module:name'"),
        ("", "my_absent_things:Net", r"model 'my_absent_things:Net': module .* there is no module 'my_absent_things'"),
        ("", "my_things.deeper:Net", r"module 'my_things.deeper' cannot be imported"),
        ("import surely_absent", "my_things:Net", r"it imports 'surely_absent', which is not installed"),
        ("def f(:", "my_things:Net", r"module 'my_things' cannot be imported: SyntaxError"),
        ("raise OSError('no disk')", "my_things:Net", r"cannot be imported: OSError: no disk"),
        ("class Nett: pass", "my_things:Net", r"module 'my_things' has no 'Net'; did you mean 'Nett'\?"),
    ],
)
def test_what_does_not_import_is_refused_with_module_and_reason(
    here: Path, source: str, reference: str, message: str
) -> None:
    (here / "my_things.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_object(reference, "model")
