"""DETR: numbers of transformers and torchvision, matching, loss, bad input, weights."""

import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch
import torchvision
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from transformers.loss.loss_for_object_detection import HungarianMatcher as TheirMatcher
from transformers.loss.loss_for_object_detection import ImageLoss

from attnlib import detr
from attnlib.convert import convert_state_dict
from attnlib.detr import DETR, HungarianMatcher, Output, ResNet, SetCriterion
from attnlib.inference import optimize_for_inference
from attnlib.models import create_model, load_pretrained
from benchmarks import detr as runs
from helpers import close, images

COUNTS = {  # all, trained, keys
    "detr_resnet50": (41_524_768, 41_302_368, 458),
    "detr_resnet50_dc5": (41_524_768, 41_302_368, 458),
    "detr_resnet101": (60_464_672, 60_242_272, 713),
    "detr_resnet101_dc5": (60_464_672, 60_242_272, 713),
}
SIZES = dict(num_encoder_layers=2, num_decoder_layers=3, embed_dim=32, num_heads=4)
SMALL = dict(num_classes=7, num_queries=9, dim_feedforward=48, dropout=0.0, **SIZES)


def their_config(backbone, **options):
    timm = dict(model_type="timm_backbone", backbone=backbone, num_channels=3)
    timm |= dict(features_only=True, use_pretrained_backbone=False, out_indices=[1, 2, 3, 4])
    return transformers.DetrConfig(backbone_config=timm, **options)


def randomized(model, seed=0):
    """Norms, frozen ones too, and biases that are not one and zero."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 * p.std() if p.ndim == 4 else 0.3))
        for key, x in model.named_buffers():
            if key.endswith(("weight", "running_var")):
                x.uniform_(0.5, 1.5)
            else:
                x.normal_(std=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def twins():
    """A small model and transformers' with the same weights, in float64."""
    torch.manual_seed(0)
    config = their_config(
        "resnet18",
        **dict(num_labels=7, num_queries=9, d_model=32, encoder_layers=2, decoder_layers=3),
        **dict(encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0),
        **dict(encoder_ffn_dim=48, decoder_ffn_dim=48, auxiliary_loss=False),
    )
    theirs = randomized(transformers.DetrForObjectDetection(config)).double()
    ours = DETR(backbone="resnet18", **SMALL).double().eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    return ours, theirs


def padded():
    """Two images of 90 x 150 and 70 x 101 pixels, and their mask."""
    x, mask = images(2, (90, 150)), torch.ones(2, 90, 150, dtype=torch.bool)
    mask[1, 70:], mask[1, :, 101:] = False, False
    return x * mask[:, None], mask


def some_targets(counts=(3, 0), num_classes=7, seed=0, dtype=torch.float64):
    generator, found = torch.Generator().manual_seed(seed), []
    for count in counts:
        corners = torch.rand(count, 2, 2, generator=generator, dtype=dtype).sort(1).values
        boxes = detr.box_xyxy_to_cxcywh(corners.flatten(1))
        labels = torch.randint(num_classes, (count,), generator=generator)
        found.append(dict(labels=labels, boxes=boxes))
    return found


