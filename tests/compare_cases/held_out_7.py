import math
from dataclasses import dataclass
from copy import deepcopy
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat
from einops.layers.torch import Rearrange

CASES = []


def add(**kw):
    kw.setdefault("call", None)
    CASES.append(kw)


# ---------------------------------------------------------------- 1 patch_embed, numpy, HWIO kernel
def build_np_patch():
    rng = np.random.default_rng(0)
    params = {
        "embedding/kernel": rng.standard_normal((8, 8, 3, 48)) * 0.07,
        "embedding/bias": rng.standard_normal(48) * 0.1,
    }

    def embed(params, images):
        k = params["embedding/kernel"]
        ph, pw, cin, width = k.shape
        x = np.transpose(images, (0, 2, 3, 1))
        b, H, W, _ = x.shape
        out = np.zeros((b, H // ph, W // pw, width), dtype=x.dtype)
        for i in range(H // ph):
            for j in range(W // pw):
                tile = x[:, i * ph : (i + 1) * ph, j * pw : (j + 1) * pw, :]
                out[:, i, j] = np.tensordot(tile, k, axes=([1, 2, 3], [0, 1, 2]))
        return out.reshape(b, -1, width) + params["embedding/bias"]

    return embed, params


add(
    name="np_patch_hwio",
    style="numpy",
    build=build_np_patch,
    reference=("patch_embed", dict(img_size=32, patch_size=8, in_chans=3, embed_dim=48)),
    label="correct",
    mistake="",
    expected="equal; kernel in (p, p, C, D) layout",
)


# ---------------------------------------------------------------- 2 vit_block, torch, nn.MultiheadAttention
class L(nn.Module):
    def __init__(self, d, h, r=4):
        super().__init__()
        self.n = nn.ModuleList([nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)])
        self.a = nn.MultiheadAttention(d, h)
        self.f = nn.Sequential(
            nn.Linear(d, r * d),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(r * d, d),
            nn.Dropout(0.0),
        )

    def forward(self, z):
        t = self.n[0](z).transpose(0, 1)
        t, w = self.a(t, t, t, average_attn_weights=False)
        z = z + t.transpose(0, 1)
        return z + self.f(self.n[1](z)), w


add(
    name="torch_block_mha",
    style="torch",
    build=lambda: L(48, 4),
    reference=("vit_block", dict(dim=48, num_heads=4, mlp_ratio=4)),
    label="correct",
    mistake="",
    expected="equal; also returns the attention weights",
)


# ---------------------------------------------------------------- 3 vit_block, jax, flax shapes
def build_jax_block():
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(1)
    D, H, K, M = 48, 4, 12, 192
    r = lambda *s: jnp.asarray(rng.standard_normal(s) * 0.15)
    A = "MultiHeadDotProductAttention_0/"
    params = {
        "LayerNorm_0/scale": 1 + r(D),
        "LayerNorm_0/bias": r(D),
        A + "query/kernel": r(D, H, K),
        A + "query/bias": r(H, K),
        A + "key/kernel": r(D, H, K),
        A + "key/bias": r(H, K),
        A + "value/kernel": r(D, H, K),
        A + "value/bias": r(H, K),
        A + "out/kernel": r(H, K, D),
        A + "out/bias": r(D),
        "LayerNorm_2/scale": 1 + r(D),
        "LayerNorm_2/bias": r(D),
        "MlpBlock_3/Dense_0/kernel": r(D, M),
        "MlpBlock_3/Dense_0/bias": r(M),
        "MlpBlock_3/Dense_1/kernel": r(M, D),
        "MlpBlock_3/Dense_1/bias": r(D),
    }

    def ln(p, name, x):
        mu = x.mean(-1, keepdims=True)
        ms = (x * x).mean(-1, keepdims=True)
        mul = jax.lax.rsqrt(ms - mu * mu + 1e-6) * p[name + "/scale"]
        return (x - mu) * mul + p[name + "/bias"]

    def encoder_block(p, inputs):
        x = ln(p, "LayerNorm_0", inputs)
        q, k, v = (
            jnp.einsum("bnd,dhk->bnhk", x, p[A + s + "/kernel"]) + p[A + s + "/bias"]
            for s in ("query", "key", "value")
        )
        q = q / jnp.sqrt(q.shape[-1])
        w = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, k), axis=-1)
        x = jnp.einsum("...hqk,...khd->...qhd", w, v)
        x = jnp.einsum("bnhk,hkd->bnd", x, p[A + "out/kernel"]) + p[A + "out/bias"]
        x = x + inputs
        y = ln(p, "LayerNorm_2", x)
        y = y @ p["MlpBlock_3/Dense_0/kernel"] + p["MlpBlock_3/Dense_0/bias"]
        y = jax.nn.gelu(y, approximate=False)
        y = y @ p["MlpBlock_3/Dense_1/kernel"] + p["MlpBlock_3/Dense_1/bias"]
        return x + y

    return encoder_block, params


add(
    name="jax_block_flax_shapes",
    style="jax",
    build=build_jax_block,
    reference=("vit_block", dict(dim=48, num_heads=4, mlp_ratio=4)),
    label="correct",
    mistake="",
    expected="equal (float32)",
)


# ---------------------------------------------------------------- 4 vit, nanoGPT
@dataclass
class ViTConfig:
    image_size: int = 32
    patch: int = 8
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 48
    n_class: int = 10
    dropout: float = 0.0
    bias: bool = True


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-6)


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.kqv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        k, q, v = self.kqv(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=False)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = SelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class NanoViT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        n = (config.image_size // config.patch) ** 2
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Linear(3 * config.patch**2, config.n_embd),
                wpe=nn.Embedding(n + 1, config.n_embd),
                cls=nn.Embedding(1, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.head = nn.Linear(config.n_embd, config.n_class)

    def forward(self, img, targets=None):
        p = self.config.patch
        b = img.size(0)
        x = img.unfold(2, p, p).unfold(3, p, p)  # B, C, gh, gw, p, p
        x = x.permute(0, 2, 3, 4, 5, 1).reshape(b, -1, 3 * p * p)
        x = self.transformer.wte(x)
        x = torch.cat([self.transformer.cls.weight.expand(b, 1, -1), x], dim=1)
        pos = torch.arange(x.size(1), device=img.device)
        x = self.transformer.drop(x + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.head(x[:, 0, :])
        loss = F.cross_entropy(logits, targets) if targets is not None else None
        return logits, loss


add(
    name="nano_vit_kqv",
    style="nanogpt",
    build=lambda: NanoViT(ViTConfig()),
    reference=(
        "vit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    label="correct",
    mistake="",
    expected="equal; packed as k, q, v; class token and positions as embeddings",
)


# ---------------------------------------------------------------- 5 vit, lucidrains, eps 1e-5
class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim_head**-0.5
        self.attend = nn.Softmax(dim=-1)
        self.to_q = nn.Linear(dim, inner_dim)
        self.to_kv = nn.Linear(dim, inner_dim * 2)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        qkv = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), qkv)
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        out = torch.einsum("b h i j, b h j d -> b h i d", self.attend(dots), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class Transformer(nn.Module):
    def __init__(self, dim, depth, heads, dim_head, mlp_dim, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        PreNorm(
                            dim, Attention(dim, heads=heads, dim_head=dim_head, dropout=dropout)
                        ),
                        PreNorm(dim, FeedForward(dim, mlp_dim, dropout=dropout)),
                    ]
                )
            )

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


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
        pool="cls",
        channels=3,
        dim_head=64,
        dropout=0.0,
        emb_dropout=0.0,
    ):
        super().__init__()
        num_patches = (image_size // patch_size) ** 2
        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch_size, p2=patch_size),
            nn.Linear(channels * patch_size**2, dim),
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(emb_dropout)
        self.transformer = Transformer(dim, depth, heads, dim_head, mlp_dim, dropout)
        self.pool = pool
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, img):
        x = self.to_patch_embedding(img)
        b, n, _ = x.shape
        cls_tokens = repeat(self.cls_token, "1 1 d -> b 1 d", b=b)
        x = torch.cat((cls_tokens, x), dim=1)
        x += self.pos_embedding[:, : (n + 1)]
        x = self.dropout(x)
        x = self.transformer(x)
        x = x.mean(dim=1) if self.pool == "mean" else x[:, 0]
        return self.mlp_head(self.to_latent(x))


