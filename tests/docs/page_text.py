"""README, its neighbours and docs/, as text: what the tests of pages share."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
RESULTS = ROOT / "results"
# Pages that `gradwire bench render` writes are held against the records by `bench render --check`.
GENERATED = {DOCS / "results.md", *(DOCS / "results").glob("*.md")}
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md")} - GENERATED)

_FENCE = re.compile(r"^```.*?^```[^\n]*$", re.DOTALL | re.MULTILINE)
_BETWEEN_MARKS = re.compile(r"<!-- generated: bench render \S+ -->.*?<!-- end -->|<!--.*?-->", re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose_of(text: str) -> str:
    """Without code, printed output, and tables that are generated."""
    text = _FENCE.sub("", _BETWEEN_MARKS.sub("", text))
    text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return re.sub(r"`[^`\n]*`", "", text)


def code_of(text: str) -> list[str]:
    """Commands and code as shown: the lines of blocks, and what stands in backticks."""
    blocks = [line.strip() for block in _FENCE.findall(text) for line in block.splitlines()[1:-1]]
    outside = _FENCE.sub("", text)
    blocks += [line.strip() for line in outside.splitlines() if line.startswith("    ")]
    joined = "\n".join(line for line in outside.splitlines() if not line.startswith("    "))
    return blocks + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", joined)]
