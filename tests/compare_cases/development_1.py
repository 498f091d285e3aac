import math
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import einsum
from einops import rearrange, repeat
from einops.layers.torch import Rearrange

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError:
    jax = None

CASES = []


def case(name, style, reference, label, mistake="", expected="", call=None):
    def register(build):
        CASES.append(
            dict(
                name=name,
                style=style,
                build=build,
                reference=reference,
                label=label,
                mistake=mistake,
                expected=expected,
                call=call,
            )
        )
        return build

    return register


# ------------------------------------------------------------------ nanoGPT


@case(
    "ng_causal_ok",
    "nanogpt",
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    "correct",
    expected="equal (packed q/k/v)",
)
def ng_causal_ok():
    class Config:
        n_embd, n_head, block_size, dropout, bias = 32, 4, 16, 0.1, True

    class CausalSelfAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            assert config.n_embd % config.n_head == 0
            self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
            self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
            self.attn_dropout = nn.Dropout(config.dropout)
            self.resid_dropout = nn.Dropout(config.dropout)
            self.n_head = config.n_head
            self.n_embd = config.n_embd
            self.register_buffer(
                "bias",
                torch.tril(torch.ones(config.block_size, config.block_size)).view(
                    1, 1, config.block_size, config.block_size
                ),
            )

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
            y = y.transpose(1, 2).contiguous().view(B, T, C)
            return self.resid_dropout(self.c_proj(y))

    return CausalSelfAttention(Config())


@case(
    "ng_causal_scale_width",
    "nanogpt",
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "Scores are divided by the square root of the full width, not of the head width.",
    "scale: 1/sqrt(n_embd) instead of 1/sqrt(head_dim)",
)
def ng_causal_scale_width():
    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd=32, n_head=4, block_size=16):
            super().__init__()
            self.c_attn = nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = nn.Linear(n_embd, n_embd)
            self.n_head = n_head
            self.register_buffer(
                "mask",
                torch.tril(torch.ones(block_size, block_size)).view(
                    1, 1, block_size, block_size
                ),
            )

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = self.c_attn(x).chunk(3, dim=-1)
            q = q.view(B, T, self.n_head, -1).transpose(1, 2)
            k = k.view(B, T, self.n_head, -1).transpose(1, 2)
            v = v.view(B, T, self.n_head, -1).transpose(1, 2)
            att = q @ k.transpose(-2, -1) * C**-0.5
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            att = att.softmax(-1)
            y = (att @ v).transpose(1, 2).reshape(B, T, C)
            return self.c_proj(y)

    return CausalSelfAttention()


@case(
    "ng_causal_mask_after_softmax",
    "nanogpt",
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "The causal mask is applied after the softmax, so the rows no longer sum to one.",
    "mask applied after softmax, rows not normalised",
)
def ng_causal_mask_after_softmax():
    class Head(nn.Module):
        def __init__(self, n_embd, head_size, block_size):
            super().__init__()
            self.key = nn.Linear(n_embd, head_size)
            self.query = nn.Linear(n_embd, head_size)
            self.value = nn.Linear(n_embd, head_size)
            self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

        def forward(self, x):
            B, T, C = x.shape
            k = self.key(x)
            q = self.query(x)
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = F.softmax(wei, dim=-1)
            wei = wei.masked_fill(self.tril[:T, :T] == 0, 0.0)
            return wei @ self.value(x)

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_heads=4, n_embd=32, block_size=16):
            super().__init__()
            self.heads = nn.ModuleList(
                [Head(n_embd, n_embd // num_heads, block_size) for _ in range(num_heads)]
            )
            self.proj = nn.Linear(n_embd, n_embd)

        def forward(self, x):
            out = torch.cat([h(x) for h in self.heads], dim=-1)
            return self.proj(out)

    return MultiHeadAttention()


@case(
    "ng_gpt_ok",
    "nanogpt",
    ("gpt", dict(vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "correct",
    expected="equal (packed q/k/v; returns (logits, loss))",
)
def ng_gpt_ok():
    class LayerNorm(nn.Module):
        def __init__(self, ndim, bias):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(ndim))
            self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

        def forward(self, input):
            return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)

    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.c_attn = nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = nn.Linear(n_embd, n_embd)
            self.n_head, self.n_embd = n_head, n_embd

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    class MLP(nn.Module):
        def __init__(self, n_embd):
            super().__init__()
            self.c_fc = nn.Linear(n_embd, 4 * n_embd)
            self.gelu = nn.GELU(approximate="tanh")
            self.c_proj = nn.Linear(4 * n_embd, n_embd)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))

    class Block(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.ln_1 = LayerNorm(n_embd, True)
            self.attn = CausalSelfAttention(n_embd, n_head)
            self.ln_2 = LayerNorm(n_embd, True)
            self.mlp = MLP(n_embd)

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            x = x + self.mlp(self.ln_2(x))
            return x

    class GPT(nn.Module):
        def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
            super().__init__()
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(vocab_size, n_embd),
                    wpe=nn.Embedding(block_size, n_embd),
                    drop=nn.Dropout(0.1),
                    h=nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)]),
                    ln_f=LayerNorm(n_embd, True),
                )
            )
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.transformer.wte.weight = self.lm_head.weight
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

        def forward(self, idx, targets=None):
            b, t = idx.size()
            pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
            x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
            for block in self.transformer.h:
                x = block(x)
            x = self.transformer.ln_f(x)
            logits = self.lm_head(x)
            loss = None
            if targets is not None:
                loss = F.cross_entropy(
                    logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
                )
            return logits, loss

    return GPT(40, 16, 2, 4, 32)


@case(
    "ng_gpt_untied",
    "nanogpt",
    ("gpt", dict(vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "wrong",
    "The output head has its own weight; it is not tied to the token embedding.",
    "head not tied to token embedding",
)
def ng_gpt_untied():
    class Attention(nn.Module):
        def __init__(self, C, nh):
            super().__init__()
            self.c_attn = nn.Linear(C, 3 * C)
            self.c_proj = nn.Linear(C, C)
            self.nh = nh

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = [
                t.view(B, T, self.nh, C // self.nh).transpose(1, 2)
                for t in self.c_attn(x).split(C, dim=2)
            ]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    class Block(nn.Module):
        def __init__(self, C, nh):
            super().__init__()
            self.ln_1 = nn.LayerNorm(C)
            self.attn = Attention(C, nh)
            self.ln_2 = nn.LayerNorm(C)
            self.mlp = nn.Sequential(
                nn.Linear(C, 4 * C), nn.GELU(approximate="tanh"), nn.Linear(4 * C, C)
            )

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT(nn.Module):
        def __init__(self, vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32):
            super().__init__()
            self.wte = nn.Embedding(vocab_size, n_embd)
            self.wpe = nn.Embedding(block_size, n_embd)
            self.blocks = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
            self.ln_f = nn.LayerNorm(n_embd)
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

        def forward(self, idx):
            pos = torch.arange(idx.shape[1], device=idx.device)
            x = self.wte(idx) + self.wpe(pos)
            for block in self.blocks:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    return GPT()


@case(
    "ng_gpt_residual_from_norm",
    "nanogpt",
    ("gpt", dict(vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "wrong",
    "The residual branch starts from the normalised activations (x = ln(x); x = x + f(x)).",
    "residual added to the normalised input",
)
def ng_gpt_residual_from_norm():
    class SelfAttention(nn.Module):
        def __init__(self, n_embd, n_head, block_size):
            super().__init__()
            self.key = nn.Linear(n_embd, n_embd)
            self.query = nn.Linear(n_embd, n_embd)
            self.value = nn.Linear(n_embd, n_embd)
            self.proj = nn.Linear(n_embd, n_embd)
            self.register_buffer(
                "mask", torch.tril(torch.ones(block_size, block_size))[None, None]
            )
            self.n_head = n_head

        def forward(self, x):
            B, T, C = x.size()
            k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
            return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))

    class Block(nn.Module):
        def __init__(self, n_embd, n_head, block_size):
            super().__init__()
            self.ln1 = nn.LayerNorm(n_embd)
            self.ln2 = nn.LayerNorm(n_embd)
            self.attn = SelfAttention(n_embd, n_head, block_size)
            self.mlp = nn.Sequential(
                nn.Linear(n_embd, 4 * n_embd),
                nn.GELU(approximate="tanh"),
                nn.Linear(4 * n_embd, n_embd),
            )

        def forward(self, x):
            x = self.ln1(x)
            x = x + self.attn(x)
            x = self.ln2(x)
            x = x + self.mlp(x)
            return x

    class GPT(nn.Module):
        def __init__(self, vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32):
            super().__init__()
            self.tok_emb = nn.Embedding(vocab_size, n_embd)
            self.pos_emb = nn.Parameter(torch.randn(1, block_size, n_embd) * 0.02)
            self.blocks = nn.Sequential(
                *[Block(n_embd, n_head, block_size) for _ in range(n_layer)]
            )
            self.ln_f = nn.LayerNorm(n_embd)
            self.head = nn.Linear(n_embd, vocab_size, bias=False)
            self.head.weight = self.tok_emb.weight

        def forward(self, idx):
            t = idx.size(1)
            x = self.tok_emb(idx) + self.pos_emb[:, :t, :]
            x = self.ln_f(self.blocks(x))
            return self.head(x)

    return GPT()


# ------------------------------------------------------------------- einops


@case(
    "eo_multihead_ok",
    "einops",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    "correct",
    expected="equal (packed q/k/v)",
)
def eo_multihead_ok():
    def exists(val):
        return val is not None

    class Attention(nn.Module):
        def __init__(self, dim, heads=4, dim_head=8, dropout=0.0):
            super().__init__()
            inner_dim = dim_head * heads
            self.heads = heads
            self.scale = dim_head**-0.5
            self.to_qkv = nn.Linear(dim, inner_dim * 3)
            self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

        def forward(self, x, mask=None):
            h = self.heads
            q, k, v = map(
                lambda t: rearrange(t, "b n (h d) -> b h n d", h=h),
                self.to_qkv(x).chunk(3, dim=-1),
            )
            q = q * self.scale
            sim = einsum("b h i d, b h j d -> b h i j", q, k)
            if exists(mask):
                sim = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max)
            attn = sim.softmax(dim=-1)
            out = einsum("b h i j, b h j d -> b h i d", attn, v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    return Attention(32)


@case(
    "eo_multihead_interleaved_ok",
    "einops",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=False)),
    "correct",
    expected="equal up to the packing: q/k/v interleaved per head, heads innermost in the merge",
)
def eo_multihead_interleaved_ok():
    class Attention(nn.Module):
        def __init__(self, dim=32, num_heads=4):
            super().__init__()
            self.num_heads = num_heads
            self.qkv = nn.Linear(dim, dim * 3, bias=False)
            self.proj = nn.Linear(dim, dim, bias=False)

        def forward(self, x, mask=None):
            q, k, v = rearrange(
                self.qkv(x), "b n (h d three) -> three b h n d", three=3, h=self.num_heads
            ).unbind(0)
            energy = torch.einsum("bhqd, bhkd -> bhqk", q, k)
            if mask is not None:
                energy = energy.masked_fill(~mask, float("-inf"))
            att = F.softmax(energy / q.shape[-1] ** 0.5, dim=-1)
            out = torch.einsum("bhal, bhlv -> bhav", att, v)
            out = rearrange(out, "b h n d -> b n (d h)")
            return self.proj(out)

    return Attention()


@case(
    "eo_cross_scaled_twice",
    "einops",
    ("cross_attention", dict(embed_dim=32, num_heads=4)),
    "wrong",
    "The scale is applied to the queries and again to the scores.",
    "scale applied twice (1/d instead of 1/sqrt(d))",
)
def eo_cross_scaled_twice():
    class CrossAttention(nn.Module):
        def __init__(self, dim, heads=4, dim_head=8):
            super().__init__()
            inner_dim = heads * dim_head
            self.heads = heads
            self.scale = dim_head**-0.5
            self.to_q = nn.Linear(dim, inner_dim)
            self.to_kv = nn.Linear(dim, inner_dim * 2)
            self.to_out = nn.Linear(inner_dim, dim)

        def forward(self, x, context, mask=None):
            q = self.to_q(x) * self.scale
            k, v = self.to_kv(context).chunk(2, dim=-1)
            q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, k, v))
            dots = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
            if mask is not None:
                dots = dots.masked_fill(~mask, -torch.finfo(dots.dtype).max)
            attn = dots.softmax(dim=-1)
            out = einsum("b h i j, b h j d -> b h i d", attn, v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    return CrossAttention(32)


@case(
    "eo_patch_embed_columns",
    "einops",
    ("patch_embed", dict(img_size=32, patch_size=8, in_chans=3, embed_dim=48)),
    "wrong",
    "The patches come out in column-major order.",
    "token order: columns first instead of rows first",
)
def eo_patch_embed_columns():
    class PatchEmbedding(nn.Module):
        def __init__(self, in_channels=3, patch_size=8, emb_size=48):
            super().__init__()
            self.projection = nn.Sequential(
                nn.Conv2d(in_channels, emb_size, kernel_size=patch_size, stride=patch_size),
                Rearrange("b e h w -> b (w h) e"),
            )

        def forward(self, x):
            return self.projection(x)

    return PatchEmbedding()


@case(
    "eo_vit_ok",
    "einops",
    (
        "vit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    "correct",
    expected="equal up to the patch projection's layout (linear on flattened pixels)",
)
def eo_vit_ok():
    class FeedForward(nn.Module):
        def __init__(self, dim, hidden_dim, dropout=0.0):
            super().__init__()
            self.net = nn.Sequential(
                nn.LayerNorm(dim, eps=1e-6),
                nn.Linear(dim, hidden_dim),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(hidden_dim, dim),
                nn.Dropout(dropout),
            )

        def forward(self, x):
            return self.net(x)

    class Attention(nn.Module):
        def __init__(self, dim, heads, dim_head, dropout=0.0):
            super().__init__()
            inner_dim = dim_head * heads
            self.heads = heads
            self.scale = dim_head**-0.5
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.attend = nn.Softmax(dim=-1)
            self.dropout = nn.Dropout(dropout)
            self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=True)
            self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

        def forward(self, x):
            x = self.norm(x)
            qkv = self.to_qkv(x).chunk(3, dim=-1)
            q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), qkv)
            dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
            attn = self.dropout(self.attend(dots))
            out = torch.matmul(attn, v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    class Transformer(nn.Module):
        def __init__(self, dim, depth, heads, dim_head, mlp_dim, dropout=0.0):
            super().__init__()
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.layers = nn.ModuleList([])
            for _ in range(depth):
                self.layers.append(
                    nn.ModuleList(
                        [
                            Attention(dim, heads, dim_head, dropout),
                            FeedForward(dim, mlp_dim, dropout),
                        ]
                    )
                )

        def forward(self, x):
            for attn, ff in self.layers:
                x = attn(x) + x
                x = ff(x) + x
            return self.norm(x)

    class ViT(nn.Module):
        def __init__(
            self,
            *,
            image_size,
            patch_size,
            num_classes,
            dim,
            depth,
            heads,
            mlp_dim,
            channels=3,
            dim_head=12,
            dropout=0.0,
            emb_dropout=0.0,
        ):
            super().__init__()
            num_patches = (image_size // patch_size) ** 2
            patch_dim = channels * patch_size**2
            self.to_patch_embedding = nn.Sequential(
                Rearrange(
                    "b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch_size, p2=patch_size
                ),
                nn.Linear(patch_dim, dim),
            )
            self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 1, dim))
            self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
            self.dropout = nn.Dropout(emb_dropout)
            self.transformer = Transformer(dim, depth, heads, dim_head, mlp_dim, dropout)
            self.mlp_head = nn.Linear(dim, num_classes)

        def forward(self, img):
            x = self.to_patch_embedding(img)
            b, n, _ = x.shape
            cls_tokens = repeat(self.cls_token, "1 1 d -> b 1 d", b=b)
            x = torch.cat((cls_tokens, x), dim=1)
            x += self.pos_embedding[:, : (n + 1)]
            x = self.dropout(x)
            x = self.transformer(x)
            return self.mlp_head(x[:, 0])

    return ViT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=48,
        depth=3,
        heads=4,
        mlp_dim=192,
        dropout=0.1,
        emb_dropout=0.1,
    )


