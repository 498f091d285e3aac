"""Attention against its definition: parity of the backends, properties,
gradients, bad input."""

import importlib.util
import math
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlib
from attnlib.attention import (
    BACKENDS as REGISTERED,
)
from attnlib.attention import (
    AdditiveAttention,
    attention,
    attention_backend,
    attention_weights,
    causal_mask,
    checkpoint_block,
    current_backend,
    fastest_backend,
    float32_products,
    masked_softmax,
    padding_mask,
    record_attention,
    register_backend,
)
from helpers import close, finer_precision

BACKENDS = ["reference", "sdpa", "auto"]
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
sizes = st.integers(1, 6)


def tensors(seed, n, m, d=4, d_v=3, lead=(2, 3), dtype=torch.float64, device="cpu"):
    """q, k, v, a mask that leaves some rows empty, and a bias."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(*lead, *s, generator=g, dtype=torch.float64)
        for s in ((n, d), (m, d), (m, d_v))
    )
    mask = torch.rand(lead[0], 1, n, m, generator=g) > 0.5
    bias = torch.randn(lead[1], n, m, generator=g, dtype=torch.float64)
    return [x.to(device, dtype) for x in (q, k, v)] + [mask.to(device), bias.to(device, dtype)]


def by_loops(q, k, v, mask, bias):
    """The definition, a pair of tokens at a time."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    mask, bias = (
        mask.expand(*q.shape[:-1], k.shape[-2]),
        bias.expand(*q.shape[:-1], k.shape[-2]),
    )
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                allowed = [j for j in range(k.shape[2]) if mask[b, h, i, j]]
                logits = [
                    q[b, h, i] @ k[b, h, j] / math.sqrt(q.shape[-1]) + bias[b, h, i, j]
                    for j in allowed
                ]
                if allowed:
                    weights = [math.exp(z - max(logits)) for z in logits]
                    out[b, h, i] = sum(w * v[b, h, j] for w, j in zip(weights, allowed)) / sum(
                        weights
                    )
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**31), n=sizes, m=sizes)
@settings(max_examples=20, deadline=None)
def test_equals_the_definition(backend, seed, n, m):
    q, k, v, mask, bias = tensors(seed, n, m)
    with attention_backend(backend):
        out = attention(q, k, v, mask=mask, bias=bias)
    torch.testing.assert_close(out, by_loops(q, k, v, mask, bias), atol=1e-12, rtol=0)


# bfloat16 keeps 8 significant bits: rounding q, k, v, the weights and the output
# costs a few units of 2^-8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [(), ("mask",), ("bias",), ("mask", "bias")], ids=str)
def test_backends_agree_with_float64(device, dtype, options):
    seed = torch.seed() % 2**31
    for n, m in ((1, 1), (5, 7), (33, 16), (64, 64)):
        arguments = tensors(seed, n, m, d=16, d_v=8, device=device)
        results = {}
        for name, kind in (
            ("truth", torch.float64),
            *((backend, dtype) for backend in BACKENDS),
        ):
            q, k, v, mask, bias = (
                x if x.dtype == torch.bool else x.to(dtype).to(kind) for x in arguments
            )
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            chosen = {"mask": mask, "bias": bias}
            with attention_backend("reference" if name == "truth" else name):
                out = attention(*leaves, **{option: chosen[option] for option in options})
            results[name] = [out, *torch.autograd.grad(out.square().mean() * m, leaves)]
        for backend in BACKENDS:
            for found, truth in zip(results[backend], results["truth"]):
                error = (found.double() - truth).abs().max() / truth.abs().max().clamp_min(1)
                assert error <= TOLERANCE[dtype], (
                    f"{backend}, seed {seed}, {n} queries, {m} keys: {error:.1e}"
                )


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_derivatives(backend):
    q, k, v, mask, bias = tensors(0, 3, 4)
    mask[0, :, 1] = False
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]

    def f(q, k, v, bias):
        with attention_backend(backend):
            return attention(q, k, v, mask=mask, bias=bias, scale=0.7)

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["mask", "bias", "both"])
def test_query_that_may_attend_nowhere_gets_zeros_and_zero_gradient(device, backend, how):
    q, k, v, _, bias = tensors(1, 4, 5, device=device)
    mask = torch.ones(4, 5, dtype=torch.bool, device=device)
    mask[2] = False
    options = {"mask": mask} if how == "mask" else {"bias": torch.where(mask, bias, -torch.inf)}
    if how == "both":
        options["mask"] = mask
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with attention_backend(backend), torch.autograd.set_detect_anomaly(True):
        out = attention(*leaves, **options)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    assert (out[..., 2, :] == 0).all() and (grads[0][..., 2, :] == 0).all()
    assert all(g.isfinite().all() for g in grads) and (out[..., 1, :] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n, m", [(0, 4), (3, 0), (0, 0)])
def test_empty_sequences(backend, n, m):
    q, k, v, mask, bias = tensors(0, n, m)
    q.requires_grad_()
    with attention_backend(backend):
        for options in ({}, {"mask": mask}, {"bias": bias}):
            out = attention(q, k, v, **options)
            assert out.shape == (2, 3, n, 3) and (out == 0).all()
            assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_axes_broadcast(backend):
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(3, 5, 8), torch.randn(5, 6)
    full = [q.expand(2, 3, 4, 8), k.expand(2, 3, 5, 8), v.expand(2, 3, 5, 6)]
    mask = torch.rand(2, 1, 1, 5) > 0.3
    with attention_backend(backend):
        torch.testing.assert_close(
            attention(q, k, v, mask=mask), attention(*full, mask=mask.expand(2, 3, 4, 5))
        )
        torch.testing.assert_close(
            attention(q[0, 0], k[0], v), full_attention(q[0, 0], k[0], v)
        )


def full_attention(q, k, v):
    return (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**31), n=sizes)
