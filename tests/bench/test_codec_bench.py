"""`bench codec`: flat records with stable fields, every round trip judged, bad names and files refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradient_files import adamw_arrays, load, sparse_arrays, write

from gradwire.codecs.gcomp import describe
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire_lab.bench import codec
from gradwire_lab.bench.codec import TimedMethod
from gradwire_lab.bench.level_rule import allowed_scale, dropped_bits
from gradwire_lab.cli import main

FIELDS = {
    **dict.fromkeys(("codec", "gradients", "commit", "cpu", "torch"), str),
    **dict.fromkeys(("ratio", "encode_gb_per_s", "decode_gb_per_s", "encode_gb_per_s_low", "encode_gb_per_s_high"), float),
    "encode_vs_zstd": float,
    "threads": int,
}  # fmt: skip


def test_records_are_flat_and_have_the_promised_fields(tmp_path: Path) -> None:
    dense, sparse = write(tmp_path / "dense.npz", adamw_arrays()), write(tmp_path / "sparse.npz", sparse_arrays())
    out, table = tmp_path / "out.json", tmp_path / "out.csv"
    words = f"--gradients {dense} {sparse} --codec gcomp raw zstd lz4 --threads 1 --rounds 1 --json {out} --csv {table}"
    assert main(["bench", "codec", *words.split()]) == 0
    records = json.loads(out.read_text())
    pairs = {(record["gradients"], record["codec"]) for record in records}
    assert pairs == {(file, codec) for file in ("dense.npz", "sparse.npz") for codec in ("gcomp", "raw", "zstd", "lz4")}
    for record in records:
        for field, kind in FIELDS.items():
            assert type(record[field]) is kind, field
        assert all(not isinstance(value, dict | list) for value in record.values())
        assert (record["exponent_bits"] is not None) == (record["codec"] == "gcomp")
    importance = {record["gradients"]: record["importance"] for record in records if record["codec"] == "gcomp"}
    assert importance == {"dense.npz": "paper", "sparse.npz": "none"}
    assert len(table.read_text().splitlines()) == 1 + len(records)


def encoded(name: str, folder: Path, arrays: dict[str, Any] | None = None) -> TimedMethod:
    """The method, which has written its message."""
    method = codec.by_spec(name, load(folder, arrays or adamw_arrays()), 1)
    assert method is not None
    method.encode()
    return method


def verified(name: str, folder: Path, arrays: dict[str, Any] | None = None) -> TimedMethod:
    """The method, after a round trip that kept its promise."""
    method = encoded(name, folder, arrays)
    method.poison()
    method.decode()
    method.verify()
    return method


def assert_found_out(method: TimedMethod, element: int, value: float) -> None:
    """If this had been decoded."""
    decoded = method.decoded().copy()
    decoded[element] = value
    method.decoded = lambda: decoded  # type: ignore[method-assign]
    with pytest.raises(CorruptMessage, match=f"element {element}"):
        method.verify()


@pytest.mark.parametrize("name", codec.choose_specs(["all"]))
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_every_codec_and_baseline_keeps_its_promise(tmp_path: Path, name: str, kind: str) -> None:
    assert len(verified(name, tmp_path, {"dense": adamw_arrays, "sparse": sparse_arrays}[kind]()).message) > 0


_GCOMP = [
    "gcomp", "gcomp:rounding=truncate", "gcomp:bits=10", "gcomp:format=1", "gcomp:format=1,rounding=nearest",
    "gcomp:importance=uniform,bits=10", "gcomp:dtype=bfloat16", "gcomp:dtype=float16",
    "gcomp:dtype=float16,importance=none", "truncate",
]  # fmt: skip


@pytest.mark.parametrize("name", ["zstd", "raw", *_GCOMP])
def test_wrong_result_stops_the_run(tmp_path: Path, name: str) -> None:
    arrays = adamw_arrays()
    arrays["gradient"][500] = 0.25
    method = verified(name, tmp_path, arrays)
    value = method.decoded()[500]
    assert_found_out(method, 500, np.nextafter(value, np.float32(1)) if name in ("zstd", "raw") else value * 4)


@pytest.mark.parametrize("name", _GCOMP)
def test_messages_are_of_format_2_unless_asked_and_hold_the_dtype(tmp_path: Path, name: str) -> None:
    method = encoded(name, tmp_path)
    parts = describe(method.message)
    assert parts["format_version"] == (1 if "format=1" in name else 2)
    dtype = next((dtype for dtype in ("bfloat16", "float16") if f"dtype={dtype}" in name), "float32")
    assert parts["dtype"] == dtype
    assert method.n_bytes == 3000 * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("name", ["gcomp", "gcomp:rounding=truncate", "gcomp:bits=10"])
def test_bits_that_count_may_not_be_dropped(tmp_path: Path, name: str) -> None:
    """The largest value may lose some bits; a 128th of it is too much."""
    method = verified(name, tmp_path)
    decoded = method.decoded()
    largest = int(np.abs(decoded).argmax())
    assert_found_out(method, largest, decoded[largest] * (1 + 2.0**-7))


@pytest.mark.parametrize("name", ["gcomp", "gcomp:dtype=bfloat16"])
def test_decoder_that_writes_nothing_is_found_out(tmp_path: Path, name: str) -> None:
    method = encoded(name, tmp_path)
    method.poison()
    with pytest.raises(CorruptMessage):
        method.verify()


def test_level_rule_drops_the_most_bits_that_the_paper_allows() -> None:
    values = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, np.inf, np.nan], np.float32)
    scale = np.array([0.0, 64.0, 65.0, 4097.0, 2.0**18 + 1, 1.0, np.inf, 1e9])
    assert dropped_bits(values, scale).tolist() == [0, 0, 6, 12, 18, 18, 0, 0]


def test_level_rule_gives_more_to_ranks_whose_number_is_no_power_of_two(tmp_path: Path) -> None:
    state = load(tmp_path, adamw_arrays()).state
    assert state is not None
    one, three, four = (allowed_scale(state, n_ranks)[0] for n_ranks in (1, 3, 4))
    assert np.array_equal(one, four)
    assert np.allclose(three, 0.75 * one)


def test_incomplete_file_is_refused_before_one_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = adamw_arrays()
    del arrays["exp_avg"]
    good, bad = write(tmp_path / "good.npz", adamw_arrays()), write(tmp_path / "bad.npz", arrays)
    out = tmp_path / "out.json"
    assert main(["bench", "codec", "--gradients", str(good), str(bad), "--json", str(out)]) == 1
    assert "exp_avg" in capsys.readouterr().err
    assert not out.exists()


def test_importance_from_the_paper_without_state_says_what_is_missing(tmp_path: Path) -> None:
    file = load(tmp_path, sparse_arrays())
    with pytest.raises(InvalidArgument, match="no 'parameter' and no optimizer state"):
        codec.by_spec("gcomp:importance=paper", file, 1)


@pytest.mark.parametrize("format", [1, 2])
def test_bound_is_the_exponents_entropy_and_the_other_bits(tmp_path: Path, format: int) -> None:
    gradient = adamw_arrays()["gradient"]
    method = encoded(f"gcomp:importance=none,format={format}", tmp_path)
    _, counts = np.unique(np.frexp(gradient[gradient != 0])[1], return_counts=True)
    share = np.append(counts, (gradient == 0).sum()) / gradient.size
    share = share[share > 0]
    exponents = -(share * np.log2(share)).sum() * gradient.size
    bound = method.parts()["bound_bytes"]
    n_open = 64 if format == 2 else 1  # format 2: sixteen lanes end in a word each
    assert 0 <= bound - (exponents + 24 * (gradient != 0).sum()) / 8 <= n_open
    assert bound < len(method.message)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("name", codec.BASELINES)
def test_baseline_returns_every_bit(name: str, n_threads: int) -> None:
    baseline = codec.baseline_by_name(name, n_threads)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42, -1.5, 3.4e38], np.float32)
    normal = (np.random.default_rng(5).standard_normal(50_000) * 1e-3).astype(np.float32)
    for array in (normal, np.zeros(10_000, np.float32), np.tile(special, 200)):
        before = array.copy()
        decoded = baseline.decode(baseline.encode(array))
        assert np.array_equal(decoded.view(np.uint32), before.view(np.uint32))
        assert np.array_equal(array.view(np.uint32), before.view(np.uint32)), "the input was changed"
