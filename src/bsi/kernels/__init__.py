"""Triton kernels and cuBLASLt products: faster implementations of functions of the other packages.

`bsi.backbones.accelerate` selects the fast form of a network, and `bsi.rng` draws noise on a GPU in one kernel. Both
import this package only when they use it, and both work without it, but are slower.

| file | content |
|---|---|
| fused_dit.py, fp8.py | a DiT's blocks, with one kernel between two matrix products; the same with 8-bit products |
| fused_unet.py | a U-Net's blocks, with one kernel between two convolutions |
| compiled.py | the blocks of any network, each type compiled once by torch.compile |
| layer_norm.py, branch_gradients.py | gated residual, LayerNorm; gradients of GELU, q, k, v; 8-bit conversion |
| group_norm.py, residual_sum.py | GroupNorm with SiLU and dropout; residual sums |
| cublaslt.py | matrix products with GELU in the epilogue, in bfloat16 or 8 bits |
| philox.py | normal random numbers from counters |
"""
