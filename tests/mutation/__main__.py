"""`python -m mutation`: change one operator, comparison or constant of the library at a time, and see that a test fails.

`make mutate` sets the paths. The changes are Cosmic Ray's; a seed draws as many of them as are asked for, in turn from the
areas below, each with the tests that have to notice. Files are changed in place, one at a time, and put back: a run that was
killed is undone by `git checkout src`. What survives is printed with its place, and is either a test that is missing or a
change without effect, which EQUAL names with the reason.
"""

import argparse
import ast
import json
import random
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = "src/gradwire"

# What is said to the user, and what is drawn or logged, is not counted as behaviour here.
_SAID = {"warning", "info", "debug", "error", "exception"}
_OPERATORS = (
    "core/ReplaceBinaryOperator", "core/ReplaceComparisonOperator", "core/ReplaceUnaryOperator", "core/AddNot",
    "core/NumberReplacer", "core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd", "core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak",
)  # fmt: skip


class Area(NamedTuple):
    """Modules under `src/gradwire`, and the tests, under `tests`, that have to notice a change of them; quick ones first."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "feedback": Area(
        ("core/feedback.py",),
        (
            "recovery/test_residuals.py", "distributed/test_conservation.py", "distributed/test_not_finite.py",
            "distributed/test_quantised_schemes.py", "distributed/test_restart.py", "distributed/test_other_world.py",
        ),
    ),
    "agreement": Area(
        ("wire/preamble.py", "schemes/plain.py"),
        (
            "corruption/test_preamble.py", "distributed/test_collectives.py", "distributed/test_warm_up.py",
            "distributed/test_low_rank_oracles.py", "distributed/test_auto.py", "distributed/test_ddp_features.py",
            "faults/test_failures.py", "device/test_on_device.py", "distributed/test_several_optimizers.py",
        ),
    ),
    "checksums and averages": Area(
        ("wire/wire.py", "schemes/compressed.py"),
        (
            "distributed/test_collectives.py", "distributed/test_not_finite.py",
            "distributed/test_quantised_schemes.py", "distributed/test_warm_up.py", "distributed/test_switch_aggregator.py",
            "distributed/test_homomorphic_sums.py", "distributed/test_selection.py", "device/test_on_device.py",
        ),
    ),
    "rounding": Area(
        ("codecs/ternary.py", "codecs/selection.py", "codecs/quantised.py"),
        (
            "recovery/test_quantisers.py", "recovery/test_arguments.py", "recovery/test_top_k_selection.py",
            "device/test_kernels.py", "device/test_coded_kernels.py",
            "distributed/test_quantised_schemes.py",
        ),
    ),
    "auto's hand-over": Area(
        ("schemes/auto/turns.py", "schemes/auto/scheme.py"),
        (
            "control/test_racing.py", "distributed/test_auto.py", "distributed/test_ddp_features.py",
            "device/test_auto_on_device.py", "faults/test_names_and_leftovers.py",
        ),
    ),
}  # fmt: skip

# Changes that cannot be noticed: (module, the line as it was changed, why).
EQUAL: tuple[tuple[str, str, str], ...] = (
    ("core/feedback.py", "one is not None and one._base is room and one.storage_offset() < offset", "copies again"),
    ("core/feedback.py", "for slot, (start, end) in zip(layout.slots, layout.spans, strict=False):", "as many of each"),
    ("schemes/compressed.py", "/,", "who makes a scheme names its options"),
    ("schemes/compressed.py", 'is_fine = getattr(getattr(self.collective, "codec", None), "bits", 1) > 8', "else 8 or less"),
    ("schemes/compressed.py",
     'if session.wire.on_device and is_kept and getattr(session.module, "find_unused_parameters", True):',
     "a wire on a device has a module"),
    ("schemes/compressed.py", "part.values.index_fill_( -1, places, 0.0)", "of one dimension"),
    ("codecs/quantised.py", "turns = zeros_between_launches(device, 3)", "more memory than is used"),
    ("codecs/ternary.py",
     'kernels.launch("gw_ternary_measure", parts(8 * shares.n_blocks, THREADS), THREADS, 1, parameters)',
     "more shared memory than is used"),
    ("schemes/auto/scheme.py", "share, n_steps = self._left.pop(slot, (torch.zeros_like(residual), -1))", "of zeros"),
    ("schemes/auto/scheme.py", "return self._lag_of( 2000001.0 * (plain.machine.n_ranks - 1) * plain.link.backend_hop_s)",
     "a millionth more"),
    ("schemes/auto/turns.py", "if communicator.world_size == 0:", "one rank compares a record with itself"),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a change that is not in EQUAL has survived."""
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="how many changes to try (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="draws them (default: %(default)s)")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS), metavar="AREA")
    parser.add_argument("--timeout", type=float, default=600, help="of the tests of one, in s (default: %(default)s)")
    parser.add_argument("--results", type=Path, default="runs/mutation.jsonl", help="goes on with what lies there")
    args = parser.parse_args(arguments)
    if subprocess.run(["git", "diff", "--quiet", "--", _SOURCES], cwd=_ROOT).returncode:
        parser.error("src/gradwire has changes: files are changed in place and put back as committed, so commit first")
    for area in args.areas:
        if subprocess.run(_command(area), cwd=_ROOT).returncode:
            parser.error(f"the tests of {area} fail without any change: mend them first")
    drawn = list(_draw(args.areas, args.n, args.seed))
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a+") as file:
        file.seek(0)
        done = {one["key"]: one for one in map(json.loads, file)}
        for number, (area, spec) in enumerate(drawn, 1):
            key = f"{_commit()} {spec.module_path} {spec.operator_name} {spec.occurrence}"
            if key not in done:
                done[key] = {"key": key, **_try(area, spec, args.timeout)}
                file.write(json.dumps(done[key]) + "\n")
                file.flush()
            print(f"[{number}/{len(drawn)}] {done[key]['outcome']:9} {area}: {done[key]['where']}", flush=True)
    return _sum_up([done[key] for key in done if key.startswith(_commit())])