def some_output(layers=3, batch=2, queries=9, num_classes=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    options = dict(generator=generator, dtype=torch.float64)
    made = []
    for _ in range(layers):
        logits = torch.randn(batch, queries, num_classes + 1, **options)
        boxes = torch.randn(batch, queries, 4, **options).sigmoid()
        made.append(Output(logits.requires_grad_(), boxes.requires_grad_(), []))
    return made[-1]._replace(aux_outputs=made[:-1])


# --- transformers: outputs, gradients, loss ---------------------------------------------------


@pytest.mark.parametrize("with_mask", [False, True])
def test_outputs_are_transformers(twins, with_mask):
    ours, theirs = twins
    x, mask = padded()
    mask = mask if with_mask else None
    with torch.no_grad():
        found = ours(x, mask)
        wanted = theirs(x, pixel_mask=None if mask is None else mask.long())
    assert found.boxes.std(1).mean() > 0.002 and found.logits.std(1).mean() > 0.01
    close(found.logits, wanted.logits)
    close(found.boxes, wanted.pred_boxes)


def test_gradients_are_transformers(twins):
    ours, theirs = twins
    x, mask = padded()
    wanted = theirs(x, pixel_mask=mask.long())
    found = ours(x, mask)
    for model, logits, boxes in (
        (ours, found.logits, found.boxes),
        (theirs, wanted.logits, wanted.pred_boxes),
    ):
        model.zero_grad()
        (logits.square().sum() + boxes.square().sum()).backward()
    theirs_by_name = {key: p.grad for key, p in theirs.named_parameters() if p.grad is not None}
    wanted = convert_state_dict(theirs_by_name, "detr")
    checked = 0
    for key, p in ours.named_parameters():
        if p.grad is not None and key in wanted:
            close(p.grad, wanted[key], 1e-10 * max(1, wanted[key].abs().max().item()))
            checked += 1
    frozen = {key for key, p in ours.named_parameters() if not p.requires_grad}
    assert {key.split(".")[1] for key in frozen} == {"conv1", "layer1"}
    assert checked == len(list(ours.parameters())) - len(frozen)


def test_the_published_size_in_float32():
    config = their_config("resnet50", num_labels=91)
    theirs = randomized(transformers.DetrForObjectDetection(config))
    ours = create_model("detr_resnet50").eval()
    load_pretrained(ours, theirs.state_dict())
    x = images(1, (96, 160)).float()
    with torch.no_grad():
        found, wanted = ours(x), theirs(x)
    close(found.logits, wanted.logits, 1e-5 * max(1, wanted.logits.abs().max().item()))
    close(found.boxes, wanted.pred_boxes, 1e-5)


def test_what_does_not_belong_to_the_loss_is_refused():
    output, targets = some_output(), some_targets((1, 1))
    targets = [target | dict(labels=target["labels"] * 0) for target in targets]
    for count in (3, 6, 8):
        with pytest.raises(
            ValueError, match=rf"output has 8 logits; for num_classes \({count}"
        ):
            SetCriterion(count)(output, targets)
    with pytest.raises(ValueError, match=r"weights \('bbox'\)"):
        SetCriterion(7, weights={"bbox": 100})
    assert SetCriterion(7, weights={"box": 100}).weights == {"class": 1, "box": 100, "giou": 2}


@pytest.mark.parametrize("counts", [(3, 0), (0, 0), (9, 2), (1, 4)])
def test_loss_is_transformers(counts):
    output, targets = some_output(), some_targets(counts)
    found = SetCriterion(7)(output, targets)
    matcher = TheirMatcher(class_cost=1, bbox_cost=5, giou_cost=2)
    theirs = ImageLoss(matcher, 7, 0.1, ["labels", "boxes"]).double()
    total, labels = 0, [dict(class_labels=t["labels"], boxes=t["boxes"]) for t in targets]
    for i, layer in enumerate([*output.aux_outputs, output]):
        wanted = theirs(dict(logits=layer.logits, pred_boxes=layer.boxes), labels)
        for name, other in dict(class_="ce", box="bbox", giou="giou").items():
            close(found[name.rstrip("_")][i].double(), wanted[f"loss_{other}"].double(), 1e-6)
        total += wanted["loss_ce"] + 5 * wanted["loss_bbox"] + 2 * wanted["loss_giou"]
    close(found["total"].double(), total.double(), 1e-5)
    inputs = [x for layer in [*output.aux_outputs, output] for x in layer[:2]]
    found = torch.autograd.grad(found["total"], inputs)
    for a, b in zip(found, torch.autograd.grad(total, inputs, allow_unused=True), strict=True):
        close(a, torch.zeros_like(a) if b is None else b, 1e-6)


def test_loss_divides_by_the_boxes_it_is_told():
    output, targets = some_output(), some_targets()
    own, other = SetCriterion(7)(output, targets), SetCriterion(7)(output, targets, num_boxes=6)
    close(own["box"], 2 * other["box"])
    close(own["class"], other["class"])


# --- weights and names ------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    with torch.device("meta"):
        model = create_model(name)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    counted = sum(p.numel() for p in parameters), trained, len(model.state_dict())
    assert counted == COUNTS[name]


def original_names(state_dict):
    """The authors' names of our weights."""
    found = {}
    for key, x in state_dict.items():
        if key.startswith("backbone."):
            key = key.replace("backbone.", "backbone.0.body.", 1)
        elif key.startswith(("encoder.", "decoder.")):
            part, rest = key.split(".", 1)
            key = f"transformer.{part}.layers.{rest}"
        elif key.startswith("norm."):
            key = f"transformer.decoder.{key}"
        elif key.startswith("bbox_embed."):
            _, number, kind = key.split(".")
            key = f"bbox_embed.layers.{int(number) // 2}.{kind}"
        found[key] = x
    return found


def test_the_authors_names_load():
    torch.manual_seed(0)
    one = DETR(backbone="resnet18", **SMALL)
    other = DETR(backbone="resnet18", **SMALL)
    names = original_names(one.state_dict())
    assert "transformer.decoder.layers.2.multihead_attn.in_proj_weight" in names
    assert "backbone.0.body.layer4.1.bn2.running_var" in names
    load_pretrained(other, {"model": names})
    for key, x in one.state_dict().items():
        assert torch.equal(x, other.state_dict()[key]), key
    mistaken = {key: x for key, x in names.items() if "query_embed" not in key}
    with pytest.raises(ValueError, match="missing: query_embed.weight"):
        load_pretrained(other, mistaken)


def test_names_before_version_5_load(twins):
    ours, theirs = twins
    older = {}
    for key, x in theirs.state_dict().items():
        key = key.replace("model.backbone.model.", "model.backbone.conv_encoder.model.")
        older[key.replace(".o_proj.", ".out_proj.").replace(".mlp.fc", ".fc")] = x
    assert older.keys() != theirs.state_dict().keys()
    other = DETR(backbone="resnet18", **SMALL).double()
    load_pretrained(other, older)
    for key, x in ours.state_dict().items():
        assert torch.equal(x, other.state_dict()[key]), key


# --- properties -------------------------------------------------------------------------------


class Small(nn.Module):
    """A backbone of one layer."""

    num_channels = [16]

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 8, 8)

    def forward(self, x):
        return [self.conv(x).relu()]


