"""The masked autoencoder beside transformers' and timm's, what masking is, and bad input."""

import json
import re
import sys
from collections import Counter

import numpy as np
import pytest
import timm
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attnlib.convert import rename_keys
from attnlib.mae import (
    MaskedAutoencoder,
    MaskedAutoencoderOutput,
    masked_loss,
    normalize_patches,
    patchify,
    random_masking,
    unpatchify,
)
from attnlib.models import create_model, load_pretrained
from attnlib.train import find_records, fit, read_record, shuffled_batches
from attnlib.vit import VisionTransformer
from benchmarks import hidden, mae
from benchmarks.runner import tune
from helpers import close, images

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
SMALL |= dict(decoder_embed_dim=20, decoder_depth=2, decoder_num_heads=5)
COUNTS = {  # all parameters, and those that are trained
    "mae_vit_base_patch16": (111_907_840, 111_655_680),
    "mae_vit_large_patch16": (329_541_888, 329_239_296),
    "mae_vit_huge_patch14": (657_074_508, 656_613_964),
}


def small(seed=0, **options):
    """A small model with no weight that is 0 or 1, and its positions."""
    torch.manual_seed(seed)
    model = MaskedAutoencoder(**SMALL | options)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model.double()


def peer(**options):
    """transformers' model of the same shape, with random weights everywhere."""
    config = transformers.ViTMAEConfig(
        **dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3),
        **dict(intermediate_size=96, image_size=32, patch_size=8, layer_norm_eps=1e-6),
        **dict(decoder_hidden_size=20, decoder_num_hidden_layers=2),
        **dict(decoder_num_attention_heads=5, decoder_intermediate_size=80),
        **options,
    )
    torch.manual_seed(0)
    model = transformers.ViTMAEForPreTraining(config).double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def older_names(state_dict):
    """The names of transformers until version 5, which the files on the hub have."""
    table = (
        (r"^vit\.layers\.", "vit.encoder.layer."),
        (r"attention\.([qkv])_proj", r"attention.attention.\1_proj"),
        *(("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")),
        *((r"attention\.o_proj", "attention.output.dense"),),
        *((r"mlp\.fc1", "intermediate.dense"), (r"mlp\.fc2", "output.dense")),
    )
    return rename_keys(state_dict, table)


# --- parity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_pix_loss", [False, True])
@pytest.mark.parametrize("rate", [0.75, 0.3])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_loss_prediction_mask_and_gradients_are_those_of_transformers(
    norm_pix_loss, rate, dtype, tolerance
):
    theirs = peer(norm_pix_loss=norm_pix_loss, mask_ratio=rate).to(dtype)
    ours = MaskedAutoencoder(**SMALL, norm_pix_loss=norm_pix_loss).to(dtype)
    load_pretrained(ours, theirs.state_dict())
    x, noise = images(3).to(dtype), torch.rand(3, 16, dtype=dtype)
    loss, prediction, masked = ours(x, rate, noise)
    wanted = theirs(x, noise=noise)
    assert torch.equal(masked, wanted.mask.bool())
    scale = max(1, wanted.logits.abs().max().item())
    close(prediction, wanted.logits, tolerance * scale)
    close(loss, wanted.loss, tolerance * max(1, wanted.loss.item()))
    loss.backward()
    wanted.loss.backward()
    found = {key: p.grad for key, p in ours.named_parameters() if p.requires_grad}
    grads = {k: p.grad for k, p in theirs.named_parameters() if p.requires_grad}
    other = MaskedAutoencoder(**SMALL).to(dtype)
    filled = {k: grads.get(k, torch.zeros_like(p)) for k, p in theirs.state_dict().items()}
    load_pretrained(other, filled)
    for key, grad in found.items():
        expected = other.state_dict()[key]
        close(grad, expected, tolerance * max(1, expected.abs().max().item()))


def test_older_names_of_transformers():
    theirs = peer()
    older = older_names(theirs.state_dict())
    assert "decoder.decoder_layers.1.attention.attention.query.bias" in older
    ours = MaskedAutoencoder(**SMALL).double()
    load_pretrained(ours, older)
    x, noise = images(2), torch.rand(2, 16)
    close(ours(x, noise=noise).prediction, theirs(x, noise=noise).logits)