@settings(max_examples=20, deadline=None)
def test_permuting_tokens_permutes_outputs(backend, seed, n):
    x = tensors(seed, n, n)[0]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    with attention_backend(backend):
        out = attention(x, 2 * x, x - 1)
        permuted = attention(x[..., order, :], 2 * x[..., order, :], x[..., order, :] - 1)
    torch.testing.assert_close(permuted, out[..., order, :], atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**31), n=sizes, m=st.integers(2, 6), data=st.data())
@settings(max_examples=20, deadline=None)
def test_masking_a_key_equals_removing_it(backend, seed, n, m, data):
    q, k, v, _, bias = tensors(seed, n, m)
    gone = data.draw(st.integers(0, m - 1))
    kept = [j for j in range(m) if j != gone]
    mask = torch.tensor([j != gone for j in range(m)])
    with attention_backend(backend):
        masked = attention(q, k, v, mask=mask, bias=bias)
        removed = attention(q, k[..., kept, :], v[..., kept, :], bias=bias[..., kept])
    torch.testing.assert_close(masked, removed, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 6), data=st.data())
@settings(max_examples=20, deadline=None)
def test_causal_output_does_not_depend_on_the_future(backend, seed, n, data):
    q, k, v, _, _ = tensors(seed, n, n)
    now = data.draw(st.integers(0, n - 2))
    later = [x.clone() for x in (q, k, v)]
    for x in later:
        x[..., now + 1 :, :] += 3
    with attention_backend(backend):
        out, changed = (
            attention(*xs, mask=causal_mask(n))[..., : now + 1, :] for xs in ((q, k, v), later)
        )
    torch.testing.assert_close(changed, out, atol=1e-12, rtol=0)


@given(seed=st.integers(0, 2**31), shift=st.floats(-1e3, 1e3))
@settings(max_examples=20, deadline=None)
def test_a_bias_that_all_keys_share_changes_nothing(seed, shift):
    q, k, v, mask, bias = tensors(seed, 3, 5)
    plain = attention_weights(q, k, mask=mask, bias=bias)
    torch.testing.assert_close(
        attention_weights(q, k, mask=mask, bias=bias + shift), plain, atol=1e-11, rtol=0
    )