def small(**options):
    torch.manual_seed(0)
    return DETR(**SMALL | dict(backbone=Small()) | options).double().eval()


def test_shapes():
    model, x = small(), images(2, (48, 64))
    output, features = model(x), model.forward_features(x)
    assert output.logits.shape == (2, 9, 8) and output.boxes.shape == (2, 9, 4)
    assert len(output.aux_outputs) == 2 and output.aux_outputs[0].logits.shape == (2, 9, 8)
    assert features.decoded.shape == (3, 2, 9, 32) and features.memory.shape == (2, 32, 6, 8)
    maps = model.attention_maps(x)
    assert [m.shape for m in maps] == [(2, 4, 9, 6, 8)] * 3
    close(maps[1].sum((-2, -1)), torch.ones(2, 4, 9).double())
    assert [y.shape[1:] for y in ResNet("resnet18")(x.float())] == [
        *((64, 12, 16), (128, 6, 8), (256, 3, 4), (512, 2, 2))
    ]
    assert ResNet("resnet50", dilation=True, in_chans=1)(x.float()[:, :1])[-1].shape[2:] == (
        3,
        4,
    )


@pytest.mark.parametrize("in_chans, trained", [(3, False), (1, True), (4, True)])
def test_a_stem_for_other_channels_is_trained(in_chans, trained):
    """No pretrained filters fit other channels than RGB: the random ones must not stay."""
    torch.manual_seed(0)
    model = DETR(backbone="resnet18", in_chans=in_chans, **SMALL)
    stem = model.backbone.conv1.weight
    before = stem.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    output = model(torch.randn(1, in_chans, 32, 32))
    (output.logits.square().mean() + output.boxes.square().mean()).backward()
    optimizer.step()
    assert (stem.grad is not None) == trained
    assert torch.equal(stem, before) != trained
    assert not any(p.requires_grad for p in model.backbone.layer1.parameters())


