"""Unusual calls of `attnlib.spatial`: timm, PyTorch's samplers, formulas in float64."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from draws import (
    batches,
    counts,
    drawn,
    dtypes,
    layouts,
    map_sizes,
    normal,
    paddings,
    seeds,
    tolerance,
)
from hypothesis import example
from hypothesis import strategies as st
from timm.layers import EcaModule, SEModule, make_divisible
from timm.layers.cbam import CbamModule
from torch import nn

from attnlib import spatial
from helpers import close

floats = st.sampled_from((torch.float64, torch.float32))
modes = st.sampled_from((True, False))


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def randomized(module, seed, dtype):
    """The module with norms and biases that are not one and zero, and the same in float64."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn_like(p))
        for name, x in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                x.uniform_(0.5, 1.5)
    module = module.to(dtype)
    return module, copy.deepcopy(module).double()


def same_slopes(found, inputs, wanted, wide, dtype):
    """The gradients of a weighted sum of some outputs are those of other ones in float64."""
    slope = normal(wanted.shape, dtype, 7)
    slopes = torch.autograd.grad(found, inputs, slope)
    exact = torch.autograd.grad(wanted, wide, slope.double())
    for a, b in zip(slopes, exact):
        close(a.double(), b, tolerance(dtype, 64) * max(1, largest(b)))


