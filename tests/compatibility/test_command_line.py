"""What a person types at a shell: versions agree, every command explains itself, and `inspect` names what it is given."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import gradwire
from float_messages import encode
from gradwire.codecs.huffman import HuffmanTable
from gradwire.core.optimizers import FAMILIES
from gradwire.errors import InvalidArgument
from gradwire.schemes.auto.fidelity import LEVELS, TABLE
from gradwire_lab.cli import COMMANDS, LABORATORY, USERS, main
from gradwire_lab.cli.bench import BENCHES
from gradwire_lab.cli.inspection import inspect_path
from gradwire_lab.ranks.netlab.check import RateCheck

_ROOT = Path(__file__).parents[2]


def _write_message(path: Path, codec_name: str) -> Path:
    message = encode(gradwire.codecs.by_name(codec_name), torch.linspace(-1, 1, 1000))
    path.write_bytes(bytes(message.tolist()))
    return path


def test_package_and_project_file_name_the_same_version():
    stated = re.search(r'^version = "(.*)"$', (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated is not None
    assert gradwire.__version__ == stated[1]


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"gradwire {gradwire.__version__}\n"


def _run_without_packages(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """An interpreter that sees the sources, the standard library and what lies in `folder`: neither torch nor an install."""
    script = f"import sys; sys.path[:0] = [{str(_ROOT / 'src')!r}, {str(folder)!r}]; {script}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60)


_RUN_COMMAND = "from gradwire.__main__ import main; sys.argv = ['gradwire', '--help']; sys.exit(main())"


def test_the_command_finds_the_laboratory_by_its_entry_point_and_does_not_wait_for_torch(tmp_path):
    project = (_ROOT / "pyproject.toml").read_text()
    registered = re.search(r'^\[project\.entry-points\."(.*)"\]\n(.*)$', project, re.MULTILINE)
    assert registered is not None
    metadata = tmp_path / "gradwire-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gradwire\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{registered[1]}]\n{registered[2].replace(chr(34), '')}\n")
    ended = _run_without_packages(tmp_path, _RUN_COMMAND)
    assert ended.returncode == 0, ended.stderr
    assert "usage: gradwire" in ended.stdout


def test_without_the_laboratory_the_command_says_what_to_install(tmp_path):
    ended = _run_without_packages(tmp_path, _RUN_COMMAND)
    assert (ended.returncode, "pip install . in" in ended.stderr) == (1, True), ended.stderr


def test_without_the_laboratory_the_switch_says_what_to_import(tmp_path):
    ended = _run_without_packages(tmp_path, "from gradwire.exchange import aggregators; aggregators.by_name('switch')")
    assert "InvalidArgument" in ended.stderr
    assert "`import gradwire_lab`" in ended.stderr


def test_without_a_command_the_users_six_come_first_and_fit_a_screen(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == text
    users, laboratory = text.split("The laboratory")
    assert [name for name in COMMANDS if f"\n  {name} " in users] == list(USERS)
    assert [name for name in COMMANDS if f"\n  {name} " in laboratory] == list(LABORATORY)
    assert len(USERS) == 6


@pytest.mark.parametrize("words", [*zip(COMMANDS), *(("bench", it) for it in BENCHES), ("netlab", "run")], ids=" ".join)
def test_every_command_explains_itself_on_one_screen(words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: gradwire {' '.join(words)}")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_the_nine_columns_of_netlab_check_fit_a_screen(capsys, monkeypatch):
    one = RateCheck(4, 25 * 10**8, 2.3e9, 1.9e9, 2.5e9, 0.01, 12345, 0.12, 5e-4)
    monkeypatch.setattr("gradwire_lab.cli.netlab.measure_rate", lambda *_: one)
    assert main(["netlab", "check", "--rates", "2.5gbit"]) == 1
    assert re.search(r"^set .{0,70} rtt ms +loss$", capsys.readouterr().out, re.MULTILINE)


def test_every_command_is_named_in_the_readme():
    readme = (_ROOT / "README.md").read_text()
    assert [command for command in COMMANDS if f"gradwire {command}" not in readme] == []


def test_every_scheme_has_its_row_in_the_page_of_schemes():
    page = (_ROOT / "docs" / "schemes.md").read_text()
    assert [name for name in gradwire.schemes.names() if f"| `{name}` |" not in page] == []


def test_the_page_of_auto_holds_the_table_that_the_code_uses():
    page = (_ROOT / "docs" / "auto.md").read_text()
    lines = []
    for row in sorted(TABLE, key=lambda row: LEVELS.index(row.level)):
        name = f"`{row.spec}`" + (" (by name only)" if row.by_name_only else "")
        n_left_out = len(set(FAMILIES) - row.families)
        one = "SGD" if "sgd" in row.families else "Adam and its kin"
        when = {0: "all", 1: "all that are known", 4: one}[n_left_out]
        if row.stands_in:
            when = "where one is unknown"
        if row.not_before:
            when += f"; Adam from step {row.not_before} on"
        lines.append(f"| {row.level} | {name} | {when} |")
    rows = re.findall(r"^(\| (?:exact|close|any) \|.*\|) [^|]+ \|$", page, re.MULTILINE)  # without what was measured
    assert rows == lines


@pytest.mark.parametrize(("codec", "kind"), [("truncate", "GComp message"), ("zlib", "general message")])
def test_inspect_names_a_message_and_its_sizes_and_refuses_an_altered_one(codec, kind, tmp_path):
    path = _write_message(tmp_path / "message.bin", codec)
    record = inspect_path(path)
    assert (record["kind"], record["dtype"], record["n_elements"]) == (kind, "float32", 1000)
    assert record["message_bytes"] == path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(gradwire.CorruptMessage):
        inspect_path(path)


def test_inspect_names_tables_state_dicts_records_and_gradients(tmp_path):
    table = HuffmanTable.prior(torch.float32)
    state = {
        "version": 1, "scheme": "gcomp", "configuration": {"topology": "ring"}, "world_size": 4, "rank": 2, "step": 7,
        "state": {"counts": torch.zeros(288, dtype=torch.int64)},
    }  # fmt: skip
    fields = {"codec": "zstd", "gradients": "g", "threads": 1, "ratio": 0.9, "encode_gb_per_s": 1, "decode_gb_per_s": 1}
    (tmp_path / "table.bin").write_bytes(table.to_bytes())
    torch.save(state, tmp_path / "rank-2.pt")
    (tmp_path / "codec.json").write_text(json.dumps([fields]))
    np.savez(tmp_path / "gradient.npz", gradient=np.array([0, 1, 2, 3], np.float32))
    for name, said in {
        "table.bin": {"kind": "Huffman table", "table_id": f"{table.id:#018x}"},
        "rank-2.pt": {"kind": "gradwire state_dict", "scheme": "gcomp", "step": 7, "state": "1 tensors, 2,304 bytes"},
        "codec.json": {"kind": "records of bench codec (1)", "names": ["zstd"]},
        "gradient.npz": {"kind": "gradient file", "n_elements": 4, "share_of_zeros": 0.25},
    }.items():
        record = inspect_path(tmp_path / name)
        assert {field: record[field] for field in said} == said


def test_inspect_names_a_run_and_whether_it_came_to_its_end(tmp_path):
    (tmp_path / "config.json").write_text('{"scheme": "gcomp"}')
    (tmp_path / "steps.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert inspect_path(tmp_path)["kind"] == "run of gradwire train, not finished (no summary.json)"
    (tmp_path / "summary.json").write_text('{"scheme": "gcomp", "loss": 1.5}')
    record = inspect_path(tmp_path)
    assert (record["kind"], record["steps_logged"], record["loss"]) == ("run of gradwire train", 2, 1.5)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", InvalidArgument),
        (b"not of gradwire", InvalidArgument),
        (b"GWGC", gradwire.CorruptMessage),
        (b"GWGE" + bytes(40), gradwire.IncompatibleVersion),
        (b"GWHT\x01\x08\x00\x00", gradwire.CorruptMessage),
        (b"PK\x03\x04 torn", gradwire.CorruptMessage),
        (b"[1, 2]", InvalidArgument),
    ],
)
def test_inspect_of_a_foreign_or_torn_file_raises_a_typed_error(content, error, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(error):
        inspect_path(tmp_path / "file")


def test_inspect_of_a_missing_path_or_an_empty_folder_raises_invalid_argument(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(gradwire.InvalidArgument):
            inspect_path(path)


def test_inspect_prints_text_from_files_as_it_is_and_writes_json(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"name": "[red]x[/red]"}')
    assert main(["inspect", str(tmp_path / "run.json"), "--json", str(tmp_path / "out.json")]) == 0
    assert "[red]x[/red]" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())[0]["name"] == "[red]x[/red]"


def test_inspect_prints_no_markup_and_no_escape_sequence_of_a_file(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"[/red]": "a", "name\x1b[2J": "\x1b]0;title\x07\u202e", "kind": "\x1b[2J"}))
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "[/red]" in said
    assert "\\x1b]0;title\\x07\\u202e" in said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)


class _Harm:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def test_code_in_a_torch_file_does_not_run(tmp_path):
    path, sign = tmp_path / "rank-0.pt", tmp_path / "it ran"
    torch.save({"scheme": "top-k", "configuration": _Harm(sign), "world_size": 1, "rank": 0}, path)
    with pytest.raises(gradwire.CorruptMessage, match="weights_only=True"):
        inspect_path(path)
    assert not sign.exists()


@pytest.mark.parametrize("command", [["train", "--steps", "1"], ["demo"]])
@pytest.mark.parametrize("option", [("--rate", "5zbit"), ("--ranks", "0"), ("--workload", "nosuch")])
def test_options_are_checked_before_anything_is_printed(command, option, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main([*command, *option]) != 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1, printed.err


def test_inspect_shows_what_lies_within_in_rows_of_its_own(tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps({"stats": {"sent": 7, "auto": {"why": "fast" * 20, "of": [{}]}}}))
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "{" not in printed
    assert max(map(len, printed.splitlines()[1:])) <= 80
    for words in ("stats.sent", "stats.auto.why", "fast", "1 entries (in full with --json)"):
        assert words in printed


@pytest.mark.parametrize(("n_paths", "unbuffered"), [(0, ""), (1, ""), (400, ""), (1, "1")])
def test_who_reads_no_further_ends_the_command_quietly(n_paths, unbuffered, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    (tmp_path / "summary.json").write_text(json.dumps({"stats": dict.fromkeys(map(str, range(20)), "long" * 5)}))
    (tmp_path / "config.json").write_text("{}")
    command = ["inspect", *[str(tmp_path)] * n_paths] if n_paths else ["--help"]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-m", "gradwire", *command], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_inspect_refuses_an_array_that_is_larger_than_memory(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("gradient.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8))
    with pytest.raises(InvalidArgument, match=r"not a readable \.npz"):
        inspect_path(tmp_path / "huge.npz")
