"""What a page points at is there: files, headings, commands with their options, names in the code, tests and modules."""

import contextlib
import importlib
import io
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from page_text import DOCS, GENERATED, MAKE_TARGETS, PAGES, ROOT, code_of, name_of, prose_of

from gradwire_lab.cli import COMMANDS, main

_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
_PATH = re.compile(r"`((?:tests|native|examples|fuzz|src)/[\w./-]+)`")


def headings(path: Path) -> set[str]:
    """The anchors that a page offers, as GitHub and the site make them."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("`", "").replace("**", "").lower() for line in lines]
    return {re.sub(r"[^\w\- ]", "", line).strip().replace(" ", "-") for line in plain}


@pytest.mark.parametrize("page", [*PAGES, *sorted(GENERATED)], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for words, target, anchor in _LINK.findall(re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{words}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in headings(path), f"{target}#{anchor}: no such heading"
        named = re.fullmatch(r"`(\w+)`", words)
        if named and path.suffix in (".py", ".hpp", ".cpp"):
            defined = rf"^\s*(class|def|struct|[\w:<>]+) {named[1]}\b"
            assert re.search(defined, path.read_text(), re.MULTILINE), f"{target} defines no {named[1]}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_backticks_exist(page: Path) -> None:
    assert [path for path in _PATH.findall(page.read_text()) if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in menu] == []


def test_public_names_are_in_the_reference() -> None:
    import gradwire

    # Attachment is a Reducer; errors and modules are there as a whole.
    elsewhere = {"Attachment", "codecs", "schemes"} | {
        name for name in gradwire.__all__ if isinstance(getattr(gradwire, name), type) and name in vars(gradwire.errors)
    }
    reference = (DOCS / "api.md").read_text()
    public = set(gradwire.__all__) - elsewhere
    assert [name for name in public if not re.search(rf"^::: .*\.{name}$", reference, re.MULTILINE)] == []


def test_prose_is_told_from_code() -> None:
    assert prose_of("a 1 %\n```\n2 %\n```\n    3 %\n`4 %`\n<!-- 5 % -->b").split() == ["a", "1", "%", "b"]


_DOTTED = re.compile(r"(?<![\w./`-])`?(gradwire(?:_lab)?(?:\.\w+)+)")
# Names of another kind than Python's, and modules that need a package which is not everywhere.
_NO_MODULES = {
    "gradwire.auto": "a logger",
    "gradwire.commands": "an entry point",
    "gradwire.pt": "a file",
    "gradwire.integrations.lightning": "needs lightning",
}


def is_there(dotted: str) -> bool:
    words = dotted.split(".")
    for end in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:end]))
        except ModuleNotFoundError:
            continue
        for word in words[end:]:
            if not hasattr(found, word):
                return False
            found = getattr(found, word)
        return True
    return False


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "src").rglob("*.py"))], ids=name_of)
def test_modules_and_names_with_dots_exist(path: Path) -> None:
    named = {name.removesuffix(".py") for name in _DOTTED.findall(path.read_text())}
    known = [name for name in named if not any(name.startswith(other) for other in _NO_MODULES)]
    assert [name for name in known if not is_there(name)] == []


def test_a_name_that_is_not_there_is_found() -> None:
    assert is_there("gradwire_lab.ranks.netlab.Netlab")
    assert not is_there("gradwire.netlab.Netlab")
    assert not is_there("gradwire.errors.PeerFound")


# ---- each `gradwire ...` and `make ...` is a command that exists, with options that it takes

_COMMAND = re.compile(r"(?:^|\s|-m )gradwire ((?:[a-z]|--)[^#|;()]*)")


@cache
def help_of(*command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return out.getvalue()


def commands_in(page: Path) -> list[list[str]]:
    found = []
    for line in code_of(page.read_text()):
        for rest in _COMMAND.findall(re.split(r"\s#", line)[0]):
            words = shlex.split(rest.replace("'", "").replace('"', "").replace("...", "").rstrip("\\"))
            if words and not words[0].endswith(":"):  # `gradwire train: PeerLost: ...` is printed, not typed
                found.append(words)
    return found


def check(words: list[str]) -> str | None:
    if words[0].startswith("-") or words[0] == "COMMAND":
        return None
    if words[0] not in COMMANDS:
        return f"no command is called {words[0]}"
    command = [words[0]]
    described = help_of(*command)
    if re.search(r"usage:.* (COMMAND|ACTION) \.\.\.", described):
        if len(words) == 1 or words[1].startswith("-"):
            return None
        if not re.search(rf"^\s+{re.escape(words[1])}\b", described, re.MULTILINE):
            return f"gradwire {words[0]} has no subcommand {words[1]}"
        command.append(words[1])
        described = help_of(*command)
    own = words[: words.index("--")] if "--" in words else words
    for word in own:
        option = word.split("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", option) and not re.search(rf"(?<![\w-]){option}(?![\w-])", described):
            return f"gradwire {' '.join(command)} has no option {option}"
    return None


@pytest.mark.parametrize("page", [*PAGES, *sorted(GENERATED)], ids=name_of)
def test_commands_on_the_page_exist(page: Path) -> None:
    assert [f"{' '.join(words)}: {wrong}" for words in commands_in(page) if (wrong := check(words))] == []
    named = [target for line in code_of(page.read_text()) for target in re.findall(r"^make ([a-z]+)\b", line)]
    assert [target for target in named if target not in MAKE_TARGETS] == []


def test_commands_that_do_not_exist_are_found() -> None:
    assert check(["trian"]) == "no command is called trian"
    assert check(["train", "--rank", "2"]) == "gradwire train has no option --rank"
    assert check(["netlab", "run", "--ranks", "2", "--", "python", "x.py", "--no-such"]) is None
    assert check(["netlab", "runs"]) is not None


def test_pages_name_commands() -> None:
    assert sum(len(commands_in(page)) for page in PAGES) > 60
