"""What a command cannot do it says in one line, before anything runs."""

import pytest

from gradwire_lab.cli import main

REFUSED = [
    ("bench run nope", "no experiment's key begins with nope"),
    ("bench run", "name experiments by KEY"),
    ("bench codec --gradients absent.npz --codec nope", "no codec or baseline is called 'nope'; there are: all, "),
    ("bench codec --gradients absent.npz --codec nope2", "embedded-float, gcomp, one-bit, "),
    ("bench codec --gradients absent.npz --codec nope3", "zstd, zlib, lz4, blosc2, zipnn, pcodec\n"),
    ("bench regret --scheme auto", "has to name ddp"),
    ("bench regret --steps 5", "20 or more"),
    ("bench regret --workload gtp", "no workload"),
    ("bench regret --then 1gbit", "--then changes the links"),
    ("bench allreduce --scheme nope", "nothing to measure is called 'nope'"),
    ("bench allreduce --scheme gcomp:bits", "expected NAME:option=value"),
    ("bench allreduce --rate fast", "fast"),
    ("bench allreduce --rate 1gbit,1gbit --ranks 3", "2 rates for 3 ranks"),
    ("bench allreduce --ranks 0", "--ranks must be at least 1"),
    ("bench allreduce --n-bytes 2", "bytes from 4 (one float32)"),
    ("bench allreduce --gradients absent.npz", "no such file"),
    ("bench allreduce --density 2", "density must be from 0 to 1"),
    ("bench train --scheme nope", "nothing to measure is called 'nope'"),
    ("bench train --workload nope", "no workload is called 'nope'"),
    ("bench train --steps 0", "both count from 1"),
    ("bench train --then 100mbit", "give the rate to begin with"),
    ("bench train --rate none --then 100mbit", "give the rate to begin with"),
    ("bench train --rate 1gbit --then none", "expected one rate"),
    ("bench train --rate 1gbit --then 1gbit,1gbit", "4 with commas between"),
    ("bench train --rate 1gbit --then fast", "is no rate"),
    ("demo --ranks 1", "nothing to communicate"),
    ("report nowhere", "nowhere does not exist"),
    ("train --steps 1 --scheme ddp --scheme-option a=1", "takes no options"),
    ("train --steps 1 --scheme ddp-powersgd --scheme-option start=1", "start is a count from 2"),
    ("train --steps 1 --scheme plain --scheme-option no_such=1", "scheme 'plain'"),
    ("train --steps 1 --scheme plain --workload-option no_such=1", "no_such"),
    ("train --steps 1 --scheme plain --resume", "checkpoint"),
    ("train --workload gtp", "no workload is called 'gtp'; did you mean 'gpt'?"),
    ("train --scheme gcmop", "no scheme is called 'gcmop'; did you mean 'gcomp'?"),
    ("train --rate fast", "'fast' is no rate: write 100mbit, "),
    ("inspect nowhere.bin", "cannot read nowhere.bin: No such file"),
    ("train --steps 0 --scheme plain", "steps is 0; it must be a whole number from 1"),
    ("train --steps 1 --scheme plain ddp --checkpoint x", "one --scheme"),
    ("train --steps 1 --scheme plain --trace", "out=RUN_DIR"),
    ("train --steps 1 --scheme plain --ranks 0", "ranks"),
    ("recommend --profile plan.json --rate 10gbit/delay=3ms", "--delay"),
]
_BOX = "--box parameters=1e9,compute_s=1"
# By command, what it refuses by the name of its first option.
NAMED = {
    "simulate": "--scheme nothing; --rate 0gbit; --rate none; --workers 0; --trace=-1=1gbit; --workload alexnet; --plot a.txt; "
    "--chrome-trace a.json --workers 2 4; --seconds nan; --seconds inf; --trace-rounds -2",
    "train --scheme plain": "--threads 100000; --threads 0; --bucket-mb nan; --feedback-decay nan --local-sgd 2; "
    "--seed 99999999999999999999; --out /etc/hostname; --checkpoint /etc/hostname/x; --fragments 2; --delay 1; --outer average",
    "bench train": "--seed 99999999999999999999",
    "netlab run --rate none true": "--timeout inf; --timeout 1e300; --timeout -1; --timeout nan; --grace inf",
    "recommend": f"--ranks 1; --seconds -4; {_BOX},ranks=four,plain_s=2; {_BOX},ranks=1e400,plain_s=2; "
    f"{_BOX},ranks=8,bus_rate=0; {_BOX},ranks=8,bus_rate=-1",
    "recommend --profile plan.json": "--ranks 4; --delay 3ms; --loss 1%",
    f"recommend {_BOX},ranks=8,plain_s=2": "--rate 1gbit; --for-ranks 4; --path loss=0; --fidelity exact",
}
REFUSED += [
    (f"{command} {words}", "InvalidArgument: " if "simulate" in command else words.split()[0])
    for command, together in NAMED.items()
    for words in together.split("; ")
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_bad_request_is_refused_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"gradwire {words.split()[0]}")
    assert error.count("\n") == 1