def test_queries_are_a_set():
    model, x, order = small(), images(1, (48, 64)), torch.randperm(9)
    usual = model(x)
    with torch.no_grad():
        model.query_embed.weight.copy_(model.query_embed.weight[order])
        close(model(x).boxes, usual.boxes[:, order])
        model.query_embed.weight.zero_()
    found = model(x)
    close(found.logits, found.logits[:, :1].expand_as(found.logits), 1e-12)


def test_the_first_self_attention_is_a_constant():
    model, seen = small(), []
    attention = model.decoder[0].self_attn
    attention.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(images(2, (48, 64), seed=1)), model(images(2, (48, 64), seed=2))
    constant = attention.out_proj(attention.in_proj_bias[-32:])
    for output in seen:
        close(output, constant.expand_as(output), 1e-12)


def test_images_of_one_size_do_not_see_each_other():
    model, x = small(), images(3, (48, 64))
    close(model(x).boxes[1:2], model(x[1:2]).boxes)


def test_masked_pixels_of_whole_cells_do_not_matter():
    """The backbone here has no padding of its own, so that nothing leaks."""
    model, x = small(), images(1, (48, 64))
    mask = torch.ones(1, 48, 96, dtype=torch.bool)
    mask[..., 64:] = False
    wide = torch.cat([x, torch.full((1, 3, 48, 32), 100.0).double()], dim=3)
    close(model(wide, mask).boxes, model(x).boxes)
    assert (model(wide).boxes - model(x).boxes).abs().max() > 1e-3


