"""What is installed, what importing it costs, and which versions it accepts."""

from __future__ import annotations

import ast
import configparser
import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spec_compile
from spec_compile import _compat
from spec_compile.errors import VersionError

ROOT = Path(__file__).parent.parent
SOURCES = ("spec_compile", "passes", "kernels", "models")
HEAVY = ("transformers", "triton", "onnx", "rich")


def run(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds packages as an installed program does."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_packages_are_the_folders_on_disk() -> None:
    options = setup_cfg()["options"]
    where = dict(line.split(" = ") for line in lines(options["package_dir"]))
    assert sorted(lines(options["packages"])) == sorted(where)
    found = set()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            found.add(path.parent.relative_to(ROOT))
    assert {Path(folder) for folder in where.values()} == found
    for folder in where.values():
        assert (ROOT / folder / "__init__.py").is_file()


def test_typed_marker_is_shipped() -> None:
    data = setup_cfg()["options.package_data"]
    for package, names in data.items():
        for name in lines(names.replace(",", "\n")):
            assert (ROOT / package / name).is_file()
    assert "py.typed" in data["spec_compile"]


def test_files_named_in_the_metadata_exist() -> None:
    metadata = setup_cfg()["metadata"]
    assert (ROOT / metadata["license_files"]).is_file()
    assert (ROOT / metadata["long_description"].removeprefix("file: ")).is_file()


def test_requirements_agree_with_the_version_check() -> None:
    config = setup_cfg()
    low = {package: f"{package}>={bounds[0][0]}.{bounds[0][1]}" for package, bounds in _compat.SUPPORTED.items()}
    assert lines(config["options"]["install_requires"]) == [low["torch"]]
    for extra in ("hf", "demo", "dev"):
        assert any(line.startswith(low["transformers"]) for line in lines(config["options.extras_require"][extra]))


def test_mapped_folders_are_not_importable_by_themselves() -> None:
    """From a checkout ``import passes`` explains itself, and nothing is registered twice afterwards."""
    code = """
import torch
for folder in ("passes", "models"):
    try:
        __import__(folder)
    except ImportError as error:
        print(error)
import spec_compile.passes, spec_compile.kernels.library
from spec_compile.passes.base import registered_passes
names = [cls.__name__ for cls in registered_passes()]
print(len(names) == len(set(names)) > 0, hasattr(torch.ops.spec_compile, "attention_v1"))
"""
    done = run(code, ROOT)
    assert done.returncode == 0, done.stderr
    for folder, line in zip(("passes", "models"), done.stdout.splitlines()):
        assert line.startswith(f"import spec_compile.{folder}; the folder '{folder}' is mapped into the package")
    assert done.stdout.splitlines()[2] == "True True"


def test_kernels_folder_registers_nothing_under_another_name() -> None:
    """``import kernels`` works, because transformers probes for a package of that name; its operators stay ours."""
    code = """
import kernels, torch
print(kernels.__version__, hasattr(torch.ops.spec_compile, "attention_v1"))
import spec_compile.kernels.library
import kernels.library
"""
    done = run(code, ROOT)
    assert done.stdout.split() == ["0", "False"], done.stderr
    assert done.returncode == 1
    assert "ImportError: import spec_compile.kernels.library" in done.stderr


def test_import_needs_torch_alone(tmp_path: Path) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import spec_compile, spec_compile.cli
print(*sorted(set(sys.modules) - before))
import spec_compile.plan, spec_compile.report, spec_compile.backend, spec_compile.explainer, spec_compile.verify
from spec_compile import SparsityPlan, compile_verify, explain, prepare
print(*sorted(set(sys.modules) - before))
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    light, full = ({name.split(".")[0] for name in line.split()} for line in done.stdout.splitlines())
    assert "spec_compile" in light
    assert not full & set(HEAVY)
    assert not light & {*HEAVY, "sympy", "numpy"}


def test_import_costs_little_over_torch(tmp_path: Path) -> None:
    """The bar: at most 0.3 s over ``import torch``; the best of three counts."""
    code = "import time, torch; start = time.perf_counter(); import spec_compile; print(time.perf_counter() - start)"
    assert any(float(run(code, tmp_path).stdout) <= 0.3 for _ in range(3))


def test_backend_is_listed_without_an_import_and_found_by_name(tmp_path: Path) -> None:
    code = """
import sys, torch
names = torch._dynamo.list_backends(exclude_tags=())
print("spec_compile" in names, "spec_compile" in sys.modules)
from torch._dynamo.backends.registry import lookup_backend
found = lookup_backend("spec_compile")
print(found.__module__, found.__name__, any(m in sys.modules for m in ("transformers", "onnx", "rich")))
"""
    done = run(code, tmp_path)
    assert done.stdout.split() == ["True", "False", "spec_compile.backend", "spec_compile_backend", "False"], done.stderr


@pytest.mark.parametrize("name", spec_compile.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(spec_compile, name) is not None
    assert name in dir(spec_compile)


def test_public_names_are_sorted_out() -> None:
    assert len(set(spec_compile.__all__)) == len(spec_compile.__all__)
    assert {"__version__", *spec_compile._HOME} == set(spec_compile.__all__)
    for name, home in spec_compile._HOME.items():
        assert getattr(importlib.import_module(home), name) is getattr(spec_compile, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        spec_compile.nothing  # noqa: B018


def top_level_imports(path: Path) -> set[str]:
    """Packages imported when the module is imported, ``if TYPE_CHECKING`` aside."""
    found: set[str] = set()

    def walk(body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Import):
                found.update(alias.name.split(".")[0] for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and not statement.level:
                found.add(str(statement.module).split(".")[0])
            elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
                walk(statement.body + statement.orelse)
            elif isinstance(statement, ast.Try):
                walk(statement.body + statement.orelse + statement.finalbody)
            elif isinstance(statement, ast.ClassDef | ast.With):
                walk(statement.body)

    walk(ast.parse(path.read_text(encoding="utf-8")).body)
    return found


def test_who_imports_transformers() -> None:
    heavy = {}
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for package in top_level_imports(path) & set(HEAVY):
                heavy.setdefault(package, set()).add(path.relative_to(ROOT).as_posix())
    assert heavy.pop("transformers") == {"models/cache.py"} | (
        {"spec_compile/demo.py"} if "transformers" in top_level_imports(ROOT / "spec_compile/demo.py") else set()
    )
    assert heavy.pop("rich", set()) <= {"spec_compile/demo.py"}
    assert all(path.startswith("kernels/") and path.endswith("_triton.py") for path in heavy.pop("triton"))
    assert heavy == {}


@pytest.mark.parametrize("folder", ["kernels", "passes"])
def test_imports_run_one_way(folder: str) -> None:
    """kernels import nothing of ours but kernels; passes import kernels and errors, never the compiler on top."""
    allowed = {
        "kernels": ("spec_compile.kernels",),
        "passes": ("spec_compile.kernels", "spec_compile.passes", "spec_compile.errors"),
    }
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("spec_compile") or name.startswith(allowed[folder]), f"{path.name} imports {name}"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.11.0a0+git123", (2, 11, 0)),
        ("5.17", (5, 17, 0)),
        ("2.12.1.dev20260101", (2, 12, 1)),
    ],
)
def test_parse_version(text: str, parsed: tuple[int, ...]) -> None:
    assert _compat.parse_version(text) == parsed


@pytest.mark.parametrize("text", ["", "main", "2"])
def test_unreadable_versions(text: str) -> None:
    with pytest.raises(VersionError, match="cannot read the version"):
        _compat.parse_version(text)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_check_version(package: str) -> None:
    (major, minor), (top_major, top_minor) = _compat.SUPPORTED[package]
    assert _compat.check_version(package, f"{major}.{minor}.0") is None
    assert _compat.check_version(package, f"{major}.{minor}.0.dev1") is None
    assert _compat.check_version(package, f"{top_major}.{top_minor - 1}.9+cu128") is None
    for newer in (f"{top_major}.{top_minor}.0", f"{top_major + 1}.0.0"):
        warning = _compat.check_version(package, newer)
        assert warning is not None
        assert f"{package} {newer} is newer than the tested range" in warning
    for older in (f"{major}.{minor - 1}.9", f"{major - 1}.99.0"):
        with pytest.raises(VersionError) as caught:
            _compat.check_version(package, older)
        assert f"needs {package} >= {major}.{minor}, found {older}" in str(caught.value)
        assert f"pip install -U '{package}>={major}.{minor}'" in str(caught.value)
        assert isinstance(caught.value, ImportError)


def test_check_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    check = _compat.check_installed.__wrapped__
    check("torch")
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(VersionError, match=r"needs torch >= 2\.11, found 2\.10\.1"):
        check("torch")
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    with caplog.at_level(logging.WARNING, logger="spec_compile"):
        check("torch")
    assert "torch 9.0.0 is newer than the tested range" in caplog.text

    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(VersionError, match=r"needs transformers >= 5\.17, which is not installed: pip install"):
        check("transformers")


def test_without_transformers_the_cache_says_what_to_install(tmp_path: Path) -> None:
    """A missing transformers is named with the remedy, not as a bare ModuleNotFoundError."""
    code = """
import sys
sys.modules["transformers"] = None
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name == "transformers":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
import spec_compile
try:
    spec_compile.VerifyCache
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("VersionError this needs transformers >= 5.17"), done.stdout