def leaves(*inputs):
    """Inputs that have gradients, and the same in float64."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    return inputs, [x.detach().double().requires_grad_() for x in inputs]


# --- looking at places ------------------------------------------------------------------------


def exact_look(attend, places, h):
    """The gate (B, 1) and the weights (B, L), in float64."""
    scores = attend.scores
    hidden = (h @ scores.query_proj.weight.T)[:, None] + places @ scores.key_proj.weight.T
    logits = (hidden.tanh() @ scores.score.weight.T)[..., 0]
    weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return 1 / (1 + (-(h @ attend.gate.weight.T + attend.gate.bias)).exp()), weights


@drawn(batches, counts, dtypes(), seeds, layouts, st.booleans())
def test_soft_attention(batch, length, dtype, seed, layout, prepared):
    attend, exact = randomized(spatial.SoftAttention(4, 5, 6), seed, dtype)
    places = normal((batch, length, 4), dtype, seed, layout)
    inputs, wide = leaves(places, normal((batch, 5), dtype, seed + 1, layout))
    context, weights, *_ = attend(*inputs, attend.prepare(inputs[0]) if prepared else None)
    gate, wanted = exact_look(exact, *wide)
    mean = gate * (wanted[..., None] * wide[0]).sum(1)
    close(weights.double(), wanted, tolerance(dtype))
    close(context.double(), mean, tolerance(dtype))
    assert context.dtype == weights.dtype == dtype
    same_slopes(context, inputs, mean, wide, dtype)


@drawn(batches, counts, dtypes(), seeds, modes, st.sampled_from((0.0, 0.5, 1.0)))
@example(3, 4, torch.float16, 1, True, 0.5)
def test_hard_attention(batch, length, dtype, seed, training, soft_share):
    attend, exact = randomized(spatial.HardAttention(4, 5, 6, soft_share), seed, dtype)
    attend.train(training)
    places, h = normal((batch, length, 4), dtype, seed), normal((batch, 5), dtype, seed + 1)
    state = torch.get_rng_state()
    prepared = attend.prepare(places)
    context, weights, log_prob, entropy = attend(places, h, prepared)
    assert torch.equal(torch.get_rng_state(), state) or training and batch
    gate, wanted = exact_look(exact, places.double(), h.double())
    close(weights.double(), wanted, tolerance(dtype))
    close(entropy.double(), torch.special.entr(wanted).sum(-1), tolerance(dtype, 32))
    soft = prepared[1][:, 0]
    assert soft.shape == (batch,) and (training or not soft.any())
    assert soft_share or not soft.any()
    assert soft.all() or soft_share < 1 or not training
    for b in range(batch):
        choices = gate[b] * places[b].double()
        if soft[b]:
            wanted_context, wanted_log = gate[b] * wanted[b] @ places[b].double(), 0.0
        else:
            taken = (choices - context[b].double()).abs().sum(1).argmin()
            wanted_context, wanted_log = choices[taken], wanted[b, taken].log().item()
            if not training:
                assert wanted[b, taken] >= wanted[b].max() - tolerance(dtype)
        close(context[b].double(), wanted_context, tolerance(dtype))
        assert log_prob[b].item() == pytest.approx(wanted_log, abs=tolerance(dtype, 32))


@drawn(batches, map_sizes(3), st.sampled_from((2, 3, 6)), floats, seeds, modes, layouts)
def test_place_encoder(batch, size, dim, dtype, seed, training, layout):
    side = 4 * size[0]
    training = training and batch * size[0] > 1  # a batch norm needs two values
    model, _ = randomized(spatial.ConvEncoder(dim, side), seed, dtype)
    model.train(training)
    x = normal((batch, 3, side, side), dtype, seed, layout)
    statistics = [(n.running_mean.clone(), n.running_var.clone()) for n in model.layers[1::3]]
    found, y = model(x), x.double()
    for i in range(3):
        conv, norm, _ = model.layers[3 * i : 3 * i + 3]
        y = F.conv2d(y, conv.weight.double(), None, 2 if i < 2 else 1, 1)
        mean, var = (s.double()[:, None, None] for s in statistics[i])
        if training:
            mean = y.mean((0, 2, 3), keepdim=True)
            var = y.var((0, 2, 3), unbiased=False, keepdim=True)
        scale = norm.weight.double()[:, None, None] / (var + norm.eps).sqrt()
        y = ((y - mean) * scale + norm.bias.double()[:, None, None]).clamp(min=0)
    close(found.double(), y + model.position.double(), tolerance(dtype, 1000))


@pytest.mark.parametrize(
    "options, shape, message",
    [
        ((8, 30), None, r"img_size \(30\) must be a multiple of 4"),
        ((1, 8), None, r"dim \(1\) must be at least 2"),
        ((4, 8), (1, 3, 8, 12), r"images of shape \(1, 3, 8, 12\) must be \(B, 3, 8, 8\)"),
        ((4, 8), (3, 8, 8), r"images of shape \(3, 8, 8\) must be \(B, 3, 8, 8\)"),
    ],
)
def test_images_that_do_not_fit(options, shape, message):
    with pytest.raises(ValueError, match=message):
        spatial.ConvEncoder(*options)(torch.zeros(shape or (1, 3, 8, 8)))


# --- captions ---------------------------------------------------------------------------------


class Patches(nn.Conv2d):
    """An encoder of images that are not square."""

    num_channels = 4

    def __init__(self):
        super().__init__(3, 4, 4, 4)


@drawn(batches, map_sizes(3), counts, dtypes(), seeds, st.booleans())
@example(0, (1, 2), 3, torch.float32, 0, False)
def test_captioner(batch, size, length, dtype, seed, hard):
    """An LSTM of PyTorch and the attention above, in float64; one by one with a cache."""
    kind = spatial.HardAttention if hard else spatial.SoftAttention
    model = spatial.Captioner(7, Patches(), attention=kind, hidden_dim=5, pad_id=0)
    model, exact = randomized(model.eval(), seed, dtype)
    images = normal((batch, 3, 4 * size[0], 4 * size[1]), dtype, seed)
    tokens = torch.arange(batch * length).view(batch, length) * (seed + 3) % 6 + 1
    tokens[:, length // 2 + 1 :] = 0  # padding at the end
    output = model(images, tokens)
    logits, weights = output.logits, output.weights
    a = exact.encoder(images.double()).flatten(2).mT
    h, c = exact.first_h(a.mean(1)), exact.first_c(a.mean(1))
    lstm = nn.LSTM(9, 5).double()
    for name, p in exact.cell.named_parameters():
        setattr(lstm, f"{name}_l0", p)
    assert (output.log_prob is not None) == (output.entropy is not None) == hard
    for t in range(length):
        y = exact.embed.weight[tokens[:, t]]
        gate, wanted = exact_look(exact.attend, a, h)
        read = F.one_hot(wanted.argmax(1), wanted.shape[1]).double() if hard else wanted
        z = gate * (read[..., None] * a).sum(1)
        if batch:
            _, (h, c) = lstm(torch.cat([y, z], 1)[None], (h[None], c[None]))
            h, c = h[0], c[0]
        score = y + h @ exact.from_h.weight.T + z @ exact.from_context.weight.T
        clear = not hard or not batch or gap(wanted) > tolerance(dtype, 64)
        if not clear:
            return  # two places are as likely, up to rounding
        close(logits[:, t].double(), exact.output(score), tolerance(dtype, 32))
        close(weights[:, t].double(), wanted, tolerance(dtype, 32))
    places, mask = model.encode(images)
    assert mask.shape == (batch, 1, 1, size[0] * size[1]) and mask.all()
    cache, rows = Cache(), []
    for some in tokens.split(2, 1):  # several new tokens in one call
        rows.append(model.decode(some, places, mask, cache))
    close(torch.cat(rows, 1).double(), logits.double(), tolerance(dtype))
    assert cache.length == length


def gap(weights):
    """By how much the likeliest place is ahead of the second, at least."""
    if weights.shape[1] == 1:
        return 1.0
    best = weights.topk(2, 1).values
    return (best[:, 0] - best[:, 1]).min().item()


class Cache(SimpleNamespace):
    """What `Captioner.decode` needs of a cache."""

    def __init__(self):
        super().__init__(room=[None], length=0)

    def __len__(self):
        return self.length

    def advance(self, count):
        self.length += count


@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.zeros(0, 3), r"tokens of shape \(0, 3\) must be \(2, T\)"),
        (torch.ones(2, 0), r"tokens of shape \(2, 0\) must be \(2, T\)"),
        (torch.tensor([[1, 7], [1, 1]]), "tokens has numbers from 1 to 7; .* from 0 to 6"),
        (torch.tensor([[1, 2], [0, 0]]), r"nothing but padding \(0\) in row 1"),
    ],
)
def test_bad_captions(tokens, message):
    with pytest.raises(ValueError, match=message):
        spatial._check_captions(tokens.long(), 2, 7, 0)
    spatial._check_captions(torch.zeros(0, 3).long(), 0, 7, 0)  # a batch without captions


@drawn(
    *(st.integers(1, 3), counts, st.integers(1, 4), dtypes(), seeds),
    *(st.sampled_from((0.0, 0.7)), layouts, st.data()),
)
def test_caption_loss(batch, length, places, dtype, seed, penalty, layout, data):
    words = data.draw(paddings(batch, length))
    targets = torch.arange(batch * length).view(batch, length) * (seed + 1) % 5 + 1
    targets = targets * words
    logits = normal((batch, length, 6), dtype, seed, layout)
    weights = normal((batch, length, places), dtype, seed + 1).softmax(-1)
    inputs, wide = leaves(logits, weights)
    found = spatial.caption_loss(inputs[0], targets, inputs[1], penalty)
    total = 0.0 * wide[0].sum() + 0.0 * wide[1].sum()
    for b in range(batch):
        covered = torch.zeros(places).double()
        for t in range(length):
            if words[b, t]:
                total = total - wide[0][b, t].log_softmax(0)[targets[b, t]]
                covered = covered + wide[1][b, t]
        total = total + penalty * (1 - covered).square().sum()
    total = total / batch
    close(found.double(), total, tolerance(dtype) * max(1, largest(total)))
    if penalty:
        same_slopes(found, inputs, total, wide, dtype)
    with pytest.raises(ValueError, match=r"weights \(None\)"):
        spatial.caption_loss(logits, targets, penalty=2.0)


# --- REINFORCE --------------------------------------------------------------------------------


@drawn(batches, counts, dtypes(), seeds, modes, st.data())
def test_reinforce(batch, length, dtype, seed, training, data):
    words = data.draw(paddings(batch, length))
    targets = (torch.arange(batch * length).view(batch, length) % 5 + 1) * words
    baseline = spatial.RewardBaseline(7, decay=0.8).train(training)
    baseline.means.copy_(normal((7,), seed=seed))
    means = baseline.means.double().clone()
    logits = normal((batch, length, 6), dtype, seed)
    inputs, wide = leaves(logits, *(normal((batch, length), dtype, seed + i) for i in (1, 2)))
    options = dict(reward_weight=2.0, entropy_weight=0.1)
    found = spatial.reinforce_loss(inputs[0], targets, *inputs[1:], baseline, **options)
    total, rewards = sum(x.sum() * 0.0 for x in wide), [[] for _ in range(7)]
    for b in range(batch):
        later = 0.0
        for t in reversed(range(length)):
            if words[b, t]:
                log_p = wide[0][b, t].log_softmax(0)[targets[b, t]]
                later += log_p.item()
                rewards[t].append(later)
                place = 2 * (later - means[t]) * wide[1][b, t]
                total = total - log_p - place - 0.1 * wide[2][b, t]
    if batch:
        total = total / batch
        close(found.double(), total, tolerance(dtype, 32) * max(1, largest(total)))
        same_slopes(found, inputs, total, wide, dtype)
    for t in range(7):
        mean = (
            0.8 * means[t] + 0.2 * sum(rewards[t]) / len(rewards[t]) if rewards[t] else means[t]
        )
        mean = mean if training else means[t]
        close(baseline.means[t].double(), mean, tolerance(dtype, 32) + 1e-5)
    assert torch.equal(baseline(length), baseline.means[:length])


def test_a_baseline_reads_words_only():
    baseline = spatial.RewardBaseline(3)
    reward = torch.tensor([[-math.inf, 1.0], [math.nan, 3.0]])
    baseline.update(reward, torch.tensor([[False, True], [False, True]]))
    close(baseline.means, torch.tensor([0, 0.2, 0]), 1e-6)
    for call in (
        lambda: baseline(4),
        lambda: baseline.update(torch.ones(2, 4), torch.ones(2, 4).bool()),
    ):
        with pytest.raises(ValueError, match=r"captions of 4 words .* max_length \(3\)"):
            call()


# --- an image that asks itself ----------------------------------------------------------------


@drawn(batches, map_sizes(5), dtypes(), seeds, layouts, st.sampled_from(("dot", "additive")))
def test_gate_of_places(batch, size, dtype, seed, layout, score):
    gate, exact = randomized(spatial.AttentionGate(4, score), seed, dtype)
    x = 0.5 * normal((batch, 4, *size), dtype, seed, layout)
    inputs, wide = leaves(x, normal((batch, 4), dtype, seed + 1, layout))
    found, weights = gate(*inputs)
    if score == "dot":
        logits = torch.einsum("bdhw,bd->bhw", *wide)
    else:
        logits = torch.einsum("bdhw,d->bhw", wide[0] + wide[1][..., None, None], exact.u)
    wanted = logits.flatten(1).softmax(1).view_as(logits)
    attended = torch.einsum("bhw,bdhw->bd", wanted, wide[0])
    assert weights.shape == (batch, *size) and found.dtype == dtype
    close(weights.double(), wanted, tolerance(dtype))
    close(found.double(), attended, tolerance(dtype))
    same_slopes(found, inputs, attended, wide, dtype)


@drawn(
    *(batches, st.sampled_from(("dot", "additive", "mean", "max", "global"))),
    *(st.sampled_from((0, 3)), floats, seeds),
)
def test_attentive_convnet(batch, pool, questions, dtype, seed):
    model = spatial.AttentiveConvnet(5, pool, questions, 16, 4).eval()
    model, exact = randomized(model, seed, dtype)
    x = normal((batch, 3, 16, 16), dtype, seed)
    question = torch.arange(batch) % 3 if questions else None
    logits, weights = model(x, question)
    y = exact.local(x.double())
    asked = exact.question.weight[question] if questions else None
    deeper = exact.deeper(y) if exact.deeper is not None else None
    wanted = None
    if pool in ("dot", "additive"):
        g = asked if questions else deeper
        score = y if pool == "dot" else y + g[..., None, None]
        by = g if pool == "dot" else exact.gate.u.expand_as(g)
        wanted = torch.einsum("bdhw,bd->bhw", score, by).flatten(1).softmax(1)
        pooled = torch.einsum("bl,bdl->bd", wanted, y.flatten(2))
        close(weights.flatten(1).double(), wanted, tolerance(dtype, 100))
    else:
        pooled = deeper if pool == "global" else None
        pooled = y.flatten(2).mean(2) if pool == "mean" else pooled
        pooled = y.flatten(2).amax(2) if pool == "max" else pooled
        assert weights is None
    pooled = torch.cat([pooled, asked], 1) if questions else pooled
    close(logits.double(), exact.head(pooled), tolerance(dtype, 100) * max(1, largest(pooled)))


@pytest.mark.parametrize(
    "options, question, side, message",
    [
        (dict(questions=4), None, 16, r"question \(None\) must be a number for each image"),
        ({}, torch.tensor([1]), 16, r"question \(of shape \(1,\)\) must be None where the"),
        ({}, None, 32, r"images of shape \(1, 3, 32, 32\) must be \(B, 3, 16, 16\)"),
    ],
)
def test_calls_that_do_not_fit_the_network(options, question, side, message):
    model = spatial.AttentiveConvnet(5, "dot", img_size=16, dim=4, **options).eval()
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(1, 3, side, side), question)
    other = spatial.AttentiveConvnet(5, "mean", img_size=16, dim=4).eval()
    assert other(torch.zeros(1, 3, 20, 33))[0].shape == (1, 5)  # which has no such limit


# --- DRAW -------------------------------------------------------------------------------------


def exact_filters(size, glimpse, numbers):
    """Gregor et al. 2015, equations 19 to 26, in loops; rows that sum to 1."""
    (height, width), banks = size, []
    x, y, log_variance, log_stride, log_gamma = numbers
    stride = (max(height, width) - 1) / max(1, glimpse - 1) * math.exp(log_stride)
    for center, length in (
        ((height + 1) / 2 * (y + 1), height),
        ((width + 1) / 2 * (x + 1), width),
    ):
        bank = torch.zeros(glimpse, length, dtype=torch.float64)
        for i in range(1, glimpse + 1):
            mu = center + (i - glimpse / 2 - 0.5) * stride
            far = [(a - mu) ** 2 / (2 * math.exp(log_variance)) for a in range(1, length + 1)]
            row = [math.exp(min(far) - one) for one in far]  # the nearest pixel has 1
            bank[i - 1] = torch.tensor(row, dtype=torch.float64) / sum(row)
        banks.append(bank)
    return *banks, math.exp(log_gamma)


@drawn(
    *(batches, map_sizes(40), counts, dtypes(), seeds),
    st.sampled_from((0.4, 1.0, 3.0)),
)
@example(2, (28, 40), 5, torch.bfloat16, 0, 0.4)
@example(2, (28, 40), 5, torch.float16, 2, 3.0)
def test_filter_bank(batch, size, glimpse, dtype, seed, scale):
    """In half precision the filters are rounded, but not their places."""
    glimpse = min(glimpse, *size)
    bank = spatial.FilterBank(size, glimpse)
    numbers = (scale * normal((batch, 5), seed=seed)).to(dtype)
    image = normal((batch, 2, *size), dtype, seed + 1)
    patch = normal((batch, 2, glimpse, glimpse), dtype, seed + 2)
    rows, columns = bank.filters(numbers)
    read, written = bank.read(image, numbers), bank.write(patch, numbers)
    assert rows.shape == (batch, glimpse, size[0]) and rows.dtype == read.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    small = tolerance(dtype, 2) + 2e5 * torch.finfo(wide).eps  # of an exponent of thousands
    for b, five in enumerate(numbers.tolist()):
        down, over, gamma = exact_filters(size, glimpse, five)
        close(rows[b].double(), down, small)
        close(columns[b].double(), over, small)
        for c in range(2):
            wanted = gamma * down @ image[b, c].double() @ over.T
            close(read[b, c].double(), wanted, (small + tolerance(dtype)) * 5 * max(1, gamma))
            wanted = down.T @ patch[b, c].double() @ over / gamma
            most = (small + tolerance(dtype)) * 5 * max(1, 1 / gamma) * glimpse
            close(written[b, c].double(), wanted, most)
    window = bank.window(numbers)
    assert all(x.shape == (batch,) and x.dtype == wide for x in window)


def test_a_bank_that_spans_the_image_reads_what_affine_sampling_reads():
    """Filters of no width, at pixels and halfway between them, are PyTorch's `grid_sample`."""
    x = normal((2, 3, 9, 9))
    whole, half = [0.0, 0, -12, math.log(0.5), 0], [0.2, -0.4, -12, math.log(0.25), 0]
    numbers = torch.tensor([whole, half], dtype=torch.float64)
    found = spatial.FilterBank(9, 5).read(x, numbers)
    theta = torch.zeros(2, 2, 3).double()
    for row, scale, (shift_x, shift_y) in ((0, 2, (0, 0)), (1, 1, (1, -2))):
        theta[row, 0] = torch.tensor([scale / 4, 0, shift_x / 4])
        theta[row, 1] = torch.tensor([0, scale / 4, shift_y / 4])
    grid = F.affine_grid(theta, (2, 3, 5, 5), align_corners=True)
    close(found, F.grid_sample(x, grid, align_corners=True), 1e-9)


