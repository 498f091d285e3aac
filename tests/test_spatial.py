"""Gates, windows and DRAW: timm's numbers, the papers' equations, gradients, bad input."""

import math

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import EcaModule, SEModule
from timm.layers.cbam import CbamModule
from torch import nn

from attnlib import spatial
from attnlib.spatial import (
    AttentionGate,
    AttentiveConvnet,
    ChannelSpatialAttention,
    Draw,
    EfficientChannelAttention,
    FilterBank,
    SqueezeExcite,
    draw_loss,
)
from helpers import close, images

MODULES = {  # ours and timm's
    "SE": (lambda: SqueezeExcite(64), lambda: SEModule(64)),
    "SE of the paper": (
        lambda: SqueezeExcite(32, 1 / 8, 1),
        lambda: SEModule(32, 1 / 8, rd_divisor=1),
    ),
    "CBAM": (lambda: ChannelSpatialAttention(64), lambda: CbamModule(64)),
    "CBAM, 3 x 3, biases": (
        lambda: ChannelSpatialAttention(24, 0.25, 8, kernel_size=3, mlp_bias=True),
        lambda: CbamModule(24, 0.25, rd_divisor=8, spatial_kernel_size=3, mlp_bias=True),
    ),
    "ECA": (EfficientChannelAttention, EcaModule),
    "ECA of 256 channels": (lambda: EfficientChannelAttention(5), lambda: EcaModule(256)),
}


