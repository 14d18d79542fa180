"""`gradwire bench render`: pages from the records, or only what of them is stale."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire_lab.bench.catalogue import book
from gradwire_lab.results.store import find_root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench render`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print what stands between the marks "
                        "`<!-- generated: bench render NAME -->` and `<!-- end -->` of a page, and write nothing")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a page is stale")
    parser.add_argument("--root", type=Path, metavar="DIR", help="the checkout (default: around this folder)")


def run(args: argparse.Namespace) -> int:
    """Write, or check, docs/results.md, docs/results/*, and the marked parts of README.md and docs/*.md."""
    root = args.root or find_root(Path.cwd())
    pages = book(root)
    if args.name:
        print(pages.snippet(args.name), end="")
        return 0
    if args.check:
        stale = pages.stale()
        for path in stale:
            print(f"stale: {path.relative_to(root)}")
        print("`gradwire bench render` makes them anew" if stale else "every page is what results/ say")
        return 1 if stale else 0
    changed = pages.render()
    for path in changed:
        print(f"wrote {path.relative_to(root)}")
    print(f"{len(changed)} files changed")
    return 0
