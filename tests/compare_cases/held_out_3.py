import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat
from einops.layers.torch import Rearrange


# ---------------------------------------------------------------- nanogpt


def nano_vit_block_residual():
    class LayerNorm(nn.Module):
        def __init__(self, ndim):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(ndim))
            self.bias = nn.Parameter(torch.zeros(ndim))

        def forward(self, input):
            return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-6)

    class SelfAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
            self.c_proj = nn.Linear(config.n_embd, config.n_embd)
            self.n_head = config.n_head
            self.n_embd = config.n_embd

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v)
            y = y.transpose(1, 2).contiguous().view(B, T, C)
            return self.c_proj(y)

    class MLP(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
            self.gelu = nn.GELU()
            self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

        def forward(self, x):
            return self.c_proj(self.gelu(self.c_fc(x)))

    class Block(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.ln_1 = LayerNorm(config.n_embd)
            self.attn = SelfAttention(config)
            self.ln_2 = LayerNorm(config.n_embd)
            self.mlp = MLP(config)

        def forward(self, x):
            x = self.ln_1(x)
            x = x + self.attn(x)
            x = x + self.mlp(self.ln_2(x))
            return x

    @dataclass
    class ViTConfig:
        n_embd: int = 48
        n_head: int = 4

    return Block(ViTConfig())


def nano_vit_causal():
    @dataclass
    class ViTConfig:
        image_size: int = 32
        patch_size: int = 8
        n_layer: int = 3
        n_head: int = 4
        n_embd: int = 48
        num_classes: int = 10

    class SelfAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            assert config.n_embd % config.n_head == 0
            self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
            self.c_proj = nn.Linear(config.n_embd, config.n_embd)
            self.n_head = config.n_head
            self.n_embd = config.n_embd

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)
            y = y.transpose(1, 2).contiguous().view(B, T, C)
            return self.c_proj(y)

    class MLP(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
            self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

        def forward(self, x):
            return self.c_proj(F.gelu(self.c_fc(x)))

    class Block(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-6)
            self.attn = SelfAttention(config)
            self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-6)
            self.mlp = MLP(config)

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            x = x + self.mlp(self.ln_2(x))
            return x

    class ViT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            n_patch = (config.image_size // config.patch_size) ** 2
            self.cls = nn.Parameter(torch.randn(1, 1, config.n_embd) * 0.02)
            self.transformer = nn.ModuleDict(
                dict(
                    wpe=nn.Embedding(n_patch + 1, config.n_embd),
                    patch=nn.Conv2d(3, config.n_embd, config.patch_size, config.patch_size),
                    h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                    ln_f=nn.LayerNorm(config.n_embd, eps=1e-6),
                )
            )
            self.head = nn.Linear(config.n_embd, config.num_classes)

        def forward(self, img, targets=None):
            x = self.transformer.patch(img).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1)
            pos = torch.arange(x.size(1), device=x.device)
            x = x + self.transformer.wpe(pos)
            for block in self.transformer.h:
                x = block(x)
            x = self.transformer.ln_f(x)
            logits = self.head(x[:, 0])
            loss = None
            if targets is not None:
                loss = F.cross_entropy(logits, targets)
            return logits, loss

    return ViT(ViTConfig())


def nano_swin_block_mask_view():
    @dataclass
    class SwinConfig:
        n_embd: int = 32
        n_head: int = 4
        res: tuple = (8, 8)
        window: int = 4
        shift: int = 2

    def to_windows(x, w):
        B, H, W, C = x.shape
        x = x.view(B, H // w, w, W // w, w, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, C)

    def from_windows(x, w, H, W):
        C = x.size(-1)
        x = x.view(-1, H // w, W // w, w, w, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, H, W, C)

    class WindowSelfAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
            self.c_proj = nn.Linear(config.n_embd, config.n_embd)
            self.n_head, self.n_embd = config.n_head, config.n_embd
            w = config.window
            self.rel_bias = nn.Embedding((2 * w - 1) ** 2, config.n_head)
            pos = torch.stack(
                torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij"), -1
            ).view(-1, 2)
            rel = pos[:, None] - pos[None] + (w - 1)
            self.register_buffer(
                "rel_index", rel[..., 0] * (2 * w - 1) + rel[..., 1], persistent=False
            )

        def forward(self, x, mask=None):
            B_, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            k = k.view(B_, T, self.n_head, C // self.n_head).transpose(1, 2)
            q = q.view(B_, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = v.view(B_, T, self.n_head, C // self.n_head).transpose(1, 2)
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att + self.rel_bias(self.rel_index).permute(2, 0, 1)
            if mask is not None:
                nW = mask.size(0)
                att = att.view(nW, B_ // nW, self.n_head, T, T) + mask[:, None, None]
                att = att.view(B_, self.n_head, T, T)
            att = F.softmax(att, dim=-1)
            y = (att @ v).transpose(1, 2).contiguous().view(B_, T, C)
            return self.c_proj(y)

    class MLP(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
            self.gelu = nn.GELU()
            self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

        def forward(self, x):
            return self.c_proj(self.gelu(self.c_fc(x)))

    class SwinBlock(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.ln_1 = nn.LayerNorm(config.n_embd)
            self.attn = WindowSelfAttention(config)
            self.ln_2 = nn.LayerNorm(config.n_embd)
            self.mlp = MLP(config)
            mask = None
            if config.shift > 0:
                H, W = config.res
                w, s = config.window, config.shift
                region = torch.zeros(1, H, W, 1)
                i = 0
                for hs in (slice(0, -w), slice(-w, -s), slice(-s, None)):
                    for ws in (slice(0, -w), slice(-w, -s), slice(-s, None)):
                        region[:, hs, ws] = i
                        i += 1
                region = to_windows(region, w).squeeze(-1)
                mask = torch.zeros(region.size(0), w * w, w * w)
                mask = mask.masked_fill(region[:, None] != region[:, :, None], -100.0)
            self.register_buffer("mask", mask)

        def forward(self, x):
            B, H, W, C = x.shape
            w, s = self.config.window, self.config.shift
            y = self.ln_1(x)
            if s > 0:
                y = torch.roll(y, (-s, -s), dims=(1, 2))
            y = self.attn(to_windows(y, w), self.mask)
            y = from_windows(y, w, H, W)
            if s > 0:
                y = torch.roll(y, (s, s), dims=(1, 2))
            x = x + y
            return x + self.mlp(self.ln_2(x))

    return SwinBlock(SwinConfig())


def nano_vit_block_interleaved():
    class Attention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.query_key_value = nn.Linear(n_embd, 3 * n_embd)
            self.dense = nn.Linear(n_embd, n_embd)
            self.n_head = n_head

        def forward(self, x):
            B, T, C = x.size()
            qkv = self.query_key_value(x).view(B, T, self.n_head, 3 * C // self.n_head)
            q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
            att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            att = F.softmax(att, dim=-1)
            y = (att @ v).transpose(1, 2).reshape(B, T, C)
            return self.dense(y), att

    class Block(nn.Module):
        def __init__(self, n_embd=48, n_head=4):
            super().__init__()
            self.input_layernorm = nn.LayerNorm(n_embd, eps=1e-6)
            self.attention = Attention(n_embd, n_head)
            self.post_attention_layernorm = nn.LayerNorm(n_embd, eps=1e-6)
            self.mlp = nn.ModuleDict(
                dict(
                    dense_h_to_4h=nn.Linear(n_embd, 4 * n_embd),
                    dense_4h_to_h=nn.Linear(4 * n_embd, n_embd),
                )
            )

        def forward(self, x):
            a, att = self.attention(self.input_layernorm(x))
            x = x + a
            m = self.mlp.dense_h_to_4h(self.post_attention_layernorm(x))
            x = x + self.mlp.dense_4h_to_h(0.5 * m * (1.0 + torch.erf(m / math.sqrt(2.0))))
            return x, att

    return Block()


# ---------------------------------------------------------------- einops


def ein_patch_embed_grid():
    class PatchEmbedding(nn.Module):
        def __init__(self, *, image_size=32, patch_size=8, channels=3, dim=48):
            super().__init__()
            assert image_size % patch_size == 0, (
                "Image dimensions must be divisible by the patch size."
            )
            patch_dim = channels * patch_size**2
            self.to_patch_embedding = nn.Sequential(
                Rearrange(
                    "b c (p1 h) (p2 w) -> b (h w) (p1 p2 c)", p1=patch_size, p2=patch_size
                ),
                nn.Linear(patch_dim, dim),
            )

        def forward(self, img):
            return self.to_patch_embedding(img)

    return PatchEmbedding()


def ein_swinv2_clamp():
    def exists(val):
        return val is not None

    class CosineWindowAttention(nn.Module):
        def __init__(self, dim=32, window_size=4, heads=4):
            super().__init__()
            self.heads = heads
            self.to_q = nn.Linear(dim, dim)
            self.to_k = nn.Linear(dim, dim, bias=False)
            self.to_v = nn.Linear(dim, dim)
            self.to_out = nn.Linear(dim, dim)
            self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))

            self.pos_mlp = nn.Sequential(
                nn.Linear(2, 512),
                nn.ReLU(),
                nn.Linear(512, heads, bias=False),
                Rearrange("... h -> h ..."),
            )

            w = window_size
            grid = torch.stack(
                torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij"), dim=-1
            )
            grid = rearrange(grid, "i j c -> (i j) c")
            rel = rearrange(grid, "i c -> i 1 c") - rearrange(grid, "j c -> 1 j c")
            rel = rel.to(torch.float64) / (w - 1) * 8
            rel = torch.sign(rel) * torch.log2(1 + rel.abs()) / math.log2(8)
            self.register_buffer("rel_pos", rel, persistent=False)

        def forward(self, x, mask=None):
            q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
            q, k, v = map(
                lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), (q, k, v)
            )

            q, k = map(lambda t: F.normalize(t, dim=-1), (q, k))
            scale = self.logit_scale.clamp(min=math.log(1.0 / 0.01)).exp()
            sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * scale

            bias = self.pos_mlp(self.rel_pos.to(x.dtype))
            sim = sim + 16 * bias.sigmoid()

            if exists(mask):
                nw = mask.shape[0]
                sim = rearrange(sim, "(b w) h i j -> b w h i j", w=nw)
                sim = sim + rearrange(mask, "w i j -> w 1 i j")
                sim = rearrange(sim, "b w h i j -> (b w) h i j")

            attn = sim.softmax(dim=-1)
            out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    return CosineWindowAttention()


def ein_deit_dist_head():
    class FeedForward(nn.Module):
        def __init__(self, dim, hidden_dim):
            super().__init__()
            self.net = nn.Sequential(
                nn.LayerNorm(dim, eps=1e-6),
                nn.Linear(dim, hidden_dim),
                nn.GELU(),
                nn.Linear(hidden_dim, dim),
            )

        def forward(self, x):
            return self.net(x)

    class Attention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.scale = (dim // heads) ** -0.5
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.attend = nn.Softmax(dim=-1)
            self.to_qkv = nn.Linear(dim, dim * 3)
            self.to_out = nn.Linear(dim, dim)

        def forward(self, x):
            qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
            q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), qkv)
            dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
            out = torch.matmul(self.attend(dots), v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    class DistillableViT(nn.Module):
        def __init__(
            self,
            *,
            image_size=32,
            patch_size=8,
            num_classes=10,
            dim=48,
            depth=3,
            heads=4,
            channels=3,
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
            self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
            self.distill_token = nn.Parameter(torch.randn(1, 1, dim))
            self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 2, dim))
            self.layers = nn.ModuleList([])
            for _ in range(depth):
                self.layers.append(
                    nn.ModuleList([Attention(dim, heads), FeedForward(dim, dim * 4)])
                )
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.mlp_head = nn.Linear(dim, num_classes)
            self.distill_head = nn.Linear(dim, num_classes)

        def forward(self, img):
            x = self.to_patch_embedding(img)
            b, n, _ = x.shape
            cls_tokens = repeat(self.cls_token, "1 1 d -> b 1 d", b=b)
            distill_tokens = repeat(self.distill_token, "1 1 d -> b 1 d", b=b)
            x = torch.cat((cls_tokens, distill_tokens, x), dim=1)
            x = x + self.pos_embedding[:, : (n + 2)]

            for attn, ff in self.layers:
                x = attn(x) + x
                x = ff(x) + x

            x = self.norm(x)
            logits, distill_logits = self.mlp_head(x[:, 0]), self.distill_head(x[:, 0])
            if self.training:
                return logits, distill_logits
            return (logits + distill_logits) / 2

    return DistillableViT()


def ein_window_attention_table():
    class WindowAttention(nn.Module):
        def __init__(self, dim=32, heads=4, window_size=4):
            super().__init__()
            inner = dim
            self.heads = heads
            self.window_size = window_size
            self.scale = (dim // heads) ** -0.5
            self.to_q = nn.Linear(dim, inner)
            self.to_kv = nn.Linear(dim, inner * 2)
            self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(0.0))
            self.pos_bias = nn.Parameter(
                torch.randn(heads, 2 * window_size - 1, 2 * window_size - 1)
            )
            r = torch.arange(window_size)
            d = r[:, None] - r[None, :] + window_size - 1
            self.register_buffer("dist", d, persistent=False)

        def forward(self, x):
            h, w = self.heads, self.window_size
            q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
            q, k, v = map(
                lambda t: rearrange(t, "b (i j) (h d) -> b h i j d", h=h, i=w), (q, k, v)
            )
            sim = torch.einsum("b h i j d, b h k l d -> b h i j k l", q * self.scale, k)
            bias = self.pos_bias[:, self.dist[:, None, :, None], self.dist[None, :, None, :]]
            sim = rearrange(sim + bias, "b h i j k l -> b h (i j) (k l)")
            attn = sim.softmax(dim=-1)
            v = rearrange(v, "b h i j d -> b h (i j) d")
            out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    return WindowAttention()


def ein_mae_loss_indexing():
    def mae_loss(pred_pixel_values, img, masked, patch_size=8):
        patches = rearrange(
            img, "b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch_size, p2=patch_size
        )
        masked = masked.bool()
        return F.mse_loss(pred_pixel_values[masked], patches[masked])

    return mae_loss


# ---------------------------------------------------------------- d2l


def d2l_vit_dropout():
    class PatchEmbedding(nn.Module):
        def __init__(self, img_size=32, patch_size=8, num_hiddens=48):
            super().__init__()
            self.num_patches = (img_size // patch_size) ** 2
            self.conv = nn.Conv2d(3, num_hiddens, kernel_size=patch_size, stride=patch_size)

        def forward(self, X):
            return self.conv(X).flatten(2).transpose(1, 2)

    class DotProductAttention(nn.Module):
        def forward(self, queries, keys, values):
            d = queries.shape[-1]
            scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
            self.attention_weights = F.softmax(scores, dim=-1)
            return torch.bmm(self.attention_weights, values)

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads, bias=True):
            super().__init__()
            self.num_heads = num_heads
            self.attention = DotProductAttention()
            self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=bias)
            self.W_k = nn.Linear(num_hiddens, num_hiddens, bias=bias)
            self.W_v = nn.Linear(num_hiddens, num_hiddens, bias=bias)
            self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

        def transpose_qkv(self, X):
            X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1)
            X = X.permute(0, 2, 1, 3)
            return X.reshape(-1, X.shape[2], X.shape[3])

        def transpose_output(self, X):
            X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2])
            X = X.permute(0, 2, 1, 3)
            return X.reshape(X.shape[0], X.shape[1], -1)

        def forward(self, queries, keys, values):
            queries = self.transpose_qkv(self.W_q(queries))
            keys = self.transpose_qkv(self.W_k(keys))
            values = self.transpose_qkv(self.W_v(values))
            return self.W_o(self.transpose_output(self.attention(queries, keys, values)))

    class ViTMLP(nn.Module):
        def __init__(self, num_hiddens, mlp_num_hiddens):
            super().__init__()
            self.dense1 = nn.Linear(num_hiddens, mlp_num_hiddens)
            self.gelu = nn.GELU()
            self.dense2 = nn.Linear(mlp_num_hiddens, num_hiddens)

        def forward(self, x):
            return self.dense2(self.gelu(self.dense1(x)))

    class ViTBlock(nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.ln1 = nn.LayerNorm(num_hiddens, eps=1e-6)
            self.attention = MultiHeadAttention(num_hiddens, num_heads)
            self.ln2 = nn.LayerNorm(num_hiddens, eps=1e-6)
            self.mlp = ViTMLP(num_hiddens, 4 * num_hiddens)

        def forward(self, X):
            Y = self.ln1(X)
            X = X + self.attention(Y, Y, Y)
            return X + self.mlp(self.ln2(X))

    class ViT(nn.Module):
        def __init__(
            self,
            img_size=32,
            patch_size=8,
            num_hiddens=48,
            num_heads=4,
            num_blks=3,
            emb_dropout=0.1,
            num_classes=10,
        ):
            super().__init__()
            self.patch_embedding = PatchEmbedding(img_size, patch_size, num_hiddens)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, num_hiddens))
            num_steps = self.patch_embedding.num_patches + 1
            self.pos_embedding = nn.Parameter(torch.randn(1, num_steps, num_hiddens))
            self.emb_dropout = emb_dropout
            self.blks = nn.Sequential()
            for i in range(num_blks):
                self.blks.add_module(f"{i}", ViTBlock(num_hiddens, num_heads))
            self.head = nn.Sequential(
                nn.LayerNorm(num_hiddens, eps=1e-6), nn.Linear(num_hiddens, num_classes)
            )

        def forward(self, X):
            X = self.patch_embedding(X)
            X = torch.cat((self.cls_token.expand(X.shape[0], -1, -1), X), 1)
            X = F.dropout(X + self.pos_embedding, self.emb_dropout)
            for blk in self.blks:
                X = blk(X)
            return self.head(X[:, 0])

    return ViT()


def d2l_patch_merging_reshape():
    class PatchMerging(nn.Module):
        def __init__(self, num_hiddens=16):
            super().__init__()
            self.ln = nn.LayerNorm(4 * num_hiddens)
            self.W = nn.Linear(4 * num_hiddens, 2 * num_hiddens, bias=False)

        def forward(self, X):
            batch_size, height, width, num_channels = X.shape
            X = X.reshape(batch_size, height // 2, width // 2, 4 * num_channels)
            return self.W(self.ln(X))

    return PatchMerging()


def d2l_giou_union():
    def box_area(boxes):
        return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])

    def inter_and_union(boxes1, boxes2):
        areas1, areas2 = box_area(boxes1), box_area(boxes2)
        inter_upperlefts = torch.max(boxes1[:, None, :2], boxes2[:, :2])
        inter_lowerrights = torch.min(boxes1[:, None, 2:], boxes2[:, 2:])
        inters = (inter_lowerrights - inter_upperlefts).clamp(min=0)
        inter_areas = inters[:, :, 0] * inters[:, :, 1]
        union_areas = areas1[:, None] + areas2 - inter_areas
        return inter_areas, union_areas

    def generalized_box_iou(boxes1, boxes2):
        inter_areas, union_areas = inter_and_union(boxes1, boxes2)
        hull_upperlefts = torch.min(boxes1[:, None, :2], boxes2[:, :2])
        hull_lowerrights = torch.max(boxes1[:, None, 2:], boxes2[:, 2:])
        hulls = hull_lowerrights - hull_upperlefts
        hull_areas = hulls[:, :, 0] * hulls[:, :, 1]
        return inter_areas / union_areas - (hull_areas - union_areas) / union_areas

    return generalized_box_iou