@given(seed=st.integers(0, 10**6), queries=st.integers(1, 5), objects=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_the_matching_is_the_cheapest(seed, queries, objects):
    objects = min(objects, queries)
    output = some_output(1, 1, queries, seed=seed)
    targets, matcher = some_targets((objects,), seed=seed), HungarianMatcher()
    labels, boxes = detr._pad_targets(targets, output.boxes)
    cost = matcher.cost(output.logits, output.boxes, labels, boxes)[0].detach()
    ((i, j),) = matcher(output.logits, output.boxes, targets)
    assert sorted(j.tolist()) == list(range(objects)) and len(set(i.tolist())) == objects
    best = min(
        sum(cost[q, t].item() for t, q in enumerate(chosen))
        for chosen in itertools.permutations(range(queries), objects)
    )
    assert cost[i, j].sum().item() == pytest.approx(best, abs=1e-5)


def test_ties_and_layers():
    output, targets = some_output(), some_targets((4, 2))
    logits = torch.stack([layer.logits for layer in [*output.aux_outputs, output]])
    boxes = torch.stack([layer.boxes for layer in [*output.aux_outputs, output]])
    matcher = HungarianMatcher()
    together = matcher(logits, boxes, targets)
    for layer, one in enumerate(together):
        alone = matcher(logits[layer], boxes[layer], targets)
        for (i, j), (k, m) in zip(one, alone, strict=True):
            assert torch.equal(i, k) and torch.equal(j, m)
    ((i, j), _) = matcher(torch.zeros(2, 9, 8), torch.full((2, 9, 4), 0.5), targets)
    assert len(set(i.tolist())) == 4  # all are equally good, and none is taken twice


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_loss_does_not_know_the_order(seed):
    output, targets = some_output(2, 2, seed=seed), some_targets((3, 2), seed=seed)
    torch.manual_seed(seed)
    order, turned = torch.randperm(9), []
    for target in targets:
        own = torch.randperm(len(target["labels"]))
        turned.append({key: x[own] for key, x in target.items()})
    layers = [Output(x.logits[:, order], x.boxes[:, order], []) for x in output.aux_outputs]
    other = Output(output.logits[:, order], output.boxes[:, order], layers)
    close(
        SetCriterion(7)(other, turned)["total"], SetCriterion(7)(output, targets)["total"], 1e-9
    )


# --- boxes ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_boxes_are_torchvisions(seed):
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(2, 6, 2, 2, generator=generator).double().sort(2).values.flatten(2)
    a, b = corners
    ops = torchvision.ops
    close(detr.box_iou(a[:, None], b)[0], ops.box_iou(a, b), 1e-9)
    giou = detr.generalized_box_iou(a[:, None], b)
    close(giou, ops.generalized_box_iou(a, b), 1e-9)
    assert (giou <= detr.box_iou(a[:, None], b)[0] + 1e-12).all() and (giou > -1).all()
    for one, other in (("xyxy", "cxcywh"), ("cxcywh", "xyxy")):
        own = getattr(detr, f"box_{one}_to_{other}")(a)
        close(own, ops.box_convert(a, one, other))
    scaled = detr.generalized_box_iou(3 * a[:, None] + 1, 3 * b + 1)
    close(scaled, giou, 1e-9)


def test_boxes_in_half_precision():
    """The values are those of float64 for the same coordinates, and what torchvision gives."""
    large = torch.tensor([[0, 0, 400, 400], [100, 50, 500, 300.0]]).half()
    small = torch.tensor([[0.5, 0.5, 0.501, 0.501], [0.25, 0, 0.2505, 1]]).half()
    for boxes in large, small, large.bfloat16():
        for mine, other in (
            (lambda a, b: detr.box_iou(a[:, None], b)[0], torchvision.ops.box_iou),
            (
                lambda a, b: detr.generalized_box_iou(a[:, None], b),
                torchvision.ops.generalized_box_iou,
            ),
        ):
            found, wanted = mine(boxes, boxes), mine(boxes.double(), boxes.double())
            assert found.dtype == torch.float32 and (found.diag() == 1).all()
            close(found.double(), wanted, 1e-6)
            close(wanted, other(boxes.double(), boxes.double()), 1e-12)
    assert detr.box_area(large).tolist() == [160_000, 100_000]
    whole = torch.tensor([[0, 0, 200, 200], [0, 0, 100, 200]], dtype=torch.uint8)
    assert detr.box_iou(whole[0], whole[1])[0] == 0.5


def test_boxes_without_an_area_have_values():
    point, line = [2.0, 2, 2, 2], [0.0, 2, 4, 2]
    turned, full = [3.0, 3, 1, 1], [0.0, 0, 4, 4]
    boxes = torch.tensor([point, line, turned, full], requires_grad=True)
    iou, union = detr.box_iou(boxes[:, None], boxes)
    giou = detr.generalized_box_iou(boxes[:, None], boxes)
    assert torch.equal(iou, torch.tensor([[0.0] * 4] * 3 + [[0.0, 0, 0, 1]]))
    assert union[3].tolist() == [16] * 4 and union[:3, :3].max() == 0
    assert giou.min() >= -1 and (giou.diag() == torch.tensor([0.0, 0, 0, 1])).all()
    apart = torch.tensor([[1.0, 1, 1, 1], [3, 2, 3, 2]])
    assert detr.generalized_box_iou(*apart) == -1
    (iou.sum() + giou.sum()).backward()
    assert boxes.grad.isfinite().all()


@pytest.mark.parametrize("side", [1e-4, 3e-4, 1e-3, 0.5])
def test_the_loss_in_half_precision(side):
    """A small box that is predicted exactly, one image of two, and one without objects."""
    boxes = torch.full((2, 9, 4), 0.25).half()
    boxes[0, 2] = torch.tensor([0.5, 0.5, side, side])
    logits = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)).half()
    targets = [dict(labels=torch.tensor([3]), boxes=boxes[0, 2:3])]
    targets += [dict(labels=torch.zeros(0).long(), boxes=torch.zeros(0, 4))]
    found, wanted = {}, {}
    for terms, dtype in ((found, torch.float16), (wanted, torch.float64)):
        x = logits.to(dtype, copy=True).requires_grad_()
        y = boxes.to(dtype, copy=True).requires_grad_()
        terms |= SetCriterion(7)(Output(x, y, []), targets)
        terms["total"].backward()
        terms["slopes"] = x.grad, y.grad
        assert x.grad.isfinite().all() and y.grad.isfinite().all()
    close(found["giou"], torch.zeros(1), 1e-6)
    close(found["total"].double(), wanted["total"].detach(), 1e-4)
    close(found["slopes"][0].double(), wanted["slopes"][0], 1e-3)
    box = detr.postprocess(Output(logits, boxes, []), [[1333, 800]] * 2)[0]["boxes"][2]
    exact = detr.box_cxcywh_to_xyxy(boxes[0, 2].double()) * torch.tensor([800, 1333, 800, 1333])
    close(box.double(), exact, 1e-3)


