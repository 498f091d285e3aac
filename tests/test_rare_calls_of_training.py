"""Values, states and arguments that were wrong without a word: attention maps, optimized
copies, counted operators, training runs and searches."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small_models import small_supernet

from attnlib import autoformer, cost, detr, inference, recipes, scaling, train
from attnlib.deit import DistillationLoss, DistilledVisionTransformer
from attnlib.gpt import GPT, GPTConfig
from attnlib.vit import VisionTransformer


class Attending(nn.Module):
    """A backbone that has attention of its own."""

    def __init__(self):
        super().__init__()
        self.num_channels = [16]
        self.vit = VisionTransformer(
            img_size=16,
            patch_size=4,
            embed_dim=16,
            depth=2,
            num_heads=2,
            num_classes=0,
            class_token=False,
            global_pool="avg",
        )

    def forward(self, x):
        return [self.vit.forward_features(x).transpose(1, 2).unflatten(2, (4, 4))]


def test_maps_are_those_of_the_decoder_also_if_the_backbone_attends():
    model = detr.DETR(2, 3, 1, 2, Attending(), 16, 2, 8).eval()
    x = torch.randn(1, 3, 16, 16)
    features = model.backbone(x)
    maps = model.attention_maps(x)
    assert [tuple(weights.shape) for weights in maps] == 2 * [(1, 2, 3, 4, 4)]

    class Given(nn.Module):
        num_channels = (16,)

        def forward(self, images):
            return features

    model.backbone = Given()
    for found, expected in zip(maps, model.attention_maps(x)):
        torch.testing.assert_close(found, expected)


def test_anchors_as_large_as_the_image_move_in_bfloat16():
    """1 - 0.001 is 1 in bfloat16, whose logit is infinite."""
    model = detr.BoxQueryDETR(
        2,
        3,
        num_encoder_layers=0,
        num_decoder_layers=2,
        backbone=detr.SmallBackbone((8, 8)),
        embed_dim=16,
        num_heads=2,
        dim_feedforward=8,
    ).eval()
    nn.init.constant_(model.bbox_embed[-1].bias, -2.0)
    noised = {
        "labels": torch.zeros(1, 1, 1, dtype=torch.long),
        "boxes": torch.tensor([[[[0.5, 0.5, 1.0, 1.0]]]]),
    }
    x = torch.randn(1, 3, 16, 16)
    expected = model(x, noised=noised).denoised.boxes
    found = model.bfloat16()(x.bfloat16(), noised=noised).denoised.boxes
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0)


def test_objects_in_order_are_matched_with_or_without_an_axis_of_layers():
    targets = [{"labels": torch.tensor([0]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}] * 2
    logits, boxes = torch.zeros(2, 3, 2), torch.rand(2, 3, 4)
    plain = detr.IdentityMatcher()(logits, boxes, targets)
    assert [tuple(map(torch.Tensor.tolist, pair)) for pair in plain] == 2 * [([0], [0])]
    layers = detr.IdentityMatcher()(
        logits.expand(4, -1, -1, -1), boxes.expand(4, -1, -1, -1), targets
    )
    assert len(layers) == 4 and all(len(images) == 2 for images in layers)


@pytest.mark.parametrize("gone", ["q_norm", "k_norm"])
def test_an_optimized_gpt_keeps_the_norm_of_keys_or_of_queries_alone(gone):
    model = GPT(GPTConfig(11, 8, 1, 2, n_embd=16, qk_norm=True)).eval()
    attn = model.h[0].attn
    for norm in attn.q_norm, attn.k_norm:
        nn.init.constant_(norm.weight, 5.0)
    setattr(attn, gone, nn.Identity())
    tokens = torch.randint(11, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(
            inference.optimize_for_inference(model)(tokens), model(tokens)
        )


@pytest.mark.parametrize(("mode", "axes"), [("linear", 1), ("bilinear", 2), ("trilinear", 3)])
def test_an_interpolation_is_no_matrix_product(mode, axes, recwarn):
    x = torch.randn(1, 2, *axes * [4])
    count = cost.count_operations(lambda: F.interpolate(x, scale_factor=2, mode=mode))
    assert [cost.operator_group(op.name) for op in count.operators] == ["rest"]
    assert not count.uncounted and not recwarn
    for name in "aten::linear", "aten::mkldnn_linear", "mkldnn::_linear_pointwise":
        assert cost.operator_group(name) == "matrix products"


def test_a_step_on_lists_of_parameters_moves_as_much_as_one_by_one(recwarn):
    found = []
    for foreach in False, True:
        p = nn.Parameter(torch.zeros(100))
        p.grad = torch.ones(100)
        optimizer = torch.optim.SGD([p], lr=0.1, foreach=foreach)
        found.append(cost.count_operations(optimizer.step).bytes)
    assert found == [3 * 400, 3 * 400]  # two are read, one is written
    lists = [torch.ones(100), torch.ones(50)]
    assert cost.count_operations(torch._foreach_zero_, lists).bytes == 600
    assert not recwarn


def test_predicting_memory_leaves_statistics_and_random_numbers_alone():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    cost.training_memory(model, torch.randn(2, 1, 8, 8, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def test_a_run_leaves_no_gradients():
    model, data = nn.Linear(3, 2), (torch.randn(8, 3), torch.randint(2, (8,)))
    train.fit(model, train.shuffled_batches(*data, batch_size=4), loss_fn=loss_fn, steps=3)
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_that_is_a_tensor_is_not_taken_for_its_rows():
    with pytest.raises(TypeError, match=r"train gave a Tensor of shape \(4, 3\)"):
        train.fit(
            nn.Linear(3, 2),
            lambda step: torch.randn(4, 3),
            loss_fn=lambda model, batch: (model(batch[0]).sum(), 1),
            steps=1,
        )


def test_a_batch_size_that_is_no_int_is_refused():
    with pytest.raises(ValueError, match=r"batch_size \(2.0\)"):
        train.shuffled_batches(torch.arange(4), batch_size=2.0)


def test_the_learning_rate_stays_at_zero_behind_the_end():
    for step in 10, 11, 15, 20:
        assert train.learning_rate(step, steps=10, warmup=2, schedule="cosine") == 0


@pytest.mark.parametrize("options", [{}, {"crossovers": 2, "mutations": 2}, {"mutations": 0}])
def test_a_generation_is_as_large_as_its_population(options):
    """Also where it has no room for as many children as there are by default."""
    supernet = small_supernet()
    _, history = autoformer.evolutionary_search(
        lambda subnet: 0.0, supernet, population=5, generations=3, **options
    )
    assert len(history) == 15


@pytest.mark.parametrize("shape", [(6, 1), (1,), (4,)])
def test_accuracy_needs_a_label_for_each_image(shape):
    data = torch.randn(6, 3), torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"labels of shape"):
        recipes.accuracy(nn.Linear(3, 2), data)


@pytest.mark.parametrize("enabled", [False, True])
def test_distillation_leaves_the_students_heads_as_they_were(enabled):
    student = DistilledVisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=2, embed_dim=8, depth=1, num_heads=1
    )
    student.set_distilled_training(enabled)
    data = torch.randn(4, 1, 8, 8), torch.randint(2, (4,))
    teacher = recipes.small_convnet(1, 2, (4,))
    loss_fn = DistillationLoss(teacher)
    train.fit(student, data, loss_fn=loss_fn, steps=1, batch_size=4)
    assert student.distilled_training == enabled


class Tied(nn.Module):
    """Two names of one weight, of which the second is spared."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Embedding(4, 3)
        self.second.weight = self.first.weight

    def no_weight_decay(self):
        return {"second.weight"}


def test_a_tied_weight_is_spared_by_either_of_its_names():
    (group,) = train.adamw(Tied(), 1e-3, (0.9, 0.999), 0.1).param_groups
    assert group["weight_decay"] == 0


def test_what_is_sent_and_received_is_contiguous(monkeypatch):
    """A group of gloo takes no other tensors."""
    sent = []
    pretended = SimpleNamespace(
        get_rank=lambda group: 0,
        get_world_size=lambda group: 2,
        isend=None,
        irecv=None,
        P2POp=lambda call, x, **options: x,
        batch_isend_irecv=lambda tensors: sent.extend(tensors) or [],
    )
    monkeypatch.setattr(scaling, "dist", pretended)
    x = torch.arange(6.0).view(2, 3).t()
    received, _ = scaling._send_on(x)
    assert torch.equal(sent[0], x) and received is sent[1] and received.shape == x.shape
    assert all(tensor.is_contiguous() for tensor in sent)