def d2l_swin_block():
    def window_partition(X, m):
        b, h, w, c = X.shape
        return (
            X.reshape(b, h // m, m, w // m, m, c)
            .transpose(2, 3)
            .reshape(b * h * w // (m * m), m * m, c)
        )

    def window_merge(X, m, h, w):
        c = X.shape[-1]
        return X.reshape(-1, h // m, w // m, m, m, c).transpose(2, 3).reshape(-1, h, w, c)

    def masked_softmax(scores, allowed):
        if allowed is None:
            return F.softmax(scores, dim=-1)
        n = allowed.shape[0]
        shape = scores.shape
        scores = scores.reshape(-1, n, *shape[1:])
        scores = scores.masked_fill(~allowed[:, None], -1e9)
        return F.softmax(scores, dim=-1).reshape(shape)

    class WindowMultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads, window):
            super().__init__()
            self.num_heads = num_heads
            self.W_q = nn.Linear(num_hiddens, num_hiddens)
            self.W_k = nn.Linear(num_hiddens, num_hiddens)
            self.W_v = nn.Linear(num_hiddens, num_hiddens)
            self.W_o = nn.Linear(num_hiddens, num_hiddens)
            self.bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
            idx = torch.arange(window * window)
            row, col = idx // window, idx % window
            index = (row[:, None] - row + window - 1) * (2 * window - 1) + (
                col[:, None] - col + window - 1
            )
            self.register_buffer("index", index)

        def split(self, X):
            return X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)

        def forward(self, X, allowed=None):
            q, k, v = self.split(self.W_q(X)), self.split(self.W_k(X)), self.split(self.W_v(X))
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores + self.bias_table[self.index].permute(2, 0, 1)
            out = masked_softmax(scores, allowed) @ v
            return self.W_o(out.permute(0, 2, 1, 3).reshape(X.shape))

    class SwinBlock(nn.Module):
        def __init__(self, num_hiddens=32, size=(8, 8), num_heads=4, window=4, shift=2):
            super().__init__()
            self.window, self.shift = window, shift
            self.ln1 = nn.LayerNorm(num_hiddens)
            self.attention = WindowMultiHeadAttention(num_hiddens, num_heads, window)
            self.ln2 = nn.LayerNorm(num_hiddens)
            self.dense1 = nn.Linear(num_hiddens, 4 * num_hiddens)
            self.dense2 = nn.Linear(4 * num_hiddens, num_hiddens)
            h, w = size
            rows = (torch.arange(h) + shift >= h).long()
            cols = (torch.arange(w) + shift >= w).long()
            region = (2 * rows[:, None] + cols)[None, :, :, None]
            region = window_partition(region, window)[..., 0]
            self.register_buffer("allowed", region[:, :, None] == region[:, None, :])

        def forward(self, X):
            b, h, w, c = X.shape
            Y = torch.roll(self.ln1(X), shifts=(-self.shift, -self.shift), dims=(1, 2))
            Y = self.attention(
                window_partition(Y, self.window), self.allowed if self.shift else None
            )
            Y = window_merge(Y, self.window, h, w)
            X = X + torch.roll(Y, shifts=(self.shift, self.shift), dims=(1, 2))
            return X + self.dense2(F.gelu(self.dense1(self.ln2(X))))

    return SwinBlock()


# ---------------------------------------------------------------- torch


def torch_vit_block_batch_first():
    class EncoderBlock(nn.Module):
        def __init__(self, hidden_dim=48, num_heads=4, mlp_dim=192, dropout=0.0):
            super().__init__()
            self.norm1 = nn.LayerNorm(hidden_dim, eps=1e-6)
            self.self_attention = nn.MultiheadAttention(hidden_dim, num_heads, dropout=dropout)
            self.norm2 = nn.LayerNorm(hidden_dim, eps=1e-6)
            self.mlp = nn.Sequential(
                nn.Linear(hidden_dim, mlp_dim),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(mlp_dim, hidden_dim),
                nn.Dropout(dropout),
            )

        def forward(self, x):
            y = self.norm1(x)
            y, _ = self.self_attention(y, y, y, need_weights=False)
            x = x + y
            return x + self.mlp(self.norm2(x))

    return EncoderBlock()


def torch_swinv2_normalize():
    class WindowAttentionV2(nn.Module):
        def __init__(self, dim=32, window_size=4, num_heads=4):
            super().__init__()
            self.num_heads = num_heads
            self.head_dim = dim // num_heads
            self.window_size = window_size
            self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((num_heads, 1, 1))))
            self.cpb_mlp = nn.Sequential(
                nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, num_heads, bias=False)
            )
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
            self.q_bias = nn.Parameter(torch.zeros(dim))
            self.v_bias = nn.Parameter(torch.zeros(dim))
            self.proj = nn.Linear(dim, dim)

            M = window_size
            r = torch.arange(-(M - 1), M, dtype=torch.float64)
            table = torch.stack(torch.meshgrid(r, r, indexing="ij"), dim=-1) * 8 / (M - 1)
            table = torch.sign(table) * torch.log2(table.abs() + 1.0) / math.log2(8)
            self.register_buffer("coords_table", table.view(-1, 2))
            c = torch.stack(
                torch.meshgrid(torch.arange(M), torch.arange(M), indexing="ij")
            ).flatten(1)
            rel = c[:, :, None] - c[:, None, :] + M - 1
            self.register_buffer("index", rel[0] * (2 * M - 1) + rel[1])

        def forward(self, x, mask=None):
            B, N, C = x.shape
            bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
            qkv = F.linear(x, self.qkv.weight, bias)
            q, k, v = qkv.view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
            attn = F.normalize(q) @ F.normalize(k).transpose(-2, -1)
            attn = attn * torch.clamp(self.logit_scale, max=math.log(100)).exp()
            pos = self.cpb_mlp(self.coords_table.to(x.dtype))[self.index]
            attn = attn + 16 * torch.sigmoid(pos.permute(2, 0, 1)).unsqueeze(0)
            if mask is not None:
                nW = mask.shape[0]
                attn = attn.view(B // nW, nW, self.num_heads, N, N) + mask[None, :, None]
                attn = attn.view(-1, self.num_heads, N, N)
            x = attn.softmax(dim=-1) @ v
            return self.proj(x.transpose(1, 2).reshape(B, N, C))

    return WindowAttentionV2()


def torch_window_attention_index():
    class WindowAttention(nn.Module):
        def __init__(self, dim=32, window_size=4, num_heads=4):
            super().__init__()
            self.num_heads = num_heads
            self.query = nn.Linear(dim, dim)
            self.key = nn.Linear(dim, dim)
            self.value = nn.Linear(dim, dim)
            self.proj = nn.Linear(dim, dim)
            self.relative_position_bias_table = nn.Parameter(
                torch.zeros((2 * window_size - 1) ** 2, num_heads)
            )
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

            coords = torch.stack(
                torch.meshgrid(
                    torch.arange(window_size), torch.arange(window_size), indexing="ij"
                )
            )
            coords = torch.flatten(coords, 1)
            relative_coords = coords[:, :, None] - coords[:, None, :]
            relative_coords = relative_coords.permute(1, 2, 0).contiguous()
            relative_coords[:, :, 0] += window_size - 1
            relative_coords[:, :, 1] += window_size - 1
            self.register_buffer("relative_position_index", relative_coords.sum(-1))

        def forward(self, x, mask=None):
            B, N, C = x.shape
            q, k, v = (
                f(x).view(B, N, self.num_heads, -1).transpose(1, 2)
                for f in (self.query, self.key, self.value)
            )
            bias = (
                self.relative_position_bias_table[self.relative_position_index]
                .permute(2, 0, 1)
                .unsqueeze(0)
            )
            if mask is not None:
                bias = bias + mask.repeat(B // mask.shape[0], 1, 1).unsqueeze(1)
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            return self.proj(x.transpose(1, 2).flatten(2))

    return WindowAttention()


def torch_vit_encoder():
    class VisionTransformer(nn.Module):
        def __init__(
            self,
            image_size=32,
            patch_size=8,
            num_layers=3,
            num_heads=4,
            hidden_dim=48,
            num_classes=10,
        ):
            super().__init__()
            self.conv_proj = nn.Conv2d(3, hidden_dim, kernel_size=patch_size, stride=patch_size)
            self.class_token = nn.Parameter(torch.zeros(1, hidden_dim))
            self.positions = nn.Parameter(
                torch.randn((image_size // patch_size) ** 2 + 1, hidden_dim) * 0.02
            )
            layer = nn.TransformerEncoderLayer(
                hidden_dim,
                num_heads,
                4 * hidden_dim,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            self.encoder = nn.TransformerEncoder(
                layer, num_layers, norm=nn.LayerNorm(hidden_dim), enable_nested_tensor=False
            )
            self.head = nn.Linear(hidden_dim, num_classes)

        def forward(self, images):
            x = self.conv_proj(images)
            x = x.permute(0, 2, 3, 1).flatten(1, 2)
            x = torch.cat([self.class_token.unsqueeze(0).repeat(x.shape[0], 1, 1), x], dim=1)
            x = self.encoder(x + self.positions)
            return {"logits": self.head(x[:, 0]), "features": x[:, 1:]}

    return VisionTransformer()


# ---------------------------------------------------------------- numpy


def np_cxcywh_inplace():
    def box_cxcywh_to_xyxy(boxes):
        boxes = np.asarray(boxes, dtype=float)
        out = boxes.copy()
        out[:, 0] = out[:, 0] - out[:, 2] / 2
        out[:, 1] = out[:, 1] - out[:, 3] / 2
        out[:, 2] = out[:, 0] + out[:, 2] / 2
        out[:, 3] = out[:, 1] + out[:, 3] / 2
        return out

    return box_cxcywh_to_xyxy


def np_mae_norm_pix():
    p = 8

    def patchify(imgs):
        n, c, h, w = imgs.shape
        x = imgs.reshape(n, c, h // p, p, w // p, p)
        x = np.einsum("nchpwq->nhwpqc", x)
        return x.reshape(n, (h // p) * (w // p), p * p * c)

    def mae_loss(pred, imgs, mask):
        target = patchify(imgs)
        mean = target.mean(axis=-1, keepdims=True)
        var = target.var(axis=-1, ddof=1, keepdims=True)
        target = (target - mean) / (var + 1e-6)
        loss = ((pred - target) ** 2).mean(axis=-1)
        mask = mask.astype(loss.dtype)
        return (loss * mask).sum() / mask.sum()

    return mae_loss


def np_window_attention_bias():
    M, heads, C = 4, 4, 32
    rng = np.random.default_rng(0)
    params = {
        "qkv_w": rng.normal(size=(C, 3 * C)) * 0.2,
        "qkv_b": rng.normal(size=3 * C) * 0.1,
        "proj_w": rng.normal(size=(C, C)) * 0.2,
        "proj_b": rng.normal(size=C) * 0.1,
        "rel_table": rng.normal(size=((2 * M - 1) ** 2, heads)),
    }

    def softmax(z):
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def relative_index():
        ys, xs = np.divmod(np.arange(M * M), M)
        dy = ys[:, None] - ys[None, :] + M - 1
        dx = xs[:, None] - xs[None, :] + M - 1
        return dy * (2 * M - 1) + dx

    def window_attention(params, x):
        b, n, c = x.shape
        qkv = x @ params["qkv_w"] + params["qkv_b"]
        q, k, v = qkv.reshape(b, n, 3, heads, c // heads).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(c // heads)
        bias = params["rel_table"][relative_index().ravel()].reshape(heads, n, n)
        out = softmax(scores + bias) @ v
        out = out.transpose(0, 2, 1, 3).reshape(b, n, c)
        return out @ params["proj_w"] + params["proj_b"]

    return window_attention, params


def np_patch_embed_linear():
    p, D = 8, 48
    rng = np.random.default_rng(1)
    params = {"kernel": rng.normal(size=(p, p, 3, D)) * 0.1, "bias": rng.normal(size=D) * 0.1}

    def patch_embed(params, images):
        w, b = params["kernel"], params["bias"]
        p = w.shape[0]
        x = np.moveaxis(images, 1, -1)
        B, H, W, C = x.shape
        tokens = []
        for i in range(0, H, p):
            for j in range(0, W, p):
                tokens.append(np.tensordot(x[:, i : i + p, j : j + p], w, axes=3) + b)
        return np.stack(tokens, axis=1)

    return patch_embed, params


# ---------------------------------------------------------------- jax


def jax_patchify():
    import jax
    import jax.numpy as jnp

    patch_size = 8

    def patchify(images):
        patches = jax.lax.conv_general_dilated_patches(
            images,
            (patch_size, patch_size),
            (patch_size, patch_size),
            "VALID",
            dimension_numbers=("NCHW", "OIHW", "NHWC"),
        )
        b, h, w, d = patches.shape
        return patches.reshape(b, h * w, d)

    return patchify


def jax_mae_mean():
    import jax.numpy as jnp

    patch_size = 8

    def patchify(images):
        b, c, h, w = images.shape
        x = images.reshape(b, c, h // patch_size, patch_size, w // patch_size, patch_size)
        x = jnp.einsum("bchpwq->bhwpqc", x)
        return x.reshape(b, -1, patch_size**2 * c)

    def reconstruction_loss(pred, images, masked):
        err = jnp.square(pred - patchify(images)).mean(-1)
        return jnp.mean(err * masked)

    return reconstruction_loss


def jax_box_iou_clip():
    import jax
    import jax.numpy as jnp

    def area(box):
        return (box[2] - box[0]) * (box[3] - box[1])

    def iou(a, b):
        lt = jnp.maximum(a[:2], b[:2])
        rb = jnp.minimum(a[2:], b[2:])
        wh = rb - lt
        inter = wh[0] * wh[1]
        return inter / (area(a) + area(b) - inter)

    def box_iou(boxes1, boxes2):
        return jax.vmap(lambda a: jax.vmap(lambda b: iou(a, b))(boxes2))(boxes1)

    return box_iou


def jax_deit():
    import jax
    import jax.numpy as jnp

    D, heads, depth, p, classes = 48, 4, 3, 8, 10
    rng = np.random.default_rng(2)

    def normal(*shape):
        return (rng.normal(size=shape) * 0.2).astype(np.float32)

    params = {
        "embedding/kernel": normal(p, p, 3, D),
        "embedding/bias": normal(D),
        "cls": normal(1, 1, D),
        "dist": normal(1, 1, D),
        "pos_embedding": normal(1, 16 + 2, D),
        "norm/scale": 1 + normal(D),
        "norm/bias": normal(D),
        "head/kernel": normal(D, classes),
        "head/bias": normal(classes),
        "head_dist/kernel": normal(D, classes),
        "head_dist/bias": normal(classes),
    }
    for i in range(depth):
        b = f"encoderblock_{i}"
        for ln in ("ln_0", "ln_1"):
            params[f"{b}/{ln}/scale"] = 1 + normal(D)
            params[f"{b}/{ln}/bias"] = normal(D)
        for name in ("query", "key", "value"):
            params[f"{b}/{name}/kernel"] = normal(D, heads, D // heads)
            params[f"{b}/{name}/bias"] = normal(heads, D // heads)
        params[f"{b}/out/kernel"] = normal(heads, D // heads, D)
        params[f"{b}/out/bias"] = normal(D)
        params[f"{b}/dense_0/kernel"] = normal(D, 4 * D)
        params[f"{b}/dense_0/bias"] = normal(4 * D)
        params[f"{b}/dense_1/kernel"] = normal(4 * D, D)
        params[f"{b}/dense_1/bias"] = normal(D)

    def layer_norm(params, name, x):
        mean = x.mean(-1, keepdims=True)
        var = jnp.square(x - mean).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + 1e-6) * params[name + "/scale"] + params[
            name + "/bias"
        ]

    def dense(params, name, x):
        return x @ params[name + "/kernel"] + params[name + "/bias"]

    def attention(params, b, x):
        q, k, v = (
            jnp.einsum("bnd,dhe->bnhe", x, params[f"{b}/{n}/kernel"]) + params[f"{b}/{n}/bias"]
            for n in ("query", "key", "value")
        )
        w = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q / jnp.sqrt(q.shape[-1]), k), axis=-1)
        o = jnp.einsum("bhqk,bkhe->bqhe", w, v)
        return (
            jnp.einsum("bqhe,hed->bqd", o, params[f"{b}/out/kernel"]) + params[f"{b}/out/bias"]
        )

    def deit(params, images):
        x = jax.lax.conv_general_dilated(
            images,
            params["embedding/kernel"],
            (p, p),
            "VALID",
            dimension_numbers=("NCHW", "HWIO", "NHWC"),
        )
        n, h, w, c = x.shape
        x = x.reshape(n, h * w, c) + params["embedding/bias"]
        cls = jnp.tile(params["cls"], (n, 1, 1))
        dist = jnp.tile(params["dist"], (n, 1, 1))
        x = jnp.concatenate([cls, dist, x], axis=1) + params["pos_embedding"]
        for i in range(depth):
            b = f"encoderblock_{i}"
            x = x + attention(params, b, layer_norm(params, f"{b}/ln_0", x))
            y = dense(params, f"{b}/dense_0", layer_norm(params, f"{b}/ln_1", x))
            x = x + dense(params, f"{b}/dense_1", jax.nn.gelu(y, approximate=False))
        x = layer_norm(params, "norm", x)
        return (dense(params, "head", x[:, 0]) + dense(params, "head_dist", x[:, 1])) / 2

    return deit, params


BLOCK = dict(dim=48, num_heads=4)
VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10)
WIN = dict(dim=32, window_size=4, num_heads=4)
SWIN = dict(dim=32, input_resolution=(8, 8), num_heads=4, window_size=4, shift_size=2)
PATCH = dict(img_size=32, patch_size=8, in_chans=3, embed_dim=48)


def case(name, style, build, ref, options, label, mistake="", expected="", call=None):
    return dict(
        name=name,
        style=style,
        build=build,
        reference=(ref, options),
        label=label,
        mistake=mistake,
        expected=expected,
        call=call,
    )


CASES = [
    case(
        "nano_vit_block_residual",
        "nanogpt",
        nano_vit_block_residual,
        "vit_block",
        BLOCK,
        "wrong",
        "The attention's residual adds the normalized input (x is overwritten by ln_1(x)) instead of the block's input.",
        "first residual is taken after the norm; add the un-normalized x",
    ),
    case(
        "nano_vit_causal",
        "nanogpt",
        nano_vit_causal,
        "vit",
        VIT,
        "wrong",
        "is_causal=True left over from GPT: the class token, which comes first, sees no patch.",
        "attention is causal; the logits do not depend on the image",
    ),
    case(
        "nano_swin_block_mask_view",
        "nanogpt",
        nano_swin_block_mask_view,
        "swin_block",
        SWIN,
        "wrong",
        "Scores viewed as (nW, B) although windows are ordered (B, nW), so with more than one image masks go to the wrong windows.",
        "right for a batch of 1 only; shift mask lands on the wrong windows (axis order batch/windows)",
    ),
    case(
        "nano_vit_block_interleaved",
        "nanogpt",
        nano_vit_block_interleaved,
        "vit_block",
        BLOCK,
        "correct",
        expected="equal up to the packing of q/k/v (interleaved per head); returns (output, weights)",
    ),
    case(
        "ein_patch_embed_grid",
        "einops",
        ein_patch_embed_grid,
        "patch_embed",
        PATCH,
        "wrong",
        "The pattern (p1 h) (p2 w) takes strided pixels of the entire image instead of contiguous patches.",
        "patches are strided grids: (p1 h) should be (h p1)",
    ),
    case(
        "ein_swinv2_clamp",
        "einops",
        ein_swinv2_clamp,
        "swinv2_attention",
        WIN,
        "wrong",
        "The logit scale is clamped from below (min=log 100) instead of from above, so it is 100 for every head.",
        "logit scale clamp: max, not min; its gradient is zero",
    ),
    case(
        "ein_deit_dist_head",
        "einops",
        ein_deit_dist_head,
        "deit",
        VIT,
        "wrong",
        "The distillation head reads the class token (index 0) instead of the distillation token (index 1).",
        "distillation head must read token 1",
    ),
    case(
        "ein_window_attention_table",
        "einops",
        ein_window_attention_table,
        "window_attention",
        WIN,
        "correct",
        expected="equal up to the layout of the bias table (heads, 2M-1, 2M-1) and to separate q and kv",
    ),
    case(
        "ein_mae_loss_indexing",
        "einops",
        ein_mae_loss_indexing,
        "mae_loss",
        dict(patch_size=8, norm_pix=False),
        "correct",
        expected="equal",
    ),
    case(
        "d2l_vit_dropout",
        "d2l",
        d2l_vit_dropout,
        "vit",
        VIT,
        "wrong",
        "F.dropout without training=self.training stays active in evaluation.",
        "dropout in evaluation: outputs are random",
    ),
    case(
        "d2l_patch_merging_reshape",
        "d2l",
        d2l_patch_merging_reshape,
        "patch_merging",
        dict(dim=16),
        "wrong",
        "A bare reshape to (H/2, W/2, 4C) joins four neighbours of one row instead of a 2x2 patch.",
        "2x2 neighbours must be gathered; reshape joins four pixels of a row",
    ),
    case(
        "d2l_giou_union",
        "d2l",
        d2l_giou_union,
        "generalized_box_iou",
        {},
        "wrong",
        "The penalty (hull - union) is divided by the union instead of by the hull's area.",
        "penalty must be divided by the enclosing box's area",
    ),
    case(
        "d2l_swin_block",
        "d2l",
        d2l_swin_block,
        "swin_block",
        SWIN,
        "correct",
        expected="equal up to separate q, k, v (mask by 4 regions and -1e9 instead of 9 and -100)",
    ),
    case(
        "torch_vit_block_batch_first",
        "torch",
        torch_vit_block_batch_first,
        "vit_block",
        BLOCK,
        "wrong",
        "nn.MultiheadAttention without batch_first=True attends across the batch instead of across tokens.",
        "attention over the batch axis; batch_first=True is missing",
    ),
    case(
        "torch_swinv2_normalize",
        "torch",
        torch_swinv2_normalize,
        "swinv2_attention",
        WIN,
        "wrong",
        "F.normalize with its default dim=1 normalizes over heads instead of over the head's channels.",
        "normalize q and k over the last axis (dim=-1)",
    ),
    case(
        "torch_window_attention_index",
        "torch",
        torch_window_attention_index,
        "window_attention",
        WIN,
        "wrong",
        "The row offset is not multiplied by 2M-1 before the sum, so different offsets share one entry of the table.",
        "relative position index: row offset must be multiplied by 2M-1",
    ),
    case(
        "torch_vit_encoder",
        "torch",
        torch_vit_encoder,
        "vit",
        VIT,
        "correct",
        expected="equal up to epsilon (1e-5); logits in a dict",
        call=lambda mine, *args, **inputs: mine(*args, *inputs.values())["logits"],
    ),
    case(
        "np_cxcywh_inplace",
        "numpy",
        np_cxcywh_inplace,
        "box_cxcywh_to_xyxy",
        {},
        "wrong",
        "Columns 2 and 3 are computed from columns 0 and 1 that have already been overwritten, so x2 = cx and y2 = cy.",
        "x2, y2 equal the centre: use the original cx, cy",
    ),
    case(
        "np_mae_norm_pix",
        "numpy",
        np_mae_norm_pix,
        "mae_loss",
        dict(patch_size=8, norm_pix=True),
        "wrong",
        "The normalized target is divided by the variance instead of by its square root.",
        "divide by sqrt(var + eps)",
    ),
    case(
        "np_window_attention_bias",
        "numpy",
        np_window_attention_bias,
        "window_attention",
        WIN,
        "wrong",
        "The gathered bias (N², heads) is reshaped to (heads, N, N) instead of transposed.",
        "bias: reshape to (N, N, heads), then move heads first",
    ),
    case(
        "np_patch_embed_linear",
        "numpy",
        np_patch_embed_linear,
        "patch_embed",
        PATCH,
        "correct",
        expected="equal up to the weight's layout (row, column, channel, D)",
    ),
    case(
        "jax_patchify",
        "jax",
        jax_patchify,
        "patchify",
        dict(patch_size=8),
        "wrong",
        "conv_general_dilated_patches returns pixels in order (channel, row, column), not (row, column, channel).",
        "pixel order in a patch: channel first instead of last",
    ),
    case(
        "jax_mae_mean",
        "jax",
        jax_mae_mean,
        "mae_loss",
        dict(patch_size=8, norm_pix=False),
        "wrong",
        "The masked errors are averaged over all patches instead of over the masked ones.",
        "divide by the number of masked patches",
    ),
    case(
        "jax_box_iou_clip",
        "jax",
        jax_box_iou_clip,
        "box_iou",
        {},
        "wrong",
        "Negative widths and heights of the intersection are not clipped to 0.",
        "disjoint boxes: clip the intersection's width and height at 0",
    ),
    case(
        "jax_deit",
        "jax",
        jax_deit,
        "deit",
        VIT,
        "correct",
        expected="equal up to layout of the weights",
    ),
]
