"""How long a step of the papers' models computes on a reference accelerator, for replay with emulated computation.

Origin of the two anchors: NVIDIA, DeepLearningExamples, training throughput of one A100 in TF32, optimizer included:
ResNet-50 v1.5 at 224 x 224, 938 images/s (A100 80 GB, container 21.03); BERT-large on SQuAD, 384 tokens, 44 sequences/s
(A100 40 GB, container 20.06). The GComp paper's testbed has one A100 (40 GB) a rank and trains in 32-bit floats.
The others are scaled from their anchor by multiply-adds of the forward pass (torchvision's tables), transformers by parameters
outside of look-ups times tokens: estimates, as a run says (`calibration` in its records); `step_ms=` replaces them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Seconds of forward and backward of one batch on one accelerator, and where the figure comes from."""

    step_s: float
    batch_size: int
    origin: str


_RESNET50_IMAGES_PER_S = 938.0
_BERT_LARGE_SEQUENCES_PER_S = 44.0  # of 384 tokens

# Giga multiply-adds per image at 224 x 224.
_GMACS = {"resnet50": 4.09, "resnet152": 11.51, "vgg16": 15.47, "vgg19": 19.63}
# Millions of parameters that multiply each token (GPT-2: the output layer too), and tokens a sample.
_TRANSFORMERS = {"bert-large": (302.3, 384), "bert-base": (85.1, 384), "gpt2": (123.7, 512)}

# Samples per rank: ACP-SGD's for ResNets and BERT-large, homomorphic compression's for BERT-base; the rest are ours.
_BATCH_SIZES = {
    "resnet50": 64, "resnet152": 32, "vgg16": 32, "vgg19": 32, "bert-base": 8, "bert-large": 8, "gpt2": 8,
}  # fmt: skip


def reference_calibration(workload: str) -> Calibration | None:
    """The step on the reference accelerator, or None for a workload that no published figure covers."""
    if workload in _GMACS:
        anchor, words = "resnet50", "938 images/s of ResNet-50"
        samples_per_s = _RESNET50_IMAGES_PER_S * _GMACS[anchor] / _GMACS[workload]
    elif workload in _TRANSFORMERS:
        anchor, words = "bert-large", "44 sequences/s of BERT-large (384 tokens)"
        (megaparameters, n_tokens), (of_anchor, its_tokens) = _TRANSFORMERS[workload], _TRANSFORMERS[anchor]
        samples_per_s = _BERT_LARGE_SEQUENCES_PER_S * of_anchor * its_tokens / (megaparameters * n_tokens)
    else:
        return None
    batch_size = _BATCH_SIZES[workload]
    how = "published" if workload == anchor else "scaled by arithmetic from the published"
    origin = f"A100 TF32, batch {batch_size}: {how} {words} (NVIDIA DeepLearningExamples)"
    return Calibration(batch_size / samples_per_s, batch_size, origin)