def test_weights_of_zero_make_a_loss_of_zero():
    """With `no_object` = 0, images without objects have nothing that counts."""
    output, none = some_output(2, 2), some_targets((0, 0))
    loss = SetCriterion(7, no_object=0.0)(output, none)
    assert loss["class"].tolist() == [0, 0] and loss["total"] == 0
    loss["total"].backward()
    assert (output.logits.grad == 0).all() and (output.boxes.grad == 0).all()
    some = SetCriterion(7, no_object=0.0)(output, some_targets((3, 0)))["class"][-1]
    matched = HungarianMatcher()(output.logits, output.boxes, some_targets((3, 0)))[0]
    label = some_targets((3, 0))[0]["labels"][matched[1]]
    close(some, nn.functional.cross_entropy(output.logits[0, matched[0]], label))


def test_frozen_norms_are_torchvisions():
    ours, theirs = detr.FrozenBatchNorm2d(5), torchvision.ops.FrozenBatchNorm2d(5)
    assert list(ours.parameters()) == []
    ours = randomized(ours).double()
    theirs.double().load_state_dict(ours.state_dict(), strict=True)
    x = images(2, 6, 5).requires_grad_()
    close(ours.train()(x), theirs(x), 1e-12)
    (a,), (b,) = (torch.autograd.grad(norm(x).square().sum(), x) for norm in (ours, theirs))
    close(a, b, 1e-11)


def test_a_backbone_sees_the_padding_as_the_authors_does():
    """Zero padding is not zero behind the first bias: the chapter measures it."""
    model, x = randomized(DETR(backbone="resnet18", **SMALL)).double(), images(1, (64, 64))
    wide, mask = torch.zeros(1, 3, 64, 128).double(), torch.zeros(1, 64, 128, dtype=torch.bool)
    wide[..., :64], mask[..., :64] = x, True
    moved = (model(wide, mask).boxes - model(x).boxes).abs().max()
    assert 1e-6 < moved < 0.2


def test_gradients_of_disjoint_boxes():
    a = torch.tensor([6.0, 0.0, 7.0, 1.0], requires_grad=True)
    b = torch.tensor([0.0, 0.0, 1.0, 1.0])
    (of_iou,) = torch.autograd.grad(detr.box_iou(a, b)[0], a)
    (of_giou,) = torch.autograd.grad(detr.generalized_box_iou(a, b), a)
    assert of_iou.tolist() == [0, 0, 0, 0]
    close(of_giou, torch.tensor([-1 / 7, 0, 5 / 49, 0]), 1e-6)


def test_postprocess():
    output = some_output(1)
    found = detr.postprocess(output, [[100, 200], [50, 30]])
    probabilities = output.logits.softmax(-1)[..., :-1]
    close(found[0]["scores"], probabilities[0].amax(-1))
    assert torch.equal(found[1]["labels"], probabilities[1].argmax(-1))
    box, (x, y, w, h) = found[0]["boxes"][0], output.boxes[0, 0].tolist()
    wanted = [200 * (x - w / 2), 100 * (y - h / 2), 200 * (x + w / 2), 100 * (y + h / 2)]
    assert box.tolist() == pytest.approx(wanted)


def test_positions_are_transformers(twins):
    ours, theirs = twins
    _, mask = padded()
    found = detr.sine_position_embedding(mask[:, ::32, ::32], 32)
    their_positions = theirs.model.position_embedding
    small_mask = mask[:, ::32, ::32]
    shape = torch.Size((2, 32, *small_mask.shape[1:]))
    wanted = their_positions(shape, mask.device, torch.float64, small_mask)
    close(found, wanted.flatten(2).mT if wanted.ndim == 4 else wanted, 1e-6)
    row = detr.sine_position_embedding(torch.ones(1, 25, 34, dtype=torch.bool), 256)[0, 0, :2]
    close(row, torch.tensor([0.24869, 0.96858]).double(), 1e-5)
    norms = (
        detr.sine_position_embedding(torch.ones(1, 5, 7, dtype=torch.bool), 256)
        .square()
        .sum(-1)
    )
    close(norms, torch.full_like(norms, 128))


