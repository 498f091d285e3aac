"""What a user may write: test_types.py runs it, and has mypy and pyright read it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnlib import GPT, GPTConfig, MultiHeadAttention, create_model
from attnlib.attention import attention, causal_mask, padding_mask, record_attention
from attnlib.train import fit

images = torch.randn(8, 3, 32, 32)
labels = torch.arange(8) % 2

model = create_model("vit_tiny_patch16_224", img_size=32, num_classes=2, depth=2)
channels: int = model.data_config["input_size"][0]
features: Tensor = model.forward_features(images)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


history = fit(model, lambda step: (images, labels), loss_fn=loss_fn, steps=3, lr=1e-3)
losses: list[float] = [record["loss"] for record in history]
with record_attention() as recorded, torch.no_grad():
    model.eval()(images)
heads: list[int] = [weights.shape[1] for weights in recorded]
model.reset_classifier(5)
decaying = {name for name, _ in model.named_parameters()} - model.no_weight_decay()

q = k = v = torch.randn(2, 4, 6, 8)  # (B, h, N, d)
out: Tensor = attention(q, k, v, mask=padding_mask(torch.tensor([6, 3])))
out = attention(q, k, v, mask=causal_mask(6), bias=torch.zeros(6, 6), scale=0.5)

layer = MultiHeadAttention(16, 4, dropout=0.1)
attended: Tensor = layer(torch.randn(2, 6, 16), mask="causal")
weights: Tensor = layer.attention_maps(torch.randn(2, 6, 16))

gpt = GPT(GPTConfig(vocab_size=11, block_size=16, n_layer=2, n_head=2, n_embd=8))
text: Tensor = gpt.generate(torch.zeros(1, 1, dtype=torch.int64), 4, temperature=0.8, top_k=5)
autoencoder: nn.Module = create_model("mae_photographs", img_size=32)
parameters: int = sum(p.numel() for p in autoencoder.parameters())
