"""Masks, their losses, the label map and its quality: those of transformers and of others."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.detection import panoptic_quality as metrics_quality
from transformers import DetrConfig, DetrForSegmentation
from transformers.loss import loss_for_object_detection as peer

from attnlib.detr import DETR, HungarianMatcher
from attnlib.models import create_model, load_pretrained
from attnlib.panoptic import (
    AttentionMaps,
    MaskHead,
    PanopticDETR,
    confident_queries,
    cut_padding,
    dice_loss,
    focal_loss,
    mask_loss,
    matched_queries,
    panoptic_postprocess,
    panoptic_quality,
)
from helpers import close, images

SMALL = dict(embed_dim=128, num_heads=8, dim_feedforward=32, num_queries=5, dropout=0.0)
LAYERS = dict(num_encoder_layers=1, num_decoder_layers=2)
DEPTHS = dict(  # transformers' names of the same
    **dict(d_model=128, encoder_attention_heads=8, decoder_attention_heads=8, num_queries=5),
    **dict(encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layers=1, decoder_layers=2),
)


def randomized(model, seed=0):
    """The same model; its norms, their statistics and its biases are not one and zero."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if "running_var" in name:
                x.uniform_(0.5, 1.5)
            elif x.ndim == 1:
                x.add_(0.1 * torch.randn_like(x))
    return model.eval()


def theirs(**options):
    backbone = dict(
        **dict(model_type="timm_backbone", backbone="resnet18", num_channels=3),
        **dict(features_only=True, use_pretrained_backbone=False, out_indices=[1, 2, 3, 4]),
    )
    options = DEPTHS | dict(num_labels=6, dropout=0.0) | options
    return DetrForSegmentation(DetrConfig(backbone_config=backbone, **options))


def ours(**options):
    detr = DETR(6, backbone="resnet18", **SMALL | LAYERS)
    return PanopticDETR(detr, **dict(joint_softmax=True) | options)


@pytest.fixture(scope="module")
def pair():
    """A small model with a ResNet-18 and transformers' with the same random weights."""
    other = randomized(theirs())
    model = ours().eval()
    assert load_pretrained(model, other.state_dict()) == []
    return model, other


# --- the model --------------------------------------------------------------------------------


def test_masks_are_those_of_transformers(pair):
    model, other = (m.float() for m in pair)
    x = images(2, (70, 100)).float()
    with torch.no_grad():
        found, wanted = model(x), other(x)
    close(found.masks, wanted.pred_masks, 1e-5)
    close(found.boxes, wanted.pred_boxes, 1e-5)
    model, other = (m.double() for m in pair)
    found, wanted = model(x.double()), other(x.double())
    close(found.logits, wanted.logits)
    close(found.masks, wanted.pred_masks)
    weight = torch.randn_like(found.masks)
    for masks in found.masks, wanted.pred_masks:
        (masks * weight).sum().backward()
    grads = {key: p.grad for key, p in other.named_parameters() if p.grad is not None}
    again = ours().double()
    missing = {k: torch.zeros_like(x) for k, x in other.state_dict().items() if k not in grads}
    load_pretrained(again, grads | missing)
    trained = [key for key, p in model.named_parameters() if p.grad is not None]
    assert {key.split(".")[0] for key in trained} == {"detr", "bbox_attention", "mask_head"}
    for key in trained:
        close(model.get_parameter(key).grad, again.get_parameter(key).data, 1e-8)


def test_masks_of_a_padded_batch(pair):
    model, other = (m.double() for m in pair)
    x, mask = images(2, (64, 96)), torch.ones(2, 64, 96, dtype=torch.bool)
    mask[1, 40:] = False
    mask[1, :, 70:] = False
    x = x * mask[:, None]
    with torch.no_grad():
        close(model(x, mask).masks, other(x, mask.long()).pred_masks)


def test_chosen_masks_are_the_same(pair):
    model, x = pair[0].double(), images(2, 64)
    chosen = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    with torch.no_grad():
        every, some = model(x).masks, model(x, choose=lambda found: chosen).masks
        none = model(x, choose=lambda found: torch.zeros_like(chosen)).masks
    close(some[chosen], every[chosen])
    assert some[~chosen].isneginf().all() and none.isneginf().all()
    assert none.shape == every.shape


