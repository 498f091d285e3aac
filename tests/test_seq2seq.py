"""The recurrent encoder-decoder: its equations, padding, causality, gradients,
decoding and bad input."""

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.seq2seq import RecurrentEncoder, Seq2Seq


def small(attention=True, seed=0):
    torch.manual_seed(seed)
    return Seq2Seq(20, 25, embed_dim=8, hidden_dim=12, attention=attention).double()


def sentences(*lengths, vocab=20, seed=0):
    """Random tokens from 3 on, each row padded with 0 after its length."""
    torch.manual_seed(seed)
    tokens = torch.randint(3, vocab, (len(lengths), max(lengths)))
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    return tokens


both = pytest.mark.parametrize("attention", [False, True])


# --- parity -----------------------------------------------------------------------------------


def test_encoder_is_two_gru_cells_run_by_hand():
    encoder = RecurrentEncoder(20, 8, 12).double()
    src = sentences(7)
    states, summary, mask = encoder(src)
    x, halves = encoder.embed(src)[0], []
    for suffix, order in (("l0", range(7)), ("l0_reverse", range(6, -1, -1))):
        cell = nn.GRUCell(8, 12).double()
        cell.load_state_dict(
            {name: getattr(encoder.gru, f"{name}_{suffix}") for name in cell.state_dict()}
        )
        h, out = torch.zeros(12, dtype=torch.float64), [None] * 7
        for t in order:
            out[t] = h = cell(x[t], h)
        halves.append(torch.stack(out))
    torch.testing.assert_close(states[0], torch.cat(halves, -1), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        summary[0], torch.cat([halves[0][-1], halves[1][0]]), rtol=0, atol=1e-12
    )
    assert mask.all()


@both
def test_decoder_is_the_equations(attention):
    model = small(attention)
    src, tgt = sentences(6), sentences(5, vocab=25, seed=1)
    h, summary, _ = model.encoder(src)
    h, d = h[0], model.decoder
    s, rows = torch.tanh(d.start.weight @ h[0, 12:] + d.start.bias), []
    for token in tgt[0]:
        y, c = d.embed.weight[token], summary[0]
        if attention:
            hidden = torch.tanh(d.attend.query_proj.weight @ s + h @ d.attend.key_proj.weight.T)
            c = torch.softmax(hidden @ d.attend.score.weight[0], 0) @ h
        i = d.cell.weight_ih @ torch.cat([y, c]) + d.cell.bias_ih
        u = d.cell.weight_hh @ s + d.cell.bias_hh
        r, z = torch.sigmoid(i[:12] + u[:12]), torch.sigmoid(i[12:24] + u[12:24])
        s = (1 - z) * torch.tanh(i[24:] + r * u[24:]) + z * s
        rows.append(d.readout.weight @ torch.cat([s, y, c]) + d.readout.bias)
    torch.testing.assert_close(model(src, tgt)[0], torch.stack(rows), rtol=0, atol=1e-12)


# --- properties -------------------------------------------------------------------------------


@both
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    extra=st.integers(0, 3),
)
def test_padding_changes_nothing(attention, lengths, seed, extra):
    model = small(attention, seed)
    src = torch.nn.functional.pad(sentences(*lengths, seed=seed), (0, extra))
    tgt = torch.randint(3, 25, (len(lengths), 4))
    together = model(src, tgt)
    for row, length in enumerate(lengths):
        alone = model(src[row : row + 1, :length], tgt[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), n=st.integers(1, 5))
def test_maps_are_weights_on_real_tokens(lengths, n):
    src = sentences(*lengths)
    maps = small().attention_maps(src, torch.randint(3, 25, (len(lengths), n)))
    assert maps.shape == (len(lengths), n, max(lengths))
    torch.testing.assert_close(maps.sum(-1), torch.ones(len(lengths), n, dtype=torch.float64))
    assert (maps >= 0).all() and (
        maps.masked_select((src == 0)[:, None].expand_as(maps)) == 0
    ).all()


@both
def test_logits_do_not_see_later_target_tokens(attention):
    model, src, tgt = small(attention), sentences(6, 4), sentences(5, 5, vocab=25)
    changed = tgt.clone()
    changed[:, 3] = 24 - changed[:, 3] % 20
    before, after = model(src, tgt), model(src, changed)
    assert torch.equal(before[:, :3], after[:, :3]) and not torch.allclose(
        before[:, 3], after[:, 3]
    )


@both
def test_every_parameter_gets_a_gradient_and_padding_none(attention):
    model, src = small(attention), sentences(6, 3)
    model(src, torch.randint(3, 25, (2, 5))).square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.any()
        for p in model.parameters()
    )
    assert not model.encoder.embed.weight.grad[0].any()


