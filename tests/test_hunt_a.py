"""Calls that are rare and allowed: autocast, threads, masks and biases of unusual shapes."""

import threading

import pytest
import torch

from attnlib.attention import attention, attention_backend
from attnlib.data import encode, train_bpe
from attnlib.efficient import (
    delta_attention,
    linear_attention,
    lsh_attention,
    performer_attention,
    random_features,
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_performer_is_as_exact_under_autocast(dtype, causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 96, 16, generator=generator)
    w = random_features(64, 16, generator=generator)
    with torch.autocast("cpu", dtype):
        out = performer_attention(q, k, v, w, causal=causal)
    torch.testing.assert_close(out, performer_attention(q, k, v, w, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_sums_of_linear_attention_do_not_overflow_under_autocast(causal):
    q = torch.full((1, 30_000, 2), 3.0)  # features of 4: the sum is 120,000, above float16
    v = torch.ones(1, 30_000, 1)
    with torch.autocast("cpu", torch.float16):
        out, state = linear_attention(q, q, v, causal=causal)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(state, torch.full((1, 2, 2), 120_000.0))


def test_delta_rule_is_as_exact_under_autocast():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 20, 8, generator=generator)
    k, beta = torch.nn.functional.normalize(k, dim=-1), torch.full((2, 20), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        found = delta_attention(q, k, v, beta, chunk=8)
    torch.testing.assert_close(found, delta_attention(q, k, v, beta, chunk=8))


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64])
def test_a_bias_may_be_a_single_number(backend, bias_dtype):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor(2.0, dtype=bias_dtype, requires_grad=True)
    with attention_backend(backend):
        out = attention(x, x, x, bias=bias)
    torch.testing.assert_close(out, attention(x, x, x))  # it moves all logits of a row alike
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert gradient.shape == () and abs(gradient) < 1e-5


def test_a_mask_of_hashed_attention_may_have_axes_that_only_keys_have():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 5, 8, generator=generator) for shape in ((), (3,), (3,)))
    mask = torch.rand(3, 5, 5, generator=generator) < 0.5
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    out = lsh_attention(q, k, v, 4, mask=mask, generator=seeds[0])
    wanted = lsh_attention(q.expand(3, 5, 8), k, v, 4, mask=mask, generator=seeds[1])
    torch.testing.assert_close(out, wanted)


def test_threads_that_encode_leave_the_tokenizer_as_it_was():
    tokenizer = train_bpe(["hello world </s>"] * 5, 40)
    texts = ["hello </s> world"] * 50
    wanted, found = encode(tokenizer, texts), []

    def work():
        found.extend(encode(tokenizer, texts) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(torch.equal(x, wanted) for x in found)
    assert not tokenizer.encode_special_tokens