def authors_keys(state_dict):
    """The names of models/segmentation.py for ours, written out by hand."""
    found = {}
    for key, x in state_dict.items():
        module, *rest = key.split(".")
        if module == "mask_head" and rest[0] in ("layers", "norms", "adapters"):
            name = dict(layers="lay", norms="gn", adapters="adapter")[rest[0]]
            key = f"mask_head.{name}{int(rest[1]) + 1}.{rest[2]}"
        key = key.replace("mask_head.output", "mask_head.out_lay")
        key = key.replace("detr.backbone.", "detr.backbone.0.body.")
        for one in "encoder", "decoder":
            key = key.replace(f"detr.{one}.", f"detr.transformer.{one}.layers.")
        key = key.replace("detr.norm.", "detr.transformer.decoder.norm.")
        if key.startswith("detr.bbox_embed"):
            key = f"detr.bbox_embed.layers.{int(rest[1]) // 2}.{rest[2]}"
        found[key] = x
    return found


def test_the_authors_files(pair):
    model = pair[0].float()
    source = authors_keys(model.state_dict())
    assert "mask_head.lay5.weight" in source and "mask_head.adapter3.bias" in source
    again = ours().eval()
    assert load_pretrained(again, {"model": source}) == []
    x = images(1, 64).float()
    with torch.no_grad():
        assert torch.equal(model(x).masks, again(x).masks)


def test_older_names_of_transformers(pair):
    old = {
        key.replace("backbone.model.", "backbone.conv_encoder.model.")
        .replace(".o_proj.", ".out_proj.")
        .replace(".mlp.fc", ".fc")
        .replace("mask_head.conv1.conv.", "mask_head.lay1.")
        .replace("mask_head.conv1.norm.", "mask_head.gn1.")
        .replace("mask_head.fpn_stages.2.refine.norm.", "mask_head.gn5.")
        .replace("bbox_attention.q_proj.", "bbox_attention.q_linear."): x
        for key, x in pair[1].float().state_dict().items()
    }
    again = ours().eval()
    assert load_pretrained(again, old) == []
    for a, b in zip(again.parameters(), pair[0].float().parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name, count, trained, keys",
    [
        ("detr_resnet50_panoptic", 42_899_288, 42_676_888, 490),
        ("detr_resnet50_dc5_panoptic", 42_899_288, 42_676_888, 490),
        ("detr_resnet101_panoptic", 61_839_192, 61_616_792, 745),
    ],
)
def test_parameters(name, count, trained, keys):
    with torch.device("meta"):
        model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
    assert len(model.state_dict()) == keys
    head = sum(p.numel() for p in model.mask_head.parameters())
    maps = sum(p.numel() for p in model.bbox_attention.parameters())
    assert (head, maps) == (1_202_073, 131_584)
    assert model.bbox_attention.joint_softmax


def test_maps_are_weights():
    torch.manual_seed(0)
    queries, memory = torch.randn(2, 5, 16), torch.randn(2, 16, 3, 4)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    for joint, total in (False, 4.0), (True, 1.0):
        maps = AttentionMaps(16, 4, joint)(queries, memory, mask)
        assert maps.shape == (2, 5, 4, 3, 4) and (maps[1, :, :, 2:] == 0).all()
        close(maps.sum((2, 3, 4)), torch.full((2, 5), total), 1e-5)


def test_a_frozen_detector_gets_no_gradient():
    model = ours()
    model.detr.requires_grad_(False)
    model(images(1, 64).float()).masks.sum().backward()
    assert all(p.grad is None for p in model.detr.parameters())
    assert all(p.grad is not None for p in model.mask_head.parameters())


# --- losses -----------------------------------------------------------------------------------


def some_masks(n=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 6, 7, dtype=torch.float64, generator=generator)
    return logits, (torch.rand(n, 6, 7, generator=generator) < 0.4).double()


@pytest.mark.parametrize("alpha, gamma", [(0.25, 2.0), (0.7, 0.0), (0.5, 3.0)])
def test_losses_are_those_of_transformers(alpha, gamma):
    logits, targets = some_masks()
    logits.requires_grad_()
    for mine, other in (
        (dice_loss, peer.dice_loss),
        (
            partial(focal_loss, alpha=alpha, gamma=gamma),
            partial(peer.sigmoid_focal_loss, alpha=alpha, gamma=gamma),
        ),
    ):
        found, wanted = (
            mine(logits, targets).sum() / 3,
            other(logits.flatten(1), targets.flatten(1), 3),
        )
        close(found, wanted)
        close(*(torch.autograd.grad(x, logits)[0] for x in (found, wanted)))