# ---------------------------------------------- d2l / annotated transformer


@case(
    "d2l_multihead_ok",
    "d2l",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    "correct",
    expected="equal (separate projections in a list)",
    call=lambda mine, x, mask=None: mine(x, x, x, mask),
)
def d2l_multihead_ok():
    import copy

    def clones(module, N):
        return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])

    def attention(query, key, value, mask=None, dropout=None):
        d_k = query.size(-1)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = scores.softmax(dim=-1)
        if dropout is not None:
            p_attn = dropout(p_attn)
        return torch.matmul(p_attn, value), p_attn

    class MultiHeadedAttention(nn.Module):
        def __init__(self, h, d_model, dropout=0.1):
            super().__init__()
            assert d_model % h == 0
            self.d_k = d_model // h
            self.h = h
            self.linears = clones(nn.Linear(d_model, d_model), 4)
            self.attn = None
            self.dropout = nn.Dropout(p=dropout)

        def forward(self, query, key, value, mask=None):
            nbatches = query.size(0)
            query, key, value = [
                lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
                for lin, x in zip(self.linears, (query, key, value))
            ]
            x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
            x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
            return self.linears[-1](x)

    return MultiHeadedAttention(4, 32)


@case(
    "d2l_layer_norm_std",
    "d2l",
    ("layer_norm", dict(dim=24, eps=1e-5)),
    "wrong",
    "Divides by the unbiased standard deviation plus epsilon instead of the root of the biased variance plus epsilon.",
    "unbiased variance (n - 1); epsilon outside the root",
)
def d2l_layer_norm_std():
    class LayerNorm(nn.Module):
        def __init__(self, features, eps=1e-5):
            super().__init__()
            self.a_2 = nn.Parameter(torch.ones(features))
            self.b_2 = nn.Parameter(torch.zeros(features))
            self.eps = eps

        def forward(self, x):
            mean = x.mean(-1, keepdim=True)
            std = x.std(-1, keepdim=True)
            return self.a_2 * (x - mean) / (std + self.eps) + self.b_2

    return LayerNorm(24)


@case(
    "d2l_encoder_prenorm",
    "d2l",
    (
        "encoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=False, act="relu"),
    ),
    "wrong",
    "The norms are applied before the sublayers, not after the residual sums.",
    "pre-norm instead of post-norm",
)
def d2l_encoder_prenorm():
    class MultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.W_q = nn.Linear(num_hiddens, num_hiddens)
            self.W_k = nn.Linear(num_hiddens, num_hiddens)
            self.W_v = nn.Linear(num_hiddens, num_hiddens)
            self.W_o = nn.Linear(num_hiddens, num_hiddens)

        def transpose_qkv(self, X):
            X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1)
            return X.permute(0, 2, 1, 3)

        def transpose_output(self, X):
            X = X.permute(0, 2, 1, 3)
            return X.reshape(X.shape[0], X.shape[1], -1)

        def forward(self, queries, keys, values, mask=None):
            queries = self.transpose_qkv(self.W_q(queries))
            keys = self.transpose_qkv(self.W_k(keys))
            values = self.transpose_qkv(self.W_v(values))
            scores = torch.matmul(queries, keys.transpose(2, 3)) / math.sqrt(queries.shape[-1])
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e6)
            self.attention_weights = F.softmax(scores, dim=-1)
            return self.W_o(self.transpose_output(torch.matmul(self.attention_weights, values)))

    class SublayerConnection(nn.Module):
        def __init__(self, size, dropout):
            super().__init__()
            self.norm = nn.LayerNorm(size)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x, sublayer):
            return x + self.dropout(sublayer(self.norm(x)))

    class PositionWiseFFN(nn.Module):
        def __init__(self, d_model, d_ff):
            super().__init__()
            self.dense1 = nn.Linear(d_model, d_ff)
            self.relu = nn.ReLU()
            self.dense2 = nn.Linear(d_ff, d_model)

        def forward(self, X):
            return self.dense2(self.relu(self.dense1(X)))

    class EncoderLayer(nn.Module):
        def __init__(self, size, heads, d_ff, dropout=0.1):
            super().__init__()
            self.self_attn = MultiHeadAttention(size, heads)
            self.feed_forward = PositionWiseFFN(size, d_ff)
            self.sublayer = nn.ModuleList([SublayerConnection(size, dropout) for _ in range(2)])

        def forward(self, x, mask=None):
            x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
            return self.sublayer[1](x, self.feed_forward)

    return EncoderLayer(32, 4, 64)


@case(
    "d2l_sinusoids_exponent",
    "d2l",
    ("sinusoids", dict()),
    "wrong",
    "The exponent counts the factor two twice (the index already runs in steps of two).",
    "frequencies: exponent 4i/d instead of 2i/d",
)
def d2l_sinusoids_exponent():
    def positional_encoding(num_steps, num_hiddens):
        P = torch.zeros((num_steps, num_hiddens), dtype=torch.float64)
        X = torch.arange(num_steps, dtype=torch.float64).reshape(-1, 1) / torch.pow(
            10000, 2 * torch.arange(0, num_hiddens, 2, dtype=torch.float64) / num_hiddens
        )
        P[:, 0::2] = torch.sin(X)
        P[:, 1::2] = torch.cos(X)
        return P

    return positional_encoding


@case(
    "d2l_padded_ce_all",
    "d2l",
    ("padded_cross_entropy", dict(pad_id=0)),
    "wrong",
    "The summed loss of the real tokens is divided by the number of all tokens.",
    "mean over all tokens, padding included",
)
def d2l_padded_ce_all():
    def masked_softmax_ce(pred, label):
        weights = (label != 0).to(pred.dtype)
        unweighted = F.cross_entropy(pred.permute(0, 2, 1), label, reduction="none")
        return (unweighted * weights).mean()

    return masked_softmax_ce


# ------------------------------------------------------------- plain torch


@case(
    "th_encoder_batch_first",
    "torch",
    (
        "encoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=False, act="relu"),
    ),
    "wrong",
    "nn.MultiheadAttention is built without batch_first, so it attends over the batch.",
    "attention mixes the batch (batch_first missing)",
)
def th_encoder_batch_first():
    class EncoderLayer(nn.Module):
        def __init__(self, d_model=32, n_heads=4, d_ff=64, dropout=0.1):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(d_model, n_heads, dropout=dropout)
            self.ffn = nn.Sequential(
                nn.Linear(d_model, d_ff),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(d_ff, d_model),
            )
            self.norm1 = nn.LayerNorm(d_model)
            self.norm2 = nn.LayerNorm(d_model)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            attn_out, _ = self.self_attn(x, x, x)
            x = self.norm1(x + self.dropout(attn_out))
            return self.norm2(x + self.dropout(self.ffn(x)))

    return EncoderLayer()