@pytest.mark.parametrize("options", [{}, dict(global_pool="avg", num_classes=5)], ids=str)
def test_the_encoder_is_timms(options):
    model = small()
    theirs = timm.models.VisionTransformer(
        **dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3),
        **dict(num_classes=0) | options,
    ).double()
    ours, wanted = model.encoder(**options), theirs.state_dict()
    own = {key: x for key, x in model.state_dict().items() if key in wanted}
    theirs.load_state_dict(
        wanted | own | {k: ours.state_dict()[k] for k in wanted - own.keys()}
    )
    assert isinstance(ours, VisionTransformer) and ours.pos_embed.requires_grad
    x = images(3)
    close(ours(x), theirs(x))


def test_the_encoder_is_the_autoencoders_that_hides_nothing():
    model, x = small(), images(3)
    tokens, keep, masked = model.forward_encoder(x, 0.0, torch.rand(3, 16))
    assert not masked.any()
    back = tokens[:, 1:].take_along_dim(keep.argsort(1)[..., None], 1)
    whole = model.encoder().forward_features(x)
    close(torch.cat([tokens[:, :1], back], 1), whole)
    with torch.no_grad():
        encoder = model.encoder()
        encoder.blocks[0].mlp.fc1.weight.zero_()  # a copy
    assert model.blocks[0].mlp.fc1.weight.abs().max() > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(qkv_bias=False), r"qkv_bias \(False\) must be True"),
        (dict(depth=3), r"depth \(3\) must be 2"),
        (dict(depth=1), r"depth \(1\) must be 2"),
        (dict(num_heads=4), r"num_heads \(4\) must be 3"),
        (dict(init_values=0.1), r"4 untrained tensors \['blocks.0.ls1.gamma'"),
        (dict(class_token=False, global_pool="avg"), r"not use 1 trained ones \['cls_token'\]"),
    ],
)
def test_an_encoder_that_was_not_trained_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small().encoder(**options)


def test_the_encoder_has_the_dtype_that_is_wanted():
    model = MaskedAutoencoder(**SMALL)
    assert model.encoder().cls_token.dtype == torch.float32
    assert model.double().encoder().cls_token.dtype == torch.float64
    half = model.encoder(dtype=torch.bfloat16, depth=2)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    close(half.cls_token, model.cls_token.bfloat16(), 0)


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes(name):
    model = create_model(name, device="meta")
    found = [(p.numel(), p.requires_grad) for p in model.parameters()]
    assert (sum(n for n, _ in found), sum(n for n, grad in found if grad)) == COUNTS[name]
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"pos_embed", "decoder_pos_embed"}
    with torch.device("meta"):
        theirs = timm.create_model(f"vit_{name[8:]}_224.mae", num_classes=0).state_dict()
        encoder = model.encoder().state_dict()
    assert {k: x.shape for k, x in theirs.items()} == {k: x.shape for k, x in encoder.items()}
    keys = list(model.state_dict())
    assert keys[:4] == ["cls_token", "pos_embed", "mask_token", "decoder_pos_embed"]
    assert {key.split(".")[0] for key in keys} == {
        *("cls_token", "pos_embed", "mask_token", "decoder_pos_embed", "patch_embed", "blocks"),
        *("norm", "decoder_embed", "decoder_blocks", "decoder_norm", "decoder_pred"),
    }


def test_transformers_model_from_a_config_has_no_positions():
    config = transformers.ViTMAEConfig(
        **dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, image_size=32),
        **dict(intermediate_size=96, patch_size=8, decoder_hidden_size=20),
        **dict(decoder_num_hidden_layers=1, decoder_num_attention_heads=5),
    )
    theirs = transformers.ViTMAEForPreTraining(config)
    positions = [
        p for key, p in theirs.named_parameters() if "position" in key or "pos_" in key
    ]
    assert len(positions) == 2 and all(p.abs().max() == 0 for p in positions)


# --- properties -------------------------------------------------------------------------------


@given(
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    p=st.integers(1, 4),
    q=st.integers(1, 3),
    chans=st.integers(1, 4),
)
@settings(max_examples=30, deadline=None)
def test_patches_put_together_are_the_image(height, width, p, q, chans):
    x = images(2, (height * p, width * q), chans)
    patches = patchify(x, (p, q))
    assert patches.shape == (2, height * width, p * q * chans)
    assert torch.equal(unpatchify(patches, (height, width), (p, q)), x)
    last = x[:, :, -p:, -q:].permute(0, 2, 3, 1).flatten(1)  # rows, columns, channels
    assert torch.equal(patches[:, -1], last)