def test_the_loss_of_a_batch_is_that_of_transformers():
    torch.manual_seed(0)
    masks, logits = torch.randn(2, 5, 4, 5).double(), torch.randn(2, 5, 7).double()
    boxes = torch.rand(2, 5, 4).double() / 4 + 0.3
    targets = [
        dict(labels=torch.tensor([1, 4]), boxes=torch.rand(2, 4).double() / 4 + 0.3),
        dict(labels=torch.tensor([2]), boxes=torch.rand(1, 4).double() / 4 + 0.3),
    ]
    for target in targets:
        target["masks"] = (torch.rand(len(target["labels"]), 9, 11) < 0.5).double()
    matched = HungarianMatcher()(logits[None], boxes[None], targets)[0]
    criterion = peer.ImageLoss(None, 6, 0.1, ["masks"])
    wanted = criterion.loss_masks({"pred_masks": masks}, targets, matched, 3)
    found = mask_loss(masks, targets, matched)
    close(found["mask"], wanted["loss_mask"])
    close(found["dice"], wanted["loss_dice"])
    chosen = matched_queries(matched, logits)
    assert chosen.sum(1).tolist() == [2, 1]
    unseen = masks.masked_fill(~chosen[..., None, None], -torch.inf)
    assert mask_loss(unseen, targets, matched) == found


def test_losses_in_half_precision():
    """300 x 300 pixels of one mask: their number is not in the range of float16."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 300, 300)).half()
    targets = torch.ones(2, 300, 300)
    targets[1, 150:] = 0
    exact = logits.double()
    for loss in dice_loss, focal_loss:
        found = loss(logits, targets.half())
        assert found.dtype == torch.float32
        close(found.double(), loss(exact, targets.double()), 1e-5)
        close(loss(logits, targets.bool()), found, 1e-7)
    objects = [dict(labels=torch.zeros(2).long(), masks=targets)]
    matched = [(torch.arange(2), torch.arange(2))]
    found, wanted = (mask_loss(x[None], objects, matched) for x in (logits, exact))
    for key in wanted:
        close(found[key].double(), wanted[key], 1e-5)


def test_no_objects_no_loss():
    empty = [dict(labels=torch.zeros(0).long(), masks=torch.zeros(0, 8, 8))] * 2
    masks = torch.randn(2, 3, 4, 4, requires_grad=True)
    none = (torch.zeros(0, dtype=torch.long),) * 2
    terms = mask_loss(masks, empty, [none, none])
    assert terms == {"mask": 0.0, "dice": 0.0}
    sum(terms.values()).backward()


# --- the label map ----------------------------------------------------------------------------


def sky():
    """Two half masks of one sky (class 1), over them a thing (class 0) of six pixels."""
    masks = torch.full((3, 12, 12), -5.0)
    masks[0, :, :6], masks[1, :, 6:] = 5.0, 5.0
    masks[2, 4:6, 4:7] = 9.0
    logits = torch.zeros(3, 3)
    logits[[0, 1, 2], [1, 1, 0]] = 9.0
    return logits, masks


def test_stuff_is_one_segment():
    segments, infos = panoptic_postprocess(*sky(), things={0})
    assert [(i["id"], i["category_id"], i["isthing"], i["area"]) for i in infos] == [
        (1, 1, False, 138),
        (2, 0, True, 6),
    ]
    assert segments.unique().tolist() == [1, 2] and (segments == 2).sum() == 6
    two = panoptic_postprocess(*sky(), things={0, 1})[1]  # and things are not joined
    assert [i["area"] for i in two] == [68, 70, 6]


def test_small_segments_go_and_leave_their_pixels():
    logits, masks = sky()
    segments, infos = panoptic_postprocess(logits, masks, things={0}, smallest=6)
    assert len(infos) == 1 and (segments == 1).all()
    segments, infos = panoptic_postprocess(logits, masks, things={0}, smallest=144)
    assert infos == [] and (segments == 0).all() and segments.shape == (12, 12)


def in_a_padded_batch():
    """An image of 40 x 60 pixels, padded to 64 x 96, with masks of 16 x 24 places: one thing on
    the left 32 columns, another on the other 28, a third on the padding."""
    masks = torch.full((3, 16, 24), -9.0)
    masks[0, :10, :8] = masks[1, :10, 8:15] = 9.0
    masks[2, 10:] = masks[2, :, 15:] = 9.0
    mask = torch.zeros(64, 96, dtype=torch.bool)
    mask[:40, :60] = True
    return 9 * torch.eye(3, 4), masks, mask


def test_padding_is_not_stretched_into_the_image():
    logits, masks, mask = in_a_padded_batch()
    stretched = panoptic_postprocess(logits, masks, {0, 1, 2}, (40, 60))[1]
    assert [info["area"] for info in stretched] == [500, 444, 1456]  # the padding is the third
    for size in (40, 60), None:
        segments, infos = panoptic_postprocess(logits, masks, {0, 1, 2}, size, mask=mask)
        assert [info["area"] for info in infos] == [1280, 1120]
        assert (segments[:, :32] == 1).all() and (segments[:, 32:] == 2).all()
    # PostProcessSegm of the authors' code: to the padded size, cut, to the image's own size
    large = F.interpolate(masks[None], (64, 96), mode="bilinear")[..., :40, :60]
    wanted = F.interpolate(large, (80, 90), mode="bilinear")[0].argmax(0)
    segments, _ = panoptic_postprocess(logits, masks, {0, 1, 2}, (80, 90), mask=mask)
    assert torch.equal(segments, wanted + 1)
    none, infos = panoptic_postprocess(0 * logits, masks, {0}, mask=mask)
    assert infos == [] and none.shape == (40, 60)


def test_cut_maps_line_up_with_the_image():
    """A map that is linear in the row and column is the same function of the image's pixels."""
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(24.0), indexing="ij")
    maps = torch.stack([row, column])
    mask = torch.zeros(64, 96, dtype=torch.bool)
    mask[8:40, 4:60] = True
    found = cut_padding(maps, mask)
    row, column = torch.meshgrid(torch.arange(8, 40), torch.arange(4, 60), indexing="ij")
    close(found, (torch.stack([row, column]) + 0.5) / 4 - 0.5, 1e-5)