@case(
    "th_encoder_seqfirst_ok",
    "torch",
    (
        "encoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=True, act="gelu"),
    ),
    "correct",
    expected="equal up to sequence-first layout and the padding mask's polarity",
    call=lambda mine, x, mask=None: mine(
        x.transpose(0, 1), None if mask is None else ~mask[:, 0, 0, :]
    ).transpose(0, 1),
)
def th_encoder_seqfirst_ok():
    class PreNormEncoderLayer(nn.Module):
        def __init__(self, d_model=32, nhead=4, dim_feedforward=64, dropout=0.1):
            super().__init__()
            self.attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
            self.linear1 = nn.Linear(d_model, dim_feedforward)
            self.linear2 = nn.Linear(dim_feedforward, d_model)
            self.norm_attn = nn.LayerNorm(d_model)
            self.norm_ff = nn.LayerNorm(d_model)
            self.drop = nn.Dropout(dropout)

        def forward(self, src, pad_mask=None):
            h = self.norm_attn(src)
            h = self.attn(h, h, h, key_padding_mask=pad_mask, need_weights=False)[0]
            src = src + self.drop(h)
            h = self.linear2(self.drop(F.gelu(self.linear1(self.norm_ff(src)))))
            return src + self.drop(h)

    return PreNormEncoderLayer()


@case(
    "th_vit_block_sdpa_dropout",
    "torch",
    ("vit_block", dict(dim=32, num_heads=4, mlp_ratio=4)),
    "wrong",
    "scaled_dot_product_attention gets dropout_p=0.1 also in evaluation.",
    "dropout active in evaluation",
)
def th_vit_block_sdpa_dropout():
    class Attention(nn.Module):
        def __init__(self, dim, num_heads, attn_drop=0.1):
            super().__init__()
            self.num_heads = num_heads
            self.attn_drop = attn_drop
            self.qkv = nn.Linear(dim, dim * 3)
            self.proj = nn.Linear(dim, dim)

        def forward(self, x):
            B, N, C = x.shape
            qkv = (
                self.qkv(x)
                .reshape(B, N, 3, self.num_heads, C // self.num_heads)
                .permute(2, 0, 3, 1, 4)
            )
            q, k, v = qkv.unbind(0)
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop)
            return self.proj(x.transpose(1, 2).reshape(B, N, C))

    class Block(nn.Module):
        def __init__(self, dim=32, num_heads=4, mlp_ratio=4):
            super().__init__()
            self.norm1 = nn.LayerNorm(dim, eps=1e-6)
            self.attn = Attention(dim, num_heads)
            self.norm2 = nn.LayerNorm(dim, eps=1e-6)
            self.mlp = nn.Sequential(
                nn.Linear(dim, dim * mlp_ratio), nn.GELU(), nn.Linear(dim * mlp_ratio, dim)
            )

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    return Block()


@case(
    "th_multihead_detached",
    "torch",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "The attention weights are detached before they multiply the values: no gradient reaches queries and keys.",
    "gradients: none for the query and key projections (detach)",
)
def th_multihead_detached():
    class SelfAttention(nn.Module):
        def __init__(self, embed_dim=32, num_heads=4):
            super().__init__()
            self.num_heads = num_heads
            self.head_dim = embed_dim // num_heads
            self.q_proj = nn.Linear(embed_dim, embed_dim)
            self.k_proj = nn.Linear(embed_dim, embed_dim)
            self.v_proj = nn.Linear(embed_dim, embed_dim)
            self.out_proj = nn.Linear(embed_dim, embed_dim)
            self.attn_weights = None

        def forward(self, x, mask=None):
            bsz, n, c = x.shape
            q = self.q_proj(x).view(bsz, n, self.num_heads, self.head_dim).transpose(1, 2)
            k = self.k_proj(x).view(bsz, n, self.num_heads, self.head_dim).transpose(1, 2)
            v = self.v_proj(x).view(bsz, n, self.num_heads, self.head_dim).transpose(1, 2)
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            self.attn_weights = torch.softmax(scores, dim=-1).detach()
            out = self.attn_weights @ v
            return self.out_proj(out.transpose(1, 2).reshape(bsz, n, c))

    return SelfAttention()


@case(
    "th_rms_norm_sum",
    "torch",
    ("rms_norm", dict(dim=24, eps=1e-5)),
    "wrong",
    "Divides by the vector's length (root of the sum of squares), not by the root mean square.",
    "scale off by sqrt(dim): sum instead of mean of squares",
)
def th_rms_norm_sum():
    class RMSNorm(nn.Module):
        def __init__(self, dim, eps=1e-5):
            super().__init__()
            self.eps = eps
            self.weight = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            norm = torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)
            return x * norm * self.weight

    return RMSNorm(24)


# ------------------------------------------------------------------- numpy


@case(
    "np_attention_axis",
    "numpy",
    ("attention", dict()),
    "wrong",
    "The softmax runs over the queries.",
    "softmax over the wrong axis",
)
def np_attention_axis():
    def softmax(x, axis):
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        return e / e.sum(axis=axis, keepdims=True)

    def attention(q, k, v, mask=None):
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = np.where(mask, scores, -1e30)
        return softmax(scores, axis=2) @ v

    return attention


@case(
    "np_multihead_ok",
    "numpy",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    "correct",
    expected="equal up to transposed (in, out) weights",
)
def np_multihead_ok():
    rng = np.random.default_rng(0)
    C, n_heads = 32, 4
    params = {}
    for n in "qkvo":
        params[f"W{n}"] = rng.normal(size=(C, C)) / np.sqrt(C)
        params[f"b{n}"] = rng.normal(size=C) * 0.1

    def softmax(x):
        e = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return e / np.sum(e, axis=-1, keepdims=True)

    def mha(params, x, mask=None):
        B, N, C = x.shape
        d = C // n_heads

        def heads(name):
            return (
                (x @ params["W" + name] + params["b" + name])
                .reshape(B, N, n_heads, d)
                .transpose(0, 2, 1, 3)
            )

        q, k, v = heads("q"), heads("k"), heads("v")
        s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d)
        if mask is not None:
            s = np.where(mask, s, -np.inf)
        o = softmax(s) @ v
        o = o.transpose(0, 2, 1, 3).reshape(B, N, C)
        return o @ params["Wo"] + params["bo"]

    return mha, params


@case(
    "np_box_iou_union",
    "numpy",
    ("box_iou", dict()),
    "wrong",
    "The intersection is not subtracted from the sum of the areas.",
    "union without minus intersection",
)
def np_box_iou_union():
    def box_area(b):
        return (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])

    def box_iou(boxes1, boxes2):
        lt = np.maximum(boxes1[:, None, :2], boxes2[None, :, :2])
        rb = np.minimum(boxes1[:, None, 2:], boxes2[None, :, 2:])
        wh = np.clip(rb - lt, 0, None)
        inter = wh[..., 0] * wh[..., 1]
        union = box_area(boxes1)[:, None] + box_area(boxes2)[None, :]
        return inter / union

    return box_iou


# --------------------------------------------------------------------- jax


