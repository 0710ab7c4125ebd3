"""Four-bit weights of bitsandbytes that are trained through."""

from torch import nn


def keep_unpacked(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for faster inference on a CPU.

    It does so in the first pass outside of training, for good, where the CPU multiplies bfloat16 (AVX-512). A pass
    through packed weights has no gradient, so adapters below them would stop learning after an evaluation.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