def test_nothing_found_is_legal():
    logits, masks = sky()
    for size in None, (20, 30):
        segments, infos = panoptic_postprocess(0 * logits, masks, {0}, size)
        assert infos == [] and segments.shape == (size or (12, 12)) and (segments == 0).all()
    truth = torch.ones(12, 12, dtype=torch.long), [dict(id=1, category_id=1)]
    assert panoptic_quality([(segments[:12, :12], [])], [truth])["all"]["pq"] == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_segments_and_infos_agree(seed):
    torch.manual_seed(seed)
    logits, masks = 6 * torch.randn(8, 5), torch.randn(8, 5, 6)
    segments, infos = panoptic_postprocess(
        logits, masks, {0, 1}, (9, 11), threshold=0.5, smallest=6
    )
    numbers, areas = segments.unique(return_counts=True)
    if infos:
        assert [i["id"] for i in infos] == numbers.tolist() == list(range(1, len(infos) + 1))
        assert [i["area"] for i in infos] == areas.tolist() and areas.min() > 6
        stuff = [i["category_id"] for i in infos if not i["isthing"]]
        assert len(stuff) == len(set(stuff))
        assert all(i["score"] > 0.5 for i in infos)
    order = torch.randperm(8)  # the order of the queries changes numbers only
    again, others = panoptic_postprocess(logits[order], masks[order], {0, 1}, (9, 11), 0.5, 6)
    kind = torch.tensor([-1] + [i["category_id"] for i in infos])
    other_kind = torch.tensor([-1] + [i["category_id"] for i in others])
    assert torch.equal(kind[segments], other_kind[again])


# --- panoptic quality -------------------------------------------------------------------------


def worked():
    """Stuff (class 1), two things (class 0) and five void pixels; the chapter's example."""
    truth, said = torch.zeros(10, 10).long(), torch.zeros(10, 10).long()
    truth[:5], truth[5:, :5], truth[5:, 5:9] = 1, 2, 3
    said[:6], said[6:, :5], said[6:, 5:7], said[6:, 7:] = 1, 2, 3, 4
    infos = [dict(id=i, category_id=int(i == 1)) for i in (1, 2, 3, 4)]
    return (said, infos), (truth, infos[:3])


