"""Triton kernels and cuBLASLt products: faster implementations of functions of the other packages.

`bsi.backbones.accelerate` selects the fast form of a network, and `bsi.rng` draws noise on a GPU in one kernel. Both
import this package only when they use it, and both work without it, but are slower.

| file | content |
|---|---|
| fused_dit.py, dit_kernels.py | a DiT's blocks, with one kernel between two matrix products in 16 or 8 bits |
| fused_unet.py, unet_kernels.py | a U-Net's blocks, with one kernel between two convolutions |
| cublaslt.py | matrix products with GELU in the epilogue, in bfloat16 or 8 bits |
| philox.py | normal random numbers from counters |
"""