def test_weights_average_the_values():
    q, k, v, mask, bias = tensors(0, 5, 7)
    weights = attention_weights(q, k, mask=mask, bias=bias)
    torch.testing.assert_close(
        weights @ v, attention(q, k, v, mask=mask, bias=bias), atol=1e-12, rtol=0
    )
    rows = weights.sum(-1)
    torch.testing.assert_close(rows, mask.any(-1).double().expand_as(rows))
    assert (weights[~mask.expand_as(weights)] == 0).all()


def test_large_logits_do_not_overflow():
    q = torch.full((1, 2), 1e4)
    assert torch.equal(
        attention_weights(q, torch.tensor([[1e4, 1e4], [0.0, 0.0]])), torch.tensor([[1.0, 0.0]])
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_the_mean(backend):
    torch.manual_seed(0)
    q, k, v, _, _ = tensors(0, 4, 64, lead=(1, 1))
    with attention_backend(backend):
        samples = torch.stack([attention(q, k, v, dropout_p=0.3) for _ in range(3000)])
    plain = attention(q, k, v)
    assert (samples[0] - samples[1]).abs().max() > 1e-3
    torch.testing.assert_close(samples.mean(0), plain, atol=0.05, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    q, k, v, mask, bias = tensors(0, 5, 7, dtype=torch.float32)
    with attention_backend(backend):
        exact = attention(q, k, v, mask=mask, bias=bias)
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k, v, mask=mask, bias=bias)
    torch.testing.assert_close(out.float(), exact, atol=4e-2, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiles_without_graph_breaks(backend, dtype):
    q, k, v, mask, bias = tensors(0, 5, 7, dtype=dtype)

    def f(q, k, v):
        return attention(q, k, v, mask=mask, bias=bias)

    torch._dynamo.reset()
    with attention_backend(backend):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        # compiled, "auto" may choose the other backend, which rounds in another order
        tolerance = max(1e-12, 4 * torch.finfo(dtype).eps)
        torch.testing.assert_close(compiled(q, k, v), f(q, k, v), atol=tolerance, rtol=0)


def zeros(q, k, v, mask, bias, scale, dropout_p):
    return torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)


def ones(q, k, v, mask, bias, scale, dropout_p):
    return torch.ones(*q.shape[:-1], v.shape[-1], dtype=q.dtype)


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_compiled_code_follows_the_backend(mode):
    q, k, v, *_ = tensors(0, 5, 7)
    wanted = attention(q, k, v)

    def f(q, k, v):
        return attention(q, k, v)

    def choosing(q, k, v):
        with attention_backend(zeros):
            first = attention(q, k, v)
        return first, attention(q, k, v)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=mode)
    for backend in ("reference", "auto", "sdpa"):
        with attention_backend(backend):
            torch.testing.assert_close(compiled(q, k, v), wanted)
    with attention_backend(zeros):
        assert (compiled(q, k, v) == 0).all()
    torch.testing.assert_close(compiled(q, k, v), wanted)
    try:
        for function, value in ((zeros, 0), (ones, 1)):  # one name, registered twice
            register_backend("constant", function)
            with attention_backend("constant"):
                assert (compiled(q, k, v) == value).all()
    finally:
        del REGISTERED["constant"]
    for count in (1, 2):
        with record_attention() as maps:
            for _ in range(count):
                compiled(q, k, v)
        assert len(maps) == count
        torch.testing.assert_close(maps[-1], attention_weights(q, k))
    first, second = torch.compile(choosing, fullgraph=True, backend=mode)(q, k, v)
    assert (first == 0).all() and current_backend() == "auto"
    torch.testing.assert_close(second, wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_threads_have_backends_of_their_own(compiled):
    q, k, v, *_ = tensors(0, 5, 7)
    wanted, weights, found = attention(q, k, v), attention_weights(q, k), {}
    barrier = threading.Barrier(3, timeout=60)

    def f(q, k, v):
        return attention(q, k, v)

    def outputs(backend, call):
        with attention_backend(backend):
            for step in range(5):
                barrier.wait()
                found[backend, step] = call(q, k, v)

    def recorded(call):
        with record_attention() as maps:
            for step in range(5):
                barrier.wait()
                found["record", step] = call(q, k, v)
        found["maps"] = maps

    torch._dynamo.reset()
    call = torch.compile(f, fullgraph=True, backend="eager") if compiled else f
    threads = [
        threading.Thread(target=outputs, args=(zeros, call)),
        threading.Thread(target=outputs, args=("reference", call)),
        threading.Thread(target=recorded, args=(call,)),
    ]
    with attention_backend(ones):  # of this thread, which the others do not inherit
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (call(q, k, v) == 1).all()
    for step in range(5):
        assert (found[zeros, step] == 0).all()
        torch.testing.assert_close(found["reference", step], wanted)
        torch.testing.assert_close(found["record", step], wanted)
    assert len(found["maps"]) == 5
    for x in found["maps"]:
        torch.testing.assert_close(x, weights)


def test_the_processor_is_asked_at_first_use_and_once(monkeypatch):
    reads = []

    def read_text(path):
        reads.append(str(path))
        return "processor : 0\nflags : fpu amx_bf16 avx2\nmodel : 1\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    spec = importlib.util.spec_from_file_location(
        "attnlib.another", sys.modules["attnlib.attention"].__file__
    )
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    assert not reads
    assert another._has_amx() and another._has_amx()
    assert reads == ["/proc/cpuinfo"]


