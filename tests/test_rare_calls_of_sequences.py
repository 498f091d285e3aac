"""Calls that are rare and allowed: autocast, threads, masks and biases of unusual shapes."""

import threading

import pytest
import torch

from attnlib.attention import attention, attention_backend
from attnlib.data import encode, train_bpe
from attnlib.decoding import KVCache
from attnlib.efficient import (
    delta_attention,
    linear_attention,
    lsh_attention,
    nystrom_attention,
    performer_attention,
    random_features,
)
from attnlib.seq2seq import Seq2Seq
from attnlib.transformer import Transformer


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


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("shape", [(5, 7), (5, 1), ()])
def test_a_large_bias_that_moves_all_logits_alike_changes_nothing(backend, shape):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 8, generator=generator).bfloat16() for n in (5, 7, 7))
    bias = torch.full(shape, 200.0, dtype=torch.bfloat16, requires_grad=True)
    with attention_backend(backend):
        out, wanted = attention(q, k, v, bias=bias), attention(q, k, v)
    torch.testing.assert_close(out, wanted, atol=0.03, rtol=0)


def test_a_mask_of_hashed_attention_may_have_axes_that_only_keys_have():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 5, 8, generator=generator) for shape in ((), (3,), (3,)))
    mask = torch.rand(3, 5, 5, generator=generator) < 0.5
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    out = lsh_attention(q, k, v, 4, mask=mask, generator=seeds[0])
    wanted = lsh_attention(q.expand(3, 5, 8), k, v, 4, mask=mask, generator=seeds[1])
    torch.testing.assert_close(out, wanted)


def test_a_mask_of_landmarks_may_have_axes_that_only_queries_have():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, 7, 4, generator=generator) for lead in ((2, 1), (3,), (1, 3)))
    mask = torch.rand(2, 1, 1, 7, generator=generator) < 0.7
    wide = (x.expand(2, 3, 7, 4) for x in (q, k, v))
    torch.testing.assert_close(
        nystrom_attention(q, k, v, 3, mask=mask), nystrom_attention(*wide, 3, mask=mask)
    )


def test_memory_read_without_gradients_has_gradients_where_they_are_wanted():
    model = Transformer(9, None, 16, 2, 1, 1, 16, dropout=0.0).double()
    src, tgt = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 3, 4]])
    weight = model.decoder.layers[0].multihead_attn.in_proj_weight
    gradients = []
    for warm in (True, False):  # whether the cache has read the memory before, without them
        memory, mask = model.encode(src)
        cache = KVCache()
        with torch.no_grad():
            model.decode(tgt[:, :2], memory if warm else memory.clone(), mask, cache)
        loss = model.decode(tgt[:, 2:], memory, mask, cache).square().sum()
        gradients.append(torch.autograd.grad(loss, [weight, memory]))
    torch.testing.assert_close(*gradients)
    assert gradients[0][0][16:].abs().max() > 0 and gradients[0][1].abs().max() > 0


@pytest.mark.parametrize("attention", [False, True])
def test_the_recurrent_decoder_writes_no_padding_before_the_end(attention):
    model = Seq2Seq(9, 11, embed_dim=4, hidden_dim=4, attention=attention)
    with torch.no_grad():
        model.decoder.readout.bias[:3] = torch.tensor(
            [100.0, 0.0, -100.0]
        )  # padding is likeliest
    src = torch.tensor([[3, 4, 5], [3, 4, 0]])
    assert (model.greedy(src, 5) != 0).all()
    assert (model.greedy(src, 5, eos_id=0) == 0).all()  # unless it is what ends a row


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
