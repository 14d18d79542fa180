"""Each `gradwire ...` and `make ...` on a page is a command that exists, with options that it takes."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from page_text import GENERATED, MAKE_TARGETS, PAGES, code_of, name_of

from gradwire_lab.cli import COMMANDS, main

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
    """What is wrong with `gradwire WORDS`."""
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