def test_backend_is_restored_even_after_an_error():
    calls = []
    with (
        pytest.raises(RuntimeError),
        attention_backend(lambda *arguments: calls.append(arguments)),
    ):
        raise RuntimeError
    q, k, v, *_ = tensors(0, 5, 7)
    assert attention(q, k, v) is not None and not calls


@pytest.mark.parametrize("tiles", [False, True])
def test_auto_rule(monkeypatch, tiles):
    monkeypatch.setattr(sys.modules["attnlib.attention"], "_has_amx", lambda: tiles)
    slow = "sdpa" if tiles else "reference"
    short, long = (torch.zeros(n, 8, dtype=torch.bfloat16) for n in (4, 600))
    assert fastest_backend(short, short) == slow
    trained = short.clone().requires_grad_()
    assert fastest_backend(trained, short) == "reference"
    assert fastest_backend(trained, long) == "sdpa"
    assert fastest_backend(trained.float(), short.float()) == "sdpa"
    with torch.no_grad():
        assert fastest_backend(trained, short) == slow
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert fastest_backend(trained.float(), short.float()) == "reference"
        assert fastest_backend(long.float(), long.float()) == "sdpa"
    finally:
        torch.set_float32_matmul_precision(precision)
    learned = torch.zeros(4, requires_grad=True)  # what the kernels for a CPU cannot do
    for options in (dict(bias=learned), dict(dropout_p=0.1)):
        assert fastest_backend(short.float(), short.float(), **options) == "reference"
        assert fastest_backend(long.float(), long.float(), **options) == "sdpa"
    with torch.no_grad():
        assert fastest_backend(short.float(), short.float(), learned) == "sdpa"


@pytest.mark.parametrize(
    "name, gpu, cpu",
    [("highest", "ieee", "ieee"), ("high", "tf32", "tf32"), ("medium", "tf32", "bf16")],
)
def test_precision_of_float32_by_the_setting_for_all(name, gpu, cpu):
    with finer_precision():
        torch.set_float32_matmul_precision(name)
        older = not hasattr(torch.backends.cuda.matmul, "fp32_precision")
        assert float32_products("cuda:0") == gpu
        assert float32_products("cpu") == cpu or older and (name, cpu) == ("high", "tf32")


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="PyTorch before 2.9 has one setting for all",
)
@pytest.mark.parametrize("gpu, cpu", [("tf32", "ieee"), ("ieee", "bf16"), ("tf32", "bf16")])
def test_precision_of_float32_by_the_setting_of_a_library(gpu, cpu):
    """After which PyTorch refuses the question that is older."""
    short = torch.zeros(4, 8)
    with finer_precision(cuda=gpu, cpu=cpu):
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert (float32_products("cuda"), float32_products("cpu")) == (gpu, cpu)
        assert fastest_backend(short, short) == ("reference" if cpu == "bf16" else "sdpa")
        attention(short, short, short)


# --- backends of others, and the weights ------------------------------------------------------


