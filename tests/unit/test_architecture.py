"""What keeps the house in order and no type checker sees: private names, weight of an import, the wheel."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import parallax

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "parallax"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FUNCTION_LINES = 60

# Private names of torch may change with any release, so each stands in one small file and has a reason.
PRIVATE = {
    "machine/cuda.py": "torch.cuda._sleep: swap.verify holds copies up on their own stream, and no public call does; "
    "torch.cuda.memory: the history of allocations has no public name, and without it a snapshot is of little use",
    "model/profiling/count.py": "fake tensors and dispatch modes are documented, but only under private names",
    "model/recording/fakes.py": "fake tensors, and the way out of their mode, have no public names",
    "model/private.py": "whether functorch wraps a tensor, which operator saves one, and what sees every operator and "
    "every call of a constructor have no public names",
    "runtime/replicas/reducer.py": "reducer: DDP arms its hooks in forward only, a pipeline decides "
    "before the last backward",
}


def run(*command: str | Path) -> str:
    """Output of ``command`` in the checkout; what it printed is the message where it fails."""
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def private_names(tree: ast.Module) -> list[str]:
    """Private names of torch in ``tree``, however they were imported; ``_C`` and DDP's reducer on any object."""
    imported, bound = [], {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
            bound |= {
                alias.asname
                for alias in node.names
                if alias.asname and alias.name.startswith("torch.")
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
            bound |= {alias.asname or alias.name for alias in node.names}
    found = [name for name in imported if name.startswith("torch.") and _is_private(name)]
    for node in ast.walk(tree):
        # Each private name of a longer expression is the last of an attribute of its own.
        if isinstance(node, ast.Attribute) and (node.attr == "reducer" or _is_private(node.attr)):
            dotted = _dotted(node)
            if node.attr in ("reducer", "_C") or dotted.split(".")[0] in bound:
                found.append(dotted)
    return found


def _dotted(node: ast.expr) -> str:
    """Names from the left to the last attribute; what is no name, such as a call, is empty."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_private(dotted: str) -> bool:
    return any(word.startswith("_") and not word.startswith("__") for word in dotted.split("."))


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._utils import x",
        "from torch.distributed import _tensor",
        "from torch import _C",
        "torch.cuda._sleep(1)",
        "torch._C._f()",
        "ddp.reducer.prepare_for_backward([])",
        "import torch.distributed as dist\ndist._make()",
        "from torch import nn\nnn._reduction",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert private_names(ast.parse(source))


def test_public_names_are_not() -> None:
    source = (
        "import torch\nprint(torch.__version__, torch.nn.Linear, self._own, torch.f(self._own).x)"
    )
    assert not private_names(ast.parse(source))


def test_private_names_of_torch_stand_where_they_are_explained() -> None:
    found = {str(path.relative_to(PACKAGE)): private_names(parsed(path)) for path in MODULES}
    used = {path: names for path, names in found.items() if names}
    assert set(used) == set(PRIVATE), used


def test_import_is_light() -> None:
    heavy = run(
        sys.executable,
        "-c",
        "import sys, parallax; print(*({'hydra', 'omegaconf', 'matplotlib', 'tensorboard'} & set(sys.modules)))",
    )
    assert heavy.strip() == ""


def test_the_command_begins_before_what_takes_long_is_imported() -> None:
    loaded = run(
        sys.executable,
        "-c",
        "import sys, parallax.cli; print(*({'torch', 'numpy', 'rich'} & set(sys.modules)))",
    )
    assert loaded.strip() == ""


def test_public_names_are_imported_at_first_use() -> None:
    assert set(parallax.__all__) <= set(dir(parallax))
    assert {name for name in parallax.__all__ if getattr(parallax, name) is None} == set()
    assert callable(parallax.swap)
    with pytest.raises(AttributeError, match="has no attribute 'Engin'"):
        parallax.Engin  # type: ignore[attr-defined]  # noqa: B018


def test_modules_are_there_after_a_bare_import() -> None:
    names = [
        path.stem
        for path in PACKAGE.iterdir()
        if not path.name.startswith("_") and path.suffix in ("", ".py")
    ]
    found = run(
        sys.executable,
        "-c",
        f"import parallax; print(*(getattr(parallax, n).__name__ for n in {names}))",
    )
    assert found.split() == [f"parallax.{name}" for name in names]


def test_one_word_for_one_thing() -> None:
    names = Counter(node.name for node in definitions() if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_no_function_is_longer_than_a_screen() -> None:
    functions = [node for node in definitions() if not isinstance(node, ast.ClassDef)]
    lines = [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in functions]
    assert not [found for found in lines if found[1] > LONGEST_FUNCTION_LINES]


@functools.cache
def definitions() -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """All classes and functions of the package."""
    return [
        node
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_the_wheel_holds_every_config(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="build is not installed (it comes with the dev extra)")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"parallax/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    code = {str(path.relative_to(ROOT)) for path in [*MODULES, *PACKAGE.rglob("*.sh")]}
    assert configs
    assert held >= configs | code | {"parallax/py.typed"}
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in held)
    assert not [name for name in held if not name.startswith(("parallax/", "parallax_train-"))]
