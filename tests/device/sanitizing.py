"""Programs under AddressSanitizer and UBSan, with the kernels compiled for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import HERE, SANITIZED, build

from gradwire.gpu.compiler import SOURCES
from ranks import patience


def run_sanitized(program: str, order: int) -> str:
    """What a program of this folder prints under AddressSanitizer and UBSan; it gets the library and the threads' order.

    Skips the test where g++ has none. Raises: AssertionError (it failed).
    """
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(library).exists() for library in libraries):
        pytest.skip("g++ has no sanitizers here")
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": os.pathsep.join([str(SOURCES.parents[2]), str(HERE)]),
    }
    command = [sys.executable, str(HERE / program), str(build(SANITIZED)), str(order)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300 * patience())
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
