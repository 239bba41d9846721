"""Libraries that are compiled once, by one process or by several, and anew.

For runtime.cpp_compiler.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CalledProcessError

import pytest
from processes import run_script
from torch._inductor import config as inductor_config

from collage_fx.runtime import cpp_compiler

COUNTING = """#!/bin/sh
case "$*" in *--version*) ;; *) echo >> {folder}/calls ;; esac
{command}
"""
SEVEN = 'extern "C" int seven() { return 7; }'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, with a space in its path, and a compiler that notes each call in `calls`."""
    cache = tmp_path / "a folder"
    cache.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    script(tmp_path, 'exec g++ "$@"')
    with inductor_config.patch({"cpp.cxx": (None, str(tmp_path / "compiler"))}):
        yield tmp_path


def script(folder: Path, command: str) -> None:
    """Write the compiler."""
    path = folder / "compiler"
    path.write_text(COUNTING.format(folder=folder, command=command))
    path.chmod(0o755)


def calls(folder: Path) -> int:
    path = folder / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_source_is_compiled_once_with_each_choice_of_flags(folder: Path) -> None:
    for _ in range(2):
        assert cpp_compiler.load(SEVEN).seven() == 7
    assert calls(folder) == 1
    assert cpp_compiler.load(SEVEN, ("-O1",)).seven() == 7
    assert cpp_compiler.load(SEVEN + "\n").seven() == 7
    assert calls(folder) == 3
    kept = list((folder / "a folder" / "collage_fx").iterdir())
    assert [path.suffix for path in kept] == [".so"] * 3, "nothing else is left there"


def test_another_compiler_torch_or_processor_is_another_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpp_compiler.load(SEVEN)
    for name, value in (("version_of", "g++ 99"), ("processor", "AVX1024")):
        monkeypatch.setattr(cpp_compiler, name, lambda *_, value=value: value)
        cpp_compiler.load(SEVEN)
    monkeypatch.setattr(cpp_compiler.torch, "__version__", "3.0")
    cpp_compiler.load(SEVEN)
    assert calls(folder) == 4


@pytest.mark.parametrize("size", [0, 100])
def test_a_library_that_is_not_whole_is_compiled_again(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cpp_compiler.ctypes, "CDLL", lambda path: None)  # which keeps it loaded
        cpp_compiler.load(SEVEN)
    (library,) = (folder / "a folder" / "collage_fx").iterdir()
    library.write_bytes(library.read_bytes()[:size])
    assert cpp_compiler.load(SEVEN).seven() == 7
    assert calls(folder) == 2


def test_a_compiler_may_print_what_is_no_text(folder: Path) -> None:
    script(folder, r"""printf '\351\n'; exec g++ "$@" """)
    assert cpp_compiler.load(SEVEN).seven() == 7


@pytest.mark.slow
def test_processes_may_compile_one_source_at_once(folder: Path) -> None:
    script(folder, 'sleep 5; exec g++ "$@"')
    settings = (str(folder / "a folder"), str(folder / "compiler"))
    code = (
        f"import os; os.environ['TORCHINDUCTOR_CACHE_DIR'], os.environ['CXX'] = {settings}\n"
        "from collage_fx.runtime import cpp_compiler\n"
        f"assert cpp_compiler.load({SEVEN!r}).seven() == 7"
    )
    with ThreadPoolExecutor(2) as threads:
        assert [done.stderr for done in threads.map(run_script, [code] * 2)] == [""] * 2
    assert calls(folder) == 2, "the control: they did it at once"
    assert len(list((folder / "a folder" / "collage_fx").iterdir())) == 1
    assert cpp_compiler.load(SEVEN).seven() == 7
    assert calls(folder) == 2, "a third one finds it"


def test_what_fails_is_told_in_the_words_of_the_compiler(folder: Path) -> None:
    with pytest.raises(CalledProcessError) as wrong:
        cpp_compiler.load("no C++")
    assert "error" in cpp_compiler.words_of(wrong.value)
    assert cpp_compiler.compiler_fault() == ""
    script(folder, "kill -9 $$")
    assert cpp_compiler.compiler_fault() == "CalledProcessError: it ended with status -9"
    with inductor_config.patch({"cpp.cxx": ("/no/such/compiler",)}):
        fault = cpp_compiler.compiler_fault()
    assert "FileNotFoundError" in fault and "/no/such/compiler" in fault
    (works,) = (folder / "a folder" / "collage_fx").iterdir()
    assert works.suffix == ".so", "what failed has left nothing"