add(
    name="lucid_vit_kv",
    style="einops",
    build=lambda: ViT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=48,
        depth=3,
        heads=4,
        mlp_dim=192,
        dim_head=12,
        dropout=0.1,
        emb_dropout=0.1,
    ),
    reference=(
        "vit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    label="correct",
    mistake="",
    expected="equal up to the norms' epsilon (1e-5 instead of 1e-6)",
)


# ---------------------------------------------------------------- 6 deit, annotated transformer
def clones(module, N):
    return nn.ModuleList([deepcopy(module) for _ in range(N)])


class ATNorm(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.a_2 * (x - mean) / torch.sqrt(var + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = ATNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


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


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(F.gelu(self.w_1(x))))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)

    def forward(self, x):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x))
        return self.sublayer[1](x, self.feed_forward)


class DistilledEncoder(nn.Module):
    def __init__(self, img, patch, d_model, N, h, classes, dropout=0.1):
        super().__init__()
        self.patch = patch
        self.src_embed = nn.Linear(3 * patch * patch, d_model)
        self.extra = nn.Parameter(torch.randn(2, d_model) * 0.02)
        self.pe = nn.Parameter(torch.randn((img // patch) ** 2 + 2, d_model) * 0.02)
        layer = EncoderLayer(
            d_model,
            MultiHeadedAttention(h, d_model, dropout),
            PositionwiseFeedForward(d_model, 4 * d_model, dropout),
            dropout,
        )
        self.layers = clones(layer, N)
        self.norm = ATNorm(d_model)
        self.generators = clones(nn.Linear(d_model, classes), 2)

    def forward(self, x):
        x = self.src_embed(F.unfold(x, self.patch, stride=self.patch).transpose(1, 2))
        x = torch.cat([self.extra.unsqueeze(0).expand(x.size(0), -1, -1), x], dim=1) + self.pe
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x[:, :2])
        y = [g(x[:, i]) for i, g in enumerate(self.generators)]
        if self.training:
            return tuple(y)
        return sum(y) / len(y)


add(
    name="annotated_deit",
    style="d2l",
    build=lambda: DistilledEncoder(32, 8, 48, 3, 4, 10),
    reference=(
        "deit",
        dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10),
    ),
    label="correct",
    mistake="",
    expected="equal; both tokens in one parameter, heads in a list (dropout 0.1 in training only)",
)


# ---------------------------------------------------------------- 7 window_attention, einops, interleaved
class WinAttn(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads = heads
        self.window = window
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Linear(dim, dim)
        self.pos_embedding = nn.Parameter(
            torch.randn(2 * window - 1, 2 * window - 1, heads) * 0.02
        )
        ij = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"), -1
        )
        ij = rearrange(ij, "i j c -> (i j) c")
        rel = rearrange(ij, "n c -> n 1 c") - rearrange(ij, "m c -> 1 m c") + window - 1
        self.register_buffer("relative_indices", rel, persistent=False)

    def forward(self, x):
        q, k, v = rearrange(self.to_qkv(x), "b n (h d qkv) -> qkv b h n d", h=self.heads, qkv=3)
        sim = torch.einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        bias = self.pos_embedding[self.relative_indices[..., 0], self.relative_indices[..., 1]]
        sim = sim + rearrange(bias, "i j h -> h i j")
        out = torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


add(
    name="lucid_window_interleaved",
    style="einops",
    build=lambda: WinAttn(32, 4, 4),
    reference=("window_attention", dict(dim=32, window_size=4, num_heads=4)),
    label="correct",
    mistake="",
    expected="equal; (h d qkv) packing, table (2M-1, 2M-1, heads)",
)


# ---------------------------------------------------------------- 8 window_attention, numpy, per-head arrays
def build_np_window():
    rng = np.random.default_rng(2)
    C, H, M = 24, 3, 4
    d = C // H
    W = dict(
        wq=rng.normal(size=(H, C, d)) * 0.3,
        bq=rng.normal(size=(H, d)) * 0.3,
        wk=rng.normal(size=(H, C, d)) * 0.3,
        bk=rng.normal(size=(H, d)) * 0.3,
        wv=rng.normal(size=(H, C, d)) * 0.3,
        bv=rng.normal(size=(H, d)) * 0.3,
        wo=rng.normal(size=(C, C)) * 0.3,
        bo=rng.normal(size=C) * 0.3,
        rpb=rng.normal(size=(H, 2 * M - 1, 2 * M - 1)),
    )

    def swin_attn(W, x):
        n_heads, C, d = W["wq"].shape
        M = (W["rpb"].shape[-1] + 1) // 2
        heads = []
        for h in range(n_heads):
            q = x @ W["wq"][h] + W["bq"][h]
            k = x @ W["wk"][h] + W["bk"][h]
            v = x @ W["wv"][h] + W["bv"][h]
            s = q @ k.transpose(0, 2, 1) / np.sqrt(d)
            for a in range(M * M):
                for b in range(M * M):
                    dy = a // M - b // M
                    dx = a % M - b % M
                    s[:, a, b] += W["rpb"][h, dy + M - 1, dx + M - 1]
            e = np.exp(s - s.max(-1, keepdims=True))
            heads.append(e / e.sum(-1, keepdims=True) @ v)
        return np.concatenate(heads, axis=-1) @ W["wo"] + W["bo"]

    return swin_attn, W


add(
    name="np_window_heads_loop",
    style="numpy",
    build=build_np_window,
    reference=("window_attention", dict(dim=24, window_size=4, num_heads=3)),
    label="correct",
    mistake="",
    expected="equal; per-head weights, table (heads, 2M-1, 2M-1)",
)


# ---------------------------------------------------------------- 9 swin_block, torch, (B, L, C)
def window_partition(x, ws):
    B, H, W, C = x.shape
    x = x.view(B, H // ws, ws, W // ws, ws, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, ws, ws, C)


def window_reverse(windows, ws, H, W):
    B = int(windows.shape[0] / (H * W / ws / ws))
    x = windows.view(B, H // ws, W // ws, ws, ws, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class SwinSelf(nn.Module):
    def __init__(self, dim, num_heads, ws):
        super().__init__()
        self.num_attention_heads = num_heads
        self.attention_head_size = dim // num_heads
        self.relative_position_bias_table = nn.Embedding((2 * ws - 1) ** 2, num_heads)
        c = torch.stack(
            torch.meshgrid([torch.arange(ws), torch.arange(ws)], indexing="ij")
        ).flatten(1)
        r = (c[:, :, None] - c[:, None, :]).permute(1, 2, 0) + (ws - 1)
        self.register_buffer("relative_position_index", r[..., 0] * (2 * ws - 1) + r[..., 1])
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)

    def forward(self, hidden_states, attention_mask=None):
        B, N, C = hidden_states.shape
        shp = (B, N, self.num_attention_heads, self.attention_head_size)
        q = self.query(hidden_states).view(shp).transpose(1, 2)
        k = self.key(hidden_states).view(shp).transpose(1, 2)
        v = self.value(hidden_states).view(shp).transpose(1, 2)
        bias = self.relative_position_bias_table(self.relative_position_index).permute(2, 0, 1)[
            None
        ]
        if attention_mask is not None:
            nW = attention_mask.shape[0]
            m = attention_mask.repeat(B // nW, 1, 1).unsqueeze(1)
            bias = bias + m
        else:
            bias = bias.expand(B, -1, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.dense(out.transpose(1, 2).reshape(B, N, C))


class SwinLayer(nn.Module):
    def __init__(
        self, dim, input_resolution, num_heads, window_size=4, shift_size=0, mlp_ratio=4
    ):
        super().__init__()
        self.input_resolution = input_resolution
        self.window_size = window_size
        self.shift_size = shift_size
        self.layernorm_before = nn.LayerNorm(dim)
        self.attention = SwinSelf(dim, num_heads, window_size)
        self.layernorm_after = nn.LayerNorm(dim)
        self.intermediate = nn.Linear(dim, mlp_ratio * dim)
        self.output = nn.Linear(mlp_ratio * dim, dim)

    def get_attn_mask(self, x):
        if self.shift_size == 0:
            return None
        H, W = self.input_resolution
        img_mask = x.new_zeros(1, H, W, 1)
        slices = (
            slice(0, -self.window_size),
            slice(-self.window_size, -self.shift_size),
            slice(-self.shift_size, None),
        )
        cnt = 0
        for h in slices:
            for w in slices:
                img_mask[:, h, w, :] = cnt
                cnt += 1
        mw = window_partition(img_mask, self.window_size).view(-1, self.window_size**2)
        diff = mw.unsqueeze(1) - mw.unsqueeze(2)
        return diff.masked_fill(diff != 0, -100.0).masked_fill(diff == 0, 0.0)

    def forward(self, hidden_states):
        H, W = self.input_resolution
        B, L_, C = hidden_states.shape
        assert L_ == H * W, "input feature has wrong size"
        shortcut = hidden_states
        x = self.layernorm_before(hidden_states).view(B, H, W, C)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        xw = window_partition(x, self.window_size).view(-1, self.window_size**2, C)
        aw = self.attention(xw, self.get_attn_mask(x)).view(
            -1, self.window_size, self.window_size, C
        )
        x = window_reverse(aw, self.window_size, H, W)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        hidden_states = shortcut + x.view(B, H * W, C)
        y = self.layernorm_after(hidden_states)
        y = self.output(F.gelu(self.intermediate(y)))
        return (hidden_states + y,)


def call_swin_flat(mine, x, **_):
    B, H, W, C = x.shape
    return mine(x.reshape(B, H * W, C))[0].reshape(B, H, W, C)


add(
    name="hf_swin_layer_flat",
    style="torch",
    build=lambda: SwinLayer(32, (8, 8), 4, 4, 2),
    reference=(
        "swin_block",
        dict(dim=32, input_resolution=(8, 8), num_heads=4, window_size=4, shift_size=2),
    ),
    label="correct",
    mistake="",
    expected="equal; input (B, L, C), table as nn.Embedding, tuple returned",
    call=call_swin_flat,
)


# ---------------------------------------------------------------- 10 patch_merging, einops
class Downsample(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            Rearrange("b (h p1) (w p2) c -> b h w (p2 p1 c)", p1=2, p2=2),
            nn.LayerNorm(4 * dim),
            nn.Linear(4 * dim, 2 * dim, bias=False),
        )

    def forward(self, fmap):
        return self.net(fmap)


add(
    name="lucid_merge_p2p1",
    style="einops",
    build=lambda: Downsample(16),
    reference=("patch_merging", dict(dim=16)),
    label="correct",
    mistake="",
    expected="equal",
)


# ---------------------------------------------------------------- 11 swinv2_attention, jax
def build_jax_v2():
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(3)
    C, H, M = 24, 3, 4
    r = lambda *s: jnp.asarray(rng.normal(size=s) * 0.3)
    theta = {
        "q": {"w": r(C, C), "b": r(C)},
        "k": {"w": r(C, C)},
        "v": {"w": r(C, C) * 0.5, "b": r(C)},
        "o": {"w": r(C, C) * 0.3, "b": r(C)},
        "cpb": {"w0": r(2, 512), "b0": r(512), "w1": r(512, H) * 0.3},
        "tau": jnp.log(10.0) + jnp.asarray([0.2, -0.3, 4.0]),
    }
    theta = {
        a + "_" + b if b else a: z
        for a, g in theta.items()
        for b, z in (g.items() if isinstance(g, dict) else [("", g)])
    }

    def unit(t):
        return t / jnp.maximum(jnp.linalg.norm(t, axis=-1, keepdims=True), 1e-12)

    def apply(theta, x):
        heads = theta["tau"].shape[0]
        B, N, C = x.shape
        m = int(round(N**0.5))
        split = lambda t: t.reshape(B, N, heads, -1).swapaxes(1, 2)
        q = split(x @ theta["q_w"] + theta["q_b"])
        k = split(x @ theta["k_w"])
        v = split(x @ theta["v_w"] + theta["v_b"])
        s = unit(q) @ unit(k).swapaxes(-1, -2)
        s = s * jnp.exp(jnp.minimum(theta["tau"], jnp.log(100.0)))[:, None, None]
        yx = jnp.stack(jnp.divmod(jnp.arange(N), m), -1).astype(x.dtype)
        delta = 8.0 * (yx[:, None] - yx[None]) / (m - 1)
        delta = jnp.sign(delta) * jnp.log2(1.0 + jnp.abs(delta)) / 3.0
        z = jax.nn.relu(delta @ theta["cpb_w0"] + theta["cpb_b0"]) @ theta["cpb_w1"]
        s = s + 16.0 * jax.nn.sigmoid(z).transpose(2, 0, 1)
        out = (jax.nn.softmax(s, -1) @ v).swapaxes(1, 2).reshape(B, N, C)
        return out @ theta["o_w"] + theta["o_b"]

    return apply, theta


add(
    name="jax_swinv2_pairwise",
    style="jax",
    build=build_jax_v2,
    reference=("swinv2_attention", dict(dim=24, window_size=4, num_heads=3)),
    label="correct",
    mistake="",
    expected="equal (float32); position MLP on all pairs, no index table",
)


# ---------------------------------------------------------------- 12 mae_loss, numpy, normalised pixels
def build_np_mae():
    def loss(pred, imgs, mask):
        n, L_, _ = pred.shape
        p = 4
        g = imgs.shape[2] // p
        target = np.empty_like(pred)
        for t in range(L_):
            r, c = divmod(t, g)
            crop = imgs[:, :, r * p : (r + 1) * p, c * p : (c + 1) * p]
            target[:, t] = np.moveaxis(crop, 1, -1).reshape(n, -1)
        target = target - target.mean(axis=-1, keepdims=True)
        target = target / np.sqrt(target.var(axis=-1, ddof=1, keepdims=True) + 1e-6)
        return np.mean(np.mean((pred - target) ** 2, axis=-1)[mask.astype(bool)])

    return loss


add(
    name="np_mae_normpix",
    style="numpy",
    build=build_np_mae,
    reference=("mae_loss", dict(patch_size=4, norm_pix=True)),
    label="correct",
    mistake="",
    expected="equal (unbiased variance and 1e-6, as in the authors' code)",
)


# ---------------------------------------------------------------- 13 generalized_box_iou, jax, vmap
def build_jax_giou():
    import jax
    import jax.numpy as jnp

    def one(a, b):
        ax1, ay1, ax2, ay2 = a
        bx1, by1, bx2, by2 = b
        iw = jnp.clip(jnp.minimum(ax2, bx2) - jnp.maximum(ax1, bx1), 0)
        ih = jnp.clip(jnp.minimum(ay2, by2) - jnp.maximum(ay1, by1), 0)
        inter = iw * ih
        union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inter
        hull = (jnp.maximum(ax2, bx2) - jnp.minimum(ax1, bx1)) * (
            jnp.maximum(ay2, by2) - jnp.minimum(ay1, by1)
        )
        return inter / union + union / hull - 1.0

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))


add(
    name="jax_giou_vmap",
    style="jax",
    build=build_jax_giou,
    reference=("generalized_box_iou", {}),
    label="correct",
    mistake="",
    expected="equal (float32)",
)


# ---------------------------------------------------------------- 14 rotary, nanogpt, complex
def build_nano_rope():
    def precompute_freqs_cis(dim, end, theta=10000.0, dtype=torch.float32):
        freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=dtype) / dim))
        freqs = torch.outer(torch.arange(end, dtype=dtype), freqs)
        return torch.polar(torch.ones_like(freqs), freqs)

    def apply_rotary_emb(x):
        *_, T, hs = x.shape
        z = torch.complex(x[..., : hs // 2].contiguous(), x[..., hs // 2 :].contiguous())
        z = z * precompute_freqs_cis(hs, T, dtype=x.dtype).to(x.device)
        return torch.cat((z.real, z.imag), dim=-1)

    return apply_rotary_emb


add(
    name="nano_rope_complex",
    style="nanogpt",
    build=build_nano_rope,
    reference=("rotary", {}),
    label="correct",
    mistake="",
    expected="equal",
)


# ---------------------------------------------------------------- 15 padded_cross_entropy, d2l
class MaskedSoftmaxCELoss(nn.CrossEntropyLoss):
    def __init__(self, padding_idx=0):
        super().__init__(reduction="none")
        self.padding_idx = padding_idx

    def forward(self, pred, label):
        weights = (label != self.padding_idx).to(pred.dtype)
        unweighted_loss = super().forward(pred.permute(0, 2, 1), label)
        weighted_loss = unweighted_loss * weights
        return weighted_loss.sum() / weights.sum()


add(
    name="d2l_masked_ce",
    style="d2l",
    build=MaskedSoftmaxCELoss,
    reference=("padded_cross_entropy", dict(pad_id=0)),
    label="correct",
    mistake="",
    expected="equal",
)


# ================================================================ wrong
class PatchStem(nn.Module):
    def __init__(self, patch_size, in_chans, embed_dim):
        super().__init__()
        self.projection = nn.Conv2d(
            in_chans, embed_dim, kernel_size=patch_size, stride=patch_size
        )

    def forward(self, pixel_values):
        x = self.projection(pixel_values)
        x = x.permute(0, 3, 2, 1)
        return x.reshape(x.size(0), -1, x.size(-1))


def build_w_patch():
    return PatchStem(8, 3, 48)


add(
    name="torch_patch_permute",
    style="torch",
    build=build_w_patch,
    reference=("patch_embed", dict(img_size=32, patch_size=8, in_chans=3, embed_dim=48)),
    label="wrong",
    mistake="The tokens are in column-major order (the two spatial axes are exchanged before flattening).",
    expected="patch tokens in the wrong (column-major) order",
)


class EinBlock(nn.Module):
    def __init__(self, dim, heads, mult=4):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(dim, eps=1e-6)
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Linear(dim, dim)
        self.ff_norm = nn.LayerNorm(dim, eps=1e-6)
        self.ff = nn.Sequential(
            nn.Linear(dim, dim * mult), nn.GELU(), nn.Linear(dim * mult, dim)
        )

    def forward(self, x):
        q, k, v = rearrange(
            self.to_qkv(self.attn_norm(x)), "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.heads
        )
        attn = torch.einsum("bhid,bhjd->bhij", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
        out = rearrange(attn @ v, "b h n d -> b n (h d)")
        x = x + self.to_out(out)
        x = self.ff_norm(x)
        return x + self.ff(x)


def build_w_block():
    return EinBlock(48, 4)


add(
    name="lucid_block_ffnorm",
    style="einops",
    build=build_w_block,
    reference=("vit_block", dict(dim=48, num_heads=4, mlp_ratio=4)),
    label="wrong",
    mistake="The MLP's residual adds the normalised input instead of the input before the norm.",
    expected="second residual branches off after the norm",
)


class ShiftedWindowLayer(nn.Module):
    def __init__(self, num_hiddens, resolution, num_heads, window, shift):
        super().__init__()
        self.num_heads, self.window, self.shift = num_heads, window, shift
        self.ln1 = nn.LayerNorm(num_hiddens)
        self.W_q = nn.Linear(num_hiddens, num_hiddens)
        self.W_k = nn.Linear(num_hiddens, num_hiddens)
        self.W_v = nn.Linear(num_hiddens, num_hiddens)
        self.W_o = nn.Linear(num_hiddens, num_hiddens)
        self.B = nn.Parameter(torch.zeros(num_heads, (2 * window - 1) ** 2))
        self.ln2 = nn.LayerNorm(num_hiddens)
        self.dense1 = nn.Linear(num_hiddens, 4 * num_hiddens)
        self.dense2 = nn.Linear(4 * num_hiddens, num_hiddens)
        i = torch.arange(window * window)
        r, c = i // window, i % window
        idx = (r[:, None] - r + window - 1) * (2 * window - 1) + (c[:, None] - c + window - 1)
        self.register_buffer("idx", idx)
        H, W = resolution
        row = (torch.arange(H) >= H - window).long() + (torch.arange(H) >= H - shift).long()
        col = (torch.arange(W) >= W - window).long() + (torch.arange(W) >= W - shift).long()
        region = self.cut((3 * row[:, None] + col)[None, :, :, None]).squeeze(-1)
        self.register_buffer("valid", region[:, :, None] == region[:, None, :])

    def cut(self, X):
        b, H, W, c = X.shape
        M = self.window
        return X.reshape(b, H // M, M, W // M, M, c).transpose(2, 3).reshape(-1, M * M, c)

    def transpose_qkv(self, X):
        return X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, X):
        b, H, W, c = X.shape
        M = self.window
        Y = torch.roll(self.ln1(X), (-self.shift, -self.shift), (1, 2))
        Y = self.cut(Y)
        q, k, v = (self.transpose_qkv(f(Y)) for f in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + self.B[:, self.idx]
        scores = scores.masked_fill(~self.valid.repeat(b, 1, 1)[:, None], -1e6)
        self.attention_weights = F.softmax(scores, dim=-1)
        Y = (self.attention_weights @ v).permute(0, 2, 1, 3).reshape(-1, M * M, c)
        Y = self.W_o(Y).reshape(b, H // M, W // M, M, M, c).transpose(2, 3).reshape(b, H, W, c)
        X = X + torch.roll(Y, (-self.shift, -self.shift), (1, 2))
        return X + self.dense2(F.gelu(self.dense1(self.ln2(X))))


def build_w_swin():
    return ShiftedWindowLayer(32, (12, 12), 4, 4, 1)


add(
    name="d2l_swin_roll",
    style="d2l",
    build=build_w_swin,
    reference=(
        "swin_block",
        dict(dim=32, input_resolution=(12, 12), num_heads=4, window_size=4, shift_size=1),
    ),
    label="wrong",
    mistake="After the attention the map is rolled by -shift again instead of back by +shift.",
    expected="the cyclic shift is not undone (rolled twice in the same direction)",
)


class CosineWindowAttention(nn.Module):
    def __init__(self, n_embd, window, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(n_embd))
        self.v_bias = nn.Parameter(torch.zeros(n_embd))
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(n_head, 1, 1)))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, n_head, bias=False)
        )
        r = torch.arange(-(window - 1), window, dtype=torch.float64)
        table = torch.stack(torch.meshgrid(r, r, indexing="ij"), -1) * 8 / (window - 1)
        table = torch.sign(table) * torch.log2(table.abs() + 1) / math.log2(8)
        self.register_buffer(
            "coords", table.to(torch.get_default_dtype()).view(-1, 2), persistent=False
        )
        i = torch.arange(window**2)
        dr = i[:, None] // window - i[None] // window + window - 1
        dc = i[:, None] % window - i[None] % window + window - 1
        self.register_buffer("index", dr * (2 * window - 1) + dc, persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = (q + self.q_bias).view(B, T, self.n_head, -1).transpose(1, 2)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = (v + self.v_bias).view(B, T, self.n_head, -1).transpose(1, 2)
        att = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        att = att * self.logit_scale.exp().clamp(max=math.log(1.0 / 0.01))
        bias = 16 * torch.sigmoid(self.cpb_mlp(self.coords))[self.index.view(-1)]
        att = att + bias.view(T, T, self.n_head).permute(2, 0, 1)
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


def build_w_v2():
    return CosineWindowAttention(24, 4, 3)


add(
    name="nano_swinv2_clamp",
    style="nanogpt",
    build=build_w_v2,
    reference=("swinv2_attention", dict(dim=24, window_size=4, num_heads=3)),
    label="wrong",
    mistake="The clamp at log 100 is applied after the exponential, so the scale is at most 4.6 instead of 100.",
    expected="logit scale clamped after exp (order of clamp and exp)",
)


def build_w_iou():
    def pairwise_iou(boxes1, boxes2):
        area1 = np.prod(boxes1[:, 2:] - boxes1[:, :2], axis=1)
        area2 = np.prod(boxes2[:, 2:] - boxes2[:, :2], axis=1)
        wh = np.minimum(boxes1[:, None, 2:], boxes2[None, :, 2:]) - np.maximum(
            boxes1[:, None, :2], boxes2[None, :, :2]
        )
        inter = wh[..., 0] * wh[..., 1]
        return inter / (area1[:, None] + area2[None] - inter)

    return pairwise_iou


add(
    name="np_iou_wh",
    style="numpy",
    build=build_w_iou,
    reference=("box_iou", {}),
    label="wrong",
    mistake="Negative widths and heights of the intersection are not clamped at 0.",
    expected="wrong for boxes that do not overlap (no clamp at 0)",
)


def build_w_sin():
    import jax.numpy as jnp

    def posemb(n, d):
        pos = jnp.arange(n)[:, None]
        k = jnp.arange(d // 2) / d
        ang = pos / jnp.power(10000.0, k)[None, :]
        return jnp.stack([jnp.sin(ang), jnp.cos(ang)], axis=-1).reshape(n, d)

    return posemb


add(
    name="jax_sin_exponent",
    style="jax",
    build=build_w_sin,
    reference=("sinusoids", {}),
    label="wrong",
    mistake="The exponent is i/d instead of 2i/d, so that the frequencies only fall to 1/100.",
    expected="wrong frequencies (exponent i/d instead of 2i/d)",
)
