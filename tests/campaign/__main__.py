"""`python -m campaign`: run, go on with, show again or sum up a campaign; `make campaign` sets the paths."""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaign.cases import KINDS, SELDOM, TURNS, Case, run_case
from programs import descendants


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="a campaign with a seed goes on where it ended (default: 1)"
    )
    parser.add_argument("--minutes", type=float, help="end after the case in which this time is up (default: 2)")
    parser.add_argument("--n", type=int, help="end after so many cases")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), help="these kinds only, in turn")
    parser.add_argument("--case", type=Case.parse, metavar="KIND:SEED:NUMBER", help="run this one again, and say all")
    parser.add_argument("--summary", action="store_true", help="sum up what lies in the folder, and run nothing")
    parser.add_argument("--folder", type=Path, default=Path("runs/campaign"), help="of results (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.case is not None:
        return _show_again(args.case)
    if not args.summary:
        _run(args)
    return _sum_up(args.folder, None if args.summary else args.seed)


def _show_again(case: Case) -> int:
    record = run_case(case.kind, case.draw())
    print(json.dumps(record["drawn"], indent=1))
    print(f"{case}: {record['verdict']} after {record['seconds']} s\n{record['found']}")
    return int(record["verdict"] == "failed")


def _run(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{args.seed}.jsonl"
    done = {record["case"] for record in _records(path)}
    ends = float("inf") if args.n is not None and args.minutes is None else time.monotonic() + 60 * (args.minutes or 2)
    n_run = 0
    with path.open("a") as file:
        for case in _cases(args.seed, args.kinds):
            if time.monotonic() >= ends or n_run == args.n:
                return
            if str(case) in done:
                continue
            record = {"case": str(case), "kind": case.kind, "commit": _commit(), **run_case(case.kind, case.draw())}
            file.write(json.dumps(record) + "\n")
            file.flush()
            n_run += 1
            if record["verdict"] == "failed":
                print(f"FAILED {case}; again: {case.command}\n{record['found']}", flush=True)


def _cases(seed: int, kinds: list[str] | None) -> Iterator[Case]:
    numbers: Counter[str] = Counter()
    for turn in itertools.count():
        for kind in kinds or (*TURNS, *(kind for kind, rounds in SELDOM.items() if turn % rounds == 0)):
            yield Case(kind, seed, numbers[kind])
            numbers[kind] += 1


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _commit() -> str:
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def _sum_up(folder: Path, seed: int | None) -> int:
    """Print cases by kind and every failure; 1 if there is one."""
    paths = sorted(folder.glob("*.jsonl")) if seed is None else [folder / f"{seed}.jsonl"]
    records = [record for path in paths for record in _records(path)]
    print(f"{'kind':<12}{'cases':>8}{'passed':>8}{'refused':>9}{'failed':>8}{'minutes':>9}")
    for kind in KINDS:
        of_kind = [record for record in records if record["kind"] == kind]
        counts = Counter(record["verdict"] for record in of_kind)
        minutes = sum(record["seconds"] for record in of_kind) / 60
        numbers = f"{len(of_kind):>8}{counts['passed']:>8}{counts['refused']:>9}{counts['failed']:>8}{minutes:>9.1f}"
        print(f"{kind:<12}{numbers}")
    failed = [record for record in records if record["verdict"] == "failed"]
    for record in failed:
        last = record["found"].strip().splitlines()[-1] if record["found"].strip() else ""
        print(f"{Case.parse(record['case']).command}    # {record['commit']}: {last[:160]}")
    print("commits:", ", ".join(sorted({record["commit"] for record in records})) or "none")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        for pid in descendants(os.getpid()):  # a rank may hang, or be about to start
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        print("campaign: interrupted; the same command goes on from here", file=sys.stderr, flush=True)
        os._exit(130)  # torch takes seconds to be taken down
