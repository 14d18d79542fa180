"""What `make docs` does beyond Markdown: README and its neighbours become pages, and so does every file a page links to.

Pages are written to be read in the repository too, with links from file to file. Here a link that leaves docs/ leads to a page
made of that file: prose as it is, code with line numbers. A link to a file that there is not stops the build.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Prose beside docs/, and the pages made of it.
PROSE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
_ORIGIN = {uri: ROOT / name for name, uri in PROSE.items()}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_SCHEME = re.compile(r'"([a-z0-9-]+)": "(gradwire\.[\w.]+):(\w+)"')
_SCHEMES_HERE = "<!-- schemes -->"
_LIST_OR_TABLE = re.compile(r"([-*] |\d+\. |\|)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    for uri, path in _ORIGIN.items():
        files.append(File.generated(config, uri, content=path.read_text(encoding="utf-8")))
    origins = {file.src_uri: _origin(file.src_uri) for file in files.documentation_pages()}
    for origin in origins.values():
        for link in _LINK.finditer(_without_code(origin.read_text(encoding="utf-8"))):
            uri, path = _target(origin, link[1])
            if files.get_file_from_path(uri) is None and path.is_file() and not path.is_relative_to(DOCS):
                files.append(File.generated(config, uri, content=_listing(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Links lead to pages, and lists and tables may follow a paragraph directly, as on most sites."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    origin = _origin(uri)
    markdown = markdown.replace(_SCHEMES_HERE, _schemes())

    def moved(link: re.Match[str]) -> str:
        target, _ = _target(origin, link[1])
        return os.path.relpath(target, os.path.dirname(uri) or ".") + (link[2] or "")

    lines: list[str] = []
    is_fenced = False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif not is_fenced and not line.startswith("    "):
            begins = _LIST_OR_TABLE.match(line)
            before = lines[-1] if lines else ""
            if begins and before.strip() and not before.startswith((" ", "|")) and not _LIST_OR_TABLE.match(before):
                lines.append("")
            line = _LINK.sub(moved, line)
        lines.append(line)
    return "\n".join(lines)


def _origin(uri: str) -> Path:
    return _ORIGIN.get(uri, DOCS / uri)


def _target(origin: Path, link: str) -> tuple[str, Path]:
    """The page that a link in the file `origin` leads to, and its file."""
    path = Path(os.path.normpath(origin.parent / link))
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS)), path
    name = str(path.relative_to(ROOT))
    return PROSE.get(name, f"source/{name}.md"), path


def _listing(path: Path) -> str:
    name = path.relative_to(ROOT)
    text = path.read_text(encoding="utf-8")
    language = {".py": "python", ".cpp": "cpp", ".hpp": "cpp", ".toml": "toml", ".yml": "yaml"}.get(path.suffix, "text")
    front = "---\nsearch: {exclude: true}\n---\n"
    return f'{front}# {name}\n\n````{language} linenums="1"\n{text}\n````\n'


def _schemes() -> str:
    """Every registered scheme, as a directive of mkdocstrings under its name."""
    registry = (ROOT / "src" / "gradwire" / "schemes" / "__init__.py").read_text(encoding="utf-8")
    return "\n".join(
        f"### `{name}`\n::: {module}.{cls}\n    options: {{heading_level: 4, show_root_toc_entry: false, members: false}}\n"
        for name, module, cls in _SCHEME.findall(registry)
    )


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
