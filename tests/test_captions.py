"""Captions: scenes and their words, the paper's equations, decoding, losses, bad input."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import nn

from attnlib import data
from attnlib.data import (
    _CAPTION_COLORS,
    _PLURALS,
    BOS,
    CAPTION_WORDS,
    EOS,
    KINDS,
    PAD,
    caption_scenes,
    context_scenes,
    decode_captions,
)
from attnlib.decoding import beam_search, greedy, sample
from attnlib.spatial import (
    Captioner,
    ConvEncoder,
    HardAttention,
    RewardBaseline,
    SoftAttention,
    caption_loss,
    reinforce_loss,
)
from attnlib.train import fit, shuffled_batches
from benchmarks.spatial import changed_attention, loss_function, weight_on_objects
from helpers import close

HALF = partial(HardAttention, soft_share=0.5)


def small(attention=SoftAttention, **options):
    torch.manual_seed(0)
    model = Captioner(
        len(CAPTION_WORDS), ConvEncoder(16), attention=attention, hidden_dim=12, **options
    )
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model.double().eval()


@pytest.fixture(scope="module")
def scenes():
    found = caption_scenes(6, seed=4)
    return 2 * found["image"].double() - 1, found["caption"]


# --- scenes -----------------------------------------------------------------------------------


@given(
    count=st.integers(1, 20),
    split=st.sampled_from(["train", "test", "novel"]),
    size=st.sampled_from([32, 48]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_captions_say_what_is_there(count, split, size, seed):
    found = caption_scenes(count, split, size, seed=seed)
    assert found["image"].shape == (count, 3, size, size)
    assert 0 <= found["image"].min() and found["image"].max() <= 1
    assert (found["mask"].sum(1) <= 1).all() and found["mask"].flatten(2).any(2).all()
    colors, kinds = list(_CAPTION_COLORS), list(KINDS)
    for i, caption in enumerate(decode_captions(found["caption"])):
        centers = (found["box"][i, :, :2] + found["box"][i, :, 2:]) / 2
        step = centers[1] - centers[0]
        axis = int(step.abs().argmax())
        assert step[axis] > 0 and step[axis] > 1.5 * step[1 - axis].abs()
        first, second = (
            f"a {colors[c]} {kinds[k]}" if n == 1 else f"two {colors[c]} {_PLURALS[k]}"
            for c, k, n in zip(*(found[key][i] for key in ("color", "kind", "number")))
        )
        assert caption == f"{first} {('left of', 'above')[axis]} {second}"
        words = [CAPTION_WORDS[t] for t in found["caption"][i]]
        for word, which in zip(words, found["named"][i].tolist()):
            assert (which >= 0) == (word in colors + kinds or word in _PLURALS)
            if which >= 0:
                color, kind = (found[key][i, which] for key in ("color", "kind"))
                assert word in (colors[color], kinds[kind], _PLURALS[kind])
    again = caption_scenes(count, split, size, seed=seed)
    assert all(torch.equal(found[key], again[key]) for key in found)


def test_the_shape_of_an_object_has_its_color():
    found = caption_scenes(200, size=64, seed=1)
    shades = torch.tensor(list(_CAPTION_COLORS.values()))
    for k in (0, 1):
        mask = found["mask"][:, k, None]
        mean = (found["image"] * mask).sum((2, 3)) / mask.sum((2, 3))
        assert (torch.cdist(mean, shades).argmin(1) == found["color"][:, k]).all()


def test_the_number_is_that_of_the_parts():
    found = caption_scenes(60, size=64, seed=2)
    for mask, number in zip(found["mask"].flatten(0, 1), found["number"].flatten()):
        assert ndimage.label(mask.numpy(), np.ones((3, 3)))[1] == number
    assert set(found["number"].flatten().tolist()) == {1, 2}
    assert (context_scenes(20)["number"] == 1).all()


def test_parts_are_apart():
    seen = {split: set() for split in ("train", "test", "novel")}
    for split, pairs in seen.items():
        found = caption_scenes(4000, split, 8, seed=2)
        thing = (4 * found["color"] + found["kind"]).sort(1).values
        pairs |= set(map(tuple, thing.tolist()))
    things = {split: {t for pair in pairs for t in pair} for split, pairs in seen.items()}
    assert not seen["train"] & seen["test"] and things["train"] == things["test"]
    assert len(things["train"]) == 18 and len(things["novel"]) == 24
    assert all(set(pair) - things["train"] for pair in seen["novel"])


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (caption_scenes, dict(count=0), r"count \(0\)"),
        (caption_scenes, dict(count=2, size=2.5), r"size \(2.5\)"),
        (
            caption_scenes,
            dict(count=2, split="dev"),
            r"split \('dev'\) must be 'train', 'test'",
        ),
        (context_scenes, dict(count=0), r"count \(0\)"),
        (context_scenes, dict(count=2, agree=1.5), r"agree \(1.5\) must be in \[0, 1\]"),
    ],
)
def test_scenes_refuse(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_context_is_as_often_right_as_asked():
    for agree in (0.0, 0.5, 0.9, 1.0):
        found = context_scenes(4000, agree, 8, seed=1)
        n = torch.arange(4000)
        beside = found["kind"][n, 1 - found["subject"]]
        square = beside == list(KINDS).index("square")
        assert ((square == found["red"]) == found["agrees"]).all()
        assert abs(found["agrees"].double().mean() - agree) < 0.03
        assert (found["kind"][n, found["subject"]] == 0).all()
        right = ((found["hue"] > 0) == found["red"]).double().mean()
        assert abs(right - 0.5 * (1 + math.erf(math.sqrt(0.5)))) < 0.02


def test_only_the_context_differs():
    pair = [context_scenes(50, agree, seed=7) for agree in (1.0, 0.0)]
    assert torch.equal(pair[0]["hue"], pair[1]["hue"])
    n = torch.arange(50)
    for found in pair:
        found["disc"] = found["mask"][n, found["subject"]]
    disc = pair[0]["disc"]
    assert torch.equal(disc, pair[1]["disc"])
    a, b = (found["image"].transpose(0, 1)[:, disc] for found in pair)
    assert torch.equal(a, b) and not torch.equal(pair[0]["image"], pair[1]["image"])
    assert (pair[0]["caption"] != pair[1]["caption"]).sum(1).eq(1).all()


# --- attention --------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), places=st.integers(1, 9), batch=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_soft_attention_is_the_papers(seed, places, batch):
    """e = wᵀ tanh(W_h h + W_a a), α = softmax(e), z = β Σ α a, β = σ(f(h)), in loops."""
    torch.manual_seed(seed)
    attend = SoftAttention(5, 7, 6).double()
    a, h = torch.randn(batch, places, 5).double(), torch.randn(batch, 7).double()
    context, weights, *_ = attend(a, h)
    w, w_h, w_a = (
        getattr(attend.scores, name).weight for name in ("score", "query_proj", "key_proj")
    )
    for b in range(batch):
        e = torch.stack([(w @ (w_h @ h[b] + w_a @ a[b, i]).tanh())[0] for i in range(places)])
        alpha = e.exp() / e.exp().sum()
        beta = 1 / (1 + (-(attend.gate.weight @ h[b] + attend.gate.bias)).exp())
        close(weights[b], alpha)
        close(context[b], beta * sum(alpha[i] * a[b, i] for i in range(places)))
    close(weights, attend.scores.attention_weights(h[:, None], a)[:, 0])


def test_soft_attention_does_not_know_the_order_of_places():
    torch.manual_seed(0)
    attend, order = SoftAttention(5, 7, 6).double(), torch.randperm(9)
    a, h = torch.randn(2, 9, 5).double(), torch.randn(2, 7).double()
    (context, weights), (other, turned) = attend(a, h)[:2], attend(a[:, order], h)[:2]
    close(context, other)
    close(weights[:, order], turned)


def test_hard_attention_draws_from_its_weights():
    torch.manual_seed(0)
    attend = HardAttention(3, 4, 5).double()
    a, h = torch.randn(1, 4, 3).double(), torch.randn(1, 4).double()
    _, weights, _, entropy = attend.train()(a, h)
    n = 20_000
    context, _, log_prob, _ = attend(a.expand(n, -1, -1), h.expand(n, -1))
    gate = attend.gate(h).sigmoid()
    place = torch.cdist(context, gate * a[0]).argmin(1)
    close(context, gate * a[0, place])
    close(log_prob, weights[0, place].log())
    shares = place.bincount(minlength=4) / n
    assert (shares - weights[0]).abs().max() < 4 * math.sqrt(0.25 / n)
    close(entropy, torch.special.entr(weights).sum(-1))


def test_hard_attention_takes_the_likeliest_place_in_evaluation():
    torch.manual_seed(0)
    attend = HALF(3, 4, 5).double().eval()
    a, h = torch.randn(6, 4, 3).double(), torch.randn(6, 4).double()
    context, weights, log_prob, _ = attend(a, h)
    best = weights.argmax(1)
    close(context, attend.gate(h).sigmoid() * a[torch.arange(6), best])
    close(log_prob, weights.amax(1).log())


def test_a_coin_lasts_for_a_caption(scenes):
    model, (x, tokens) = small(HALF).train(), scenes
    torch.manual_seed(3)
    x, tokens = x.repeat(10, 1, 1, 1), tokens.repeat(10, 1)
    soft = model(x, tokens[:, :-1]).log_prob == 0  # (B, T)
    assert (soft.all(1) | ~soft.any(1)).all() and 0.2 < soft[:, 0].double().mean() < 0.8


# --- the captioner ----------------------------------------------------------------------------


def test_the_captioner_is_the_papers(scenes):
    model, (x, tokens) = small(), scenes
    logits, weights, log_prob, entropy = model(x, tokens[:, :-1])
    assert log_prob is None and entropy is None
    a = model.encoder(x).flatten(2).transpose(1, 2)
    h, c = (f(a.mean(1)) for f in (model.first_h, model.first_c))
    lstm = nn.LSTM(12 + 16, 12).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(lstm, f"{name}_l0").data = getattr(model.cell, name).data
    for t in range(9):
        y = model.embed.weight[tokens[:, t]]
        z, alpha, *_ = model.attend(a, h)
        _, (h, c) = lstm(torch.cat([y, z], 1)[None], (h[None].contiguous(), c[None]))
        h, c = h[0], c[0]
        wanted = (
            y + h @ model.from_h.weight.T + z @ model.from_context.weight.T
        ) @ model.output.weight.T + model.output.bias
        close(logits[:, t], wanted)
        close(weights[:, t], alpha)


@pytest.mark.parametrize("attention", [SoftAttention, HardAttention])
def test_decoding_with_and_without_cache(attention, scenes):
    model, (x, _) = small(attention), scenes
    written = greedy(model, x, 10)
    assert torch.equal(written, greedy(model, x, 10, use_cache=False))
    one, score = beam_search(model, x, 10, 4)
    two, other = beam_search(model, x, 10, 4, use_cache=False)
    assert torch.equal(one, two)
    close(score, other)
    first = torch.cat([torch.full((6, 1), BOS), written[:, :-1]], 1)
    logits = model(x, first)[0]
    logits[..., PAD] = -torch.inf
    ended = (written == EOS).cumsum(1) - (written == EOS).int() > 0
    assert ((logits.argmax(-1) == written) | ended).all()
    assert sample(model, x, 5).shape[0] == 6


def test_beam_search_is_at_least_as_likely_as_greedy(scenes):
    model, (x, _) = small(), scenes
    found, score = beam_search(model, x, 3, len(CAPTION_WORDS) ** 2, length_penalty=0.0)
    written = greedy(model, x, 3)
    start = torch.full((6, 1), BOS)
    log_p = model(x, torch.cat([start, written[:, :-1]], 1))[0].double()
    log_p = log_p.log_softmax(-1).gather(2, written[..., None])[..., 0]
    log_p = log_p.masked_fill(written == PAD, 0).sum(1)
    assert (score >= log_p - 1e-9).all() and found.shape[1] <= 3


def test_any_encoder_will_do(scenes):
    class Patches(nn.Conv2d):
        num_channels = 10

    model = Captioner(len(CAPTION_WORDS), Patches(3, 10, 8, 8), hidden_dim=12)
    logits, weights, *_ = model(scenes[0].float(), scenes[1][:, :-1])
    assert logits.shape == (6, 9, len(CAPTION_WORDS)) and weights.shape == (6, 9, 16)


def test_captions_do_not_see_each_other(scenes):
    model, (x, tokens) = small(), scenes
    close(model(x, tokens)[0][2:3], model(x[2:3], tokens[2:3])[0])
    other = tokens.clone()
    other[:, 5:] = EOS
    close(model(x, tokens)[0][:, :5], model(x, other)[0][:, :5])


def test_attention_can_be_changed(scenes):
    model, (x, tokens) = small(), scenes
    usual = model(x, tokens).logits
    with changed_attention(model, lambda weights: weights):
        close(model(x, tokens)[0], usual)
    with changed_attention(model, lambda weights: torch.full_like(weights, 1 / 64)):
        other, even, *_ = model(x, tokens)
    close(even, torch.full_like(even, 1 / 64))
    assert (other - usual).abs().max() > 1e-3
    close(model(x, tokens)[0], usual)  # the hook is gone


def test_attention_to_one_place_can_be_changed(scenes):
    model, (x, tokens) = small(HardAttention), scenes
    usual = model(x, tokens)
    with changed_attention(model, lambda weights: weights):
        same = model(x, tokens)
    for a, b in zip(usual, same, strict=True):
        close(a, b)
    with changed_attention(model, lambda weights: weights.sqrt()):  # the same place
        close(model(x, tokens)[0], usual[0])
    with changed_attention(model, lambda weights: weights.flip(-1)):
        assert (model(x, tokens)[0] - usual[0]).abs().max() > 1e-3


# --- losses -----------------------------------------------------------------------------------


def test_loss_is_the_formula(scenes):
    torch.manual_seed(0)
    targets = scenes[1][:, 1:]
    logits, alpha = torch.randn(6, 9, 23).double(), torch.randn(6, 9, 4).double().softmax(-1)
    wanted = 0.0
    for b in range(6):
        coverage = torch.zeros(4).double()
        for t in range(9):
            if targets[b, t] != PAD:
                wanted = wanted - logits[b, t].log_softmax(0)[targets[b, t]] / 6
                coverage += alpha[b, t]
        wanted = wanted + 0.7 * (1 - coverage).square().sum() / 6
    close(caption_loss(logits, targets, alpha, 0.7), wanted)
    plain = caption_loss(logits, targets)
    close(plain, caption_loss(logits, targets, alpha))
    assert plain < caption_loss(logits, targets, alpha, 0.7)


def test_reinforce_is_the_formula(scenes):
    torch.manual_seed(0)
    targets = scenes[1][:, 1:]
    logits = torch.randn(6, 9, 23).double()
    log_prob, entropy = (-torch.rand(6, 9).double()).requires_grad_(), torch.rand(6, 9).double()
    baseline = RewardBaseline(12).double()
    baseline.means = -torch.rand(12).double()
    before, wanted = baseline.means.clone(), 0.0
    words = (targets != PAD).sum(1).tolist()
    log_p = [
        [logits[b, t].log_softmax(0)[targets[b, t]] for t in range(words[b])] for b in range(6)
    ]
    for b in range(6):
        for t in range(words[b]):
            advantage = sum(log_p[b][t:]) - before[t]
            wanted -= (log_p[b][t] + 2 * advantage * log_prob[b, t] + 0.1 * entropy[b, t]) / 6
    found = reinforce_loss(
        *(logits, targets, log_prob, entropy, baseline),
        **dict(reward_weight=2.0, entropy_weight=0.1),
    )
    close(found, wanted)
    for t in range(12):
        rewards = [sum(log_p[b][t:]) for b in range(6) if t < words[b]]
        mean = sum(rewards) / len(rewards) if rewards else before[t]
        close(baseline.means[t], 0.9 * before[t] + 0.1 * mean)
    kept = baseline.eval().means.clone()
    reinforce_loss(logits, targets, log_prob, entropy, baseline)
    assert torch.equal(baseline.means, kept)  # in evaluation it stays


def test_an_interrupted_run_goes_on_with_its_baseline(scenes, tmp_path):
    found, images = [], scenes[0].float()
    for stops in (None,), (2, None):
        torch.manual_seed(0)
        model = Captioner(
            len(CAPTION_WORDS), ConvEncoder(16), attention=HardAttention, hidden_dim=12
        )
        start = {key: x.clone() for key, x in model.state_dict().items()}
        for stop in stops:
            model.load_state_dict(start)  # as a new process does
            fit(
                model,
                shuffled_batches(images, scenes[1], batch_size=3),
                loss_fn=loss_function(baseline=model.baseline),
                **dict(steps=4, lr=0.01, log_every=2, stop_after=stop),
                checkpoint=tmp_path / f"run_{len(stops)}.json",
            )
        found.append(model.state_dict())
    whole, interrupted = found
    assert whole["baseline.means"][:5].max() < -1  # it has moved
    for key, x in whole.items():
        assert torch.equal(x, interrupted[key]), key


def test_a_baseline_without_a_module_is_refused(scenes):
    logits, some = torch.randn(6, 9, 23), torch.zeros(6, 9)
    with pytest.raises(TypeError, match="baseline of type Tensor"):
        reinforce_loss(logits, scenes[1][:, 1:], some, some, torch.zeros(9))
    with pytest.raises(
        ValueError, match=r"captions of 9 words are longer than max_length \(4\)"
    ):
        reinforce_loss(logits, scenes[1][:, 1:], some, some, RewardBaseline(4))


def test_reinforce_estimates_the_gradient_of_the_bound():
    """One word, four places: the mean of many draws against the exact gradient."""
    torch.manual_seed(0)
    theta = torch.randn(4).double().requires_grad_()
    outcomes = torch.randn(4, 5).double()  # the logits of the word after each place
    target, n = torch.tensor([[2]]), 100_000
    p, f = theta.softmax(0), outcomes.log_softmax(1)[:, 2]
    (wanted,) = torch.autograd.grad((p * f).sum(), theta)
    for start in (0.0, f.mean().item()):
        place = torch.multinomial(p.detach(), n, replacement=True)
        baseline = RewardBaseline(1).double()
        baseline.means.fill_(start)
        loss = reinforce_loss(
            outcomes[place][:, None],
            target.expand(n, 1),
            theta.log_softmax(0)[place][:, None],
            torch.zeros(n, 1).double(),
            baseline,
        )
        (found,) = torch.autograd.grad(-loss, theta)
        rows = (f[place] - start)[:, None] * (torch.eye(4)[place] - p.detach())
        error = rows.std(0) / math.sqrt(n)
        assert ((found - wanted).abs() < 4 * error).all()


def test_weight_on_objects():
    masks = torch.zeros(1, 2, 8, 8, dtype=torch.bool)
    masks[0, 0, :2, :2] = masks[0, 1, 5, 5] = True
    weights = torch.zeros(1, 2, 16)  # places of 2 x 2 pixels
    weights[0, 0, 0], weights[0, 0, 1], weights[0, 1, 10] = 0.7, 0.3, 1.0
    mass, peak, area = weight_on_objects(weights, masks)
    close(mass, torch.tensor([[[0.7, 0.0], [0.0, 1.0]]]), 1e-6)
    assert peak.tolist() == [[[True, False], [False, True]]]
    close(area, torch.full((1, 2), 1 / 16))


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: SoftAttention(0, 4, 4), r"feature_dim \(0\)"),
        (lambda: HardAttention(4, 4, 4, soft_share=2), r"soft_share \(2\) must be in \[0, 1\]"),
        (lambda: ConvEncoder(0), r"dim \(0\)"),
        (lambda: Captioner(0), r"vocab_size \(0\)"),
        (lambda: Captioner(9, hidden_dim=0), r"hidden_dim \(0\)"),
    ],
)
def test_bad_sizes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t + 30, r"tokens has numbers from 30 to \d+; they must be from 0 to 22"),
        (lambda t: t - 1, "tokens has numbers from -1"),
        (lambda t: t[:, :0], r"tokens of shape \(6, 0\) must be \(6, T\)"),
        (lambda t: t[:4], r"tokens of shape \(4, 10\) must be \(6, T\): a row for each image"),
        (lambda t: t[0], r"tokens of shape \(10,\)"),
        (lambda t: t * (torch.arange(6) != 3)[:, None], r"nothing but padding \(0\) in row 3"),
    ],
)
def test_bad_captions(change, message, scenes):
    with pytest.raises(ValueError, match=message):
        small()(scenes[0], change(scenes[1]))


def test_decoding_refuses_what_is_too_long(scenes):
    with pytest.raises(ValueError, match=r"max_length \(21\)"):
        greedy(small(), scenes[0], 21)


def test_the_scenes_use_numbers_that_do_not_depend_on_size():
    a, b = (caption_scenes(5, "test", size, seed=3) for size in (32, 64))
    assert torch.equal(a["caption"], b["caption"]) and torch.equal(a["kind"], b["kind"])
    assert len(data.CAPTION_WORDS) == 23