def _draw(areas: list[str], n: int, seed: int) -> Iterator[tuple[str, MutationSpec]]:
    """Changes, in turn from the areas."""
    random_of = random.Random(seed)
    waiting = {}
    for area in areas:
        sites = list(_sites(AREAS[area].modules, random_of))
        random_of.shuffle(sites)
        waiting[area] = sites
    while n and any(waiting.values()):
        for area, sites in waiting.items():
            if sites and n:
                n -= 1
                yield area, sites.pop()


def _sites(modules: tuple[str, ...], random_of: random.Random) -> Iterator[MutationSpec]:
    """All changes of some modules, but for those of what is said and of annotations."""
    paths = [_ROOT / _SOURCES / module for module in modules]
    quiet = {path: set(_quiet_lines(ast.parse(path.read_text()))) for path in paths}
    at_place: dict[tuple[Path, tuple[int, int], str], list[MutationSpec]] = {}
    with use_db(":memory:", WorkDB.Mode.create) as found:
        init(paths, found, {})
        for item in found.work_items:
            (spec,) = item.mutations
            kind = next((kind for kind in _OPERATORS if spec.operator_name.startswith(kind)), None)
            if kind is not None and spec.start_pos[0] not in quiet[spec.module_path]:
                at_place.setdefault((spec.module_path, spec.start_pos, kind), []).append(spec)
    for place in sorted(at_place):  # of a + that may become any of ten operators, one
        yield random_of.choice(sorted(at_place[place], key=lambda spec: (spec.operator_name, spec.occurrence)))


def _quiet_lines(module: ast.Module) -> Iterator[int]:
    """Lines of annotations, of errors' texts and of logs."""
    for node in ast.walk(module):
        parts: list[ast.expr | ast.stmt | None] = []
        if isinstance(node, ast.FunctionDef):
            parts = [node.returns, *(one.annotation for one in [*node.args.args, *node.args.kwonlyargs])]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _says(node)):
            parts = [node]
        for part in parts:
            if part is not None:
                yield from range(part.lineno, (part.end_lineno or part.lineno) + 1)


def _says(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _SAID


def _command(area: str) -> list[str]:
    tests = [f"tests/{name}" for name in AREAS[area].tests]
    return [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]


def _try(area: str, spec: MutationSpec, timeout_s: float) -> dict[str, object]:
    begun = time.monotonic()
    result = mutate_and_test([spec], shlex.join(_command(area)), timeout_s)
    if result.worker_outcome is not WorkerOutcome.NORMAL:
        raise RuntimeError(result.output)
    return {
        "outcome": "survived" if result.test_outcome is TestOutcome.SURVIVED else "killed",
        "module": str(spec.module_path.relative_to(_ROOT / _SOURCES)),
        "line": next(line[1:].strip() for line in result.diff.splitlines() if re.match(r"\+(?!\+\+)", line)),
        "where": f"{spec.module_path.relative_to(_ROOT)}:{spec.start_pos[0]} {spec.operator_name.split('/')[-1]}",
        "diff": result.diff,
        "seconds": round(time.monotonic() - begun, 1),
    }


def _sum_up(results: list[dict[str, object]]) -> int:
    equal = {(module, line) for module, line, _ in EQUAL}
    survived = [one for one in results if one["outcome"] == "survived"]
    without_effect = [one for one in survived if (one["module"], one["line"]) in equal]
    missed = [one for one in survived if one not in without_effect]
    for one in missed:
        print(f"\nsurvived: {one['where']}\n{one['diff']}")
    n = Counter(str(one["outcome"]) for one in results)
    print(
        f"\n{len(results)} changes: {n['killed']} noticed, {len(without_effect)} without effect, {len(missed)} survived: "
        f"{100 * n['killed'] / max(1, len(results) - len(without_effect)):.0f} % of those that have an effect"
    )
    return int(bool(missed))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
