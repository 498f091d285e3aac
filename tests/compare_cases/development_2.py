"""Further cases, beyond the 36 + 20 of cases.py (same form)."""

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


@case(
    "x_th_causal_qkv_view",
    "torch",
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "The packed projection is reshaped with the axis of q, k, v before the tokens, which mixes tokens with q, k, v.",
    "q/k/v unpacked in the wrong order (reshape mixes tokens)",
)
def x_th_causal_qkv_view():
    class CausalAttention(nn.Module):
        def __init__(self, dim=32, num_heads=4):
            super().__init__()
            self.num_heads = num_heads
            self.qkv = nn.Linear(dim, 3 * dim)
            self.out = nn.Linear(dim, dim)

        def forward(self, x):
            B, N, C = x.shape
            q, k, v = (
                self.qkv(x)
                .reshape(B, 3, N, self.num_heads, C // self.num_heads)
                .permute(1, 0, 3, 2, 4)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(B, N, C))

    return CausalAttention()


@case(
    "x_ng_causal_no_proj_bias",
    "nanogpt",
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "The output projection has no bias.",
    "output projection's bias missing",
)
def x_ng_causal_no_proj_bias():
    class Head(nn.Module):
        def __init__(self, n_embd, head_size, block_size, dropout):
            super().__init__()
            self.key = nn.Linear(n_embd, head_size)
            self.query = nn.Linear(n_embd, head_size)
            self.value = nn.Linear(n_embd, head_size)
            self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            B, T, C = x.shape
            k = self.key(x)
            q = self.query(x)
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
            wei = self.dropout(F.softmax(wei, dim=-1))
            return wei @ self.value(x)

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_heads=4, n_embd=32, block_size=16, dropout=0.2):
            super().__init__()
            self.heads = nn.ModuleList(
                [
                    Head(n_embd, n_embd // num_heads, block_size, dropout)
                    for _ in range(num_heads)
                ]
            )
            self.proj = nn.Linear(n_embd, n_embd, bias=False)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            out = torch.cat([h(x) for h in self.heads], dim=-1)
            return self.dropout(self.proj(out))

    return MultiHeadAttention()


@case(
    "x_ng_gpt_positions_buffer",
    "nanogpt",
    ("gpt", dict(vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "wrong",
    "The learned positions are a buffer, not a parameter: they are never trained.",
    "position embedding not a parameter",
)
def x_ng_gpt_positions_buffer():
    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.c_attn = nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = nn.Linear(n_embd, n_embd)
            self.n_head = n_head

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = (
                t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                for t in self.c_attn(x).split(C, dim=2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    class Block(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.ln_1 = nn.LayerNorm(n_embd)
            self.attn = CausalSelfAttention(n_embd, n_head)
            self.ln_2 = nn.LayerNorm(n_embd)
            self.c_fc = nn.Linear(n_embd, 4 * n_embd)
            self.c_proj = nn.Linear(4 * n_embd, n_embd)

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self, vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32):
            super().__init__()
            self.wte = nn.Embedding(vocab_size, n_embd)
            self.register_buffer("wpe", torch.randn(block_size, n_embd) * 0.02)
            self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
            self.ln_f = nn.LayerNorm(n_embd)
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, idx):
            x = self.wte(idx) + self.wpe[: idx.size(1)]
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    return GPT()


@case(
    "x_ng_gpt_no_final_norm",
    "nanogpt",
    ("gpt", dict(vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "wrong",
    "The final norm exists but is not applied.",
    "final norm not applied (its parameters get no gradient)",
)
def x_ng_gpt_no_final_norm():
    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.c_attn = nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = nn.Linear(n_embd, n_embd)
            self.n_head = n_head

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = (
                t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                for t in self.c_attn(x).split(C, dim=2)
            )
            att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            att = att + torch.full((T, T), float("-inf"), device=x.device, dtype=x.dtype).triu(
                1
            )
            y = F.softmax(att, dim=-1) @ v
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    class Block(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.ln_1 = nn.LayerNorm(n_embd)
            self.attn = CausalSelfAttention(n_embd, n_head)
            self.ln_2 = nn.LayerNorm(n_embd)
            self.mlp = nn.Sequential(
                nn.Linear(n_embd, 4 * n_embd),
                nn.GELU(approximate="tanh"),
                nn.Linear(4 * n_embd, n_embd),
            )

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT(nn.Module):
        def __init__(self, vocab_size=40, block_size=16, n_layer=2, n_head=4, n_embd=32):
            super().__init__()
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(vocab_size, n_embd),
                    wpe=nn.Embedding(block_size, n_embd),
                    h=nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer)),
                    ln_f=nn.LayerNorm(n_embd),
                )
            )
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.transformer.wte.weight = self.lm_head.weight

        def forward(self, idx):
            pos = torch.arange(idx.size(1), device=idx.device).unsqueeze(0)
            x = self.transformer.wte(idx) + self.transformer.wpe(pos)
            for block in self.transformer.h:
                x = block(x)
            return self.lm_head(x)

    return GPT()


@case(
    "x_eo_vit_positions_patches_only",
    "einops",
    (
        "vit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=10),
    ),
    "wrong",
    "The positions are added to the patches before the class token is put in front, so the class token has none.",
    "no position for the class token",
)
def x_eo_vit_positions_patches_only():
    class MHSA(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.to_q = nn.Linear(dim, dim)
            self.to_k = nn.Linear(dim, dim)
            self.to_v = nn.Linear(dim, dim)
            self.unify = nn.Linear(dim, dim)

        def forward(self, x):
            q, k, v = (
                rearrange(f(x), "b t (h k) -> b h t k", h=self.heads)
                for f in (self.to_q, self.to_k, self.to_v)
            )
            att = torch.softmax(einsum("bhik,bhjk->bhij", q, k) / q.size(-1) ** 0.5, dim=-1)
            return self.unify(
                rearrange(einsum("bhij,bhjk->bhik", att, v), "b h t k -> b t (h k)")
            )

    class Residual(nn.Module):
        def __init__(self, dim, fn):
            super().__init__()
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.fn = fn

        def forward(self, x):
            return x + self.fn(self.norm(x))

    class ViT(nn.Module):
        def __init__(self, dim=48, depth=2, heads=4, classes=10, patch=8, size=32):
            super().__init__()
            self.embed = nn.Sequential(
                nn.Conv2d(3, dim, patch, patch), Rearrange("b c h w -> b (h w) c")
            )
            self.positions = nn.Parameter(torch.randn((size // patch) ** 2, dim) * 0.02)
            self.cls = nn.Parameter(torch.randn(dim) * 0.02)
            layers = []
            for _ in range(depth):
                layers += [
                    Residual(dim, MHSA(dim, heads)),
                    Residual(
                        dim,
                        nn.Sequential(
                            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
                        ),
                    ),
                ]
            self.encoder = nn.Sequential(*layers)
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.head = nn.Linear(dim, classes)

        def forward(self, x):
            x = self.embed(x) + self.positions
            x = torch.cat([repeat(self.cls, "d -> b 1 d", b=len(x)), x], dim=1)
            x = self.norm(self.encoder(x))
            return self.head(x[:, 0])

    return ViT()


@case(
    "x_th_llama_rope_queries_only",
    "torch",
    ("llama", dict(vocab_size=40, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=48)),
    "wrong",
    "Only the queries are rotated, the keys are not.",
    "rotary missing on the keys",
)
def x_th_llama_rope_queries_only():
    class Rotary(nn.Module):
        def __init__(self, head_dim, base=10000.0):
            super().__init__()
            self.register_buffer(
                "inv_freq",
                base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim),
                persistent=False,
            )

        def forward(self, x):
            pos = torch.arange(x.size(-2), device=x.device, dtype=torch.float64)
            freqs = pos[:, None] * self.inv_freq.to(torch.float64)[None]
            cos, sin = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    class LlamaLayer(nn.Module):
        def __init__(self, dim, heads, kv_heads, inner):
            super().__init__()
            self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
            self.input_norm = nn.RMSNorm(dim, eps=1e-5)
            self.q_proj = nn.Linear(dim, dim, bias=False)
            self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
            self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
            self.o_proj = nn.Linear(dim, dim, bias=False)
            self.rotary = Rotary(self.head_dim)
            self.post_norm = nn.RMSNorm(dim, eps=1e-5)
            self.gate_proj = nn.Linear(dim, inner, bias=False)
            self.up_proj = nn.Linear(dim, inner, bias=False)
            self.down_proj = nn.Linear(inner, dim, bias=False)

        def forward(self, x):
            b, n, c = x.shape
            h = self.input_norm(x)
            q = self.q_proj(h).view(b, n, self.heads, self.head_dim).transpose(1, 2)
            k = self.k_proj(h).view(b, n, self.kv_heads, self.head_dim).transpose(1, 2)
            v = self.v_proj(h).view(b, n, self.kv_heads, self.head_dim).transpose(1, 2)
            q = self.rotary(q)
            groups = self.heads // self.kv_heads
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o_proj(o.transpose(1, 2).reshape(b, n, c))
            h = self.post_norm(x)
            return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))

    class TinyLlama(nn.Module):
        def __init__(self, vocab=40, layers=2, heads=4, kv_heads=2, dim=32, inner=48):
            super().__init__()
            self.embed_tokens = nn.Embedding(vocab, dim)
            self.layers = nn.ModuleList(
                [LlamaLayer(dim, heads, kv_heads, inner) for _ in range(layers)]
            )
            self.norm = nn.RMSNorm(dim, eps=1e-5)

        def forward(self, input_ids):
            x = self.embed_tokens(input_ids)
            for layer in self.layers:
                x = layer(x)
            return {"logits": F.linear(self.norm(x), self.embed_tokens.weight)}

    return TinyLlama()


@case(
    "x_d2l_multihead_tiny_fill",
    "d2l",
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    "wrong",
    "Masked scores are filled with 1e-9 instead of -1e9, so they still get weight.",
    "mask fill value 1e-9 instead of -1e9",
)
def x_d2l_multihead_tiny_fill():
    class ScaledDotProductAttention(nn.Module):
        def __init__(self, temperature, attn_dropout=0.1):
            super().__init__()
            self.temperature = temperature
            self.dropout = nn.Dropout(attn_dropout)

        def forward(self, q, k, v, mask=None):
            attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
            if mask is not None:
                attn = attn.masked_fill(mask == 0, 1e-9)
            attn = self.dropout(F.softmax(attn, dim=-1))
            return torch.matmul(attn, v), attn

    class MultiHeadAttention(nn.Module):
        def __init__(self, n_head=4, d_model=32):
            super().__init__()
            self.n_head, self.d_k = n_head, d_model // n_head
            self.w_qs = nn.Linear(d_model, d_model)
            self.w_ks = nn.Linear(d_model, d_model)
            self.w_vs = nn.Linear(d_model, d_model)
            self.fc = nn.Linear(d_model, d_model)
            self.attention = ScaledDotProductAttention(temperature=self.d_k**0.5)

        def forward(self, x, mask=None):
            sz_b, n, _ = x.shape
            q = self.w_qs(x).view(sz_b, n, self.n_head, self.d_k).transpose(1, 2)
            k = self.w_ks(x).view(sz_b, n, self.n_head, self.d_k).transpose(1, 2)
            v = self.w_vs(x).view(sz_b, n, self.n_head, self.d_k).transpose(1, 2)
            out, attn = self.attention(q, k, v, mask=mask)
            out = out.transpose(1, 2).contiguous().view(sz_b, n, -1)
            return self.fc(out), attn

    return MultiHeadAttention()


@case(
    "x_d2l_encoder_functional_dropout",
    "d2l",
    (
        "encoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=False, act="relu"),
    ),
    "wrong",
    "F.dropout is called without the training flag, so it also drops in evaluation.",
    "dropout active in evaluation",
)
def x_d2l_encoder_functional_dropout():
    class EncoderLayer(nn.Module):
        def __init__(self, d_model=32, h=4, d_ff=64, p=0.1):
            super().__init__()
            self.h, self.p = h, p
            self.WQ, self.WK, self.WV, self.WO = (nn.Linear(d_model, d_model) for _ in range(4))
            self.l1 = nn.Linear(d_model, d_ff)
            self.l2 = nn.Linear(d_ff, d_model)
            self.norm1 = nn.LayerNorm(d_model)
            self.norm2 = nn.LayerNorm(d_model)

        def attention(self, x, mask):
            b, n, d = x.shape
            q, k, v = [
                W(x).view(b, n, self.h, d // self.h).transpose(1, 2)
                for W in (self.WQ, self.WK, self.WV)
            ]
            scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.h)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            out = scores.softmax(-1) @ v
            return self.WO(out.transpose(1, 2).reshape(b, n, d))

        def forward(self, x, mask=None):
            x = self.norm1(x + F.dropout(self.attention(x, mask), self.p))
            x = self.norm2(x + F.dropout(self.l2(F.relu(self.l1(x))), self.p))
            return x

    return EncoderLayer()


@case(
    "x_th_patch_merging_norm_after",
    "torch",
    ("patch_merging", dict(dim=16)),
    "wrong",
    "The norm comes after the reduction, over 2C channels instead of 4C before it.",
    "norm after instead of before the linear layer",
)
def x_th_patch_merging_norm_after():
    class PatchMerging(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
            self.norm = nn.LayerNorm(2 * dim)

        def forward(self, x):
            x0 = x[:, 0::2, 0::2, :]
            x1 = x[:, 1::2, 0::2, :]
            x2 = x[:, 0::2, 1::2, :]
            x3 = x[:, 1::2, 1::2, :]
            x = torch.cat([x0, x1, x2, x3], -1)
            return self.norm(self.reduction(x))

    return PatchMerging()


@case(
    "x_eo_patch_merging_ok",
    "einops",
    ("patch_merging", dict(dim=16)),
    "correct",
    expected="equal",
)
def x_eo_patch_merging_ok():
    class PatchMerging(nn.Module):
        def __init__(self, dim, factor=2):
            super().__init__()
            self.merge = Rearrange("b (h dh) (w dw) c -> b h w (dw dh c)", dh=factor, dw=factor)
            self.norm = nn.LayerNorm(dim * factor**2)
            self.linear = nn.Linear(dim * factor**2, dim * 2, bias=False)

        def forward(self, x):
            return self.linear(self.norm(self.merge(x)))

    return PatchMerging(16)


@case(
    "x_th_swin_no_mask",
    "torch",
    (
        "swin_block",
        dict(dim=32, input_resolution=(8, 8), num_heads=4, window_size=4, shift_size=2),
    ),
    "wrong",
    "The shifted windows are attended to without the mask between regions.",
    "mask of the shifted windows missing",
)
def x_th_swin_no_mask():
    def window_partition(x, window_size):
        B, H, W, C = x.shape
        x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size * window_size, C)

    def window_reverse(windows, window_size, H, W):
        B = int(windows.shape[0] / (H * W / window_size / window_size))
        x = windows.view(B, H // window_size, W // window_size, window_size, window_size, -1)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)

    class WindowAttention(nn.Module):
        def __init__(self, dim, window_size, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.scale = (dim // num_heads) ** -0.5
            self.relative_position_bias_table = nn.Parameter(
                torch.zeros((2 * window_size - 1) ** 2, num_heads)
            )
            coords = torch.stack(
                torch.meshgrid(
                    [torch.arange(window_size), torch.arange(window_size)], indexing="ij"
                )
            )
            coords = torch.flatten(coords, 1)
            relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
            relative[:, :, 0] += window_size - 1
            relative[:, :, 1] += window_size - 1
            relative[:, :, 0] *= 2 * window_size - 1
            self.register_buffer("relative_position_index", relative.sum(-1))
            self.qkv = nn.Linear(dim, dim * 3)
            self.proj = nn.Linear(dim, dim)
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

        def forward(self, x, mask=None):
            B_, N, C = x.shape
            qkv = (
                self.qkv(x)
                .reshape(B_, N, 3, self.num_heads, C // self.num_heads)
                .permute(2, 0, 3, 1, 4)
            )
            q, k, v = qkv[0], qkv[1], qkv[2]
            attn = (q * self.scale) @ k.transpose(-2, -1)
            bias = self.relative_position_bias_table[
                self.relative_position_index.view(-1)
            ].view(N, N, -1)
            attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
            if mask is not None:
                nW = mask.shape[0]
                attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(
                    1
                ).unsqueeze(0)
                attn = attn.view(-1, self.num_heads, N, N)
            attn = attn.softmax(dim=-1)
            return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))

    class SwinTransformerBlock(nn.Module):
        def __init__(
            self,
            dim=32,
            input_resolution=(8, 8),
            num_heads=4,
            window_size=4,
            shift_size=2,
            mlp_ratio=4.0,
        ):
            super().__init__()
            self.window_size, self.shift_size = window_size, shift_size
            self.norm1 = nn.LayerNorm(dim)
            self.attn = WindowAttention(dim, window_size, num_heads)
            self.norm2 = nn.LayerNorm(dim)
            hidden = int(dim * mlp_ratio)
            self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            H, W = input_resolution
            img_mask = torch.zeros((1, H, W, 1))
            slices = (
                slice(0, -window_size),
                slice(-window_size, -shift_size),
                slice(-shift_size, None),
            )
            cnt = 0
            for h in slices:
                for w in slices:
                    img_mask[:, h, w, :] = cnt
                    cnt += 1
            mask_windows = window_partition(img_mask, window_size).squeeze(-1)
            attn_mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)
            self.register_buffer(
                "attn_mask", attn_mask.masked_fill(attn_mask != 0, -100.0), persistent=False
            )

        def forward(self, x):
            B, H, W, C = x.shape
            shortcut = x
            x = torch.roll(
                self.norm1(x), shifts=(-self.shift_size, -self.shift_size), dims=(1, 2)
            )
            windows = window_partition(x, self.window_size)
            windows = self.attn(windows)
            x = window_reverse(windows, self.window_size, H, W)
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
            x = shortcut + x
            return x + self.mlp(self.norm2(x))

    return SwinTransformerBlock()


@case(
    "x_th_cxcywh_full",
    "torch",
    ("box_cxcywh_to_xyxy", dict()),
    "wrong",
    "The whole width and height are subtracted and added, not half.",
    "half extents missing (w instead of w / 2)",
)
def x_th_cxcywh_full():
    def box_cxcywh_to_xyxy(x):
        x_c, y_c, w, h = x.unbind(-1)
        b = [x_c - w, y_c - h, x_c + w, y_c + h]
        return torch.stack(b, dim=-1)

    return box_cxcywh_to_xyxy


@case(
    "x_np_patchify_channels_first",
    "numpy",
    ("patchify", dict(patch_size=4)),
    "wrong",
    "The pixels of a patch are ordered (channel, row, column) instead of (row, column, channel).",
    "pixel order within a patch: channels first",
)
def x_np_patchify_channels_first():
    def patchify(imgs, p=4):
        n, c, hh, ww = imgs.shape
        h, w = hh // p, ww // p
        x = imgs.reshape(n, c, h, p, w, p)
        x = x.transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(n, h * w, c * p * p)

    return patchify


@case("x_np_rotary_ok", "numpy", ("rotary", dict()), "correct", expected="equal")
def x_np_rotary_ok():
    def rotary(x, base=10000.0):
        n, d = x.shape[-2:]
        half = d // 2
        inv = base ** (-np.arange(half) / half)
        ang = np.arange(n)[:, None] * inv[None, :]
        c, s = np.cos(ang), np.sin(ang)
        out = np.empty_like(x)
        out[..., :half] = x[..., :half] * c - x[..., half:] * s
        out[..., half:] = x[..., :half] * s + x[..., half:] * c
        return out

    return rotary


@case(
    "x_np_mlp_act_last",
    "numpy",
    ("mlp", dict(dim=24, hidden=48, act="gelu")),
    "wrong",
    "The activation follows the second layer instead of the first.",
    "activation in the wrong place",
)
def x_np_mlp_act_last():
    from scipy.special import erf

    rng = np.random.default_rng(4)
    params = dict(
        w1=rng.normal(size=(24, 48)) * 0.2,
        b1=np.zeros(48),
        w2=rng.normal(size=(48, 24)) * 0.2,
        b2=np.zeros(24),
    )

    def gelu(x):
        return 0.5 * x * (1 + erf(x / np.sqrt(2)))

    def mlp(params, x):
        h = x @ params["w1"] + params["b1"]
        return gelu(h @ params["w2"] + params["b2"])

    return mlp, params


@case(
    "x_jax_grouped_order",
    "jax",
    ("grouped_attention", dict(embed_dim=32, num_heads=4, num_kv_heads=2, bias=False)),
    "wrong",
    "The query heads are reshaped to (group, kv head) instead of (kv head, group), both before and after attention.",
    "grouped heads: i % num_kv_heads instead of i // group",
)
def x_jax_grouped_order():
    H, K, D = 4, 2, 8
    ks = jax.random.split(jax.random.PRNGKey(0), 4)
    params = {
        "wq": jax.random.normal(ks[0], (32, H * D)) * 0.2,
        "wk": jax.random.normal(ks[1], (32, K * D)) * 0.2,
        "wv": jax.random.normal(ks[2], (32, K * D)) * 0.2,
        "wo": jax.random.normal(ks[3], (H * D, 32)) * 0.2,
    }

    def gqa(params, x):
        b, n, _ = x.shape
        q = (x @ params["wq"]).reshape(b, n, H // K, K, D)
        k = (x @ params["wk"]).reshape(b, n, K, D)
        v = (x @ params["wv"]).reshape(b, n, K, D)
        s = jnp.einsum("bngkd,bmkd->bgknm", q, k) / jnp.sqrt(D)
        s = jnp.where(jnp.tril(jnp.ones((n, n), bool)), s, -jnp.inf)
        o = jnp.einsum("bgknm,bmkd->bngkd", jax.nn.softmax(s, axis=-1), v)
        return o.reshape(b, n, H * D) @ params["wo"]

    return gqa, params


@case("x_jax_next_token_ok", "jax", ("next_token_loss", dict()), "correct", expected="equal")
def x_jax_next_token_ok():
    def loss_fn(logits, tokens):
        logp = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        targets = tokens[:, 1:]
        ll = jnp.take_along_axis(logp, targets[..., None], axis=-1)
        return -ll.mean()

    return loss_fn


@case(
    "x_jax_rms_norm_ok",
    "jax",
    ("rms_norm", dict(dim=24, eps=1e-5)),
    "correct",
    expected="equal up to a scale stored as offset from one",
)
def x_jax_rms_norm_ok():
    params = {"scale": jnp.zeros(24)}

    def rms_norm(params, x, eps=1e-5):
        ms = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(ms + eps) * (1 + params["scale"])

    return rms_norm, params