def test_a_registered_backend_is_called_and_gone_afterwards():
    q, k, v, mask, bias = tensors(0, 5, 7)
    register_backend("zeros", zeros)
    try:
        with attention_backend("zeros"):
            assert (attention(q, k, v, mask=mask, bias=bias) == 0).all()
        assert (attention(q, k, v, mask=mask, bias=bias) != 0).any()
    finally:
        del REGISTERED["zeros"]


@pytest.mark.parametrize(
    "options", [{}, {"mask": "causal"}, {"scale": 0.1, "dropout_p": 0.5}], ids=str
)
def test_recorded_weights_are_those_that_average(options):
    q, k, v, mask, bias = tensors(0, 5, 7)
    options = {"mask": mask, "bias": bias} | options
    with record_attention() as maps:
        out = attention(q, k, v, **options)
        with record_attention() as inner:
            attention(q[:, :, :2], k, v)
        attention(q, k, v)
    assert [tuple(x.shape) for x in maps] == [(2, 3, 5, 7), (2, 3, 2, 7), (2, 3, 5, 7)]
    assert [tuple(x.shape) for x in inner] == [(2, 3, 2, 7)]
    dropout_p = options.pop("dropout_p", 0)
    torch.testing.assert_close(maps[0], attention_weights(q, k, **options))
    if not dropout_p:
        torch.testing.assert_close(out, maps[0] @ v)
    attention(q, k, v)
    assert len(maps) == 3  # outside nothing is kept


# --- additive attention, masks ----------------------------------------------------------------


def test_additive_attention():
    torch.manual_seed(0)
    module = AdditiveAttention(6, 4, 5).double()
    q, k, v = (torch.randn(2, n, d, dtype=torch.float64) for n, d in ((3, 6), (7, 4), (7, 2)))
    mask = padding_mask(torch.tensor([4, 0]), 7)[:, 0]  # (2, 1, 7)
    out = module(q, k, v, mask)
    weights = module.attention_weights(q, k, mask)
    torch.testing.assert_close(out, weights @ v)
    assert (out[1] == 0).all() and (weights[0, :, 4:] == 0).all()
    torch.testing.assert_close(out[0], module(q[0], k[0, :4], v[0, :4]), atol=1e-12, rtol=0)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "query_proj.weight": (5, 6),
        "key_proj.weight": (5, 4),
        "score.weight": (1, 5),
    }
    with pytest.raises(TypeError, match="mask of dtype torch.float64"):
        module(q, k, v, mask.double())
    with pytest.raises(
        ValueError,
        match=r"mask of shape \(3, 1, 7\)",
    ):
        module(q, k, v, torch.ones(3, 1, 7, dtype=torch.bool))


def test_masked_softmax_without_a_mask_is_the_softmax():
    z = torch.randn(4, 5)
    assert torch.equal(masked_softmax(z), F.softmax(z, -1))


def test_causal_mask():
    assert causal_mask(3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    # the newest of three positions sees all of them
    assert causal_mask(1, 3).tolist() == [[True, True, True]]
    assert torch.equal(causal_mask(2, 5), causal_mask(5)[3:])
    with pytest.raises(ValueError, match=r"m \(2\)"):
        causal_mask(3, 2)


def test_padding_mask():
    assert padding_mask(torch.tensor([2, 0, 3])).shape == (3, 1, 1, 3)
    assert padding_mask(torch.tensor([2, 0, 3]), 4)[:, 0, 0].sum(-1).tolist() == [2, 0, 3]
    with pytest.raises(ValueError, match=r"m \(2\)"):
        padding_mask(torch.tensor([1, 3]), 2)


# --- bad input --------------------------------------------------------------------------------

q, k, v = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8), torch.zeros(2, 3, 7, 4)


