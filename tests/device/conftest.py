"""The late device, compiled once and kept; without it the tests of this folder that need it are skipped, and say why."""

from pathlib import Path

import late
import pytest
import torch

# torch's interfaces for new devices change from release to release.
WRITTEN_FOR = "2.13."


@pytest.fixture(scope="session")
def library() -> Path:
    try:
        return late.build()
    except Exception as error:
        if torch.__version__.startswith(WRITTEN_FOR):
            raise
        pytest.skip(f"the late device needs torch {WRITTEN_FOR}x and does not compile for {torch.__version__}: {error}")
