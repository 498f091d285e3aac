"""Attention by its definition in float64, and comparison with it, for the other tests here."""

import torch
from draws import normal, tolerance


def dense_weights(q, k, mask=None, bias=None, scale=None):
    """exp(logits) over their sum among the keys that a query may attend to: (..., N, M)."""
    q, k = q.double(), k.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * torch.einsum("...nd,...md->...nm", q, k)
    if bias is not None:
        logits = logits + bias.double()
    allowed = logits > -torch.inf
    if mask is not None:
        allowed = allowed & mask
    weights = logits.masked_fill(~allowed, 0).exp() * allowed
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


def dense(q, k, v, mask=None, bias=None, scale=None):
    """The values averaged with these weights: (..., N, d_v)."""
    return torch.einsum(
        "...nm,...md->...nd", dense_weights(q, k, mask, bias, scale), v.double()
    )


def with_gradients(function, inputs, seed=0):
    """What a function of tensors returns, and the gradients of a random weighting of it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weighting = normal(out.shape, seed=seed + 100).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, weighting, allow_unused=True)
    gradients = [
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
    ]
    return [out.detach(), *gradients]


def agree(found, wanted, dtype, steps=16):
    """Assert that two tensors differ by few units of rounding of their largest entry.

    Where `found` is of a coarser dtype, as the gradient of a bias may be, its rounding counts.
    """
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    largest = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    atol = largest * max(tolerance(dtype, steps), tolerance(found.dtype, steps))
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=atol)


def compare(function, oracle, inputs, dtype, steps=16):
    """Assert that a function and its oracle agree in their output and in all gradients.

    The oracle gets the inputs in float64.
    """
    found = with_gradients(function, inputs)
    wanted = with_gradients(oracle, [x.double() for x in inputs])
    for x, x_exact in zip(found, wanted, strict=True):
        agree(x, x_exact, dtype, steps)
