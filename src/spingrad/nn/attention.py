"""Attention whose four projections are binary layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spingrad._numbers import check_whole
from spingrad.nn.linear import BinaryLinear, Device, Scale


class BinaryMultiheadAttention(nn.Module):
    """:class:`torch.nn.MultiheadAttention` with projections whose weights are -1 or +1.

    The projections are four layers of their own, ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``; scores
    and softmax are as in torch. It is called as torch's module is, masks and ``need_weights`` included.

    Args:
        embed_dim: Size of queries and outputs.
        num_heads: Number of heads, which divides ``embed_dim``.
        dropout: Probability of a dropped attention weight in training.
        bias: Give all four projections a bias.
        kdim: Size of keys; ``embed_dim`` by default.
        vdim: Size of values; ``embed_dim`` by default.
        batch_first: Whether the batch comes before the sequence.
        device: As in torch.
        dtype: As in torch; latent weights are never below float32.
        scale: As in :class:`~spingrad.BinaryLinear`, for each projection.

    Example:
        >>> attention = BinaryMultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> out, weights = attention(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    # nn.TransformerEncoderLayer asks for these before it takes a faster path with real weights.
    in_proj_weight = None
    in_proj_bias = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        scale: Scale = True,
    ) -> None:
        super().__init__()
        check_whole("embed_dim", embed_dim, 1)
        check_whole("num_heads", num_heads, 1)
        embed_dim, num_heads = int(embed_dim), int(num_heads)
        if embed_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim, got embed_dim={embed_dim}, num_heads={num_heads}"
            )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim

        def projection(size: int) -> BinaryLinear:
            return BinaryLinear(size, embed_dim, bias, device, dtype, scale=scale)

        self.q_proj, self.k_proj = projection(embed_dim), projection(self.kdim)
        self.v_proj, self.out_proj = projection(self.vdim), projection(embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`torch.nn.MultiheadAttention.forward`."""
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(
                "query, key and value have 3 dimensions, or 2 without a batch, "
                f"got {query.ndim}, {key.ndim} and {value.ndim}"
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True only says that attn_mask is causal: pass attn_mask too")
        batched = query.ndim == 3
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if not batched:
            q, k, v = q[None], k[None], v[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        q, k, v = (self._heads(part) for part in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / self.head_dim**0.5) @ k.transpose(-2, -1)
            scores = scores if mask is None else scores + mask
            weights = F.dropout(scores.softmax(-1), dropout)
            found = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            found = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = found.transpose(1, 2).flatten(2)  # (N, L, E)
        if not batched:
            return self.out_proj(out[0]), None if weights is None else weights[0]
        return self.out_proj(out if self.batch_first else out.transpose(0, 1)), weights

    def _heads(self, x: Tensor) -> Tensor:  # (N, L, E) -> (N, heads, L, E / heads)
        parts: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim))
        return parts.transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores, of a shape that fits ``(N, heads, L, S)``."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            mask = mask.view(-1, self.num_heads, *mask.shape[1:]) if mask.ndim == 3 else mask
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        return mask

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