@pytest.mark.parametrize(
    "error, message, arguments, options",
    [
        (
            ValueError,
            r"k \(2, 3, 7, 6\), v .* must be \(..., N, d\), \(..., M, d\)",
            (q, k[..., :6], v),
            {},
        ),
        (
            ValueError,
            r"q \(2, 3, 5, 0\), .* with d at least 1",
            (q[..., :0], k[..., :0], v),
            {},
        ),
        (
            ValueError,
            r"v \(2, 3, 6, .*\) must be .* \(..., M, d_v\)",
            (q, k, v[..., :6, :]),
            {},
        ),
        (ValueError, r"q \(8,\), k .* must be \(..., N, d\)", (q[0, 0, 0], k, v), {}),
        (
            ValueError,
            r"q \(2, 3, 5, 8\), k \(3, 3, 7, 8\).* leading axes must agree or broadcast",
            (q, torch.zeros(3, 3, 7, 8), torch.zeros(3, 3, 7, 4)),
            {},
        ),
        (
            TypeError,
            r"mask of dtype torch.float32 must be torch.bool",
            (q, k, v),
            {"mask": torch.ones(5, 7)},
        ),
        (
            TypeError,
            r"mask of dtype torch.int64 must be torch.bool",
            (q, k, v),
            {"mask": torch.ones(5, 7).long()},
        ),
        (
            ValueError,
            r"mask of shape \(7, 5\) must broadcast to the logits' shape \(2, 3, 5, 7\)",
            (q, k, v),
            {"mask": torch.ones(7, 5, dtype=torch.bool)},
        ),
        (
            ValueError,
            r"mask of shape \(4, 2, 3, 5, 7\) must broadcast",
            (q, k, v),
            {"mask": torch.ones(4, 2, 3, 5, 7, dtype=torch.bool)},
        ),
        (
            ValueError,
            r"bias of shape \(2, 3, 5, 6\) must broadcast to the logits' shape \(2, 3, 5, 7\)",
            (q, k, v),
            {"bias": torch.zeros(2, 3, 5, 6)},
        ),
        (
            ValueError,
            r"bias of shape \(2, 3, 5, 7\) must broadcast to the logits' shape \(1, 3, 5, 7\)",
            (q[:1], k[:1], v[:1]),
            {"bias": torch.zeros(2, 3, 5, 7)},
        ),
        (
            TypeError,
            r"bias of dtype torch.bool must be floating point",
            (q, k, v),
            {"bias": torch.ones(5, 7, dtype=torch.bool)},
        ),
        (ValueError, r"dropout_p \(1.0\) must be in \[0, 1\)", (q, k, v), {"dropout_p": 1.0}),
        (ValueError, r"dropout_p \(-0.1\) must be in \[0, 1\)", (q, k, v), {"dropout_p": -0.1}),
        (
            ValueError,
            r"dropout_p \(nan\) must be in \[0, 1\)",
            (q, k, v),
            {"dropout_p": math.nan},
        ),
    ],
)
def test_bad_input(error, message, arguments, options):
    with pytest.raises(error, match=message):
        attention(*arguments, **options)
    if "dropout_p" not in options and arguments[2] is v:
        with pytest.raises(error):
            attention_weights(arguments[0], arguments[1], **options)


def test_unknown_backend():
    message = r"name \('flash'\) must be one of 'auto', 'reference', 'sdpa'"
    with pytest.raises(ValueError, match=message), attention_backend("flash"):
        pass


