"""Which scheme works behind which door: one table, for the docs, and for the tests that try every cell."""

from __future__ import annotations

from gradwire import schemes

# Door: what a user calls.
DOORS = {
    "ddp": "`attach(ddp, ...)`",
    "fsdp2": "`attach(fsdp2, ...)`",
    "two-level": "`TwoLevel(scheme)`",
    "local-sgd": "`LocalSgd(...)`",
    "reducer": "`Reducer(...)`",
}
_OWNS_STEP = "steps parameters itself, inside DDP's model"
_READS_OPTIMIZER = 'with `importance="none"`'
_UNDER_ADAM = "under Adam and AdamW"
_EXCHANGES_MOMENTA = "exchanges the momenta of DDP's Adam"
_UNDER_MOMENTUM = "under Adam, Muon and SGD with momentum"
_READS_MOMENTA = "reads the momentum of the model's optimizer"
_WATCHES_DDP = "times the steps of a DDP model"
_DIFFERS = "its replicas differ by design"


def refusal(scheme: str, door: str) -> str | None:
    """Why a scheme, with its options as they are, is refused behind a door; None: it works."""
    if scheme == "power-momentum":
        return _UNDER_MOMENTUM if door in ("ddp", "fsdp2") else _READS_MOMENTA
    if schemes.needs_momenta(scheme):
        return _UNDER_ADAM if door == "ddp" else _EXCHANGES_MOMENTA
    if door == "ddp":
        return None
    if schemes.owns_step(scheme):
        return _OWNS_STEP
    if scheme == "auto":
        return _WATCHES_DDP
    if scheme == "periodic" and door in ("two-level", "local-sgd"):
        return _DIFFERS
    if scheme == "gcomp" and door in ("local-sgd", "reducer"):
        return _READS_OPTIMIZER
    return None


def markdown() -> str:
    """The table as docs/doors.md shows it."""
    rows = [f"| scheme | {' | '.join(DOORS.values())} |", f"|---|{'---|' * len(DOORS)}"]
    for scheme in schemes.names():
        cells = [refusal(scheme, door) or "yes" for door in DOORS]
        if set(cells) == {"yes"}:
            continue
        if len(set(cells[1:])) == 1 and cells[1] == _OWNS_STEP:
            cells = [cells[0], f"no: {_OWNS_STEP}", "no", "no", "no"]
        rows.append(f"| `{scheme}` | {' | '.join(cells)} |")
    rows.append(f"| all others | {' | '.join(['yes'] * len(DOORS))} |")
    return "\n".join(rows)