@given(count=st.integers(2, 120), hundredths=st.integers(0, 99), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_given_share_is_masked(count, hundredths, seed):
    noise = torch.rand(3, count, generator=torch.Generator().manual_seed(seed))
    visible = count * (100 - hundredths) // 100  # exactly
    if visible == 0:
        with pytest.raises(ValueError, match=r"mask_ratio \(0\.\d+\) masks all of \d+ patches"):
            random_masking(noise, hundredths / 100)
        return
    keep, masked = random_masking(noise, hundredths / 100)
    assert keep.shape == (3, visible) and (~masked).sum(1).tolist() == [visible] * 3
    assert masked.dtype == torch.bool and not masked.gather(1, keep).any()
    again = random_masking(noise, hundredths / 100)
    assert torch.equal(keep, again[0]) and torch.equal(masked, again[1])
    largest_kept = noise.gather(1, keep).max(1, keepdim=True).values
    assert (noise[~masked].view(3, -1) <= largest_kept).all()
    assert ((noise > largest_kept) == masked).all()


def test_nothing_masked_and_no_images_cost_nothing():
    model, x = small(), images()
    prediction = torch.randn(2, 16, 192, requires_grad=True)
    loss = model.forward_loss(x, prediction, torch.zeros(2, 16, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and (prediction.grad == 0).all()
    none, noise = x[:0], torch.rand(0, 16)
    assert model(none, noise=noise).loss == 0
    assert patchify(none, 8).shape == (0, 16, 192)
    assert unpatchify(patchify(none, 8), (4, 4), 8).shape == none.shape


@pytest.mark.parametrize("options", [{}, dict(norm_pix_loss=True, patch_size=(4, 8))])
def test_the_lean_loss_is_the_loss(options):
    model, x = small(**options), images()
    noise = torch.rand(2, model.patch_embed.num_patches)
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = model(x, 0.6, noise).loss
    lean = mae.page.lean_loss(model, x, noise, 0.6)
    close(lean, loss)
    for found, wanted in zip(
        torch.autograd.grad(lean, trained), torch.autograd.grad(loss, trained)
    ):
        close(found, wanted)


def test_all_subsets_are_drawn_alike():
    torch.manual_seed(0)
    _, masked = random_masking(torch.rand(60_000, 6), 0.6)  # 2 of 6 stay
    found = Counter((masked.float() @ 2.0 ** torch.arange(6)).int().tolist())
    assert len(found) == 15
    expected = 60_000 / 15
    assert sum((n - expected) ** 2 / expected for n in found.values()) < 36.1  # 0.1% at 14


def test_no_patch_is_lost_to_rounding():
    for count, rate, visible in (100, 0.9, 10), (100, 0.8, 20), (196, 0.75, 49), (10, 0.7, 3):
        assert random_masking(torch.rand(1, count), rate)[0].shape == (1, visible)


@pytest.mark.parametrize("chans, size", [(1, (16, 40)), (5, (24, 8))])
def test_rectangles_and_any_channels(chans, size):
    model = small(img_size=size, in_chans=chans, patch_size=(4, 8))
    x = images(2, size, chans)
    loss, prediction, masked = model(x, 0.5)
    grid = size[0] // 4, size[1] // 8
    count = grid[0] * grid[1]
    assert prediction.shape == (2, count, 32 * chans) and masked.shape == (2, count)
    error = (unpatchify(prediction, grid, (4, 8)) - x).square()
    pixels = masked.view(2, 1, *grid).repeat_interleave(4, 2).repeat_interleave(8, 3)
    close(loss, (error * pixels).sum() / (pixels.sum() * chans))
    assert model.encoder()(x).shape == (2, 24)


def test_normalized_patches_forget_contrast_and_brightness():
    x = patchify(images(), 8)
    close(normalize_patches(x), normalize_patches(3 * x + 2), 1e-4)
    n, variance = x.shape[-1], x.var(-1)
    wanted = (n - 1) / n * variance / (variance + 1e-6)  # what it costs to predict 0
    close(normalize_patches(x).square().mean(-1), wanted)
    assert normalize_patches(torch.ones(1, 1, 4)).abs().max() == 0


def test_masked_patches_are_not_seen():
    model, x, noise = small(), images(), torch.rand(2, 16)
    _, prediction, masked = model(x, noise=noise)
    pixels = mae.page.masked_pixels(masked, (4, 4), 8)
    other = torch.where(pixels, torch.randn_like(x), x)
    close(model(other, noise=noise).prediction, prediction, 1e-12)
    x.requires_grad_()
    model(x, noise=noise).prediction.square().sum().backward()
    assert x.grad[pixels.expand_as(x)].abs().max() == 0 < x.grad.abs().max()


def test_without_positions_all_masked_patches_are_the_same():
    model = small()
    model.decoder_pos_embed.data.zero_()
    _, prediction, masked = model(images(), noise=torch.rand(2, 16))
    same = prediction[masked].view(2, 12, -1)
    close(same, same[:, :1].expand_as(same), 1e-12)


def test_what_a_model_returns_has_names():
    model, x, noise = small(), images(), torch.rand(2, 16)
    output = model(x, noise=noise)
    assert isinstance(output, MaskedAutoencoderOutput)
    assert output.masked.dtype == torch.bool and output.masked.sum(1).tolist() == [12, 12]
    loss = model.forward_loss(x, output.prediction, output.masked)
    assert loss == output.loss == output[0]
    with pytest.warns(DeprecationWarning, match="mask of .*forward_loss is called masked"):
        assert model.forward_loss(x, output.prediction, mask=output.masked) == loss


def test_bfloat16_and_autocast():
    model, x = small().float(), images().float()
    noise = torch.rand(2, 16)
    wanted = model(x, noise=noise).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x, noise=noise).loss.item() == pytest.approx(wanted, rel=0.05)
    half = model.bfloat16()(x.bfloat16(), noise=noise)
    assert half.prediction.dtype == torch.bfloat16
    assert half.loss.item() == pytest.approx(wanted, rel=0.05)


def test_it_learns():
    torch.manual_seed(0)
    x = hidden.digit_parts()["train"][0][:256]
    model = MaskedAutoencoder(**mae.SHAPE, **mae.DECODER)
    history = fit(
        model,
        shuffled_batches(x, batch_size=64),
        loss_fn=masked_loss,
        **dict(steps=60, lr=3e-3, warmup=5, log_every=20),
    )
    assert history[-1]["loss"] < 0.8 < history[0]["loss"]
    assert torch.equal(model.pos_embed, MaskedAutoencoder(**mae.SHAPE, **mae.DECODER).pos_embed)


# --- what fills without learning --------------------------------------------------------------


def test_a_harmonic_surface_is_found():
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(16.0), indexing="ij")
    plane = (2 * x - 3 * y)[None, None].double()
    gone = torch.zeros(1, 1, 12, 16, dtype=torch.bool)
    gone[..., 3:8, 4:12] = True  # not at the border
    close(mae.page.harmonic_fill(plane.masked_fill(gone, 9.0), gone), plane, 1e-8)
    gone[..., :] = torch.rand(12, 16) < 0.8
    z = torch.randn(1, 2, 12, 16).double()
    filled = mae.page.harmonic_fill(z, gone)
    padded = nn.functional.pad(filled, (1, 1, 1, 1), "replicate")
    flat = sum(padded.roll(s, a) for a in (2, 3) for s in (1, -1))[..., 1:-1, 1:-1] - 4 * filled
    assert (flat * gone).abs().max() < 1e-8 < (flat * ~gone).abs().max()
    assert torch.equal(filled[~gone.expand_as(z)], z[~gone.expand_as(z)])


def test_the_linear_prediction_is_a_regression():
    torch.manual_seed(0)
    train, x = torch.randn(300, 1, 2, 3).double(), torch.randn(4, 1, 2, 3).double()
    train[:, 0, 1] += train[:, 0, 0]
    gone = torch.tensor([[False, True, False], [True, False, False]])[None, None].expand(
        4, 1, 2, 3
    )
    filled = mae.page.linear_fill(x, train, gone, ridge=0.0)
    seen, hidden_part = ~gone[0].flatten(), gone[0].flatten()
    a = train.flatten(1)
    design = torch.cat([torch.ones(300, 1), a[:, seen]], 1)
    weights = torch.linalg.lstsq(design, a[:, hidden_part]).solution
    b = x.flatten(1)
    wanted = torch.cat([torch.ones(4, 1), b[:, seen]], 1) @ weights
    close(filled.flatten(1)[:, hidden_part], wanted, 1e-8)
    assert torch.equal(filled[~gone], x[~gone])


def test_the_kernels_weights_are_those_of_the_distance():
    torch.manual_seed(0)
    train, x = torch.randn(20, 1, 2, 3).double(), torch.randn(4, 1, 2, 3).double()
    gone = torch.rand(4, 1, 2, 3) < 0.5
    filled = mae.page.kernel_fill(x, train, gone, 0.7)
    for one, other, own in zip(x, filled, gone):
        distance = ((train - one).square() * ~own).sum((1, 2, 3))
        weights = (-distance / (2 * 0.7**2)).softmax(0)
        mean = (weights[:, None, None, None] * train).sum(0)
        close(other, torch.where(own, mean, one))


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_out_of_range(rate):
    with pytest.raises(ValueError, match=rf"mask_ratio \({rate}\)"):
        small()(images(), rate)


def test_what_does_not_fit():
    model = small()
    with pytest.raises(ValueError, match=r"mask_ratio \(0.99\) masks all of 16 patches; at le"):
        model(images(), 0.99)
    with pytest.raises(ValueError, match=r"mask_ratio \(0.0\) masks none of 16 patches"):
        model(images(), 0.0)
    for shape in (2, 15), (3, 16), (2, 16, 1):
        with pytest.raises(ValueError, match=re.escape(f"noise of shape {shape} must have")):
            model(images(), noise=torch.rand(shape))
    with pytest.raises(ValueError, match=r"x of shape \(2, 3, 24, 32\)"):
        model(images(size=(24, 32)))
    with pytest.raises(ValueError, match=r"patch_size \(8, 8\)"):
        MaskedAutoencoder(**SMALL | dict(img_size=(32, 30)))
    with pytest.raises(ValueError, match=r"patch_size \(5, 5\)"):
        patchify(images(), 5)
    with pytest.raises(ValueError, match=r"dim \(22\)"):
        MaskedAutoencoder(**SMALL | dict(decoder_embed_dim=22))
    with pytest.raises(ValueError, match="num_heads"):
        MaskedAutoencoder(**SMALL | dict(decoder_num_heads=3))
    with pytest.raises(ValueError, match=r"patches of shape \(1, 2, 1\)"):
        normalize_patches(torch.ones(1, 2, 1))


# --- the experiments --------------------------------------------------------------------------


def test_pieces_are_repeatable_and_of_their_split():
    for split in ("train", "test"):
        x = mae.page.photo_crops(20, split, 32, seed=3)
        assert x.shape == (20, 3, 32, 32) and 0 <= x.min() and x.max() <= 1
        assert torch.equal(x[:5], mae.page.photo_crops(5, split, 32, seed=3))
    assert not torch.equal(x, mae.page.photo_crops(20, "train", 32, seed=3))


def test_the_parts_of_the_digits():
    parts = hidden.digit_parts()
    assert [len(parts[name][0]) for name in ("train", "valid", "test")] == [1200, 237, 360]
    x = parts["train"][0]
    assert abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-3
    whole = torch.cat([images for images, _ in parts.values()]).flatten(1)
    assert len(whole.unique(dim=0)) == 1797
    for count in (20, 50, 100):
        known, labels = hidden.few(parts["train"], count, 1)
        assert labels.bincount().tolist() == [count // 10] * 10
        assert torch.equal(known[:20], hidden.few(parts["train"], 20, 1)[0])
    assert len(hidden.few(parts["train"], 1200, 1)[0]) == 1200


def test_a_probe_and_a_fine_tuned_model():
    parts = hidden.digit_parts()
    found = hidden.probe(lambda x: x.flatten(1).numpy(), parts, 100, 0)
    assert found["C"] in hidden.STRENGTHS and 0.8 < found["test"] < 0.95
    options = dict(num_classes=10, global_pool="avg")
    found = hidden.fine_tuned(
        lambda: VisionTransformer(**mae.SHAPE, **options), parts, 20, 0, 5, 1e-3, 1.0
    )
    assert set(found) == {"valid", "test", "seconds"} and 0 <= found["test"] < 0.6
    assert hidden.more_steps(300, 10.0, 100.0) == 3300
    entries = {1: 0.5, 2: 0.8, 3: 0.8}
    best, runs = tune(
        lambda lr, seed: dict(valid=entries[lr], seed=seed),
        rates=(1, 2, 3),
        seeds=(0, 1, 2),
        score=lambda run: run["valid"],
    )
    assert best == 2 and [run["seed"] for run in runs] == [0, 1, 2]


def test_a_tiny_record(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mae", "digits", "--tiny", "--out", str(tmp_path)])
    mae.main()
    record = json.loads((tmp_path / "mae.json").read_text())
    assert {run["variant"] for run in record["runs"]} == {"long"}
    assert {run["filler"] for run in record["fillers"]} == {
        *("harmonic", "mean image", "linear", "kernel")
    }
    assert {run["contestant"] for run in record["probes"]} == {"raw pixels", "untrained", "MAE"}
    steps = {(run["contestant"], run["steps"]) for run in record["tuning"]}
    assert steps == {("MAE", 3), ("from scratch", 3), ("from scratch", 6)}
    model = MaskedAutoencoder(**mae.SHAPE, **mae.DECODER)
    load_pretrained(model, tmp_path / "mae_digits.safetensors")
    before = (tmp_path / "mae.json").read_text()
    mae.main()  # nothing is left to do
    assert (tmp_path / "mae.json").read_text() == before


@pytest.mark.slow
def test_tiny_sweeps(tmp_path, monkeypatch):
    command = ["mae", "sweeps", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    mae.main()
    record = json.loads((tmp_path / "mae_sweeps.json").read_text())
    assert {run["variant"] for run in record["runs"]} == set(mae.VARIANTS)
    for run in record["runs"]:
        assert (run["error"] is None) == (run["variant"] == "normalized")
        assert all(0 <= found["test"] <= 1 for found in run["probes"].values())


def test_tiny_photographs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mae", "photographs", "--tiny", "--out", str(tmp_path)])
    mae.main()
    model = create_model("mae_photographs", tmp_path / "mae_photographs.safetensors")
    assert model(torch.rand(2, 3, 64, 64)).prediction.shape == (2, 64, 192)
    record = json.loads((tmp_path / "mae_photographs.json").read_text())
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    fillers = {"masked autoencoder", "mean color", "harmonic"}
    assert all(set(run["test"]) == fillers for run in record["runs"])


def test_tiny_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["mae", "speed", "--tiny", "--repeats", "2", "--out", str(tmp_path)]
    )
    mae.main()
    record = json.loads((tmp_path / "mae_speed_cpu.json").read_text())
    assert all(row["ratio"] > 0 for row in record["rows"])


def test_pre_training_for_a_gpu(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, 32, 32, generator=generator)
    y = torch.arange(40) % 10
    monkeypatch.setattr(mae, "small_images", lambda name: ((x, y), (x[:10], y[:10])))
    found = mae.cifar(tmp_path, tiny=True)
    assert found["history"][-1]["step"] == 2 and 0 <= found["probe"]["test"] <= 1


# --- the records, as the page tells them ------------------------------------------------------


def test_the_stored_weights_give_the_recorded_error():
    record = read_record("mae_photographs")
    assert find_records()["mae_photographs"].with_suffix(".safetensors").stat().st_size < 2e6
    model = create_model("mae_photographs", pretrained=True)
    test = mae.normalize_for(mae.page.photo_crops(100, "test", seed=1), "mae_photographs")
    found = mae.errors(model, test)
    for name, errors in record["runs"][0]["test"].items():
        np.testing.assert_allclose(found[name], errors, rtol=0.2)


def test_the_digits_weights_give_the_recorded_error():
    model = MaskedAutoencoder(**mae.SHAPE, **mae.DECODER)
    load_pretrained(model, "attnlib/mae_digits")
    found = mae.masked_error(model, hidden.digit_parts()["test"][0])
    runs = [r for r in read_record("mae")["runs"] if r["variant"] == "long" and r["seed"] == 0]
    assert found == pytest.approx(runs[0]["error"], abs=2e-3)


def mean(entries, key="test", **what):
    found = [e[key] for e in entries if all(e[k] == v for k, v in what.items())]
    assert len(found) == 3
    return sum(found) / 3


def test_the_experiment_says_what_the_page_says():
    record = read_record("mae")
    runs, probes, fillers = record["runs"], record["probes"], record["fillers"]
    (linear,) = (f["error"] for f in fillers if f["filler"] == "linear")
    assert mean(runs, "error", variant="long") < 0.30 < linear
    pixels, ours = (
        {n: mean(probes, contestant=c, labels=n) for n in (20, 100)}
        for c in ("raw pixels", "MAE")
    )
    assert ours[20] > pixels[20] + 0.08 and ours[100] > pixels[100]