# --- bad input --------------------------------------------------------------------------------


def target(labels, boxes):
    return [dict(labels=torch.tensor(labels), boxes=torch.tensor(boxes))]


@pytest.mark.parametrize(
    "targets, message",
    [
        (
            target([1], [[0.9, 0.5, 0.4, 0.2]]),
            r"targets\[0\]\['boxes'\] has \[0.9, .* inside it",
        ),
        (target([1], [[0.5, 0.5, 0.0, 0.2]]), "with an area"),
        (target([1], [[0.5, 0.5, 0.2, -0.2]]), "with an area"),
        (target([1], [[10.0, 10.0, 50.0, 40.0]]), r"\(center x, center y, width, height\)"),
        (target([1], [[math.nan, 0.5, 0.2, 0.2]]), r"targets\[0\]\['boxes'\] has \[nan"),
        (target([1], [0.5, 0.5, 0.2, 0.2]), r"boxes \(4,\); they must be \(n,\) and \(n, 4\)"),
        (target([1, 2], [[0.5, 0.5, 0.2, 0.2]]), r"labels \(2,\) and boxes \(1, 4\)"),
        (target([7], [[0.5, 0.5, 0.2, 0.2]]), r"from 7 to 7 must be from 0 to 6"),
        (target([-1], [[0.5, 0.5, 0.2, 0.2]]), r"from -1 to -1 must be from 0 to 6"),
        (
            target([1] * 10, [[0.5, 0.5, 0.2, 0.2]] * 10),
            r"has 10 objects, more than num_queries",
        ),
        ([], r"targets \(0\) must be one for each of 1 images"),
    ],
)
def test_bad_targets_are_named(targets, message):
    output = some_output(2, 1)
    with pytest.raises(ValueError, match=message):
        SetCriterion(7)(output, targets)


def test_no_objects_at_all():
    output, none = some_output(), some_targets((0, 0))
    terms = SetCriterion(7)(output, none)
    assert terms["box"].sum() == terms["giou"].sum() == 0 and terms["class"].min() > 0
    gradients = torch.autograd.grad(terms["total"], [output.logits, output.boxes])
    assert all(g.isfinite().all() for g in gradients)
    matched = HungarianMatcher()(output.logits, output.boxes, none)
    assert [len(i) for i, _ in matched] == [0, 0]


