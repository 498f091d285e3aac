"""Rare but legitimate calls: infinite logits, far windows, counts, and buffers that change."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn as nn
from torch.autograd import forward_ad

from attnlib.beit import VectorQuantizer, VQAutoencoder
from attnlib.cost import (
    count_operations,
    roofline_probes,
    saved_activations,
    training_memory,
)
from attnlib.data import draw_numbers, number_words
from attnlib.deit import soft_distillation_loss
from attnlib.efficient import sparse_mask
from attnlib.gpt import GPTConfig, rope_cos_sin
from attnlib.mae import MaskedAutoencoder
from attnlib.spatial import Draw, FilterBank
from attnlib.swin import window_layout
from attnlib.vit import VisionTransformer

# --- a teacher that excludes classes ---------------------------------------------------------


@pytest.mark.parametrize("excluded", [-math.inf, -1e4])
@pytest.mark.parametrize("student_excludes", [True, False])
def test_a_class_that_the_teacher_excludes_adds_nothing(excluded, student_excludes):
    teacher = torch.tensor([[1.0, excluded, 0.5], [0.0, 2.0, excluded]])
    student = torch.tensor([[0.3, 0.2, 0.1], [-1.0, 0.5, 2.0]])
    if student_excludes:
        student[0, 1] = excluded
    student.requires_grad_()
    labels = torch.tensor([0, 1])
    loss = soft_distillation_loss(
        student, student, teacher, labels, weight=1.0, temperature=2.0
    )
    expected = 0.0
    for taught, told in zip(teacher.tolist(), student.tolist()):
        p_total = sum(math.exp(value / 2) for value in taught)
        q_total = sum(math.exp(value / 2) for value in told)
        for a, b in zip(taught, told):
            p = math.exp(a / 2) / p_total
            if p > 0:
                expected += 4 * p * math.log(p / (math.exp(b / 2) / q_total)) / 6
    torch.testing.assert_close(loss.item(), expected, rtol=1e-5, atol=1e-7)
    loss.backward()
    p, q = (teacher / 2).softmax(-1), (student.detach() / 2).softmax(-1)
    torch.testing.assert_close(student.grad, 4 * (q - p) / 2 / 6)


def test_a_class_that_only_the_student_excludes_costs_infinitely_much():
    teacher = torch.tensor([[1.0, 0.0]])
    student = torch.tensor([[1.0, -math.inf]])
    loss = soft_distillation_loss(student, student, teacher, torch.tensor([0]))
    assert loss == math.inf


# --- windows far outside the image -----------------------------------------------------------

FAR = (
    (3.0, 0.0, 0.0, 0.0, 0.0),
    (1e3, -1e3, 0.0, 0.0, 0.0),
    (-1e6, 1e6, 10.0, -3.0, 0.0),
    (1e9, 0.0, 25.0, 0.0, 0.0),
    (0.13, 0.24, -30.0, 0.0, 0.0),
    (0.13, 0.24, 0.0, 30.0, 0.0),
    (0.13, 0.24, 30.0, -30.0, 0.0),
)


def exact_filters(center, log_variance, log_stride, length, image_side, glimpse):
    stride = Fraction(image_side - 1, glimpse - 1) * Fraction(math.exp(log_stride))
    variance = Fraction(math.exp(log_variance))
    middle = Fraction(length + 1, 2) * (Fraction(center) + 1)
    rows = []
    for i in range(1, glimpse + 1):
        mu = middle + (i - Fraction(glimpse + 1, 2)) * stride
        squares = [(a - mu) ** 2 for a in range(1, length + 1)]
        least = min(squares)
        powers = [math.exp(-min(1000, (square - least) / variance / 2)) for square in squares]
        rows.append([power / sum(powers) for power in powers])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("numbers", FAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_filters_of_a_far_window(numbers, dtype):
    five = torch.tensor([numbers], dtype=dtype, requires_grad=True)
    x, y, log_variance, log_stride, _ = five[0].tolist()
    F_Y, F_X = FilterBank((7, 9), 4).filters(five)
    expected_y = exact_filters(y, log_variance, log_stride, 7, 9, 4)
    expected_x = exact_filters(x, log_variance, log_stride, 9, 9, 4)
    torch.testing.assert_close(F_Y[0].double(), expected_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(F_X[0].double(), expected_x, rtol=1e-4, atol=1e-5)
    (F_Y[0, :, 0].sum() + F_X[0, :, 0].sum()).backward()
    assert five.grad.isfinite().all()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [1e30, -1e30, math.inf, -math.inf])
def test_no_filter_overflows(place, value):
    five = torch.zeros(1, 5, dtype=torch.float32)
    five[0, place] = value
    five.requires_grad_()
    for filters in FilterBank((7, 9), 4).filters(five):
        torch.testing.assert_close(filters.sum(-1), torch.ones(1, 4))
        filters[0, 0, 0].backward(retain_graph=True)
    assert five.grad.isfinite().all()


def test_a_far_window_of_draw_writes_to_the_edge():
    torch.manual_seed(0)
    model = Draw(8, steps=1, glimpse=3, hidden_dim=4, latent_dim=2)
    with torch.no_grad():
        model.write_window.weight.zero_()
        model.write_window.bias.copy_(torch.tensor([1e20, 0.0, -4.0, 0.0, 0.0]))
    written = model.write(torch.randn(2, 4))
    assert written[..., 7].abs().min() > 0
    assert not written[..., :7].any()


# --- recurrent layers without biases ---------------------------------------------------------


@pytest.mark.parametrize("layer_class", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_recurrent_layer_multiplies_each_token_by_each_matrix(
    layer_class, options, bias, batch
):
    layer = layer_class(5, 3, bias=bias, **options)
    matrices = [weight for weight in layer.parameters() if weight.ndim == 2]
    expected = 2 * 7 * batch * sum(weight.numel() for weight in matrices)
    x = torch.randn(7, batch, 5)
    with torch.no_grad():
        assert count_operations(layer, x).flops == expected


@pytest.mark.parametrize("layer_class", [nn.LSTM, nn.GRU])
def test_biases_take_no_products_in_the_backward_pass(layer_class):
    x = torch.randn(7, 4, 5, requires_grad=True)

    def step(layer):
        layer(x)[0].sum().backward()

    plain = count_operations(step, layer_class(5, 3, bias=False))
    biased = count_operations(step, layer_class(5, 3))
    assert plain.flops == biased.flops


# --- another default dtype -------------------------------------------------------------------

DTYPES = (torch.bfloat16, torch.float16, torch.float64)
SCALINGS = (
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


@pytest.fixture(params=DTYPES, ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def scaled(frequency, scaling):
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (keep + (1 - keep) / scaling["factor"])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_angles_do_not_depend_on_the_default_dtype(default_dtype, scaling):
    config = GPTConfig(
        vocab_size=5,
        block_size=8192,
        n_layer=1,
        n_head=1,
        n_embd=8,
        position="rotary",
        rope_scaling=scaling,
    )
    positions = [0, 1, 4001, 8190]
    cos, sin = rope_cos_sin(config, torch.tensor(positions))
    for row, position in enumerate(positions):
        for pair in range(4):
            angle = position * scaled(10000.0 ** (-pair / 4), scaling)
            assert abs(cos[row, pair].item() - math.cos(angle)) < 1e-6
            assert abs(sin[row, pair].item() - math.sin(angle)) < 1e-6


def test_probes_move_the_bytes_that_they_name(default_dtype):
    for name, probe in roofline_probes("cpu", shapes=[(2, 3, 4)], megabytes=[0.01]).items():
        if probe.bytes > 0:
            found = count_operations(probe.call).bytes
            assert abs(found - probe.bytes) <= 4, name


def test_random_orders_do_not_depend_on_the_default_dtype(default_dtype):
    def draws():
        torch.manual_seed(0)
        masked = model(images).masked
        mask = sparse_mask(300, window=1, random_keys=3)
        return masked, mask

    sizes = dict(embed_dim=8, depth=1, num_heads=2)
    decoder = dict(decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=2)
    model = MaskedAutoencoder(img_size=64, patch_size=4, **sizes, **decoder).float()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float32)
    found = draws()
    torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, draws()):
        assert torch.equal(ours, theirs)


# --- buffers that a forward pass assigns -----------------------------------------------------


class Counter(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.in_place = in_place
        self.register_buffer("steps", torch.zeros(100))
        self.register_buffer("last", None)

    def forward(self, x):
        if self.in_place:
            self.steps += 1
        else:
            self.steps = self.steps + 1
        self.last = x.detach().clone()
        return self.layer(x) * self.steps.sum()


@pytest.mark.parametrize("look", [saved_activations, training_memory])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_look_leaves_buffers_as_they_are(look, in_place):
    model, x = Counter(in_place), torch.randn(3, 4)
    buffer = model.steps
    found = look(model, x)
    assert model.steps is buffer
    assert not model.steps.any()
    assert model.last is None
    assert look(model, x) == found


@pytest.mark.parametrize("look", [saved_activations, training_memory])
@pytest.mark.parametrize("kmeans_steps", [0, 2])
def test_a_look_leaves_the_codebook_as_it_is(look, kmeans_steps):
    torch.manual_seed(0)
    quantizer = VectorQuantizer(6, 4, kmeans_steps=kmeans_steps)
    model = VQAutoencoder(nn.Conv2d(3, 4, 2, 2), quantizer, nn.Conv2d(4, 3, 1))
    x = torch.randn(2, 3, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    look(model, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_assigned_buffer_is_no_activation():
    x = torch.randn(3, 4)
    in_place, assigned = Counter(True), Counter(False)
    assert saved_activations(assigned, x) == saved_activations(in_place, x)
    assert training_memory(assigned, x) == training_memory(in_place, x)
    assert training_memory(assigned, x).activations == 4


# --- checkpointed blocks inside another module -----------------------------------------------


def small_vit():
    torch.manual_seed(0)
    sizes = dict(img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2)
    return VisionTransformer(num_classes=5, **sizes)


def test_a_container_has_the_memory_of_the_checkpointed_model_in_it():
    model, x = small_vit(), torch.randn(2, 3, 16, 16)
    plain = training_memory(model, x)
    model.set_grad_checkpointing()
    expected = training_memory(model, x)
    assert training_memory(nn.Sequential(model), x) == expected
    assert training_memory(nn.Sequential(nn.Sequential(model)), x) == expected
    assert expected.activations < plain.activations
    assert model.grad_checkpointing


def test_the_blocks_of_two_models_in_a_container_are_checkpointed():
    class Sum(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.first = first
            self.second = second

        def forward(self, x):
            return self.first(x) + self.second(x)

    first, second, x = small_vit(), small_vit(), torch.randn(2, 3, 16, 16)
    model = Sum(first, second)
    plain = training_memory(model, x).activations
    saved = training_memory(first, x).activations
    first.set_grad_checkpointing()
    saved -= training_memory(first, x).activations
    assert training_memory(model, x).activations == plain - saved
    second.set_grad_checkpointing()
    assert training_memory(model, x).activations == plain - 2 * saved


def test_a_module_without_blocks_inside_a_container_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].grad_checkpointing = True
    with pytest.raises(ValueError, match="model.1 has grad_checkpointing but no blocks"):
        training_memory(model, torch.ones(2, 3))


# --- numbers of few and of many digits -------------------------------------------------------


def test_how_often_a_number_has_few_digits():
    numbers = draw_numbers(60_000, 10**6)
    for digits in (1, 6):
        smallest = 0 if digits == 1 else 10 ** (digits - 1)
        chance = sum((10**digits - smallest) / 10**bound for bound in range(digits, 7)) / 6
        share = sum(len(str(number)) == digits for number in numbers) / len(numbers)
        assert abs(share - chance) < 0.006
        assert f"{chance:.3g}" in draw_numbers.__doc__


def test_danish_millions_are_of_common_gender():
    names = number_words([1_000_000, 21_000_000, 101_000_000, 901_101_001], "da")
    assert names == [
        "en million",
        "enogtyve millioner",
        "ethundrede og en millioner",
        "nihundrede og en millioner ethundrede og ettusinde og et",
    ]


# --- derivatives that the kernels do not have ------------------------------------------------


def flash(x):
    flash_attention = pytest.importorskip("attnlib.flash").flash_attention
    return flash_attention(x, x, x)


def in_windows(x):
    window_attention = pytest.importorskip("attnlib.windows").window_attention
    layout = window_layout((4, 4), (4, 4))
    return window_attention(x, torch.zeros(1, 16, 16, device=x.device), layout, 1)


KERNELS = (
    (flash, (1, 1, 16, 16), "flash_attention"),
    (in_windows, (1, 4, 4, 48), "window_attention"),
)


def kernel_input(shape):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(shape, device=device)


@pytest.mark.parametrize("function, shape, name", KERNELS)
def test_second_derivatives_name_the_function(function, shape, name):
    x = kernel_input(shape).requires_grad_()
    total = function(x).square().sum()
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} has no gradients of gradients"):
        gradient.sum().backward()


@pytest.mark.parametrize("function, shape, name", KERNELS)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_forward_mode_names_the_function(function, shape, name, grad_mode):
    x = kernel_input(shape)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=f"{name} has no .* forward mode"):
            function(dual)


@pytest.mark.parametrize("function, shape, name", KERNELS)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacfwd])
def test_transformations_name_the_function(function, shape, name, transform):
    x = kernel_input(shape)
    x = x[None] if transform is torch.func.vmap else x
    with pytest.raises(RuntimeError, match=f"{name} has no transformations of torch.func"):
        transform(lambda x: function(x).sum())(x)
