"""What no scheme can serve is refused when it is made, with words that name the option, or what it does not go with."""

import math
from typing import Any

import pytest

from gradwire import InvalidArgument, codecs, schemes

_NO_COUNTS = [-1, 1.5, True, "50"]
_LOW_RANK: dict[str, list[Any]] = {
    "rank": [0, -1, 2.0, True], "min_compression_rate": [-1, math.nan], "buffer_mb": [-1, math.nan],
    "factor_dtype": ["float16"], "ranks": [3], "start_step": _NO_COUNTS,
}  # fmt: skip
# Scheme, option, and values of which each is refused with the option's name.
WRONG: dict[str, dict[str, list[Any]]] = {
    **dict.fromkeys(("acp-sgd", "power-sgd", "power-sgd-overlap"), _LOW_RANK),
    "aqgb": {
        "floor": [0.0, 1.5], "confidence": [0.0], "max_contention": [0.0, 1.5], "partition": [100], "format": [3],
        "topology": ["tree"], "blocks": [0, [], [[1]]], "max_grad_norm": [0.0],
    },
    "broadcast": {"bits": [1, 33]},
    "dgc": {
        "per": ["model"], "weight_decay": [-0.1], "share": [0], "momentum": [1.0], "warmup_steps": [-1],
        "max_norm": [0.0], "seed": [0.5],
    },
    "homomorphic": {"budget": [0], "integer_bits": [24], "density": [2], "gamma": [1.1]},
    "one-bit": {"warmup_steps": _NO_COUNTS, "exempt": [3, [""], [None]]},
    "one-bit-adam": {
        "freeze_step": [0, -1, 1.5], "exempt": [7], "only": [[""]], "correction": ["none"], "codec": ["thc"],
        "pull": ["push"], "chunk_elements": [0],
    },
    "qsgd": {"levels": [300], "error_feedback": [True]},
    "sign-sgd": {"error_feedback": [True]},
    "slimgc": {
        "threshold_bytes": [-1, 0.5, math.nan, 1 << 63], "topology": ["star"], "pull": ["half"], "group_elements": [0],
        "warmup_steps": [3], "drift_every": [-1], "method": ["best"], "codec": ["none such", 3], "nonsense": [1],
    },
    "terngrad": {"clip": [0], "seed": [-1], "per": ["model"]},
    "thc": {"clip": [math.nan]},
    "top-k": {"share": [0.0, 1.1, math.nan], "warmup_steps": _NO_COUNTS},
    "two-bit": {"threshold": [-1.0], "chunk_elements": [0], "warmup_steps": _NO_COUNTS},
}  # fmt: skip
# Scheme, options that do not go together or have other values, and the words that say so.
TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("aqgb", {"floor": 0.5, "ceiling": 0.25}, "ceiling"),
    ("aqgb", {"floor": 0.03, "ceiling": 0.03}, "ceiling"),
    ("auto", {"fidelity": "exakt"}, "did you mean 'exact'"),
    ("auto", {"fidelity": ["slimgc"]}, "takes no turns"),
    ("auto", {"candidates": ["terngrad"]}, 'fidelity="any" would take it'),
    ("auto", {"candidates": ["gcmp"]}, "did you mean 'gcomp'"),
    ("auto", {"budget": 0.5}, "budget is a share of the time from 0 to 0.1"),
    ("acp-sgd", {"factor_dtype": "float16"}, "float32, bfloat16"),
    ("dgc", {"per": "model"}, "layer, bucket"),
    ("dgc", {"nesterov": True, "momentum": 0.0}, "nesterov"),
    ("homomorphic", {"mode": "fast"}, "packed, sketch, exact, lossy"),
    ("homomorphic", {"integer_bits": 16, "mode": "sketch"}, 'integer_bits=16 is for mode="packed"'),
    ("homomorphic", {"sparsifier": "random"}, "top-k"),
    ("homomorphic", {"error_feedback": True}, "left out"),
    ("homomorphic", {"index": "list"}, "auto, bitmap, bloom"),
    ("homomorphic", {"aggregator": "cloud"}, "process-group"),
    ("one-bit", {"pull": "half"}, "compressed, raw"),
    ("one-bit", {"scale": "median"}, "two-means"),
    ("one-bit", {"exempt": 3}, "exempt takes names"),
    ("power-sgd", {"overlap": True}, "power-sgd-overlap"),
    ("sign-sgd", {"ties": "random"}, "zero, positive"),
    ("slimgc", {"pull": "raw", "topology": "all-reduce"}, "pull"),
    ("slimgc", {"codec": codecs.by_name("raw"), "level": 3}, "level"),
    ("slimgc", {"codec": schemes.by_name("top-k")}, "not TopK"),
    ("slimgc", {"drift_factor": 1.0}, "the drift factor is above 1"),
    ("slimgc", {"codec": "qsgd", "error_feedback": True}, "error_feedback=True does not go with qsgd"),
    ("slimgc", {"codec": "ternary", "error_feedback": True}, "error_feedback=True does not go with ternary"),
    ("slimgc", {"update": "owner"}, "update"),
    ("slimgc", {"backup": True, "local": "guess"}, "local"),
    ("slimgc", {"backup": True, "local_rate": 0.1}, "local_rate"),
    ("slimgc", {"backup": True, "local": "sgd", "local_rate": -1.0}, "local_rate"),
    ("slimgc", {"backup": True, "sync_steps": -1}, "sync_steps"),
    ("slimgc", {"backup": True, "max_grad_norm": 0.0}, "max_grad_norm"),
    ("slimgc", {"max_grad_norm": 0.0}, "max_grad_norm"),
    ("slimgc", {"local": "sgd", "local_rate": -1.0}, "local"),
    ("slimgc", {"local_rate": 0.1}, "local_rate"),
    ("terngrad", {"per": "model"}, "layer, bucket"),
]


@pytest.mark.parametrize("name", WRONG)
def test_values_out_of_range_are_refused_by_the_options_name(name: str) -> None:
    for option, values in WRONG[name].items():
        for value in values:
            with pytest.raises(InvalidArgument, match=option):
                schemes.by_name(name, **{option: value})


@pytest.mark.parametrize(("name", "options", "words"), TOLD)
def test_options_that_do_not_go_together_say_what_would(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        schemes.by_name(name, **options)