@drawn(batches, map_sizes(6), st.none() | st.integers(1, 6), st.integers(1, 3), floats, seeds)
@example(0, (3, 5), 2, 2, torch.float32, 0)
def test_draw(batch, size, glimpse, steps, dtype, seed):
    """Step by step in float64 with PyTorch's LSTM cells and divergence."""
    glimpse = None if glimpse is None else min(glimpse, *size)
    model, exact = randomized(spatial.Draw(size, steps, glimpse, 5, 3), seed, dtype)
    images = (normal((batch, 1, *size), seed=seed) > 0).to(dtype)
    torch.manual_seed(seed)
    found = model(images)
    torch.manual_seed(seed)
    noise = [torch.randn(batch, 3, dtype=dtype).double() for _ in range(steps)]
    x, canvas = images.double(), exact.canvas.expand(batch, 1, -1, -1)
    h = torch.zeros(batch, 5).double()
    seen = drawn_by = (h, h)
    for t in range(steps):
        both = torch.cat([x, x - canvas.sigmoid()], 1)
        if glimpse:
            both = exact.bank.read(both, exact.read_window(drawn_by[0]))
        seen = exact.encoder(torch.cat([both.flatten(1), drawn_by[0]], 1), seen)
        mean, log_sigma = exact.posterior(seen[0]).split(3, 1)
        posterior = torch.distributions.Normal(mean, log_sigma.exp(), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        kl = torch.distributions.kl_divergence(posterior, prior).sum(1)
        drawn_by = exact.decoder(mean + log_sigma.exp() * noise[t], drawn_by)
        patch = exact.painter(drawn_by[0]).unflatten(1, exact.patch)
        if glimpse:
            patch = exact.bank.write(patch, exact.write_window(drawn_by[0]))
        canvas = canvas + patch
        small = tolerance(dtype, 1000) * max(1, largest(canvas), largest(kl))
        close(found.canvas[:, t].double(), canvas[:, 0], small)
        close(found.kl[:, t].double(), kl, small)
        close(found.states[:, t + 1].double(), drawn_by[0], small)
    assert type(found) is spatial.DrawOutput and not found.states[:, 0].any()
    p = canvas.sigmoid().clamp(1e-300, 1 - 1e-16)
    cost = -(x * p.log() + (1 - x) * (1 - p).log()).sum((1, 2, 3)) + found.kl.double().sum(1)
    for kind in (dtype, torch.bool, torch.uint8):
        bound = spatial.draw_loss(found, images.to(kind))
        close(bound.double(), cost, tolerance(dtype, 1000) * max(1, largest(cost)))
    samples = model(count=batch)
    assert samples.canvas.shape == (batch, steps, *size) and not samples.kl.any()


# --- gates of channels ------------------------------------------------------------------------


@drawn(st.integers(1, 300), st.sampled_from((1 / 16, 0.25, 0.3, 1.0, 2.0)), st.integers(1, 16))
def test_reduced_channels(channels, ratio, divisor):
    if int(channels * ratio + 0.5) < 1:
        with pytest.raises(ValueError, match=rf"leaves no channel of {channels}"):
            spatial._reduced_channels(channels, ratio, divisor)
        return
    wanted = make_divisible(channels * ratio, divisor, round_limit=0.0)
    assert spatial._reduced_channels(channels, ratio, divisor) == wanted


def compare_gate(ours, theirs, x, dtype, seed):
    """Outputs and gradients are those of timm's module in float64."""
    ours, exact = randomized(ours, seed, dtype)
    if len(x) == 0:  # which not all of timm's can do
        assert ours.eval()(x).shape == x.shape
        return ours
    theirs.double().load_state_dict(exact.state_dict(), strict=True)
    inputs, wide = leaves(x)
    for module in (ours.eval(), theirs.eval()):
        module.requires_grad_(False)
    found, wanted = ours(*inputs), theirs(*wide)
    assert found.dtype == dtype and found.shape == x.shape
    close(found.double(), wanted, tolerance(dtype))
    same_slopes(found, inputs, wanted, wide, dtype)
    return ours


shapes = (batches, st.sampled_from((16, 8, 24)), map_sizes(6), dtypes(), seeds, layouts)


@drawn(*shapes, st.sampled_from(((1 / 16, 8), (0.25, 1), (1.0, 8))))
def test_squeeze_and_excite(batch, channels, size, dtype, seed, layout, widths):
    x = normal((batch, channels, *size), dtype, seed, layout)
    theirs = SEModule(channels, widths[0], rd_divisor=widths[1])
    ours = compare_gate(spatial.SqueezeExcite(channels, *widths), theirs, x, dtype, seed)
    gate = ours.gate(x)
    assert gate.shape == (batch, channels, 1, 1) and torch.equal(ours(x), x * gate)


@drawn(*shapes, st.sampled_from((1, 3, 9)))
def test_efficient_channel_attention(batch, channels, size, dtype, seed, layout, kernel_size):
    x = normal((batch, channels, *size), dtype, seed, layout)
    theirs = EcaModule(kernel_size=kernel_size)
    compare_gate(spatial.EfficientChannelAttention(kernel_size), theirs, x, dtype, seed)


@drawn(*shapes, st.sampled_from((1, 7)), st.booleans(), st.booleans())
def test_channels_and_places(
    batch, channels, size, dtype, seed, layout, kernel_size, bias, last
):
    x = normal((batch, channels, *size), dtype, seed, layout)
    options = dict(rd_ratio=0.25, rd_divisor=1, mlp_bias=bias)
    theirs = CbamModule(channels, spatial_kernel_size=kernel_size, **options)
    options |= dict(kernel_size=kernel_size)
    ours = spatial.ChannelSpatialAttention(channels, **options)
    ours = compare_gate(ours, theirs, x, dtype, seed)
    if last:
        turned = spatial.ChannelSpatialAttention(channels, **options, first="max").to(dtype)
        state = ours.state_dict()
        state["spatial.conv.conv.weight"] = state["spatial.conv.conv.weight"].flip(1)
        turned.load_state_dict(state)
        close(turned.eval()(x), ours(x), tolerance(dtype))


@pytest.mark.parametrize("kernel_size", [2, 0, -1, 3.0])
def test_kernels_without_a_middle(kernel_size):
    for make in (
        lambda: spatial._check_odd(kernel_size),
        lambda: spatial.EfficientChannelAttention(kernel_size),
        lambda: spatial.ChannelSpatialAttention(16, kernel_size=kernel_size),
    ):
        with pytest.raises(ValueError, match=rf"kernel_size \({kernel_size}\)"):
            make()


# --- all of them ------------------------------------------------------------------------------

ORACLES = {
    "SoftAttention": test_soft_attention,
    "ConvEncoder": test_place_encoder,
    "Captioner": test_captioner,
    "_check_captions": test_bad_captions,
    "caption_loss": test_caption_loss,
    "HardAttention": test_hard_attention,
    "RewardBaseline": test_reinforce,
    "reinforce_loss": test_reinforce,
    "AttentionGate": test_gate_of_places,
    "AttentiveConvnet": test_attentive_convnet,
    "FilterBank": test_filter_bank,
    "DrawOutput": test_draw,
    "Window": test_filter_bank,
    "AttentionOutput": test_soft_attention,
    "CaptionerOutput": test_captioner,
    "Draw": test_draw,
    "draw_loss": test_draw,
    "_reduced_channels": test_reduced_channels,
    "SqueezeExcite": test_squeeze_and_excite,
    "_check_odd": test_kernels_without_a_middle,
    "EfficientChannelAttention": test_efficient_channel_attention,
    "ChannelSpatialAttention": test_channels_and_places,
}
NOT_HERE = {}


def test_everything_has_an_oracle():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(spatial.__all__)