def test_gradient_is_the_slope_of_the_loss():
    model, src, tgt = small(), sentences(5, 2), sentences(3, 3, vocab=25)
    weight = model.decoder.attend.key_proj.weight
    model(src, tgt).square().sum().backward()
    with torch.no_grad():
        direction, values = torch.randn_like(weight), []
        for sign in (1, -2):
            weight += sign * 1e-5 * direction
            values.append(model(src, tgt).square().sum())
    slope = (values[0] - values[1]) / 2e-5
    torch.testing.assert_close((weight.grad * direction).sum(), slope, rtol=1e-5, atol=1e-7)


def test_states_stay_between_minus_one_and_one():
    encoder = RecurrentEncoder(20, 8, 12).double()
    with torch.no_grad():
        for p in encoder.parameters():
            p.mul_(20)
    assert encoder(sentences(9, 4))[0].abs().max() <= 1


# --- greedy -----------------------------------------------------------------------------------


@both
def test_greedy_is_the_argmax_of_forward(attention):
    model, src = small(attention), sentences(6, 3, 1)
    out = model.greedy(src, 7, eos_id=24)
    given_tokens = torch.cat([torch.ones(3, 1, dtype=torch.long), out], 1)
    best = model(src, given_tokens[:, :-1]).argmax(-1)
    for row, wanted in zip(out.tolist(), best.tolist()):
        stop = row.index(24) + 1 if 24 in row else len(row)
        assert row[:stop] == wanted[:stop] and not any(row[stop:])


def test_greedy_stops_when_all_have_ended():
    model = small()
    with torch.no_grad():
        model.decoder.readout.weight.zero_()
        model.decoder.readout.bias.zero_()[2] = 1
    assert model.greedy(sentences(4, 2), 50).tolist() == [[2], [2]]


def test_attention_learns_to_copy_backward():
    torch.manual_seed(0)
    model = Seq2Seq(10, 10, embed_dim=16, hidden_dim=32)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        src = torch.randint(3, 10, (32, 5))
        tgt = torch.cat([torch.ones(32, 1, dtype=torch.long), src.flip(1)], 1)
        loss = nn.functional.cross_entropy(
            model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    src = torch.randint(3, 10, (100, 5))
    assert (model.greedy(src, 5, eos_id=0) == src.flip(1)).float().mean() > 0.9


# --- bad input --------------------------------------------------------------------------------


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


@pytest.mark.parametrize(
    "src, tgt, match",
    [
        (
            0 * ones(2, 4),
            ones(2, 3),
            r"src holds nothing but padding \(0\) in row 0",
        ),
        (ones(2, 0), ones(2, 3), r"src of shape \(2, 0\) must be"),
        (
            torch.tensor([[3, 0, 4]]),
            ones(1, 3),
            r"src has padding \(0\) before a token in row 0; .* after the tokens",
        ),
        (
            torch.tensor([[3, 20]]),
            ones(1, 3),
            "src holds the token 20; it must be from 0 to 19",
        ),
        (
            torch.tensor([[-1, 3]]),
            ones(1, 3),
            "src holds the token -1; it must be from 0",
        ),
        (
            torch.tensor([[3, 4]]),
            torch.tensor([[25]]),
            "tgt holds the token 25; it must be from 0 to 24",
        ),
        (
            torch.tensor([[3, 4]]),
            ones(2, 3),
            r"src of shape \(1, 2\) and tgt of shape \(2, 3\) .* equally",
        ),
        (torch.tensor([[3, 4]]), ones(1, 0), r"tgt of shape \(1, 0\) must be"),
        (torch.tensor([3, 4]), ones(2, 3), r"src of shape \(2,\) must be \(B, N\)"),
        (ones(0, 4), ones(0, 3), r"src of shape \(0, 4\) must be"),
    ],
)
def test_bad_tokens_are_named(src, tgt, match):
    with pytest.raises(ValueError, match=match):
        small()(src, tgt)


def test_tokens_must_be_whole_numbers():
    with pytest.raises(TypeError, match="src of dtype torch.float32"):
        small()(torch.ones(2, 3), ones(2, 3))


def test_plain_model_has_no_maps():
    with pytest.raises(ValueError, match=r"attention \(False\)"):
        small(False).attention_maps(sentences(3), sentences(3))


@pytest.mark.parametrize("name", ["src_vocab", "tgt_vocab", "embed_dim", "hidden_dim"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=rf"{name} \(0\)"):
        Seq2Seq(**{"src_vocab": 5, "tgt_vocab": 5, name: 0})


def test_max_length_must_be_positive():
    with pytest.raises(ValueError, match=r"max_length \(0\)"):
        small().greedy(sentences(3), 0)


@pytest.mark.parametrize("name", ["bos_id", "eos_id"])
@pytest.mark.parametrize("token", [25, -1, 1.5, None])
def test_tokens_that_are_none(name, token):
    with pytest.raises(ValueError, match=rf"{name} \(.*\)"):
        small().greedy(sentences(3, 2), 4, **{name: token})