def test_the_worked_example():
    found = panoptic_quality(*([one] for one in worked()), things={0})
    wanted = dict(pq=0.5837288, sq=0.8237288, rq=0.7, n=2)  # as panopticapi says
    assert found["all"] == pytest.approx(wanted, abs=1e-6)
    assert found["things"] == pytest.approx(dict(pq=0.32, sq=0.8, rq=0.4, n=1))
    assert found["stuff"]["pq"] == pytest.approx(50 / 59)


def random_map(generator, classes=4):
    """Segments of random classes, the first two of which are stuff, on a 12 × 12 map."""
    coarse = torch.randint(0, 7, (4, 4), generator=generator)
    segments = coarse.repeat_interleave(3, 0).repeat_interleave(3, 1)
    label = torch.randint(0, classes, (7,), generator=generator)
    label[0] = -1
    for c in (0, 1):  # one segment for each stuff class
        rows = (label == c).nonzero()[:, 0].tolist()
        for row in rows[1:]:
            segments[segments == row] = rows[0]
    there = sorted(set(segments.unique().tolist()) - {0})
    return segments, [dict(id=i, category_id=int(label[i])) for i in there], label


@pytest.mark.parametrize("seed", range(20))
def test_quality_is_that_of_torchmetrics(seed):
    """With some truth unknown; torchmetrics also leaves out what a prediction leaves empty."""
    generator = torch.Generator().manual_seed(seed)
    truths, predictions, both = [], [], ([], [])
    for _ in range(3):
        segments, infos, label = random_map(generator)
        some = torch.tensor([i["id"] for i in infos])
        wrong = some[torch.randint(0, len(some), (12, 12), generator=generator)]
        said = torch.where(torch.rand(12, 12, generator=generator) < 0.2, wrong, segments)
        said = torch.where(said == 0, wrong[0, 0], said)
        kept = set(said.unique().tolist())
        truths.append((segments, infos))
        predictions.append((said, [i for i in infos if i["id"] in kept]))
        for found, x in zip(both, (said, segments)):
            found.append(torch.stack([label[x], x], dim=-1))
    wanted = metrics_quality(
        *(torch.stack(x) for x in both),
        **dict(things={2, 3}, stuffs={0, 1}, allow_unknown_preds_category=True),
        **dict(return_sq_and_rq=True),
    )
    found = panoptic_quality(predictions, truths)["all"]
    close(torch.tensor([found[key] for key in ("pq", "sq", "rq")]), wanted.float(), 1e-6)


