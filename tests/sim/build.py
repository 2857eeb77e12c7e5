"""The simulated accelerator's library: built once for each source and version of torch, kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from parallax.common.files import cache_directory

SOURCE = Path(__file__).with_name("simgpu.cpp")
NAME = "simgpu_c"
_SECONDS = 600


def missing() -> str:
    """Why it cannot be built here; '' where it can."""
    if sys.platform != "linux":
        return "the simulated accelerator needs Linux"
    if shutil.which(_compiler()) is None:
        return f"the simulated accelerator needs a C++ compiler ({_compiler()}): install g++, or set CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the simulated accelerator needs Python.h: install python3-dev"
    return ""


def library() -> Path:
    """The library's file; builds it where it is not there, which takes half a minute."""
    text = [SOURCE.read_bytes(), torch.__version__.encode(), sys.version.encode()]
    digest = hashlib.sha256(b"\n".join(text)).hexdigest()[:16]
    folder = cache_directory() / "simgpu"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{digest}.so"
    with (folder / "lock").open("w") as lock:  # the system unlocks it whatever ends this process
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


@cache
def load() -> ModuleType:
    """The library in this process, which has the device from now on."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _build(target: Path) -> None:
    root = Path(torch.__file__).parent
    temporary = target.with_suffix(f".{os.getpid()}")
    headers = [root / "include", root / "include/torch/csrc/api/include"]
    command = [
        *(_compiler(), "-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w"),
        *(f"-DTORCH_EXTENSION_NAME={NAME}", "-DAT_PER_OPERATOR_HEADERS"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in (*headers, sysconfig.get_path("include"))),
        *(str(SOURCE), "-o", str(temporary)),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{ran.stderr[-4000:]}")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    print(library())