def test_costs_that_are_no_numbers():
    output, targets = some_output(), some_targets()
    with pytest.raises(ValueError, match=r"logits or boxes \(NaN\)"):
        HungarianMatcher()(output.logits * math.nan, output.boxes, targets)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: HungarianMatcher(0, 0, 0), "must not all be 0"),
        (lambda: small(num_queries=0), r"num_queries \(0\) must be an integer of at least 1"),
        (lambda: small(num_classes=0), r"num_classes \(0\) must be"),
        (lambda: small(num_decoder_layers=0), r"num_decoder_layers \(0\) must be"),
        (lambda: small(dropout=1.0), r"dropout \(1.0\) must be in \[0, 1\)"),
        (lambda: small(num_heads=5), r"embed_dim \(32\) must be divisible by num_heads \(5\)"),
        (lambda: small()(torch.zeros(3, 8, 8)), r"images of shape \(3, 8, 8\) must be"),
        (
            lambda: small()(images(1), torch.ones(1, 32, 32)),
            r"mask of dtype torch.float32 .* must be torch.bool and \(1, 32, 32\)",
        ),
        (
            lambda: small()(images(1), torch.ones(1, 32, 8, dtype=torch.bool)),
            r"shape \(1, 32, 8\) must be",
        ),
        (
            lambda: detr.postprocess(some_output(1), [[3, 4]]),
            r"sizes of shape \(1, 2\) must be \(2, 2\)",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- training, and the copy for inference -----------------------------------------------------


def test_a_few_steps_reduce_the_loss():
    model, loss = small().float().train(), SetCriterion(7)
    x, targets = images(2, 48).float(), some_targets((2, 1), dtype=torch.float32)
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(30):
        found.append(loss(model(x), targets)["total"])
        optimizer.zero_grad()
        found[-1].backward()
        optimizer.step()
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_the_copy_for_inference_says_the_same(backbone):
    model = randomized(DETR(backbone=backbone, **SMALL))
    fast, x = optimize_for_inference(model), images(2, (64, 96)).float()
    with torch.no_grad():
        found, wanted = fast(x), model(x)
        close(found.logits, wanted.logits, 1e-4)
        close(found.boxes, wanted.boxes, 1e-5)
    types = {type(part).__name__ for part in fast.modules()}
    assert "FrozenBatchNorm2d" not in types and "_PackedConv" in types


# --- the commands at a tiny size --------------------------------------------------------------


@pytest.fixture
def coco(tmp_path):
    """A folder as COCO's archives unpack, with two pictures and three objects."""
    (tmp_path / "val2017").mkdir(), (tmp_path / "annotations").mkdir()
    pictures, sizes = [], {7: (60, 40), 9: (30, 50)}  # width, height
    for number, (width, height) in sizes.items():
        name = f"{number:012}.jpg"
        noise = np.random.default_rng(number).integers(0, 255, (height, width, 3))
        Image.fromarray(noise.astype("uint8")).save(tmp_path / "val2017" / name)
        pictures.append(dict(id=number, file_name=name, width=width, height=height))
    boxes = {1: (7, 18, [5, 5, 20, 20]), 2: (7, 1, [30, 10, 25, 25]), 3: (9, 1, [2, 3, 20, 40])}
    objects = [
        dict(id=i, image_id=image, category_id=label, bbox=box, area=box[2] * box[3], iscrowd=0)
        for i, (image, label, box) in boxes.items()
    ]
    truth = dict(images=pictures, annotations=objects, categories=[dict(id=1), dict(id=18)])
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(truth))
    return tmp_path


def test_coco_is_judged(coco):
    """A model that finds everything has AP 1; a box with IoU 0.75 is right up to there."""
    truth = runs.read_truth(coco)

    class Knows(nn.Module):
        calls = iter([(7, 1.0), (9, 0.75)])  # pictures, and how much of a box is found

        def forward(self, x):
            number, share = next(self.calls)
            (entry,) = truth.loadImgs([number])
            found = truth.loadAnns(truth.getAnnIds([number]))
            logits, boxes = torch.full((1, 4, 92), -9.0), torch.full((1, 4, 4), 0.1)
            for i, one in enumerate(found):
                left, top, width, height = one["bbox"]
                box = torch.tensor([[left, top, left + width, top + share * height]])
                box = detr.box_xyxy_to_cxcywh(box) / torch.tensor(
                    [entry["width"], entry["height"]] * 2
                )
                logits[0, i, one["category_id"]], boxes[0, i] = 9.0, box[0]
            return Output(logits, boxes, [])

    found = runs.coco_results(Knows(), coco, truth, [7, 9], shorter=32)
    assert len(found) == 8
    scores = runs.judge(truth, found, [7, 9])
    assert scores["ap50"] == 1 and 0.75 < scores["ap"] < 1
    assert runs.scaled_size(640, 480) == (800, 1066)
    assert runs.scaled_size(480, 640) == (1066, 800)
    assert runs.scaled_size(1000, 400) == (533, 1332)


def test_the_command_for_coco_runs(coco, tmp_path, monkeypatch):
    arguments = ["detr", "coco", "--tiny", "--coco", str(coco), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runs.main()
    record = json.loads((tmp_path / "detr_coco.json").read_text())
    assert record["images"] == 2 and record["ap"] < 0.5


def test_tiny_speed(tmp_path, monkeypatch):
    arguments = ["detr", "speed", "--tiny", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runs.main()
    record = json.loads((tmp_path / "detr_speed_cpu.json").read_text())
    assert len(record["rows"]) == 5 and 0 < record["matching"] < 1
    assert all(row["ratio"] > 0 for row in record["rows"])