def randomized(module, seed=0):
    """Norms and biases that are not one and zero."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for key, x in module.named_buffers():
            if x.is_floating_point():
                x.uniform_(0.5, 1.5)
    return module.eval()


def twins(name):
    """Ours and timm's with the same weights, and input for them."""
    ours, theirs = (make() for make in MODULES[name])
    randomized(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    weight = getattr(ours, "fc1", None) or getattr(ours, "channel", [None])[0]
    return ours.eval(), theirs, images(2, 9, weight.in_channels if weight else 20)


def numbers(batch=1, seed=0):
    """Five numbers of windows that lie in the image."""
    torch.manual_seed(seed)
    return 0.4 * torch.randn(batch, 5, dtype=torch.float64)


# --- timm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_gates_are_timms(name):
    ours, theirs, x = twins(name)
    close(ours.double()(x), theirs.double()(x))
    close(ours.float()(x.float()), theirs.float()(x.float()), 1e-5)
    assert (ours.double()(x) - x).abs().max() > 0.1


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_timms(name):
    ours, theirs, x = twins(name)
    for module in (ours.double().train(), theirs.double().train()):
        module(x).square().sum().backward()
    for (key, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters()):
        close(p.grad, q.grad, 1e-10 * max(1, q.grad.abs().max().item())), key


def test_a_bottleneck_of_seresnet50_with_our_gate():
    network = randomized(timm.create_model("seresnet50", pretrained=False)).double()
    x = images(1, 32, 256)
    block = network.layer1[1]
    with torch.no_grad():
        before = block(x)
        ours = SqueezeExcite(256)
        ours.load_state_dict(block.se.state_dict())
        block.se = ours.double()
        close(block(x), before)
        block.se = nn.Identity()  # control
        assert (block(x) - before).abs().max() > 1e-3


def test_the_authors_order_of_the_pools():
    """The same weights mean another gate; with the kernel's channels swapped, the same."""
    module = randomized(ChannelSpatialAttention(16, 0.25)).double()
    authors = ChannelSpatialAttention(16, 0.25, first="max").double().eval()
    authors.load_state_dict(module.state_dict())
    x = images(2, 9, 16)
    with torch.no_grad():
        assert (authors(x) - module(x)).abs().max() > 1e-2
        conv = authors.spatial.conv.conv
        conv.weight.copy_(conv.weight.flip(1))
        close(authors(x), module(x))


def test_widths_of_the_bottleneck_are_timms():
    for channels in (16, 24, 64, 100, 256):
        for divisor in (1, 8):
            ours = SqueezeExcite(channels, 1 / 16, divisor)
            theirs = SEModule(channels, 1 / 16, rd_divisor=divisor)
            assert ours.fc1.out_channels == theirs.fc1.out_channels
    assert SqueezeExcite(64).fc1.out_channels == 8  # and the paper's is 4


# --- the gate of an image that asks itself ----------------------------------------------------


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_the_gate_is_the_papers(score):
    torch.manual_seed(0)
    gate = AttentionGate(6, score).double()
    x, g = images(2, (3, 4), 6), images(2, 1, 6)[:, :, 0, 0]
    attended, weights = gate(x, g)
    for b in range(2):
        places = [x[b, :, i, j] for i in range(3) for j in range(4)]
        if score == "dot":
            c = torch.stack([place @ g[b] for place in places])
        else:
            c = torch.stack([gate.u @ (place + g[b]) for place in places])
        a = c.exp() / c.exp().sum()
        close(weights[b].flatten(), a)
        close(attended[b], sum(weight * place for weight, place in zip(a, places)))


@given(shift=st.floats(-5, 5), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_only_the_dot_product_asks(shift, seed):
    x, g = images(1, 4, 6, seed), images(1, 1, 6, seed + 1)[:, :, 0, 0]
    torch.manual_seed(seed)
    gate = AttentionGate(6, "additive").double()
    close(gate(x, g)[1], gate(x, g + shift)[1])
    dot = AttentionGate(6)
    assert (dot(x, g)[1] - dot(x, -g)[1]).abs().max() > 1e-4


@pytest.mark.parametrize("pool", ["dot", "additive", "mean", "max", "global"])
@pytest.mark.parametrize("questions", [0, 5])
def test_the_small_network(pool, questions):
    torch.manual_seed(0)
    model, x = (
        AttentiveConvnet(7, pool, questions, img_size=32).eval(),
        torch.rand(3, 3, 32, 32),
    )
    question = torch.tensor([0, 1, 4]) if questions else None
    logits, weights = model(x, question)
    assert logits.shape == (3, 7)
    assert (weights is None) == (pool not in ("dot", "additive"))
    if weights is not None:
        assert weights.shape == (3, 8, 8)
        assert torch.allclose(weights.sum((1, 2)), torch.ones(3))
    logits.square().sum().backward()
    without = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is None}
    assert not without  # what is built is used
    if questions:
        other, moved = model(x, question.flip(0))
        assert (other - logits).abs().max() > 1e-4
        if pool == "additive":
            close(moved, weights, 1e-6)


def test_a_sum_does_not_train_what_makes_the_global_vector():
    for pool, trained in (("dot", True), ("additive", False)):
        torch.manual_seed(0)
        model = AttentiveConvnet(7, pool, img_size=32).double()
        model(images(4, 32))[0].square().sum().backward()
        slope = max(p.grad.abs().max().item() for p in model.deeper.parameters())
        assert (slope > 1e-8) == trained


# --- the window -------------------------------------------------------------------------------


def test_the_window_is_the_papers():
    """Equations of section 3.2, with loops and pixels that count from 1."""
    bank, five = FilterBank((7, 10), 4), numbers(2)
    x, image = images(2, (7, 10), 1), []
    for b in range(2):
        gx, gy, log_variance, log_stride, log_gamma = five[b].tolist()
        gx, gy = (10 + 1) / 2 * (gx + 1), (7 + 1) / 2 * (gy + 1)
        stride = (10 - 1) / (4 - 1) * math.exp(log_stride)
        filters = []
        for center, length in ((gy, 7), (gx, 10)):
            rows = torch.zeros(4, length, dtype=torch.float64)
            for i in range(1, 5):
                mu = center + (i - 4 / 2 - 0.5) * stride
                for a in range(1, length + 1):
                    rows[i - 1, a - 1] = math.exp(-((a - mu) ** 2) / 2 / math.exp(log_variance))
            filters.append(rows / rows.sum(1, keepdim=True))
        image.append(math.exp(log_gamma) * filters[0] @ x[b, 0] @ filters[1].T)
    close(bank.read(x, five)[:, 0], torch.stack(image))


def test_reading_and_writing_have_derivatives():
    bank, five = FilterBank((5, 6), 3), numbers(2).requires_grad_()
    x, patch = images(2, (5, 6), 2).requires_grad_(), images(2, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(bank.read, (x, five))
    assert torch.autograd.gradcheck(bank.write, (patch, five))


@given(
    height=st.integers(2, 12),
    width=st.integers(2, 12),
    glimpse=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_writing_is_the_adjoint(height, width, glimpse, seed):
    glimpse = min(height, width, glimpse)
    bank, five = FilterBank((height, width), glimpse), numbers(2, seed)
    rows, columns = bank.filters(five)
    close(rows.sum(-1), torch.ones(2, glimpse).double())
    close(columns.sum(-1), torch.ones(2, glimpse).double())
    x, w = images(2, (height, width), 1, seed), images(2, glimpse, 1, seed + 1)
    read = (bank.read(x, five) * w).sum((1, 2, 3))
    written = (x * bank.write(w, five)).sum((1, 2, 3))
    close(read, (2 * five[:, 4]).exp() * written, 1e-9)


def test_a_window_as_large_as_the_image_is_the_identity():
    for size in (1, 5, 8):
        bank, x = FilterBank(size, size), images(2, size, 3)
        five = torch.tensor([[0, 0, -8.0, 0, 0]]).double().expand(2, -1)
        close(bank.read(x, five), x)
        close(bank.write(x, five), x)


def test_a_window_far_outside_is_finite():
    """In single precision, where Gaussians underflow: the filters stay normalized."""
    bank = FilterBank(16, 5)
    five = torch.tensor([[30.0, -30.0, -6.0, 1.0, 0.0]], requires_grad=True)
    read = bank.read(torch.rand(1, 1, 16, 16), five)
    read.sum().backward()
    assert read.isfinite().all() and five.grad.isfinite().all()
    rows, _ = bank.filters(five.detach())
    assert torch.allclose(rows.sum(-1), torch.ones(1, 5))


# --- DRAW -------------------------------------------------------------------------------------


@pytest.mark.parametrize("glimpse", [3, None])
def test_draw_has_the_shapes_it_says(glimpse):
    torch.manual_seed(0)
    model = Draw((8, 10), steps=4, glimpse=glimpse, hidden_dim=12, latent_dim=3)
    x = (torch.rand(5, 1, 8, 10) > 0.5).float()
    drawing = model(x)
    assert drawing.canvas.shape == (5, 4, 8, 10) and drawing.kl.shape == (5, 4)
    assert drawing.states.shape == (5, 5, 12) and (drawing.kl >= 0).all()
    draw_loss(drawing, x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    dreamt = model(count=6)
    assert dreamt.canvas.shape == (6, 4, 8, 10) and not dreamt.kl.any()


@pytest.mark.parametrize("glimpse", [3, None])
def test_each_step_adds_what_is_written(glimpse):
    torch.manual_seed(0)
    model = Draw(8, steps=3, glimpse=glimpse, hidden_dim=12, latent_dim=3).double()
    drawing = model(images(2, 8, 1).sigmoid())
    canvas = model.canvas.expand(2, -1, -1)
    for t in range(3):
        canvas = canvas + model.write(drawing.states[:, t + 1])[:, 0]
        close(drawing.canvas[:, t], canvas)


def test_the_divergence_is_pytorchs():
    torch.manual_seed(0)
    model = Draw(6, steps=1, glimpse=2, hidden_dim=10, latent_dim=4).double()
    x, hidden = images(3, 6, 1).sigmoid(), torch.zeros(3, 10).double()
    canvas = model.canvas.expand(3, 1, -1, -1)
    _, kl, state = model.infer(x, canvas, hidden, (hidden, hidden))
    mean, log_sigma = model.posterior(state[0]).chunk(2, 1)
    proposed = torch.distributions.Normal(mean, log_sigma.exp())
    prior = torch.distributions.Normal(torch.zeros(4).double(), torch.ones(4).double())
    close(kl, torch.distributions.kl_divergence(proposed, prior).sum(1))


def test_the_bound_is_above_the_cost():
    """With one latent number, -log p(x) by a sum over a fine grid of it."""
    torch.manual_seed(0)
    model = Draw(4, steps=1, glimpse=2, hidden_dim=6, latent_dim=1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
        x = (images(1, 4, 1) > 0).double()
        z = torch.linspace(-8, 8, 4001).double()[:, None]
        zeros = torch.zeros(len(z), 6).double()
        h, _ = model.decoder(z, (zeros, zeros))
        logits = (model.canvas + model.write(h))[:, 0]
        bernoulli = torch.distributions.Bernoulli(logits=logits).log_prob(x[:, 0]).sum((1, 2))
        prior = torch.distributions.Normal(0.0, 1.0).log_prob(z[:, 0])
        exact = -(bernoulli + prior + math.log(16 / 4000)).logsumexp(0)
        many = x.expand(20_000, -1, -1, -1)
        mean = draw_loss(model(many), many).mean()
    assert mean > exact and mean < exact + 5


def test_the_loss_falls():
    torch.manual_seed(0)
    model = Draw(8, steps=3, glimpse=3, hidden_dim=24, latent_dim=4)
    x = torch.zeros(32, 1, 8, 8)
    for i in range(32):
        x[i, 0, i % 4 : i % 4 + 4, i // 8 : i // 8 + 4] = 1
    optimizer, costs = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(150):
        cost = draw_loss(model(x), x).mean()
        optimizer.zero_grad()
        cost.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        costs.append(cost.item())
    assert costs[0] > 40 and sum(costs[-10:]) / 10 < 25


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: FilterBank((8, 12), 9), r"glimpse \(9\) must be at most .* side \(8\)"),
        (lambda: FilterBank(8, 0), r"glimpse \(0\)"),
        (lambda: FilterBank(0, 1), r"img_size \(0\)"),
        (lambda: Draw(16, glimpse=17), r"glimpse \(17\) must be at most"),
        (lambda: Draw(16, steps=0), r"steps \(0\)"),
        (lambda: Draw(8)(torch.rand(2, 1, 8, 9)), r"images of shape \(2, 1, 8, 9\)"),
        (lambda: Draw(8)(torch.rand(2, 3, 8, 8)), r"must be \(B, 1, 8, 8\)"),
        (lambda: SqueezeExcite(4, 0.1), r"rd_ratio \(0.1\) leaves no channel of 4"),
        (lambda: SqueezeExcite(0), r"channels \(0\)"),
        (lambda: SqueezeExcite(16, rd_divisor=0), r"rd_divisor \(0\)"),
        (lambda: ChannelSpatialAttention(4), r"rd_ratio \(0.0625\) leaves no channel of 4"),
        (lambda: ChannelSpatialAttention(16, first="min"), r"first \('min'\) must be"),
        (lambda: ChannelSpatialAttention(16, kernel_size=4), r"kernel_size \(4\) must be odd"),
        (lambda: EfficientChannelAttention(2), r"kernel_size \(2\) must be odd"),
        (lambda: AttentionGate(8, "sum"), r"score \('sum'\) must be 'dot' or 'additive'"),
        (lambda: AttentionGate(0), r"dim \(0\)"),
        (
            lambda: AttentionGate(8)(torch.rand(2, 8, 3, 3), torch.rand(2, 7)),
            r"g of shape \(2, 7\) must have batch and width",
        ),
        (lambda: AttentiveConvnet(3, "sum"), r"pool \('sum'\)"),
        (lambda: AttentiveConvnet(3, img_size=40), r"img_size \(40\) must be .* 16"),
        (lambda: AttentiveConvnet(0), r"num_classes \(0\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_smallest_ratio_leaves_one_channel():
    assert spatial._reduced_channels(8, 0.5 / 8, 1) == 1