def patterned(k, n=24):
    """A prediction and a truth with void in both and a crowd, made by rule."""
    i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    truth = (i // 5 * 5 + j // 6 + k) % 9
    said = ((i + k % 3) // 5 * 5 + (j + k // 3) // 6 + k) % 9
    said = torch.where((i * j + k) % 11 == 0, 8 - said, said)

    def infos(x, crowd):
        there = sorted(set(x.unique().tolist()) - {0})
        return [dict(id=s, category_id=(3 * s + k) % 4, iscrowd=s == crowd) for s in there]

    return (said, infos(said, None)), (truth, infos(truth, 4))


def test_quality_is_that_of_panopticapi():
    """Its `pq_compute_single_core` and `pq_average` at commit 7bb4655, on the same maps."""
    found = panoptic_quality(*zip(*map(patterned, range(6))), things={2, 3})
    for name, values in {
        "all": (0.3582280538, 0.6371569838, 0.5643939394, 4),
        "things": (0.3398940275, 0.6209265413, 0.5454545455, 2),
        "stuff": (0.3765620801, 0.6533874263, 0.5833333333, 2),
    }.items():
        assert tuple(found[name].values()) == pytest.approx(values, abs=1e-9)


def test_crowds_and_void_are_ignored():
    truth, said = torch.zeros(6, 6).long(), torch.zeros(6, 6).long()
    truth[:2], truth[2:4] = 1, 2  # a crowd of class 0, a thing of class 0; the rest is void
    said[:2, :5], said[2:4], said[4:, :3] = 5, 6, 7
    infos = [dict(id=1, category_id=0, iscrowd=1), dict(id=2, category_id=0, iscrowd=0)]
    mine = [dict(id=i, category_id=0) for i in (5, 6, 7)]
    found = panoptic_quality([(said, mine)], [(truth, infos)])
    assert found["classes"] == {0: dict(pq=1.0, sq=1.0, rq=1.0)}
    mine[0]["category_id"] = 1  # a crowd of another class is no excuse
    found = panoptic_quality([(said, mine)], [(truth, infos)])
    assert found["classes"][1]["pq"] == 0 and found["all"]["pq"] == 0.5


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_quality_is_a_product_and_at_most_one(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = random_map(generator)[:2], random_map(generator)[:2]
    for row in panoptic_quality([a], [b])["classes"].values():
        assert row["pq"] == pytest.approx(row["sq"] * row["rq"])
        assert 0 <= row["pq"] <= 1 and (row["sq"] == 0 or row["sq"] > 0.5)
    if a[1]:
        assert panoptic_quality([a], [a])["all"]["pq"] == 1
    one, other = panoptic_quality([a], [b])["all"], panoptic_quality([a, b], [b, b])["all"]
    assert other["pq"] >= one["pq"] - 1e-12 or one["n"] != other["n"]


# --- bad input --------------------------------------------------------------------------------

MAP = torch.ones(4, 4).long()
ONE = (MAP, [dict(id=1, category_id=0)])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: MaskHead(64, 8, [32, 16], 16), r"num_groups \(16\) must divide every width"),
        (
            lambda: confident_queries(torch.zeros(3, 4), 1.5),
            r"threshold \(1.5\) must be in \[0, 1\)",
        ),
        (
            lambda: panoptic_postprocess(torch.zeros(3, 4), torch.zeros(2, 4, 4), {0}),
            r"\(3, 4\) and masks \(2",
        ),
        (
            lambda: panoptic_postprocess(torch.zeros(1, 3, 4), torch.zeros(3, 4, 4), {0}),
            "one image, the same",
        ),
        (
            lambda: panoptic_postprocess(*sky(), {0}, mask=torch.ones(12, 12)),
            r"mask of dtype torch.float32 and shape \(12, 12\) must be torch.bool and \(H, W\)",
        ),
        (
            lambda: panoptic_postprocess(*sky(), {0}, mask=torch.eye(12).bool()),
            r"mask is True at 12 pixels of \(12, 12\); it must be True in one rectangle",
        ),
        (
            lambda: panoptic_postprocess(*sky(), {0}, mask=torch.zeros(12, 12).bool()),
            "mask is True at 0 pixels",
        ),
        (
            lambda: panoptic_postprocess(
                9 * torch.eye(2, 3), torch.full((2, 4, 4), -torch.inf), {0}
            ),
            "masks of queries above the threshold are -inf",
        ),
        (lambda: panoptic_quality([ONE], []), r"predictions \(1\) must be as many as truths"),
        (
            lambda: panoptic_quality([ONE], [(MAP[:2], ONE[1])]),
            r"map \(4, 4\) where truths has \(2, 4\)",
        ),
        (
            lambda: panoptic_quality([(MAP, [])], [ONE]),
            r"prediction: the map has the segments \[",
        ),
        (
            lambda: panoptic_quality([ONE], [(MAP, 2 * ONE[1])]),
            "truth: the map has .* each once",
        ),
        (
            lambda: panoptic_quality([(-MAP, [dict(id=-1, category_id=0)])], [ONE]),
            "and positive",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_masks_are_named():
    masks, matched = torch.zeros(1, 3, 4, 4), [(torch.tensor([0]), torch.tensor([0]))]
    label = torch.tensor([1])
    for wrong, message in (
        (dict(labels=label), r"targets\[0\]\['masks'\] of shape \(\) must be \(1, H, W\)"),
        (
            dict(labels=label, masks=torch.zeros(2, 4, 4)),
            r"of shape \(2, 4, 4\) must be \(1, H",
        ),
        (dict(labels=label, masks=torch.zeros(4, 4)), r"of shape \(4, 4\) must be \(1, H, W\)"),
    ):
        with pytest.raises(ValueError, match=message):
            mask_loss(masks, [wrong], matched)
    two = [dict(labels=label, masks=torch.zeros(1, n, 4)) for n in (4, 5)]
    with pytest.raises(ValueError, match=r"masks of the sizes \[\(4, 4\), \(5, 4\)\]"):
        mask_loss(torch.zeros(2, 3, 4, 4), two, 2 * matched)