def test_without_triton_its_backend_says_what_to_install(monkeypatch):
    monkeypatch.delitem(REGISTERED, "triton", raising=False)
    monkeypatch.delitem(sys.modules, "attnlib.flash", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    with pytest.raises(ImportError, match=r'pip install "attnlib\[triton\]"'):
        with attention_backend("triton"):
            pass


def test_package_exports():
    assert (
        attnlib.AdditiveAttention is AdditiveAttention
        and attnlib.attention is attention
        and sys.modules["attnlib.attention"].attention is attention
    )
    assert (
        attnlib.attention_backend is attention_backend
        and attnlib.attention_weights is attention_weights
    )


# --- the causal mask by its name --------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("n, m", [(5, 5), (3, 7), (1, 1), (1, 6)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_causal_by_name_is_the_causal_mask(backend, n, m, with_bias):
    torch.manual_seed(n + m)
    q, k, v = (torch.randn(2, 3, tokens, 8, requires_grad=True) for tokens in (n, m, m))
    bias = torch.randn(3, n, m, requires_grad=True) if with_bias else None
    leaves = [x for x in (q, k, v, bias) if x is not None]
    with attention_backend(backend):
        out = attention(q, k, v, mask="causal", bias=bias)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
    wanted = attention(q, k, v, mask=causal_mask(n, m), bias=bias)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad(wanted.square().sum(), leaves)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    weights = attention_weights(q, k, mask="causal", bias=bias)
    torch.testing.assert_close(weights @ v, wanted, rtol=0, atol=1e-5)


def test_causal_by_name_refuses():
    q, k = torch.zeros(2, 4, 8), torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match=r"mask \('causal'\)"):
        attention(q, k, k, mask="causal")
    with pytest.raises(ValueError, match=r"mask \('padding'\)"):
        attention(k, k, k, mask="padding")


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_too_small_for_the_dtype_is_a_mask(backend, dtype):
    q, k = torch.randn(5, 8).to(dtype), torch.randn(7, 8).to(dtype)
    bias = torch.zeros(5, 7)
    bias[2], bias[3, 1:] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    with attention_backend(backend):
        out = attention(q, k, k, bias=bias)
        sums = attention(q, k, torch.ones_like(k), bias=bias)
    assert out.isfinite().all()
    torch.testing.assert_close(out[3], k[0])
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=0.01, rtol=0)  # row 2 as well


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_keeps_its_differences_in_half_precision(backend, dtype, masked):
    """Against float64; a bias that all keys share changes nothing, however large it is."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, generator=g).to(dtype) for _ in range(3))
    mask = causal_mask(9) if masked else None
    for shared in (0.0, 300.0, -1e5):
        bias = torch.randn(3, 9, 9, generator=g) + shared
        logits = q.double() @ k.double().mT / 4 + bias.double()
        logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)
        wanted = logits.softmax(-1) @ v.double()
        with attention_backend(backend):
            found = attention(q, k, v, mask=mask, bias=bias)
        assert found.dtype == dtype
        close(found.double(), wanted, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
def test_large_biases_by_hand(backend):
    """Logits 300 and 301 give the weight 1 / (1 + 1/e); one key gets all weight."""
    zeros, v = torch.zeros(2, 8), torch.tensor([[0.0], [1.0]]).expand(2, 8)
    bias, share = torch.tensor([300.0, 301.0]), 1 / (1 + math.exp(-1))
    with attention_backend(backend):
        found = [
            attention(*(x.bfloat16() for x in (zeros, zeros, v)), bias=bias),
            attention(zeros.half(), zeros[1:].half(), v[1:].half(), bias=torch.tensor([-1e5])),
        ]
        with torch.autocast("cpu", torch.bfloat16):
            found.append(attention(zeros, zeros, v, bias=bias))
    for out, wanted in zip(found, (share, 1, share)):
        torch.testing.assert_close(
            out.float(), torch.full((2, 8), float(wanted)), atol=2e-3, rtol=0
        )


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_the_gradient_of_a_wider_bias(backend):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 8, generator=g).bfloat16() for _ in range(3))
    bias = (torch.randn(5, 5, generator=g) + 300).requires_grad_()
    wide = bias.detach().double().requires_grad_()
    logits = q.double() @ k.double().mT / math.sqrt(8) + wide
    (logits.softmax(-1) @ v.double()).square().sum().backward()
    with attention_backend(backend):
        attention(q, k, v, bias=bias).float().square().sum().backward()
    assert bias.grad.dtype == torch.float32
    close(bias.grad.double(), wide.grad, 0.05)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("scale", [-0.5, -3.0, 0.0])
@pytest.mark.parametrize("n", [5, 600])
def test_a_scale_that_is_not_positive(backend, scale, n):
    q, k, v = torch.randn(3, 1, 2, n, 4, dtype=torch.float64)
    q.requires_grad_()
    for mask in (None, "causal", causal_mask(n)):
        logits = scale * q @ k.mT
        logits = logits if mask is None else logits.masked_fill(~causal_mask(n), -math.inf)
        wanted = logits.softmax(-1) @ v
        with attention_backend(backend):
            found = attention(q, k, v, mask=mask, scale=scale)
            close(attention(q.detach(), k, v, mask=mask, scale=scale), wanted.detach(), 1e-12)
        close(found, wanted, 1e-12)
        gradients = [torch.autograd.grad(out.square().sum(), q)[0] for out in (found, wanted)]
        close(*gradients, 1e-10)


def test_a_bias_of_tensors_without_values():
    q = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    with attention_backend("sdpa"):
        assert attention(q, q, q, bias=torch.empty(5, 5, device="meta")).shape == q.shape


def test_a_bias_without_axes_shifts_nothing():
    q, k = torch.randn(2, 5, 8)
    torch.testing.assert_close(
        attention_weights(q, k, bias=torch.tensor(0.5)), attention_weights(q, k)
    )


def test_vmap_over_masks():
    q, masks = torch.randn(5, 8), torch.rand(3, 5, 5) > 0.5
    masks[0, 2] = False
    for backend in ("reference", "sdpa"):
        with attention_backend(backend):
            found = torch.vmap(lambda mask: attention(q, q, q, mask=mask))(masks)
            torch.testing.assert_close(
                found, torch.stack([attention(q, q, q, mask=mask) for mask in masks])
            )


def test_additive_attention_takes_no_words():
    with pytest.raises(TypeError, match=r"mask of dtype str"):
        AdditiveAttention(4, 4, 8)(
            torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4), "causal"
        )


@pytest.mark.parametrize(
    "lengths",
    [torch.zeros(0, dtype=torch.long), torch.ones(3, 1, dtype=torch.long), torch.tensor(3)],
)
def test_lengths_of_a_padding_mask(lengths):
    with pytest.raises(ValueError, match=r"lengths of shape \(.*\)"):
        padding_mask(lengths)


# --- recording --------------------------------------------------------------------------------


def test_nested_records_have_every_call():
    q, k, v, mask, bias = tensors(0, 5, 7)
    with record_attention() as outer:
        attention(q, k, v)
        with record_attention() as inner:
            found = attention(q, k, v, mask=mask, bias=bias)
        attention(q, k, v)
    assert len(outer) == 3 and len(inner) == 1 and outer[1] is inner[0]
    with attention_backend("reference"):
        assert torch.equal(found, attention(q, k, v, mask=mask, bias=bias))
    assert current_backend() == "auto"


@pytest.mark.parametrize("backend", [*BACKENDS, "function"])
def test_a_backend_inside_a_record_is_recorded(backend):
    calls = []

    def function(q, k, v, mask, bias, scale, dropout_p):
        calls.append(dropout_p)
        return 2 * REGISTERED["reference"](q, k, v, mask, bias, scale, dropout_p)

    q, k, v, mask, bias = tensors(1, 5, 7)
    wanted = attention_weights(q, k, mask=mask, bias=bias)
    with record_attention() as outer:
        with attention_backend(function if backend == "function" else backend):
            with record_attention() as inner:
                found = attention(q, k, v, mask=mask, bias=bias)
            attention(q, k, v)
    assert len(outer) == 2 and len(inner) == 1 and torch.equal(outer[0], wanted)
    factor = 2 if backend == "function" else 1
    torch.testing.assert_close(found, factor * wanted @ v)
    assert calls == [0.0, 0.0] * (backend == "function")


def test_a_recorded_block_is_computed_again_by_its_own_backend():
    """The second computation records nothing."""
    seen = []

    def function(*arguments):
        seen.append(arguments[0].shape)
        return REGISTERED["reference"](*arguments)

    q = torch.randn(2, 5, 4, requires_grad=True)
    with record_attention() as maps, attention_backend(function):
        checkpoint_block(attention, q, q, q).sum().backward()
    assert len(maps) == 1 and len(seen) == 2


@pytest.mark.parametrize(
    "lengths, error, message",
    [
        (
            torch.tensor([2.5, 1.0]),
            TypeError,
            "dtype torch.float32 must be integers",
        ),
        (torch.tensor([True, False]), TypeError, "lengths of dtype torch.bool"),
        (torch.tensor([3, -2]), ValueError, r"lengths \(-2\) must be at least 0"),
    ],
)
def test_lengths_are_counts(lengths, error, message):
    with pytest.raises(error, match=message):
        padding_mask(lengths)
