"""Self-attention between the product that makes queries, keys and values, and the one that reads the mixture."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(qkv: Float[Tensor, "batch tokens three_widths"], heads: int) -> Float[Tensor, "batch tokens width"]:
    """The values, mixed by each head for itself. Queries, keys and values lie side by side and are read in place."""
    batch, tokens, three_widths = qkv.shape
    q, k, v = qkv.view(batch, tokens, 3, heads, three_widths // 3 // heads).transpose(1, 3).unbind(2)
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, three_widths // 3)