@case(
    "jax_multihead_ok",
    "jax",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    "correct",
    expected="equal up to (width, heads, head width) weights",
)
def jax_multihead_ok():
    C, H = 32, 4
    D = C // H
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    params = {
        "query/kernel": jax.random.normal(keys[0], (C, H, D)) * 0.2,
        "query/bias": jax.random.normal(keys[1], (H, D)) * 0.1,
        "key/kernel": jax.random.normal(keys[2], (C, H, D)) * 0.2,
        "key/bias": jax.random.normal(keys[3], (H, D)) * 0.1,
        "value/kernel": jax.random.normal(keys[4], (C, H, D)) * 0.2,
        "value/bias": jax.random.normal(keys[5], (H, D)) * 0.1,
        "out/kernel": jax.random.normal(keys[6], (H, D, C)) * 0.2,
        "out/bias": jax.random.normal(keys[7], (C,)) * 0.1,
    }

    def apply(params, x, mask=None):
        q = jnp.einsum("bnc,chd->bnhd", x, params["query/kernel"]) + params["query/bias"]
        k = jnp.einsum("bnc,chd->bnhd", x, params["key/kernel"]) + params["key/bias"]
        v = jnp.einsum("bnc,chd->bnhd", x, params["value/kernel"]) + params["value/bias"]
        logits = jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(D), k)
        if mask is not None:
            logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
        weights = jax.nn.softmax(logits, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return jnp.einsum("bqhd,hdc->bqc", out, params["out/kernel"]) + params["out/bias"]

    return apply, params


@case(
    "jax_causal_zero_fill",
    "jax",
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "Masked scores are set to zero instead of minus infinity, so future tokens are still seen.",
    "causal mask fills with 0, future tokens leak",
)
def jax_causal_zero_fill():
    n_embd, n_head = 32, 4
    k1, k2, k3, k4 = jax.random.split(jax.random.PRNGKey(1), 4)
    params = {
        "c_attn_w": 0.2 * jax.random.normal(k1, (n_embd, 3 * n_embd)),
        "c_attn_b": 0.1 * jax.random.normal(k2, (3 * n_embd,)),
        "c_proj_w": 0.2 * jax.random.normal(k3, (n_embd, n_embd)),
        "c_proj_b": 0.1 * jax.random.normal(k4, (n_embd,)),
    }

    def causal_self_attention(params, x):
        B, T, C = x.shape
        qkv = x @ params["c_attn_w"] + params["c_attn_b"]
        q, k, v = jnp.split(qkv, 3, axis=-1)
        split = lambda t: t.reshape(B, T, n_head, C // n_head).transpose(0, 2, 1, 3)
        q, k, v = split(q), split(k), split(v)
        scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(C // n_head)
        scores = jnp.tril(scores)
        att = jax.nn.softmax(scores, axis=-1)
        y = (att @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
        return y @ params["c_proj_w"] + params["c_proj_b"]

    return causal_self_attention, params


# ------------------------------------------------------- nanoGPT, continued


@case(
    "ng_conv1d_causal_ok",
    "nanogpt",
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    "correct",
    expected="equal up to Conv1D (in, out) weights; returns (output, weights)",
)
def ng_conv1d_causal_ok():
    class Conv1D(nn.Module):
        def __init__(self, nf, nx):
            super().__init__()
            self.nf = nf
            self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.02))
            self.bias = nn.Parameter(torch.zeros(nf))

        def forward(self, x):
            size_out = x.size()[:-1] + (self.nf,)
            x = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
            return x.view(size_out)

    class GPT2Attention(nn.Module):
        def __init__(self, hidden_size=32, num_heads=4, max_positions=32):
            super().__init__()
            self.register_buffer(
                "bias",
                torch.tril(torch.ones(max_positions, max_positions, dtype=torch.bool))[
                    None, None
                ],
                persistent=False,
            )
            self.embed_dim = hidden_size
            self.num_heads = num_heads
            self.head_dim = hidden_size // num_heads
            self.c_attn = Conv1D(3 * hidden_size, hidden_size)
            self.c_proj = Conv1D(hidden_size, hidden_size)

        def _split_heads(self, t):
            return t.view(t.size()[:-1] + (self.num_heads, self.head_dim)).permute(0, 2, 1, 3)

        def _merge_heads(self, t):
            t = t.permute(0, 2, 1, 3).contiguous()
            return t.view(t.size()[:-2] + (self.num_heads * self.head_dim,))

        def _attn(self, query, key, value):
            attn_weights = torch.matmul(query, key.transpose(-1, -2)) / (value.size(-1) ** 0.5)
            n = query.size(-2)
            mask_value = torch.full(
                [], torch.finfo(attn_weights.dtype).min, dtype=attn_weights.dtype
            )
            attn_weights = torch.where(self.bias[:, :, :n, :n], attn_weights, mask_value)
            attn_weights = F.softmax(attn_weights, dim=-1)
            return torch.matmul(attn_weights, value), attn_weights

        def forward(self, hidden_states):
            query, key, value = self.c_attn(hidden_states).split(self.embed_dim, dim=2)
            out, weights = self._attn(
                self._split_heads(query), self._split_heads(key), self._split_heads(value)
            )
            return self.c_proj(self._merge_heads(out)), weights

    return GPT2Attention()


@case(
    "ng_llama_ok",
    "nanogpt",
    ("llama", dict(vocab_size=40, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=48)),
    "correct",
    expected="equal (packed q/k/v, w1 and w3 the gate and up projections)",
)
def ng_llama_ok():
    class RMSNorm(nn.Module):
        def __init__(self, dim, eps=1e-5):
            super().__init__()
            self.eps = eps
            self.weight = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    def rotate_half(x):
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head, n_kv_head):
            super().__init__()
            self.n_head, self.n_kv_head, self.hd = n_head, n_kv_head, n_embd // n_head
            self.c_attn = nn.Linear(n_embd, (n_head + 2 * n_kv_head) * self.hd, bias=False)
            self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

        def forward(self, x, cos, sin):
            B, T, C = x.size()
            qkv = self.c_attn(x)
            q, k, v = qkv.split(
                [self.n_head * self.hd, self.n_kv_head * self.hd, self.n_kv_head * self.hd],
                dim=-1,
            )
            q, k, v = map(lambda t: t.view(B, T, -1, self.hd).transpose(1, 2), (q, k, v))
            q = q * cos + rotate_half(q) * sin
            k = k * cos + rotate_half(k) * sin
            rep = self.n_head // self.n_kv_head
            k = k[:, :, None].expand(-1, -1, rep, -1, -1).reshape(B, self.n_head, T, self.hd)
            v = v[:, :, None].expand(-1, -1, rep, -1, -1).reshape(B, self.n_head, T, self.hd)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    class MLP(nn.Module):
        def __init__(self, n_embd, n_inner):
            super().__init__()
            self.w1 = nn.Linear(n_embd, n_inner, bias=False)
            self.w2 = nn.Linear(n_inner, n_embd, bias=False)
            self.w3 = nn.Linear(n_embd, n_inner, bias=False)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    class Block(nn.Module):
        def __init__(self, n_embd, n_head, n_kv_head, n_inner):
            super().__init__()
            self.ln_1 = RMSNorm(n_embd)
            self.attn = CausalSelfAttention(n_embd, n_head, n_kv_head)
            self.ln_2 = RMSNorm(n_embd)
            self.mlp = MLP(n_embd, n_inner)

        def forward(self, x, cos, sin):
            x = x + self.attn(self.ln_1(x), cos, sin)
            x = x + self.mlp(self.ln_2(x))
            return x

    class Llama(nn.Module):
        def __init__(self, vocab_size, n_layer, n_head, n_kv_head, n_embd, n_inner, max_len=64):
            super().__init__()
            self.wte = nn.Embedding(vocab_size, n_embd)
            self.h = nn.ModuleList(
                [Block(n_embd, n_head, n_kv_head, n_inner) for _ in range(n_layer)]
            )
            self.ln_f = RMSNorm(n_embd)
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.lm_head.weight = self.wte.weight
            hd = n_embd // n_head
            inv_freq = 1.0 / (10000 ** (torch.arange(0, hd, 2, dtype=torch.float64) / hd))
            freqs = torch.outer(torch.arange(max_len, dtype=torch.float64), inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1)
            self.register_buffer("cos", emb.cos(), persistent=False)
            self.register_buffer("sin", emb.sin(), persistent=False)

        def forward(self, idx):
            T = idx.size(1)
            x = self.wte(idx)
            cos, sin = self.cos[:T].to(x.dtype), self.sin[:T].to(x.dtype)
            for block in self.h:
                x = block(x, cos, sin)
            return self.lm_head(self.ln_f(x))

    return Llama(40, 2, 4, 2, 32, 48)


@case(
    "ng_llama_kv_repeat",
    "nanogpt",
    ("llama", dict(vocab_size=40, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=48)),
    "wrong",
    "The key/value heads are tiled (0, 1, 0, 1) instead of each being repeated (0, 0, 1, 1).",
    "grouped heads: query head i uses key/value head i % n_kv_head",
)
def ng_llama_kv_repeat():
    class RMSNorm(nn.Module):
        def __init__(self, dim, eps=1e-5):
            super().__init__()
            self.eps = eps
            self.g = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            return F.rms_norm(x, self.g.shape, self.g, self.eps)

    def apply_rope(x, base=10000.0):
        T, hd = x.shape[-2:]
        theta = base ** (-torch.arange(0, hd, 2, device=x.device, dtype=torch.float64) / hd)
        ang = torch.arange(T, device=x.device, dtype=torch.float64)[:, None] * theta
        cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)

    class Attention(nn.Module):
        def __init__(self, C, nh, nkv):
            super().__init__()
            self.nh, self.nkv, self.hd = nh, nkv, C // nh
            self.wq = nn.Linear(C, nh * self.hd, bias=False)
            self.wk = nn.Linear(C, nkv * self.hd, bias=False)
            self.wv = nn.Linear(C, nkv * self.hd, bias=False)
            self.wo = nn.Linear(C, C, bias=False)

        def forward(self, x):
            B, T, C = x.shape
            q = apply_rope(self.wq(x).view(B, T, self.nh, self.hd).transpose(1, 2))
            k = apply_rope(self.wk(x).view(B, T, self.nkv, self.hd).transpose(1, 2))
            v = self.wv(x).view(B, T, self.nkv, self.hd).transpose(1, 2)
            n_rep = self.nh // self.nkv
            k = k.repeat(1, n_rep, 1, 1)
            v = v.repeat(1, n_rep, 1, 1)
            att = q @ k.transpose(-2, -1) / math.sqrt(self.hd)
            att = att.masked_fill(
                torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), float("-inf")
            )
            y = att.softmax(dim=-1) @ v
            return self.wo(y.transpose(1, 2).reshape(B, T, C))

    class FeedForward(nn.Module):
        def __init__(self, C, H):
            super().__init__()
            self.w1 = nn.Linear(C, H, bias=False)
            self.w2 = nn.Linear(H, C, bias=False)
            self.w3 = nn.Linear(C, H, bias=False)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    class TransformerBlock(nn.Module):
        def __init__(self, C, nh, nkv, H):
            super().__init__()
            self.attention = Attention(C, nh, nkv)
            self.feed_forward = FeedForward(C, H)
            self.attention_norm = RMSNorm(C)
            self.ffn_norm = RMSNorm(C)

        def forward(self, x):
            h = x + self.attention(self.attention_norm(x))
            return h + self.feed_forward(self.ffn_norm(h))

    class Transformer(nn.Module):
        def __init__(
            self, vocab_size=40, n_layers=2, n_heads=4, n_kv_heads=2, dim=32, hidden=48
        ):
            super().__init__()
            self.tok_embeddings = nn.Embedding(vocab_size, dim)
            self.layers = nn.ModuleList(
                TransformerBlock(dim, n_heads, n_kv_heads, hidden) for _ in range(n_layers)
            )
            self.norm = RMSNorm(dim)
            self.output = nn.Linear(dim, vocab_size, bias=False)
            self.tok_embeddings.weight = self.output.weight

        def forward(self, tokens):
            h = self.tok_embeddings(tokens)
            for layer in self.layers:
                h = layer(h)
            return self.output(self.norm(h))

    return Transformer()


@case(
    "ng_gpt_shared_blocks",
    "nanogpt",
    ("gpt", dict(vocab_size=40, block_size=16, n_layer=3, n_head=4, n_embd=32)),
    "wrong",
    "One block object is repeated, so all layers share their weights.",
    "blocks share parameters",
)
def ng_gpt_shared_blocks():
    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.qkv = nn.Linear(n_embd, 3 * n_embd)
            self.proj = nn.Linear(n_embd, n_embd)
            self.n_head = n_head

        def forward(self, x):
            B, T, C = x.size()
            qkv = (
                self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
            )
            y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
            return self.proj(y.transpose(1, 2).reshape(B, T, C))

    class Block(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.ln1 = nn.LayerNorm(n_embd)
            self.attn = CausalSelfAttention(n_embd, n_head)
            self.ln2 = nn.LayerNorm(n_embd)
            self.mlp = nn.Sequential(
                nn.Linear(n_embd, 4 * n_embd), nn.GELU("tanh"), nn.Linear(4 * n_embd, n_embd)
            )

        def forward(self, x):
            x = x + self.attn(self.ln1(x))
            x = x + self.mlp(self.ln2(x))
            return x

    class GPT(nn.Module):
        def __init__(self, vocab_size=40, block_size=16, n_layer=3, n_head=4, n_embd=32):
            super().__init__()
            self.wte = nn.Embedding(vocab_size, n_embd)
            self.wpe = nn.Embedding(block_size, n_embd)
            self.h = nn.ModuleList([Block(n_embd, n_head)] * n_layer)
            self.ln_f = nn.LayerNorm(n_embd)

        def forward(self, idx):
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
            for block in self.h:
                x = block(x)
            return F.linear(self.ln_f(x), self.wte.weight)

    return GPT()


@case(
    "ng_next_token_unshifted",
    "nanogpt",
    ("next_token_loss", dict()),
    "wrong",
    "The logits are compared with the same tokens; nothing is shifted.",
    "targets not shifted by one",
)
def ng_next_token_unshifted():
    def language_model_loss(logits, idx):
        B, T, C = logits.shape
        logits = logits.reshape(B * T, C)
        targets = idx.reshape(B * T)
        return F.cross_entropy(logits, targets)

    return language_model_loss


# -------------------------------------------------------- einops, continued


@case(
    "eo_grouped_ok",
    "einops",
    ("grouped_attention", dict(embed_dim=32, num_heads=4, num_kv_heads=2, bias=False)),
    "correct",
    expected="equal",
)
def eo_grouped_ok():
    class GroupedQueryAttention(nn.Module):
        def __init__(self, dim, heads, kv_heads):
            super().__init__()
            self.heads, self.kv_heads = heads, kv_heads
            dim_head = dim // heads
            self.scale = dim_head**-0.5
            self.to_q = nn.Linear(dim, dim, bias=False)
            self.to_kv = nn.Linear(dim, 2 * kv_heads * dim_head, bias=False)
            self.to_out = nn.Linear(dim, dim, bias=False)

        def forward(self, x):
            n = x.shape[1]
            q = rearrange(
                self.to_q(x),
                "b n (h g d) -> b h g n d",
                h=self.kv_heads,
                g=self.heads // self.kv_heads,
            )
            k, v = rearrange(self.to_kv(x), "b n (kv h d) -> kv b h n d", kv=2, h=self.kv_heads)
            sim = einsum("b h g i d, b h j d -> b h g i j", q * self.scale, k)
            causal_mask = torch.ones((n, n), dtype=torch.bool, device=x.device).triu(1)
            sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
            attn = sim.softmax(dim=-1)
            out = einsum("b h g i j, b h j d -> b h g i d", attn, v)
            out = rearrange(out, "b h g n d -> b n (h g d)")
            return self.to_out(out)

    return GroupedQueryAttention(32, 4, 2)


@case(
    "eo_vit_mean_pool",
    "einops",
    (
        "vit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    "wrong",
    "The head reads the mean of all tokens instead of the class token.",
    "pooling: mean of tokens instead of the class token",
)
def eo_vit_mean_pool():
    class PreNorm(nn.Module):
        def __init__(self, dim, fn):
            super().__init__()
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.fn = fn

        def forward(self, x, **kwargs):
            return self.fn(self.norm(x), **kwargs)

    class Attention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.scale = (dim // heads) ** -0.5
            self.to_qkv = nn.Linear(dim, dim * 3)
            self.to_out = nn.Linear(dim, dim)

        def forward(self, x):
            q, k, v = rearrange(
                self.to_qkv(x), "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.heads
            )
            attn = (einsum("b h i d, b h j d -> b h i j", q, k) * self.scale).softmax(dim=-1)
            out = einsum("b h i j, b h j d -> b h i d", attn, v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    class ViT(nn.Module):
        def __init__(
            self, image_size=32, patch_size=8, num_classes=10, dim=48, depth=3, heads=4
        ):
            super().__init__()
            num_patches = (image_size // patch_size) ** 2
            self.patch = nn.Conv2d(3, dim, patch_size, patch_size)
            self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
            self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 1, dim) * 0.02)
            self.layers = nn.ModuleList(
                [
                    nn.ModuleList(
                        [
                            PreNorm(dim, Attention(dim, heads)),
                            PreNorm(
                                dim,
                                nn.Sequential(
                                    nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
                                ),
                            ),
                        ]
                    )
                    for _ in range(depth)
                ]
            )
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.head = nn.Linear(dim, num_classes)

        def forward(self, img):
            x = rearrange(self.patch(img), "b d h w -> b (h w) d")
            cls = repeat(self.cls_token, "1 n d -> b n d", b=x.shape[0])
            x = torch.cat([cls, x], dim=1) + self.pos_embedding
            for attn, ff in self.layers:
                x = x + attn(x)
                x = x + ff(x)
            x = self.norm(x).mean(dim=1)
            return self.head(x)

    return ViT()


@case(
    "eo_window_bias_index",
    "einops",
    ("window_attention", dict(dim=32, window_size=4, num_heads=4)),
    "wrong",
    "The row offset is multiplied by M instead of 2M - 1, so different offsets share a bias.",
    "relative position index: factor M instead of 2M-1",
)
def eo_window_bias_index():
    class WindowAttention(nn.Module):
        def __init__(self, dim=32, window_size=4, num_heads=4):
            super().__init__()
            self.num_heads = num_heads
            self.scale = (dim // num_heads) ** -0.5
            self.qkv = nn.Linear(dim, 3 * dim)
            self.proj = nn.Linear(dim, dim)
            m = window_size
            self.bias_table = nn.Parameter(torch.randn((2 * m - 1) ** 2, num_heads) * 0.02)
            pos = torch.stack(torch.meshgrid(torch.arange(m), torch.arange(m), indexing="ij"))
            pos = rearrange(pos, "c i j -> (i j) c")
            rel = rearrange(pos, "i c -> i 1 c") - rearrange(pos, "j c -> 1 j c") + m - 1
            self.register_buffer("rel_index", rel[..., 0] * m + rel[..., 1], persistent=False)

        def forward(self, x, mask=None):
            q, k, v = rearrange(
                self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.num_heads
            ).unbind(0)
            sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
            sim = sim + rearrange(self.bias_table[self.rel_index], "i j h -> 1 h i j")
            if mask is not None:
                sim = sim.masked_fill(~mask, float("-inf"))
            out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
            return self.proj(rearrange(out, "b h n d -> b n (h d)"))

    return WindowAttention()


@case(
    "eo_swin_unshift",
    "einops",
    (
        "swin_block",
        dict(dim=32, input_resolution=(8, 8), num_heads=4, window_size=4, shift_size=2),
    ),
    "wrong",
    "After attention the map is rolled further in the same direction instead of back.",
    "the shift is not undone (rolled the wrong way)",
)
def eo_swin_unshift():
    class CyclicShift(nn.Module):
        def __init__(self, displacement):
            super().__init__()
            self.displacement = displacement

        def forward(self, x):
            return torch.roll(x, shifts=(self.displacement, self.displacement), dims=(1, 2))

    def get_relative_distances(window_size):
        indices = torch.tensor([[x, y] for x in range(window_size) for y in range(window_size)])
        return indices[:, None, :] - indices[None, :, :]

    def region_mask(size, window, shift):
        edge = torch.zeros(size, dtype=torch.long)
        edge[size - window : size - shift] = 1
        edge[size - shift :] = 2
        region = edge[:, None] * 3 + edge[None, :]
        region = rearrange(region, "(nh wh) (nw ww) -> (nh nw) (wh ww)", wh=window, ww=window)
        return region[:, :, None] == region[:, None, :]

    class WindowAttention(nn.Module):
        def __init__(self, dim, heads, window_size, resolution, displacement):
            super().__init__()
            self.heads = heads
            self.scale = (dim // heads) ** -0.5
            self.window_size = window_size
            self.cyclic_shift = CyclicShift(-displacement)
            self.cyclic_back_shift = CyclicShift(-displacement)
            self.register_buffer(
                "mask", region_mask(resolution, window_size, displacement), persistent=False
            )
            self.to_qkv = nn.Linear(dim, dim * 3)
            self.register_buffer(
                "relative_indices",
                get_relative_distances(window_size) + window_size - 1,
                persistent=False,
            )
            self.pos_embedding = nn.Parameter(
                torch.randn(2 * window_size - 1, 2 * window_size - 1, heads)
            )
            self.to_out = nn.Linear(dim, dim)

        def forward(self, x):
            x = self.cyclic_shift(x)
            b, n_h, n_w, _ = x.shape
            nw_h, nw_w = n_h // self.window_size, n_w // self.window_size
            q, k, v = map(
                lambda t: rearrange(
                    t,
                    "b (nw_h w_h) (nw_w w_w) (h d) -> b h (nw_h nw_w) (w_h w_w) d",
                    h=self.heads,
                    w_h=self.window_size,
                    w_w=self.window_size,
                ),
                self.to_qkv(x).chunk(3, dim=-1),
            )
            dots = einsum("b h w i d, b h w j d -> b h w i j", q, k) * self.scale
            bias = self.pos_embedding[
                self.relative_indices[..., 0], self.relative_indices[..., 1]
            ]
            dots = dots + rearrange(bias, "i j h -> 1 h 1 i j")
            dots = dots.masked_fill(~self.mask, float("-inf"))
            attn = dots.softmax(dim=-1)
            out = einsum("b h w i j, b h w j d -> b h w i d", attn, v)
            out = rearrange(
                out,
                "b h (nw_h nw_w) (w_h w_w) d -> b (nw_h w_h) (nw_w w_w) (h d)",
                h=self.heads,
                w_h=self.window_size,
                w_w=self.window_size,
                nw_h=nw_h,
                nw_w=nw_w,
            )
            return self.cyclic_back_shift(self.to_out(out))

    class SwinBlock(nn.Module):
        def __init__(self, dim=32, heads=4, resolution=8, window_size=4, shift=2):
            super().__init__()
            self.norm1 = nn.LayerNorm(dim)
            self.attention = WindowAttention(dim, heads, window_size, resolution, shift)
            self.norm2 = nn.LayerNorm(dim)
            self.mlp = nn.Sequential(
                nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
            )

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    return SwinBlock()


@case(
    "eo_rotary_mixed",
    "einops",
    ("rotary", dict()),
    "wrong",
    "The angles are repeated per neighbouring pair, while the rotation pairs the two halves.",
    "angles interleaved but channels paired by halves",
)
def eo_rotary_mixed():
    def rotate_half(x):
        x = rearrange(x, "... (j d) -> ... j d", j=2)
        x1, x2 = x.unbind(dim=-2)
        return torch.cat((-x2, x1), dim=-1)

    def apply_rotary_pos_emb(t):
        n, d = t.shape[-2:]
        inv_freq = 1.0 / (
            10000 ** (torch.arange(0, d, 2, dtype=torch.float64, device=t.device) / d)
        )
        freqs = einsum(
            "i, j -> i j", torch.arange(n, dtype=torch.float64, device=t.device), inv_freq
        )
        freqs = repeat(freqs, "n f -> n (f r)", r=2)
        return t * freqs.cos().to(t.dtype) + rotate_half(t) * freqs.sin().to(t.dtype)

    return apply_rotary_pos_emb


# ----------------------------------------------------------- d2l, continued


@case(
    "d2l_transformer_ok",
    "d2l",
    ("transformer", dict(vocab=30, d_model=32, nhead=4, layers=2, dim_feedforward=64)),
    "correct",
    expected="equal",
)
def d2l_transformer_ok():
    class MultiHeadAttention(nn.Module):
        def __init__(self, d_model, h, dropout):
            super().__init__()
            self.h = h
            self.w_q = nn.Linear(d_model, d_model)
            self.w_k = nn.Linear(d_model, d_model)
            self.w_v = nn.Linear(d_model, d_model)
            self.fc = nn.Linear(d_model, d_model)
            self.dropout = nn.Dropout(dropout)

        def forward(self, q, k, v, mask=None):
            b, d = q.size(0), q.size(-1)
            q = self.w_q(q).view(b, -1, self.h, d // self.h).transpose(1, 2)
            k = self.w_k(k).view(b, -1, self.h, d // self.h).transpose(1, 2)
            v = self.w_v(v).view(b, -1, self.h, d // self.h).transpose(1, 2)
            score = q @ k.transpose(2, 3) / math.sqrt(d // self.h)
            if mask is not None:
                score = score.masked_fill(mask == 0, -1e9)
            out = self.dropout(torch.softmax(score, -1)) @ v
            return self.fc(out.transpose(1, 2).contiguous().view(b, -1, d))

    class PositionwiseFeedForward(nn.Module):
        def __init__(self, d_model, hidden, dropout):
            super().__init__()
            self.w_1 = nn.Linear(d_model, hidden)
            self.w_2 = nn.Linear(hidden, d_model)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            return self.w_2(self.dropout(self.w_1(x).relu()))

    class AddNorm(nn.Module):
        def __init__(self, size, dropout):
            super().__init__()
            self.norm = nn.LayerNorm(size)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x, y):
            return self.norm(x + self.dropout(y))

    class EncoderBlock(nn.Module):
        def __init__(self, d_model, h, d_ff, dropout):
            super().__init__()
            self.attention = MultiHeadAttention(d_model, h, dropout)
            self.addnorm1 = AddNorm(d_model, dropout)
            self.ffn = PositionwiseFeedForward(d_model, d_ff, dropout)
            self.addnorm2 = AddNorm(d_model, dropout)

        def forward(self, x):
            y = self.addnorm1(x, self.attention(x, x, x))
            return self.addnorm2(y, self.ffn(y))

    class DecoderBlock(nn.Module):
        def __init__(self, d_model, h, d_ff, dropout):
            super().__init__()
            self.attention1 = MultiHeadAttention(d_model, h, dropout)
            self.addnorm1 = AddNorm(d_model, dropout)
            self.attention2 = MultiHeadAttention(d_model, h, dropout)
            self.addnorm2 = AddNorm(d_model, dropout)
            self.ffn = PositionwiseFeedForward(d_model, d_ff, dropout)
            self.addnorm3 = AddNorm(d_model, dropout)

        def forward(self, x, memory, mask):
            y = self.addnorm1(x, self.attention1(x, x, x, mask))
            z = self.addnorm2(y, self.attention2(y, memory, memory))
            return self.addnorm3(z, self.ffn(z))

    class PositionalEncoding(nn.Module):
        def __init__(self, d_model, dropout, max_len=200):
            super().__init__()
            self.dropout = nn.Dropout(p=dropout)
            pe = torch.zeros(max_len, d_model, dtype=torch.float64)
            position = torch.arange(0, max_len, dtype=torch.float64).unsqueeze(1)
            div_term = torch.exp(
                torch.arange(0, d_model, 2, dtype=torch.float64)
                * -(math.log(10000.0) / d_model)
            )
            pe[:, 0::2] = torch.sin(position * div_term)
            pe[:, 1::2] = torch.cos(position * div_term)
            self.register_buffer("pe", pe.unsqueeze(0), persistent=False)

        def forward(self, x):
            return self.dropout(x + self.pe[:, : x.size(1)].to(x.dtype))

    class Transformer(nn.Module):
        def __init__(self, vocab, d_model, h, n, d_ff, dropout=0.1):
            super().__init__()
            self.d_model = d_model
            self.embedding = nn.Embedding(vocab, d_model)
            self.pos_encoding = PositionalEncoding(d_model, dropout)
            self.encoder = nn.ModuleList(
                [EncoderBlock(d_model, h, d_ff, dropout) for _ in range(n)]
            )
            self.decoder = nn.ModuleList(
                [DecoderBlock(d_model, h, d_ff, dropout) for _ in range(n)]
            )
            self.generator = nn.Linear(d_model, vocab, bias=False)
            self.generator.weight = self.embedding.weight

        def embed(self, tokens):
            return self.pos_encoding(self.embedding(tokens) * math.sqrt(self.d_model))

        def encode(self, src):
            x = self.embed(src)
            for blk in self.encoder:
                x = blk(x)
            return x

        def decode(self, memory, tgt):
            n = tgt.size(1)
            mask = torch.tril(torch.ones(1, 1, n, n, device=tgt.device))
            y = self.embed(tgt)
            for blk in self.decoder:
                y = blk(y, memory, mask)
            return y

        def forward(self, src, tgt):
            return self.generator(self.decode(self.encode(src), tgt))

    return Transformer(30, 32, 4, 2, 64)


@case(
    "d2l_transformer_no_scale",
    "d2l",
    ("transformer", dict(vocab=30, d_model=32, nhead=4, layers=2, dim_feedforward=64)),
    "wrong",
    "The embeddings are not multiplied by the square root of d_model.",
    "embedding scale sqrt(d_model) missing",
)
def d2l_transformer_no_scale():
    class Embeddings(nn.Module):
        def __init__(self, d_model, vocab):
            super().__init__()
            self.lut = nn.Embedding(vocab, d_model)
            self.d_model = d_model

        def forward(self, x):
            return self.lut(x)

    class PositionalEncoding(nn.Module):
        def __init__(self, d_model, max_len=100):
            super().__init__()
            pos = torch.arange(max_len, dtype=torch.float64)[:, None]
            i = torch.arange(0, d_model, 2, dtype=torch.float64)
            angle = pos / 10000 ** (i / d_model)
            self.register_buffer(
                "pe",
                torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(max_len, d_model),
                persistent=False,
            )

        def forward(self, x):
            return x + self.pe[: x.size(1)].to(x.dtype)

    class MultiHeadedAttention(nn.Module):
        def __init__(self, h, d_model):
            super().__init__()
            self.h, self.d_k = h, d_model // h
            self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

        def forward(self, query, key, value, mask=None):
            nb = query.size(0)
            query, key, value = [
                l(x).view(nb, -1, self.h, self.d_k).transpose(1, 2)
                for l, x in zip(self.linears, (query, key, value))
            ]
            scores = query @ key.transpose(-2, -1) / math.sqrt(self.d_k)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            x = F.softmax(scores, dim=-1) @ value
            x = x.transpose(1, 2).contiguous().view(nb, -1, self.h * self.d_k)
            return self.linears[-1](x)

    class FeedForward(nn.Sequential):
        def __init__(self, d_model, d_ff):
            super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    class EncoderLayer(nn.Module):
        def __init__(self, d_model, h, d_ff):
            super().__init__()
            self.self_attn = MultiHeadedAttention(h, d_model)
            self.feed_forward = FeedForward(d_model, d_ff)
            self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(2)])

        def forward(self, x):
            x = self.norms[0](x + self.self_attn(x, x, x))
            return self.norms[1](x + self.feed_forward(x))

    class DecoderLayer(nn.Module):
        def __init__(self, d_model, h, d_ff):
            super().__init__()
            self.self_attn = MultiHeadedAttention(h, d_model)
            self.src_attn = MultiHeadedAttention(h, d_model)
            self.feed_forward = FeedForward(d_model, d_ff)
            self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(3)])

        def forward(self, x, memory, tgt_mask):
            x = self.norms[0](x + self.self_attn(x, x, x, tgt_mask))
            x = self.norms[1](x + self.src_attn(x, memory, memory))
            return self.norms[2](x + self.feed_forward(x))

    def subsequent_mask(size):
        attn_shape = (1, size, size)
        return torch.triu(torch.ones(attn_shape), diagonal=1).type(torch.uint8) == 0

    class EncoderDecoder(nn.Module):
        def __init__(self, vocab=30, d_model=32, h=4, N=2, d_ff=64):
            super().__init__()
            self.embed = Embeddings(d_model, vocab)
            self.position = PositionalEncoding(d_model)
            self.encoder = nn.ModuleList([EncoderLayer(d_model, h, d_ff) for _ in range(N)])
            self.decoder = nn.ModuleList([DecoderLayer(d_model, h, d_ff) for _ in range(N)])

        def forward(self, src, tgt):
            memory = self.position(self.embed(src))
            for layer in self.encoder:
                memory = layer(memory)
            x = self.position(self.embed(tgt))
            mask = subsequent_mask(tgt.size(-1)).unsqueeze(1)
            for layer in self.decoder:
                x = layer(x, memory, mask)
            return x @ self.embed.lut.weight.T

    return EncoderDecoder()


@case(
    "d2l_decoder_mask_diagonal",
    "d2l",
    (
        "decoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=False, act="relu"),
    ),
    "wrong",
    "The causal mask also hides the current position (diagonal=0).",
    "causal mask excludes the current token",
)
def d2l_decoder_mask_diagonal():
    class DotProductAttention(nn.Module):
        def forward(self, queries, keys, values, mask=None):
            d = queries.shape[-1]
            scores = torch.matmul(queries, keys.transpose(-2, -1)) / math.sqrt(d)
            if mask is not None:
                scores = scores.masked_fill(mask, -1e6)
            return torch.matmul(nn.functional.softmax(scores, dim=-1), values)

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.attention = DotProductAttention()
            self.W_q = nn.Linear(num_hiddens, num_hiddens)
            self.W_k = nn.Linear(num_hiddens, num_hiddens)
            self.W_v = nn.Linear(num_hiddens, num_hiddens)
            self.W_o = nn.Linear(num_hiddens, num_hiddens)

        def split(self, X):
            return X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)

        def forward(self, queries, keys, values, mask=None):
            out = self.attention(
                self.split(self.W_q(queries)),
                self.split(self.W_k(keys)),
                self.split(self.W_v(values)),
                mask,
            )
            out = out.permute(0, 2, 1, 3)
            return self.W_o(out.reshape(out.shape[0], out.shape[1], -1))

    class DecoderLayer(nn.Module):
        def __init__(self, d_model=32, heads=4, d_ff=64):
            super().__init__()
            self.slf_attn = MultiHeadAttention(d_model, heads)
            self.enc_attn = MultiHeadAttention(d_model, heads)
            self.pos_ffn = nn.Sequential(
                nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)
            )
            self.ln1 = nn.LayerNorm(d_model)
            self.ln2 = nn.LayerNorm(d_model)
            self.ln3 = nn.LayerNorm(d_model)

        def forward(self, x, memory):
            n = x.size(1)
            mask = torch.triu(torch.ones(n, n, device=x.device), diagonal=0).bool()
            x = self.ln1(x + self.slf_attn(x, x, x, mask))
            x = self.ln2(x + self.enc_attn(x, memory, memory))
            return self.ln3(x + self.pos_ffn(x))

    return DecoderLayer()


@case(
    "d2l_cross_entropy_softmax",
    "d2l",
    ("cross_entropy", dict()),
    "wrong",
    "The logits go through a softmax before F.cross_entropy takes its own.",
    "softmax applied twice",
)
def d2l_cross_entropy_softmax():
    def loss(logits, labels):
        y_hat = torch.softmax(logits, dim=1)
        return F.cross_entropy(y_hat, labels)

    return loss


@case(
    "d2l_encoder_shared_norm",
    "d2l",
    (
        "encoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=False, act="relu"),
    ),
    "wrong",
    "Both sublayers use one and the same LayerNorm.",
    "one norm shared by both sublayers",
)
def d2l_encoder_shared_norm():
    class MultiHeadAttention(nn.Module):
        def __init__(self, d_model, heads):
            super().__init__()
            self.h = heads
            self.w_qs = nn.Linear(d_model, d_model)
            self.w_ks = nn.Linear(d_model, d_model)
            self.w_vs = nn.Linear(d_model, d_model)
            self.fc = nn.Linear(d_model, d_model)

        def forward(self, q, k, v, mask=None):
            bs, lq, lk, d = q.size(0), q.size(1), k.size(1), q.size(2) // self.h
            q = self.w_qs(q).view(bs, lq, self.h, d).transpose(1, 2)
            k = self.w_ks(k).view(bs, lk, self.h, d).transpose(1, 2)
            v = self.w_vs(v).view(bs, lk, self.h, d).transpose(1, 2)
            attn = torch.matmul(q / d**0.5, k.transpose(2, 3))
            if mask is not None:
                attn = attn.masked_fill(mask == 0, -1e9)
            attn = F.softmax(attn, dim=-1)
            out = torch.matmul(attn, v).transpose(1, 2).contiguous().view(bs, lq, -1)
            return self.fc(out), attn

    class EncoderLayer(nn.Module):
        def __init__(self, d_model=32, n_head=4, d_inner=64, dropout=0.1):
            super().__init__()
            self.slf_attn = MultiHeadAttention(d_model, n_head)
            self.w_1 = nn.Linear(d_model, d_inner)
            self.w_2 = nn.Linear(d_inner, d_model)
            self.norm = nn.LayerNorm(d_model)
            self.dropout = nn.Dropout(dropout)

        def forward(self, enc_input, slf_attn_mask=None):
            out, attn = self.slf_attn(enc_input, enc_input, enc_input, mask=slf_attn_mask)
            out = self.norm(enc_input + self.dropout(out))
            ff = self.w_2(F.relu(self.w_1(out)))
            out = self.norm(out + self.dropout(ff))
            return out, attn

    return EncoderLayer()


@case(
    "d2l_multihead_merge",
    "d2l",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "The heads are merged by a reshape without swapping the head and token axes back.",
    "head merge without transpose",
)
def d2l_multihead_merge():
    class MultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens=32, num_heads=4, dropout=0.0):
            super().__init__()
            self.num_heads = num_heads
            self.dropout = nn.Dropout(dropout)
            self.W_q = nn.Linear(num_hiddens, num_hiddens)
            self.W_k = nn.Linear(num_hiddens, num_hiddens)
            self.W_v = nn.Linear(num_hiddens, num_hiddens)
            self.W_o = nn.Linear(num_hiddens, num_hiddens)

        def forward(self, X, mask=None):
            b, n, c = X.shape
            q, k, v = (
                W(X).reshape(b, n, self.num_heads, -1).permute(0, 2, 1, 3)
                for W in (self.W_q, self.W_k, self.W_v)
            )
            scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(c // self.num_heads)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e6)
            output = torch.matmul(self.dropout(F.softmax(scores, dim=-1)), v)
            output = output.reshape(b, n, c)
            return self.W_o(output)

    return MultiHeadAttention()


@case(
    "d2l_ffn_ok",
    "d2l",
    ("mlp", dict(dim=24, hidden=48, act="relu")),
    "correct",
    expected="equal",
)
def d2l_ffn_ok():
    class PositionWiseFFN(nn.Module):
        def __init__(self, ffn_num_hiddens, ffn_num_outputs):
            super().__init__()
            self.dense1 = nn.LazyLinear(ffn_num_hiddens)
            self.relu = nn.ReLU()
            self.dense2 = nn.LazyLinear(ffn_num_outputs)

        def forward(self, X):
            return self.dense2(self.relu(self.dense1(X)))

    ffn = PositionWiseFFN(48, 24)
    ffn(torch.ones((2, 3, 24)))
    return ffn


# --------------------------------------------------------- torch, continued


@case(
    "th_decoder_ok",
    "torch",
    (
        "decoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=True, act="relu"),
    ),
    "correct",
    expected="equal",
)
def th_decoder_ok():
    class DecoderLayer(nn.Module):
        def __init__(self, d_model=32, nhead=4, d_ff=64, dropout=0.1):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(
                d_model, nhead, dropout=dropout, batch_first=True
            )
            self.cross_attn = nn.MultiheadAttention(
                d_model, nhead, dropout=dropout, batch_first=True
            )
            self.mlp = nn.Sequential(
                nn.Linear(d_model, d_ff),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(d_ff, d_model),
            )
            self.norm_sa = nn.LayerNorm(d_model)
            self.norm_ca = nn.LayerNorm(d_model)
            self.norm_mlp = nn.LayerNorm(d_model)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x, memory):
            causal = nn.Transformer.generate_square_subsequent_mask(
                x.size(1), device=x.device, dtype=x.dtype
            )
            h = self.norm_sa(x)
            x = x + self.dropout(
                self.self_attn(h, h, h, attn_mask=causal, is_causal=True, need_weights=False)[0]
            )
            h = self.norm_ca(x)
            x = x + self.dropout(self.cross_attn(h, memory, memory)[0])
            return x + self.dropout(self.mlp(self.norm_mlp(x)))

    return DecoderLayer()


@case(
    "th_vit_python_list",
    "torch",
    (
        "vit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    "wrong",
    "The blocks sit in a plain Python list, so their parameters are not registered.",
    "blocks' parameters not registered",
)
def th_vit_python_list():
    class Block(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.ln_1 = nn.LayerNorm(dim, eps=1e-6)
            self.self_attention = nn.MultiheadAttention(dim, heads, batch_first=True)
            self.ln_2 = nn.LayerNorm(dim, eps=1e-6)
            self.fc1 = nn.Linear(dim, 4 * dim)
            self.fc2 = nn.Linear(4 * dim, dim)

        def forward(self, x):
            y = self.ln_1(x)
            x = x + self.self_attention(y, y, y, need_weights=False)[0]
            return x + self.fc2(F.gelu(self.fc1(self.ln_2(x))))

    class VisionTransformer(nn.Module):
        def __init__(self, img_size=32, patch_size=8, dim=48, depth=3, heads=4, num_classes=10):
            super().__init__()
            self.conv_proj = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size)
            self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
            self.pos_embed = nn.Parameter(
                torch.randn(1, (img_size // patch_size) ** 2 + 1, dim) * 0.02
            )
            self.blocks = [Block(dim, heads) for _ in range(depth)]
            self.ln = nn.LayerNorm(dim, eps=1e-6)
            self.head = nn.Linear(dim, num_classes)

        def forward(self, x):
            x = self.conv_proj(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.class_token.expand(x.size(0), -1, -1), x], dim=1)
            x = x + self.pos_embed
            for block in self.blocks:
                x = block(x)
            return self.head(self.ln(x)[:, 0])

    return VisionTransformer()


def _deit_parts():
    class Attention(nn.Module):
        def __init__(self, dim, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.query = nn.Linear(dim, dim)
            self.key = nn.Linear(dim, dim)
            self.value = nn.Linear(dim, dim)
            self.dense = nn.Linear(dim, dim)

        def forward(self, x):
            B, N, C = x.shape
            q, k, v = (
                f(x).view(B, N, self.num_heads, -1).transpose(1, 2)
                for f in (self.query, self.key, self.value)
            )
            out = F.scaled_dot_product_attention(q, k, v)
            return self.dense(out.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self, dim, num_heads, mlp_ratio=4):
            super().__init__()
            self.norm1 = nn.LayerNorm(dim, eps=1e-6)
            self.attn = Attention(dim, num_heads)
            self.norm2 = nn.LayerNorm(dim, eps=1e-6)
            self.mlp = nn.Sequential(
                nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim)
            )

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    return Attention, Block


@case(
    "th_deit_ok",
    "torch",
    (
        "deit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    "correct",
    expected="equal",
)
def th_deit_ok():
    Attention, Block = _deit_parts()

    class DistilledVisionTransformer(nn.Module):
        def __init__(
            self, img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10
        ):
            super().__init__()
            self.patch_embed = nn.Conv2d(3, embed_dim, patch_size, stride=patch_size)
            n = (img_size // patch_size) ** 2
            self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
            self.dist_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
            self.pos_embed = nn.Parameter(torch.zeros(1, n + 2, embed_dim))
            for p in (self.cls_token, self.dist_token, self.pos_embed):
                nn.init.trunc_normal_(p, std=0.02)
            self.blocks = nn.Sequential(*[Block(embed_dim, num_heads) for _ in range(depth)])
            self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
            self.head = nn.Linear(embed_dim, num_classes)
            self.head_dist = nn.Linear(embed_dim, num_classes)

        def forward_features(self, x):
            B = x.shape[0]
            x = self.patch_embed(x).flatten(2).transpose(1, 2)
            x = torch.cat(
                (self.cls_token.expand(B, -1, -1), self.dist_token.expand(B, -1, -1), x), dim=1
            )
            x = self.norm(self.blocks(x + self.pos_embed))
            return x[:, 0], x[:, 1]

        def forward(self, x):
            x, x_dist = self.forward_features(x)
            x, x_dist = self.head(x), self.head_dist(x_dist)
            if self.training:
                return x, x_dist
            return (x + x_dist) / 2

    return DistilledVisionTransformer()


@case(
    "th_deit_dist_head",
    "torch",
    (
        "deit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    "wrong",
    "The distillation head reads the class token, so the distillation token's output is unused.",
    "distillation head on the class token",
)
def th_deit_dist_head():
    Attention, Block = _deit_parts()

    class DeiT(nn.Module):
        def __init__(
            self, img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10
        ):
            super().__init__()
            self.patch_embed = nn.Conv2d(3, embed_dim, patch_size, stride=patch_size)
            self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
            self.distill_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
            self.pos_embed = nn.Parameter(
                torch.randn(1, (img_size // patch_size) ** 2 + 2, embed_dim) * 0.02
            )
            self.blocks = nn.ModuleList([Block(embed_dim, num_heads) for _ in range(depth)])
            self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
            self.cls_head = nn.Linear(embed_dim, num_classes)
            self.distill_head = nn.Linear(embed_dim, num_classes)

        def forward(self, images):
            b = images.size(0)
            x = self.patch_embed(images).flatten(2).transpose(1, 2)
            tokens = torch.cat([self.cls_token, self.distill_token], dim=1).expand(b, -1, -1)
            x = torch.cat([tokens, x], dim=1) + self.pos_embed
            for blk in self.blocks:
                x = blk(x)
            x = self.norm(x)
            logits, distill = self.cls_head(x[:, 0]), self.distill_head(x[:, 0])
            if self.training:
                return logits, distill
            return (logits + distill) / 2

    return DeiT()


@case(
    "th_swinv2_no_clamp",
    "torch",
    ("swinv2_attention", dict(dim=32, window_size=4, num_heads=4)),
    "wrong",
    "The logit scale is exponentiated without the clamp at log 100.",
    "logit scale not clamped (visible once it exceeds log 100)",
)
def th_swinv2_no_clamp():
    class WindowAttention(nn.Module):
        def __init__(self, dim=32, window_size=4, num_heads=4):
            super().__init__()
            self.num_heads = num_heads
            M = window_size
            self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((num_heads, 1, 1))))
            self.cpb_mlp = nn.Sequential(
                nn.Linear(2, 512, bias=True),
                nn.ReLU(inplace=True),
                nn.Linear(512, num_heads, bias=False),
            )
            rel = torch.arange(-(M - 1), M, dtype=torch.float64)
            table = torch.stack(torch.meshgrid(rel, rel, indexing="ij"), dim=-1) / (M - 1) * 8
            table = torch.sign(table) * torch.log2(table.abs() + 1.0) / math.log2(8)
            self.register_buffer("relative_coords_table", table, persistent=False)
            coords = torch.stack(
                torch.meshgrid(torch.arange(M), torch.arange(M), indexing="ij")
            ).flatten(1)
            relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + M - 1
            self.register_buffer(
                "relative_position_index",
                relative[..., 0] * (2 * M - 1) + relative[..., 1],
                persistent=False,
            )
            self.qkv = nn.Linear(dim, dim * 3, bias=False)
            self.q_bias = nn.Parameter(torch.zeros(dim))
            self.v_bias = nn.Parameter(torch.zeros(dim))
            self.proj = nn.Linear(dim, dim)

        def forward(self, x, mask=None):
            B_, N, C = x.shape
            qkv_bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
            qkv = F.linear(x, self.qkv.weight, qkv_bias)
            q, k, v = qkv.reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            attn = attn * self.logit_scale.exp()
            table = self.cpb_mlp(self.relative_coords_table.to(x.dtype)).view(
                -1, self.num_heads
            )
            bias = table[self.relative_position_index.view(-1)].view(N, N, -1).permute(2, 0, 1)
            attn = attn + 16 * torch.sigmoid(bias).unsqueeze(0)
            if mask is not None:
                attn = attn.masked_fill(~mask, float("-inf"))
            attn = attn.softmax(dim=-1)
            return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))

    return WindowAttention()


# --------------------------------------------------------- numpy, continued


@case(
    "np_gpt_ok",
    "numpy",
    ("gpt", dict(vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "correct",
    expected="equal up to transposed (in, out) weights",
)
def np_gpt_ok():
    rng = np.random.default_rng(3)
    V, T, L, H, C = 40, 16, 2, 4, 32
    params = {
        "wte": rng.normal(size=(V, C)) * 0.2,
        "wpe": rng.normal(size=(T, C)) * 0.2,
        "ln_f.g": np.ones(C),
        "ln_f.b": np.zeros(C),
    }
    for i in range(L):
        for n in ("ln_1", "ln_2"):
            params[f"h{i}.{n}.g"], params[f"h{i}.{n}.b"] = np.ones(C), np.zeros(C)
        for n, (a, b) in {
            "attn.c_attn": (C, 3 * C),
            "attn.c_proj": (C, C),
            "mlp.c_fc": (C, 4 * C),
            "mlp.c_proj": (4 * C, C),
        }.items():
            params[f"h{i}.{n}.w"] = rng.normal(size=(a, b)) * 0.1
            params[f"h{i}.{n}.b"] = np.zeros(b)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def softmax(x):
        exp_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return exp_x / np.sum(exp_x, axis=-1, keepdims=True)

    def layer_norm(x, g, b, eps: float = 1e-5):
        mean = np.mean(x, axis=-1, keepdims=True)
        variance = np.var(x, axis=-1, keepdims=True)
        return g * (x - mean) / np.sqrt(variance + eps) + b

    def linear(x, w, b):
        return x @ w + b

    def attention(q, k, v, mask):
        return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask) @ v

    def mha(x, p, name):
        x = linear(x, p[name + ".c_attn.w"], p[name + ".c_attn.b"])
        qkv_heads = [np.split(t, H, axis=-1) for t in np.split(x, 3, axis=-1)]
        causal_mask = (1 - np.tri(x.shape[1], dtype=x.dtype)) * -1e10
        out_heads = [attention(q, k, v, causal_mask) for q, k, v in zip(*qkv_heads)]
        return linear(
            np.concatenate(out_heads, axis=-1), p[name + ".c_proj.w"], p[name + ".c_proj.b"]
        )

    def gpt2(params, inputs):
        p = params
        x = p["wte"][inputs] + p["wpe"][range(inputs.shape[1])]
        for i in range(L):
            x = x + mha(layer_norm(x, p[f"h{i}.ln_1.g"], p[f"h{i}.ln_1.b"]), p, f"h{i}.attn")
            h = layer_norm(x, p[f"h{i}.ln_2.g"], p[f"h{i}.ln_2.b"])
            h = gelu(linear(h, p[f"h{i}.mlp.c_fc.w"], p[f"h{i}.mlp.c_fc.b"]))
            x = x + linear(h, p[f"h{i}.mlp.c_proj.w"], p[f"h{i}.mlp.c_proj.b"])
        return layer_norm(x, p["ln_f.g"], p["ln_f.b"]) @ p["wte"].T

    return gpt2, params


@case("np_sinusoids_ok", "numpy", ("sinusoids", dict()), "correct", expected="equal")
def np_sinusoids_ok():
    def get_sinusoid_encoding_table(n_position, d_hid):
        def get_position_angle_vec(position):
            return [
                position / np.power(10000, 2 * (hid_j // 2) / d_hid) for hid_j in range(d_hid)
            ]

        sinusoid_table = np.array(
            [get_position_angle_vec(pos_i) for pos_i in range(n_position)]
        )
        sinusoid_table[:, 0::2] = np.sin(sinusoid_table[:, 0::2])
        sinusoid_table[:, 1::2] = np.cos(sinusoid_table[:, 1::2])
        return sinusoid_table

    return get_sinusoid_encoding_table


@case(
    "np_mae_mean_all",
    "numpy",
    ("mae_loss", dict(patch_size=4, norm_pix=False)),
    "wrong",
    "The masked patches' errors are averaged over all patches, not over the masked ones.",
    "divided by all patches instead of masked patches",
)
def np_mae_mean_all():
    def patchify(imgs, p=4):
        n, c, hh, ww = imgs.shape
        h, w = hh // p, ww // p
        x = imgs.reshape(n, c, h, p, w, p)
        x = np.einsum("nchpwq->nhwpqc", x)
        return x.reshape(n, h * w, p * p * c)

    def mae_loss(pred, imgs, mask):
        target = patchify(imgs)
        loss = ((pred - target) ** 2).mean(axis=-1)
        return (loss * mask).mean()

    return mae_loss


@case(
    "np_giou_enclosing",
    "numpy",
    ("generalized_box_iou", dict()),
    "wrong",
    "The left-top corner of the enclosing box takes the maximum instead of the minimum.",
    "enclosing box: max instead of min for the left-top corner",
)
def np_giou_enclosing():
    def generalized_box_iou(a, b):
        area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
        area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
        a_ = a[:, None, :]
        b_ = b[None, :, :]
        wh = np.clip(
            np.minimum(a_[..., 2:], b_[..., 2:]) - np.maximum(a_[..., :2], b_[..., :2]), 0, None
        )
        inter = wh[..., 0] * wh[..., 1]
        union = area_a[:, None] + area_b[None] - inter
        iou = inter / union
        lt = np.maximum(a_[..., :2], b_[..., :2])
        rb = np.maximum(a_[..., 2:], b_[..., 2:])
        wh = np.clip(rb - lt, 0, None)
        area = wh[..., 0] * wh[..., 1]
        return iou - (area - union) / area

    return generalized_box_iou


# ----------------------------------------------------------- jax, continued


@case(
    "jax_swiglu_ok",
    "jax",
    ("swiglu", dict(dim=24, hidden=40)),
    "correct",
    expected="equal up to one packed (in, out) matrix for up and gate",
)
def jax_swiglu_ok():
    k1, k2 = jax.random.split(jax.random.PRNGKey(2))
    params = {
        "w_in": jax.random.normal(k1, (24, 80)) * 0.2,
        "w_out": jax.random.normal(k2, (40, 24)) * 0.2,
    }

    def swiglu(params, x):
        up, gate = jnp.split(x @ params["w_in"], 2, axis=-1)
        return (up * jax.nn.swish(gate)) @ params["w_out"]

    return swiglu, params


@case(
    "jax_vit_block_ok",
    "jax",
    ("vit_block", dict(dim=32, num_heads=4, mlp_ratio=4)),
    "correct",
    expected="equal up to transposed (in, out) weights",
)
def jax_vit_block_ok():
    C, heads = 32, 4
    rng = jax.random.split(jax.random.PRNGKey(5), 8)
    params = {
        "norm1_scale": 1 + 0.1 * jax.random.normal(rng[4], (C,)),
        "norm1_bias": jnp.zeros(C),
        "norm2_scale": 1 + 0.1 * jax.random.normal(rng[5], (C,)),
        "norm2_bias": jnp.zeros(C),
        "qkv_w": jax.random.normal(rng[0], (C, 3 * C)) * 0.2,
        "qkv_b": 0.1 * jax.random.normal(rng[6], (3 * C,)),
        "proj_w": jax.random.normal(rng[1], (C, C)) * 0.2,
        "proj_b": jnp.zeros(C),
        "fc1_w": jax.random.normal(rng[2], (C, 4 * C)) * 0.2,
        "fc1_b": 0.1 * jax.random.normal(rng[7], (4 * C,)),
        "fc2_w": jax.random.normal(rng[3], (4 * C, C)) * 0.2,
        "fc2_b": jnp.zeros(C),
    }

    def layer_norm(x, scale, bias, eps=1e-6):
        mu = x.mean(-1, keepdims=True)
        var = jnp.square(x - mu).mean(-1, keepdims=True)
        return (x - mu) * jax.lax.rsqrt(var + eps) * scale + bias

    def attend_one(p, x):
        n = x.shape[0]
        q, k, v = (
            (x @ p["qkv_w"] + p["qkv_b"]).reshape(n, 3, heads, C // heads).transpose(1, 2, 0, 3)
        )
        a = jax.nn.softmax(q @ k.transpose(0, 2, 1) * (C // heads) ** -0.5, axis=-1)
        return (a @ v).transpose(1, 0, 2).reshape(n, C) @ p["proj_w"] + p["proj_b"]

    def block(params, x):
        h = layer_norm(x, params["norm1_scale"], params["norm1_bias"])
        x = x + jax.vmap(attend_one, in_axes=(None, 0))(params, h)
        h = layer_norm(x, params["norm2_scale"], params["norm2_bias"])
        h = jax.nn.gelu(h @ params["fc1_w"] + params["fc1_b"], approximate=False)
        return x + h @ params["fc2_w"] + params["fc2_b"]

    return block, params


@case(
    "jax_encoder_norm_axes",
    "jax",
    (
        "encoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=False, act="relu"),
    ),
    "wrong",
    "The layer norms take their statistics over tokens and channels together.",
    "layer norm over the wrong axes (tokens and channels)",
)
def jax_encoder_norm_axes():
    d_model, nhead, d_ff = 32, 4, 64
    rng = jax.random.split(jax.random.PRNGKey(7), 6)
    dense = lambda key, i, o: 0.2 * jax.random.normal(key, (i, o))
    params = {
        "wq": dense(rng[0], d_model, d_model),
        "wk": dense(rng[1], d_model, d_model),
        "wv": dense(rng[2], d_model, d_model),
        "wo": dense(rng[3], d_model, d_model),
        "w1": dense(rng[4], d_model, d_ff),
        "w2": dense(rng[5], d_ff, d_model),
        "bq": jnp.zeros(d_model),
        "bk": jnp.zeros(d_model),
        "bv": jnp.zeros(d_model),
        "bo": jnp.zeros(d_model),
        "b1": jnp.zeros(d_ff),
        "b2": jnp.zeros(d_model),
        "gamma1": jnp.ones(d_model),
        "beta1": jnp.zeros(d_model),
        "gamma2": jnp.ones(d_model),
        "beta2": jnp.zeros(d_model),
    }

    def layer_norm(x, gamma, beta, eps=1e-5):
        mean = jnp.mean(x, axis=(1, 2), keepdims=True)
        var = jnp.var(x, axis=(1, 2), keepdims=True)
        return gamma * (x - mean) / jnp.sqrt(var + eps) + beta

    def self_attention(p, x, mask):
        split = lambda t: t.reshape(*t.shape[:2], nhead, -1)
        q, k, v = (split(x @ p["w" + n] + p["b" + n]) for n in "qkv")
        logits = jnp.einsum("bihd,bjhd->bhij", q, k) / jnp.sqrt(q.shape[-1])
        if mask is not None:
            logits = jnp.where(mask, logits, -1e9)
        out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(logits), v)
        return out.reshape(x.shape) @ p["wo"] + p["bo"]

    def encoder_layer(params, x, mask=None):
        x = layer_norm(x + self_attention(params, x, mask), params["gamma1"], params["beta1"])
        ff = jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
        return layer_norm(x + ff, params["gamma2"], params["beta2"])

    return encoder_layer, params


@case(
    "jax_cross_mask_ignored",
    "jax",
    ("cross_attention", dict(embed_dim=32, num_heads=4)),
    "wrong",
    "The mask is accepted but its result is thrown away, so padded context is attended to.",
    "mask ignored",
)
def jax_cross_mask_ignored():
    C, H = 32, 4
    ks = jax.random.split(jax.random.PRNGKey(11), 6)
    params = {
        "to_q": 0.2 * jax.random.normal(ks[0], (C, C)),
        "to_kv": 0.2 * jax.random.normal(ks[1], (C, 2 * C)),
        "to_out": 0.2 * jax.random.normal(ks[2], (C, C)),
        "b_q": 0.1 * jax.random.normal(ks[3], (C,)),
        "b_kv": 0.1 * jax.random.normal(ks[4], (2 * C,)),
        "b_out": 0.1 * jax.random.normal(ks[5], (C,)),
    }

    def cross_attention(params, x, context, mask=None):
        b, n, _ = x.shape
        m = context.shape[1]
        q = (x @ params["to_q"] + params["b_q"]).reshape(b, n, H, C // H)
        k, v = jnp.split(context @ params["to_kv"] + params["b_kv"], 2, axis=-1)
        k, v = k.reshape(b, m, H, C // H), v.reshape(b, m, H, C // H)
        scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) * (C // H) ** -0.5
        if mask is not None:
            jnp.where(mask, scores, -jnp.inf)
        out = jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores, axis=-1), v).reshape(b, n, C)
        return out @ params["to_out"] + params["b_out"]

    return cross_attention, params
