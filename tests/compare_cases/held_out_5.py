import math

import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from einops import rearrange, repeat, einsum as esum
from einops.layers.torch import Rearrange

try:
    import jax
    import jax.numpy as jnp
    from jax import lax
except ModuleNotFoundError:
    jax = None

CASES = []

VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=10)
EMB = dict(img_size=32, patch_size=8, in_chans=3, embed_dim=48)
WIN = dict(dim=32, window_size=4, num_heads=4)
SWIN = dict(dim=32, input_resolution=(8, 8), num_heads=4, window_size=4, shift_size=2)


def add(name, style, build, reference, mistake="", expected="equal", call=None):
    CASES.append(
        dict(
            name=name,
            style=style,
            build=build,
            reference=reference,
            label="wrong" if mistake else "correct",
            mistake=mistake,
            expected=expected,
            call=call,
        )
    )


# ---------------------------------------------------------------- patch embedding


class UnfoldTokenizer(nn.Module):
    def __init__(self, size=32, patch=8, channels=3, width=48):
        super().__init__()
        self.cut = nn.Unfold(kernel_size=patch, stride=patch)
        self.lin = nn.Linear(channels * patch * patch, width)
        self.n = (size // patch) ** 2

    def forward(self, img):
        cols = self.cut(img).permute(0, 2, 1)
        tokens = self.lin(cols)
        return {"tokens": tokens, "num_patches": self.n}


add(
    "patch_embed_unfold_dict",
    "torch",
    lambda: UnfoldTokenizer(),
    ("patch_embed", EMB),
    expected="equal (Linear over (c, p, p) = convolution)",
)


def stem(weights, imgs):
    z = jnp.transpose(imgs, (0, 2, 3, 1))
    k = weights["embedding"]["kernel"]
    z = lax.conv_general_dilated(
        z,
        k,
        window_strides=k.shape[:2],
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    z = z + weights["embedding"]["bias"]
    n, h, w, c = z.shape
    return z.reshape(n, h * w, c)


def build_stem():
    k1, k2 = jax.random.split(jax.random.PRNGKey(3))
    return stem, {
        "embedding": {
            "kernel": 0.1 * jax.random.normal(k1, (8, 8, 3, 48)),
            "bias": 0.1 * jax.random.normal(k2, (48,)),
        }
    }


add("patch_embed_flax_hwio", "jax", build_stem, ("patch_embed", EMB))


class ToPatchEmbedding(nn.Module):
    def __init__(self, *, image_size, patch_size, channels, dim):
        super().__init__()
        assert image_size % patch_size == 0
        patch_dim = channels * patch_size**2
        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (w h) (p1 p2 c)", p1=patch_size, p2=patch_size),
            nn.Linear(patch_dim, dim),
        )

    def forward(self, img):
        return self.to_patch_embedding(img)


add(
    "patch_embed_rearrange_wh",
    "einops",
    lambda: ToPatchEmbedding(image_size=32, patch_size=8, channels=3, dim=48),
    ("patch_embed", EMB),
    "The tokens are flattened column by column, (w h), not row by row.",
    "tokens are in column-major order (a permutation of the tokens)",
)


# ---------------------------------------------------------------- ViT block

from scipy.special import erf


def _ln(v, p):
    m = v.mean(-1, keepdims=True)
    s = ((v - m) ** 2).mean(-1, keepdims=True)
    return (v - m) / np.sqrt(s + 1e-6) * p[0] + p[1]


def np_block(P, X):
    B, N, C = X.shape
    heads = len(P["heads"])
    Y = _ln(X, P["n1"])
    acc = 0.0
    for h in P["heads"]:
        q = Y @ h["q"][0] + h["q"][1]
        k = Y @ h["k"][0] + h["k"][1]
        v = Y @ h["v"][0] + h["v"][1]
        s = np.einsum("bid,bjd->bij", q, k) / np.sqrt(q.shape[-1])
        s = np.exp(s - s.max(-1, keepdims=True))
        s = s / s.sum(-1, keepdims=True)
        acc = acc + (s @ v) @ h["o"]
    X = X + acc + P["ob"]
    Y = _ln(X, P["n2"])
    U = Y @ P["ff"][0] + P["ff"][1]
    U = U * 0.5 * (1.0 + erf(U / np.sqrt(2.0)))
    return X + U @ P["ff"][2] + P["ff"][3]


def build_np_block(C=48, H=4):
    g = np.random.default_rng(7)
    r = lambda *s: 0.15 * g.standard_normal(s)
    d = C // H
    return np_block, {
        "n1": [1 + r(C), r(C)],
        "n2": [1 + r(C), r(C)],
        "heads": [
            {"q": (r(C, d), r(d)), "k": (r(C, d), r(d)), "v": (r(C, d), r(d)), "o": r(d, C)}
            for _ in range(H)
        ],
        "ob": r(C),
        "ff": [r(C, 4 * C), r(4 * C), r(4 * C, C), r(C)],
    }


add(
    "vit_block_numpy_head_list",
    "numpy",
    build_np_block,
    ("vit_block", dict(dim=48, num_heads=4, mlp_ratio=4)),
)


class SublayerConnection(nn.Module):
    "Norm first, then the sublayer, then the residual."

    def __init__(self, size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=1e-6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class SingleHead(nn.Module):
    def __init__(self, num_hiddens, head_hiddens):
        super().__init__()
        self.W_q = nn.Linear(num_hiddens, head_hiddens)
        self.W_k = nn.Linear(num_hiddens, head_hiddens)
        self.W_v = nn.Linear(num_hiddens, head_hiddens)

    def forward(self, queries, keys, values):
        q, k, v = self.W_q(queries), self.W_k(keys), self.W_v(values)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        self.attention_weights = F.softmax(scores, dim=-1)
        return torch.bmm(self.attention_weights, v)


class HeadsOfAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(
            [SingleHead(num_hiddens, num_hiddens // num_heads) for _ in range(num_heads)]
        )
        self.W_o = nn.Linear(num_hiddens, num_hiddens)

    def forward(self, queries, keys, values):
        return self.W_o(torch.cat([h(queries, keys, values) for h in self.heads], dim=-1))


class PositionWiseMLP(nn.Module):
    def __init__(self, num_hiddens, mlp_num_hiddens, dropout=0.1):
        super().__init__()
        self.dense1 = nn.Linear(num_hiddens, mlp_num_hiddens)
        self.gelu = nn.GELU()
        self.dropout1 = nn.Dropout(dropout)
        self.dense2 = nn.Linear(mlp_num_hiddens, num_hiddens)

    def forward(self, X):
        return self.dense2(self.dropout1(self.gelu(self.dense1(X))))


class AnnotatedViTBlock(nn.Module):
    def __init__(self, size, num_heads, dropout=0.1):
        super().__init__()
        self.self_attn = HeadsOfAttention(size, num_heads)
        self.feed_forward = PositionWiseMLP(size, 4 * size, dropout)
        self.sublayer = nn.ModuleList([SublayerConnection(size, dropout) for _ in range(2)])

    def forward(self, X):
        X = self.sublayer[0](X, lambda x: self.self_attn(x, x, x))
        return self.sublayer[1](X, self.feed_forward)


add(
    "vit_block_head_modulelist",
    "d2l",
    lambda: AnnotatedViTBlock(48, 4),
    ("vit_block", dict(dim=48, num_heads=4, mlp_ratio=4)),
)


class KQVBlock(nn.Module):
    """one pre-norm block; the kqv matrix is stored channel by channel"""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.ln_1 = nn.LayerNorm(n_embd, eps=1e-6)
        self.c_attn = nn.Parameter(torch.randn(n_embd, 3 * n_embd) * 0.02)
        self.b_attn = nn.Parameter(torch.zeros(3 * n_embd))
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd, eps=1e-6)
        self.mlp = nn.ModuleDict(
            dict(
                c_fc=nn.Linear(n_embd, 4 * n_embd),
                act=nn.GELU(),
                c_proj=nn.Linear(4 * n_embd, n_embd),
            )
        )
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def attend(self, x):
        B, T, C = x.size()
        kqv = torch.addmm(self.b_attn, x.view(-1, C), self.c_attn)
        kqv = kqv.view(B, T, self.n_head, C // self.n_head, 3).transpose(1, 2)
        k, q, v = kqv.unbind(-1)
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        x = x + self.mlpf(self.ln_2(x))
        return x


add(
    "vit_block_kqv_channel_interleaved",
    "nanogpt",
    lambda: KQVBlock(48, 4),
    ("vit_block", dict(dim=48, num_heads=4, mlp_ratio=4)),
    expected="equal up to the packing (heads, d, kqv)",
)


# ---------------------------------------------------------------- ViT


class EncoderViT(nn.Module):
    def __init__(self, img=32, p=8, d=48, layers=3, heads=4, classes=10):
        super().__init__()
        self.embedder = nn.Conv2d(3, d, p, p)
        n = (img // p) ** 2
        self.extra = nn.Parameter(torch.zeros(d))
        self.where = nn.Embedding(n + 1, d)
        self.register_buffer("idx", torch.arange(n + 1), persistent=False)
        layer = nn.TransformerEncoderLayer(
            d,
            heads,
            4 * d,
            dropout=0.0,
            activation=F.gelu,
            layer_norm_eps=1e-6,
            batch_first=False,
            norm_first=True,
        )
        self.body = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(d, eps=1e-6), enable_nested_tensor=False
        )
        self.out = nn.Linear(d, classes)

    def forward(self, image):
        t = self.embedder(image).flatten(2).permute(2, 0, 1)
        first = self.extra.expand(1, t.shape[1], -1)
        t = torch.cat((first, t), 0) + self.where(self.idx)[:, None]
        t = self.body(t)
        return self.out(t[0])


add("vit_torch_encoder_seq_first", "torch", lambda: EncoderViT(), ("vit", VIT))


def layer_norm_j(x, g, b, eps=1e-6):
    mu = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return g * (x - mu) * lax.rsqrt(var + eps) + b


def vit_apply(params, images):
    b, c, hh, ww = images.shape
    p = 8
    x = images.reshape(b, c, hh // p, p, ww // p, p)
    x = jnp.einsum("bchpwq,pqcd->bhwd", x, params["patch_w"]) + params["patch_b"]
    x = x.reshape(b, -1, x.shape[-1])
    cls = jnp.broadcast_to(params["cls"], (b, 1, x.shape[-1]))
    x = jnp.concatenate([cls, x], axis=1) + params["pos"]

    def layer(h, w):
        y = layer_norm_j(h, w["ln1_g"], w["ln1_b"])
        q, k, v = jnp.einsum("bnc,cthd->tbhnd", y, w["qkv_w"]) + w["qkv_b"][:, None, :, None, :]
        a = jax.nn.softmax(jnp.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5, axis=-1)
        y = jnp.einsum("bhij,bhjd->bihd", a, v)
        h = h + jnp.einsum("bihd,hdc->bic", y, w["out_w"]) + w["out_b"]
        y = layer_norm_j(h, w["ln2_g"], w["ln2_b"])
        y = jax.nn.gelu(y @ w["up_w"] + w["up_b"], approximate=False)
        return h + y @ w["down_w"] + w["down_b"], None

    x, _ = lax.scan(layer, x, params["layers"])
    x = layer_norm_j(x[:, 0], params["lnf_g"], params["lnf_b"])
    return x @ params["head_w"] + params["head_b"]


def build_vit_scan(D=48, L=3, H=4):
    g = np.random.default_rng(11)
    r = lambda *s: jnp.asarray(0.1 * g.standard_normal(s), jnp.float32)
    d = D // H
    layers = dict(
        ln1_g=1 + r(L, D),
        ln1_b=r(L, D),
        qkv_w=r(L, D, 3, H, d),
        qkv_b=r(L, 3, H, d),
        out_w=r(L, H, d, D),
        out_b=r(L, D),
        ln2_g=1 + r(L, D),
        ln2_b=r(L, D),
        up_w=r(L, D, 4 * D),
        up_b=r(L, 4 * D),
        down_w=r(L, 4 * D, D),
        down_b=r(L, D),
    )
    return vit_apply, dict(
        patch_w=r(8, 8, 3, D),
        patch_b=r(D),
        cls=r(1, 1, D),
        pos=r(17, D),
        layers=layers,
        lnf_g=1 + r(D),
        lnf_b=r(D),
        head_w=r(D, 10),
        head_b=r(10),
    )


add("vit_jax_scan_stacked", "jax", build_vit_scan, ("vit", VIT))


class PreNormAttend(nn.Module):
    def __init__(self, dim, heads, dim_head):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner)
        self.to_kv = nn.Linear(dim, inner * 2)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(0.0))

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), (q, k, v))
        attn = (esum(q, k, "b h i d, b h j d -> b h i j") * self.scale).softmax(dim=-1)
        out = esum(attn, v, "b h i j, b h j d -> b h i d")
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class LucidViT(nn.Module):
    def __init__(self, *, image_size, patch_size, num_classes, dim, depth, heads, channels=3):
        super().__init__()
        n = (image_size // patch_size) ** 2
        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch_size, p2=patch_size),
            nn.Linear(channels * patch_size**2, dim),
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, n + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        PreNormAttend(dim, heads, dim // heads),
                        nn.Sequential(
                            nn.LayerNorm(dim),
                            nn.Linear(dim, dim * 4),
                            nn.GELU(),
                            nn.Linear(dim * 4, dim),
                        ),
                    ]
                )
            )
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, img):
        x = self.to_patch_embedding(img)
        cls = repeat(self.cls_token, "1 1 d -> b 1 d", b=x.shape[0])
        x = torch.cat((cls, x), dim=1)
        x += self.pos_embedding
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(x[:, 0])


add(
    "vit_einops_q_kv_eps5",
    "einops",
    lambda: LucidViT(image_size=32, patch_size=8, num_classes=10, dim=48, depth=3, heads=4),
    ("vit", VIT),
    expected="equal up to epsilon (1e-5 in the layer norms)",
)


class NanoAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config["n_embd"], 3 * config["n_embd"])
        self.c_proj = nn.Linear(config["n_embd"], config["n_embd"])
        self.n_head = config["n_head"]
        self.n_embd = config["n_embd"]

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config["n_embd"], 4 * config["n_embd"])
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config["n_embd"], config["n_embd"])

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class NanoBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config["n_embd"], eps=1e-6)
        self.attn = NanoAttention(config)
        self.ln_2 = nn.LayerNorm(config["n_embd"], eps=1e-6)
        self.mlp = NanoMLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


NANO = dict(n_embd=48, n_head=4, n_layer=3, patch=8, grid=4, n_class=10)


class NanoViT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Conv2d(3, config["n_embd"], config["patch"], stride=config["patch"]),
                wpe=nn.Embedding(config["grid"] ** 2 + 1, config["n_embd"]),
                h=nn.ModuleList([NanoBlock(config) for _ in range(config["n_layer"])]),
                ln_f=nn.LayerNorm(config["n_embd"], eps=1e-6),
            )
        )
        self.cls = nn.Parameter(torch.zeros(1, 1, config["n_embd"]))
        self.lm_head = nn.Linear(config["n_embd"], config["n_class"])

    def forward(self, img):
        tok = self.transformer.wte(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(tok.size(0), -1, -1), tok], dim=1)
        pos = torch.arange(0, x.size(1), dtype=torch.long, device=x.device)
        x = x + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x[:, -1, :])
        return logits


add(
    "vit_nano_last_token",
    "nanogpt",
    lambda: NanoViT(NANO),
    ("vit", VIT),
    "The head reads the last patch token instead of the class token, which is first.",
    "the head reads the wrong token (last instead of class token)",
)


# ---------------------------------------------------------------- DeiT


class NanoDeiT(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config["n_embd"]
        self.specials = nn.Parameter(torch.randn(2, C) * 0.02)
        self.stem = nn.Conv2d(3, C, config["patch"], stride=config["patch"])
        self.pe_special = nn.Parameter(torch.randn(2, C) * 0.02)
        self.pe_grid = nn.Parameter(torch.randn(config["grid"], config["grid"], C) * 0.02)
        self.h = nn.Sequential(*[NanoBlock(config) for _ in range(config["n_layer"])])
        self.ln_f = nn.LayerNorm(C, eps=1e-6)
        self.heads = nn.ModuleList([nn.Linear(C, config["n_class"]) for _ in range(2)])

    def forward(self, img):
        g = self.stem(img).permute(0, 2, 3, 1) + self.pe_grid
        s = (self.specials + self.pe_special).unsqueeze(0).repeat(img.size(0), 1, 1)
        x = self.ln_f(self.h(torch.cat([s, g.flatten(1, 2)], dim=1)))
        outs = [head(x[:, i]) for i, head in enumerate(self.heads)]
        if self.training:
            return tuple(outs)
        return torch.stack(outs).mean(0)


add(
    "deit_nano_packed_specials",
    "nanogpt",
    lambda: NanoDeiT(NANO),
    ("deit", VIT),
    expected="equal (positions in two tables, tokens in one)",
)


class PlainLayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm_a = nn.LayerNorm(d, eps=1e-6)
        self.mha = nn.MultiheadAttention(d, h, batch_first=True)
        self.norm_b = nn.LayerNorm(d, eps=1e-6)
        self.ffn = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        y = self.norm_a(x)
        x = x + self.mha(y, y, y, need_weights=False)[0]
        return x + self.ffn(self.norm_b(x))


class PlainDeiT(nn.Module):
    def __init__(self, d=48, h=4, depth=3, classes=10, p=8, n=16):
        super().__init__()
        self.proj = nn.Conv2d(3, d, p, stride=p)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.dist_token = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embed = nn.Parameter(torch.randn(1, n + 2, d) * 0.02)
        self.blocks = nn.ModuleList([PlainLayer(d, h) for _ in range(depth)])
        self.norm = nn.LayerNorm(d, eps=1e-6)
        self.head = nn.Linear(d, classes)
        self.head_dist = nn.Linear(d, classes)

    def forward_features(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        b = x.shape[0]
        x = torch.cat(
            (self.cls_token.expand(b, -1, -1), self.dist_token.expand(b, -1, -1), x), dim=1
        )
        x = x + self.pos_embed
        for blk in self.blocks:
            x = blk(x)
        x = self.norm(x)
        return x[:, 0], x[:, 0]

    def forward(self, x):
        x, x_dist = self.forward_features(x)
        x = self.head(x)
        x_dist = self.head_dist(x_dist)
        if self.training:
            return x, x_dist
        return (x + x_dist) / 2


add(
    "deit_plain_both_heads_cls",
    "torch",
    lambda: PlainDeiT(),
    ("deit", VIT),
    "The distillation head reads the class token instead of the distillation token.",
    "the distillation head reads the wrong token",
)


# ---------------------------------------------------------------- Swin


class WindowMHSA(nn.Module):
    def __init__(self, width, ws, heads):
        super().__init__()
        self.ws, self.heads = ws, heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.rel = nn.Parameter(torch.zeros(heads, 2 * ws - 1, 2 * ws - 1))

    def bias(self):
        t = torch.arange(self.ws, device=self.rel.device)
        r, c = torch.meshgrid(t, t, indexing="ij")
        r, c = r.reshape(-1), c.reshape(-1)
        dr = r[:, None] - r[None, :] + self.ws - 1
        dc = c[:, None] - c[None, :] + self.ws - 1
        return self.rel[:, dr, dc]

    def forward(self, windows, mask=None):
        q, k, v = (
            m(windows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        b = self.bias()[None]
        if mask is not None:
            b = b.masked_fill(~mask, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=b.to(q.dtype))
        return self.o(y.transpose(1, 2).flatten(2)), b


add(
    "window_attention_3d_table_tuple",
    "torch",
    lambda: WindowMHSA(32, 4, 4),
    ("window_attention", WIN),
    expected="equal up to the table's shape (heads, 2M-1, 2M-1)",
)


def softmax_np(a):
    a = np.exp(a - np.max(a, axis=-1, keepdims=True))
    return a / np.sum(a, axis=-1, keepdims=True)


def rel_index(m):
    ij = np.array([(i, j) for i in range(m) for j in range(m)])
    out = np.zeros((m * m, m * m), dtype=int)
    for a, (i, j) in enumerate(ij):
        for b, (k, l) in enumerate(ij):
            out[a, b] = (i - k + m - 1) * (2 * m - 1) + (j - l + m - 1)
    return out


def win_attn(prm, x):
    bw, n, c = x.shape
    A, B = prm["A"], prm["a"]
    H = prm["T"].shape[0]
    z = x @ A.T + B
    z = z.reshape(bw, n, H, 3, c // H)
    q, k, v = (z[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
    s = q @ k.swapaxes(-1, -2) * (c // H) ** -0.5
    s = s + prm["T"][:, prm["index"]]
    y = softmax_np(s) @ v
    return y.transpose(0, 2, 1, 3).reshape(bw, n, c) @ prm["Z"].T + prm["z"]


def build_win_attn(c=32, H=4, m=4):
    g = np.random.default_rng(21)
    return win_attn, {
        "A": g.normal(size=(3 * c, c)) * 0.2,
        "a": g.normal(size=3 * c) * 0.2,
        "T": g.normal(size=(H, (2 * m - 1) ** 2)),
        "index": rel_index(m),
        "Z": g.normal(size=(c, c)) * 0.2,
        "z": g.normal(size=c) * 0.2,
    }


add(
    "window_attention_numpy_short_names",
    "numpy",
    build_win_attn,
    ("window_attention", WIN),
    expected="equal up to the packing (heads, qkv, d) and the table's transpose",
)


def swin_window_forward(params, x):
    nb, n, c = x.shape
    table = params["relative_position_bias_table"]
    heads = table.shape[1]
    qkv = x @ params["qkv.weight"].T + params["qkv.bias"]
    qkv = qkv.reshape(nb, n, 3, heads, c // heads).transpose(2, 0, 3, 1, 4)
    q, k, v = qkv
    attn = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(c // heads)
    bias = table[rel_index(int(n**0.5)).ravel()].reshape(n, n, heads).transpose(2, 0, 1)
    attn = softmax_np(attn) + bias
    y = np.einsum("bhij,bhjd->bihd", attn, v).reshape(nb, n, c)
    return y @ params["proj.weight"].T + params["proj.bias"]


def build_swin_window(c=32, H=4, m=4):
    g = np.random.default_rng(22)
    return swin_window_forward, {
        "qkv.weight": g.normal(size=(3 * c, c)) * 0.2,
        "qkv.bias": g.normal(size=3 * c) * 0.2,
        "relative_position_bias_table": g.normal(size=((2 * m - 1) ** 2, H)) * 0.5,
        "proj.weight": g.normal(size=(c, c)) * 0.2,
        "proj.bias": g.normal(size=c) * 0.2,
    }


add(
    "window_attention_numpy_bias_after_softmax",
    "numpy",
    build_swin_window,
    ("window_attention", WIN),
    "The relative position bias is added after the softmax.",
    "position bias after the softmax",
)


class CyclicShift(nn.Module):
    def __init__(self, displacement):
        super().__init__()
        self.displacement = displacement

    def forward(self, x):
        return torch.roll(x, shifts=(self.displacement, self.displacement), dims=(1, 2))


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(x, **kwargs) + x


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class ShiftedWindowAttention(nn.Module):
    def __init__(self, dim, heads, window_size, shifted):
        super().__init__()
        self.heads, self.window_size = heads, window_size
        self.scale = (dim // heads) ** -0.5
        self.shifted = shifted
        if shifted:
            displacement = window_size // 2
            self.cyclic_shift = CyclicShift(-displacement)
            self.cyclic_back_shift = CyclicShift(displacement)
            ul = torch.zeros(window_size**2, window_size**2)
            ul[-displacement * window_size :, : -displacement * window_size] = float("-inf")
            ul[: -displacement * window_size, -displacement * window_size :] = float("-inf")
            lr = rearrange(
                torch.zeros(window_size**2, window_size**2),
                "(h1 w1) (h2 w2) -> h1 w1 h2 w2",
                h1=window_size,
                h2=window_size,
            ).clone()
            lr[:, -displacement:, :, :-displacement] = float("-inf")
            lr[:, :-displacement, :, -displacement:] = float("-inf")
            self.register_buffer("upper_lower_mask", ul)
            self.register_buffer(
                "left_right_mask", rearrange(lr, "h1 w1 h2 w2 -> (h1 w1) (h2 w2)").clone()
            )
        self.to_qkv = nn.Linear(dim, dim * 3)
        idx = torch.tensor([[x, y] for x in range(window_size) for y in range(window_size)])
        self.register_buffer(
            "relative_indices", idx[None, :, :] - idx[:, None, :] + window_size - 1
        )
        self.pos_embedding = nn.Parameter(
            torch.randn(2 * window_size - 1, 2 * window_size - 1, heads)
        )
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        if self.shifted:
            x = self.cyclic_shift(x)
        b, n_h, n_w, _ = x.shape
        ws = self.window_size
        nw_h, nw_w = n_h // ws, n_w // ws
        q, k, v = map(
            lambda t: rearrange(
                t,
                "b (nh wh) (nw ww) (h d) -> b h (nh nw) (wh ww) d",
                h=self.heads,
                wh=ws,
                ww=ws,
            ),
            self.to_qkv(x).chunk(3, dim=-1),
        )
        dots = torch.einsum("b h w i d, b h w j d -> b h w i j", q, k) * self.scale
        bias = self.pos_embedding[self.relative_indices[..., 0], self.relative_indices[..., 1]]
        dots = dots + rearrange(bias, "i j h -> h 1 i j")
        if self.shifted:
            dots[:, :, -nw_w:] += self.upper_lower_mask
            dots[:, :, nw_w - 1 :: nw_w] += self.left_right_mask
        out = torch.einsum("b h w i j, b h w j d -> b h w i d", dots.softmax(dim=-1), v)
        out = rearrange(
            out,
            "b h (nh nw) (wh ww) d -> b (nh wh) (nw ww) (h d)",
            nh=nw_h,
            nw=nw_w,
            wh=ws,
            ww=ws,
        )
        out = self.to_out(out)
        if self.shifted:
            out = self.cyclic_back_shift(out)
        return out


class SwinBlockE(nn.Module):
    def __init__(self, dim, heads, mlp_dim, window_size, shifted=True):
        super().__init__()
        self.attention_block = Residual(
            PreNorm(dim, ShiftedWindowAttention(dim, heads, window_size, shifted))
        )
        self.mlp_block = Residual(
            PreNorm(
                dim, nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))
            )
        )

    def forward(self, x):
        return self.mlp_block(self.attention_block(x))


add(
    "swin_block_einops_two_masks",
    "einops",
    lambda: SwinBlockE(32, 4, 128, 4),
    ("swin_block", SWIN),
    expected="equal up to the table (key minus query, (2M-1, 2M-1, heads))",
)


def swin_fn(w, x):
    b, hh, ww, c = x.shape
    m, s, nh = 4, 2, w["attn"]["bias"].shape[-1]
    y = layer_norm_j(x, *w["norm1"], eps=1e-5)
    y = jnp.roll(y, (-s, -s), (1, 2))

    def split(t):
        t = t.reshape(t.shape[0], hh // m, m, ww // m, m, *t.shape[3:])
        return jnp.swapaxes(t, 2, 3).reshape(-1, m * m, *t.shape[5:])

    y = split(y)
    q, k, v = [y @ w["attn"][n][0] + w["attn"][n][1] for n in ("query", "key", "value")]
    q, k, v = [t.reshape(-1, m * m, nh, c // nh) for t in (q, k, v)]
    logits = jnp.einsum("wihd,wjhd->whij", q / jnp.sqrt(c // nh), k)
    logits += jnp.moveaxis(w["attn"]["bias"][jnp.asarray(rel_index(m))], -1, 0)
    strip = lambda n: jnp.where(
        jnp.arange(n) < n - m, 0, jnp.where(jnp.arange(n) < n - s, 1, 2)
    )
    region = split((strip(hh)[:, None] * 3 + strip(ww)[None, :])[None])
    same = region[:, :, None] == region[:, None, :]
    same = jnp.tile(same, (b, 1, 1))[:, None]
    probs = jax.nn.softmax(jnp.where(same, logits, -1e9), axis=-1)
    y = jnp.einsum("whij,wjhd->wihd", probs, v).reshape(-1, m * m, c)
    y = y @ w["attn"]["out"][0] + w["attn"]["out"][1]
    y = y.reshape(b, hh // m, ww // m, m, m, c).swapaxes(2, 3).reshape(b, hh, ww, c)
    x = x + jnp.roll(y, (s, s), (1, 2))
    y = layer_norm_j(x, *w["norm2"], eps=1e-5)
    (w1, b1), (w2, b2) = w["mlp"]
    return x + jax.nn.gelu(y @ w1 + b1, approximate=False) @ w2 + b2


def build_swin_fn(c=32, H=4, m=4):
    g = np.random.default_rng(5)
    r = lambda *s: jnp.asarray(0.15 * g.standard_normal(s), jnp.float32)
    attn = {n: (r(c, c), r(c)) for n in ("query", "key", "value", "out")}
    attn["bias"] = r((2 * m - 1) ** 2, H)
    return swin_fn, {
        "norm1": (1 + r(c), r(c)),
        "attn": attn,
        "norm2": (1 + r(c), r(c)),
        "mlp": [(r(c, 4 * c), r(4 * c)), (r(4 * c, c), r(c))],
    }


add("swin_block_jax_regions", "jax", build_swin_fn, ("swin_block", SWIN))


class SwinWindowAttentionD(nn.Module):
    def __init__(self, num_hiddens, num_heads, window):
        super().__init__()
        self.num_heads, self.window = num_heads, window
        self.W_q = nn.Linear(num_hiddens, num_hiddens)
        self.W_k = nn.Linear(num_hiddens, num_hiddens)
        self.W_v = nn.Linear(num_hiddens, num_hiddens)
        self.W_o = nn.Linear(num_hiddens, num_hiddens)
        self.B_hat = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        self.register_buffer("index", torch.from_numpy(rel_index(window)))

    def transpose_qkv(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1)
        return X.permute(0, 2, 1, 3)

    def forward(self, X, mask=None):
        queries, keys, values = (
            self.transpose_qkv(W(X)) for W in (self.W_q, self.W_k, self.W_v)
        )
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        scores = scores + self.B_hat[self.index].permute(2, 0, 1)
        if mask is not None:
            nW = mask.shape[0]
            scores = scores.reshape(-1, nW, *scores.shape[1:]) + mask.unsqueeze(1)
            scores = scores.flatten(0, 1)
        output = F.softmax(scores, dim=-1) @ values
        return self.W_o(output.permute(0, 2, 1, 3).flatten(2))


class SwinBlockD(nn.Module):
    def __init__(self, num_hiddens, resolution, num_heads, window, shift):
        super().__init__()
        self.window, self.shift = window, shift
        self.ln1 = nn.LayerNorm(num_hiddens)
        self.attention = SwinWindowAttentionD(num_hiddens, num_heads, window)
        self.ln2 = nn.LayerNorm(num_hiddens)
        self.mlp = PositionWiseMLP(num_hiddens, 4 * num_hiddens)
        H, W = resolution
        img = torch.zeros(1, H, W, 1)
        cnt = 0
        for h in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
            for w in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
                img[:, h, w] = cnt
                cnt += 1
        ids = self.partition(img).squeeze(-1)
        diff = ids.unsqueeze(1) - ids.unsqueeze(2)
        self.register_buffer("mask", torch.zeros_like(diff).masked_fill(diff != 0, -100.0))

    def partition(self, X):
        B, H, W, C = X.shape
        X = X.view(B, H // self.window, self.window, W // self.window, self.window, C)
        return X.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, C)

    def restore(self, Y, shape):
        B, H, W, C = shape
        Y = Y.view(B, H // self.window, W // self.window, self.window, self.window, C)
        return Y.permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)

    def forward(self, X):
        Y = torch.roll(self.ln1(X), (-self.shift, -self.shift), dims=(1, 2))
        Y = self.restore(self.attention(self.partition(Y), self.mask), X.shape)
        Y = torch.roll(Y, (-self.shift, -self.shift), dims=(1, 2))
        X = X + Y
        return X + self.mlp(self.ln2(X))


add(
    "swin_block_d2l_roll_twice",
    "d2l",
    lambda: SwinBlockD(32, (8, 8), 4, 4, 2),
    ("swin_block", SWIN),
    "The map is rolled back in the same direction as before the attention (-shift instead of +shift).",
    "the cyclic shift is not undone",
)


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
    "patch_merging_rearrange_p2p1",
    "einops",
    lambda: Downsample(24),
    ("patch_merging", dict(dim=24)),
)


class CosineWindowAttention(nn.Module):
    def __init__(self, dim, window, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)
        self.tau = nn.Parameter(torch.full((heads,), math.log(10.0)))
        self.meta = nn.Sequential(
            nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, heads, bias=False)
        )
        t = torch.arange(window, dtype=torch.float64)
        yx = torch.cartesian_prod(t, t)
        delta = (yx[:, None] - yx[None]) * 8 / (window - 1)
        self.register_buffer("delta", delta.sign() * torch.log1p(delta.abs()) / math.log(2) / 3)

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:2], self.heads, -1)
        q = F.normalize(self.query(hidden_states).view(shape), dim=-1).transpose(1, 2)
        k = F.normalize(self.key(hidden_states).view(shape), dim=-1).transpose(1, 2)
        v = self.value(hidden_states).view(shape).transpose(1, 2)
        scale = self.tau.clamp(max=math.log(100.0)).exp()[:, None, None]
        bias = 16 * torch.sigmoid(self.meta(self.delta.to(v.dtype))).permute(2, 0, 1)
        probs = (q @ k.mT * scale + bias).softmax(-1)
        return {
            "context": self.dense((probs @ v).transpose(1, 2).flatten(2)),
            "attentions": probs,
        }


def _first(mine, *args, **kw):
    x = args[0] if args else next(iter(kw.values()))
    return mine(x)["context"]


add(
    "swinv2_attention_pairwise_meta",
    "torch",
    lambda: CosineWindowAttention(32, 4, 4),
    ("swinv2_attention", WIN),
    expected="equal (no key bias, bias MLP on all pairs)",
    call=_first,
)


class WindowAttentionV2(nn.Module):
    def __init__(self, dim, window_size, num_heads):
        super().__init__()
        self.dim = dim
        self.window_size = window_size
        self.num_heads = num_heads
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((num_heads, 1, 1))))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 512, bias=True),
            nn.ReLU(inplace=True),
            nn.Linear(512, num_heads, bias=False),
        )
        r = torch.arange(-(window_size - 1), window_size, dtype=torch.float64)
        table = torch.stack(torch.meshgrid(r, r, indexing="ij"), -1)[None]
        table /= window_size - 1
        table *= 8
        table = torch.sign(table) * torch.log2(torch.abs(table) + 1.0) / np.log2(8)
        self.register_buffer("relative_coords_table", table, persistent=False)
        self.register_buffer(
            "relative_position_index",
            torch.from_numpy(rel_index(window_size)),
            persistent=False,
        )
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv_bias = torch.cat(
            (self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias)
        )
        qkv = F.linear(x, self.qkv.weight, qkv_bias)
        qkv = qkv.reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale.exp(), max=math.log(1.0 / 0.01))
        attn = attn * logit_scale
        bias = self.cpb_mlp(self.relative_coords_table.to(x.dtype)).view(-1, self.num_heads)
        bias = (
            bias[self.relative_position_index.view(-1)]
            .view(N, N, -1)
            .permute(2, 0, 1)
            .contiguous()
        )
        attn = attn + 16 * torch.sigmoid(bias).unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(
                0
            )
            attn = attn.view(-1, self.num_heads, N, N)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))


add(
    "swinv2_attention_clamp_after_exp",
    "torch",
    lambda: WindowAttentionV2(32, 4, 4),
    ("swinv2_attention", WIN),
    "The clamp at log 100 is applied after the exponential, so the scale is at most 4.6 instead of 100.",
    "logit scale clamped in the wrong place",
)


# ---------------------------------------------------------------- MAE


def masked_patch_error(pred, imgs, mask, p=8):
    B, C, H, W = imgs.shape
    total, count = 0.0, 0
    for b in range(B):
        l = 0
        for i in range(0, H, p):
            for j in range(0, W, p):
                if mask[b, l]:
                    t = imgs[b, :, i : i + p, j : j + p].transpose(1, 2, 0).ravel()
                    t = (t - t.mean()) / np.sqrt(t.var(ddof=1) + 1e-6)
                    total += np.mean((pred[b, l] - t) ** 2)
                    count += 1
                l += 1
    return total / count


add(
    "mae_loss_numpy_norm_pix_loop",
    "numpy",
    lambda: masked_patch_error,
    ("mae_loss", dict(patch_size=8, norm_pix=True)),
)


def patches(images, p=8):
    b, c, h, w = images.shape
    x = images.reshape(b, c, h // p, p, w // p, p)
    return jnp.transpose(x, (0, 2, 4, 3, 5, 1)).reshape(b, -1, p * p * c)


def mae_objective(pred, images, masked):
    err = jnp.square(pred - patches(images)).mean(axis=-1)
    return jnp.mean(err * masked)


add(
    "mae_loss_jax_mean_all",
    "jax",
    lambda: mae_objective,
    ("mae_loss", dict(patch_size=8, norm_pix=False)),
    "The sum over masked patches is divided by the number of all patches instead of the masked ones.",
    "wrong denominator: all patches instead of the masked ones",
)


# ---------------------------------------------------------------- boxes


def pairwise_overlap(P, Q):
    R = np.zeros((P.shape[0], Q.shape[0]))
    for i, (x0, y0, x1, y1) in enumerate(P):
        for j, (u0, v0, u1, v1) in enumerate(Q):
            dx = max(min(x1, u1) - max(x0, u0), 0)
            dy = max(min(y1, v1) - max(y0, v0), 0)
            both = dx * dy
            R[i, j] = both / ((x1 - x0) * (y1 - y0) + (u1 - u0) * (v1 - v0) - both)
    return R


add("box_iou_numpy_loop", "numpy", lambda: pairwise_overlap, ("box_iou", {}))


def giou_matrix(boxes1, boxes2):
    wh1 = boxes1[:, 2:] - boxes1[:, :2]
    wh2 = boxes2[:, 2:] - boxes2[:, :2]
    area1, area2 = wh1.prod(-1), wh2.prod(-1)
    a, b = rearrange(boxes1, "n c -> n 1 c"), rearrange(boxes2, "m c -> 1 m c")
    inter = (
        (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2]))
        .clamp(min=0)
        .prod(-1)
    )
    union = area1[:, None] + area2[None, :] - inter
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(
        -1
    )
    return inter / union - (hull - inter) / hull


add(
    "giou_einops_hull_minus_inter",
    "einops",
    lambda: giou_matrix,
    ("generalized_box_iou", {}),
    "The penalty uses the enclosing area minus the intersection instead of minus the union.",
    "GIoU's penalty is wrong: (hull - intersection) / hull instead of (hull - union) / hull",
)


# ---------------------------------------------------------------- positions and losses


def positional_table(max_len, num_hiddens):
    P = torch.zeros((1, max_len, num_hiddens), dtype=torch.float64)
    X = torch.arange(max_len, dtype=torch.float64).reshape(-1, 1)
    X = X * torch.exp(
        -math.log(10000.0) * torch.arange(0, num_hiddens, 2, dtype=torch.float64) / num_hiddens
    )
    P[:, :, 0::2] = torch.sin(X)
    P[:, :, 1::2] = torch.cos(X)
    return P.squeeze(0)


add("sinusoids_d2l", "d2l", lambda: positional_table, ("sinusoids", {}))


def apply_rope(x):
    T, hs = x.size(-2), x.size(-1)
    inv_freq = 10000.0 ** (-torch.arange(hs // 2, dtype=x.dtype, device=x.device) * 2 / hs)
    ang = torch.outer(torch.arange(T, dtype=x.dtype, device=x.device), inv_freq)
    x1, x2 = x.split(hs // 2, dim=-1)
    z = torch.complex(x1.contiguous(), x2.contiguous()) * torch.polar(torch.ones_like(ang), ang)
    return torch.cat([z.real, z.imag], dim=-1)


add("rotary_nano_complex_halves", "nanogpt", lambda: apply_rope, ("rotary", {}))


def token_nll(logits, targets, pad_id=0):
    onehot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    nll = jax.nn.logsumexp(logits, axis=-1) - jnp.einsum("bnv,bnv->bn", onehot, logits)
    w = jnp.not_equal(targets, pad_id).astype(logits.dtype)
    return jnp.vdot(nll, w) / w.sum(), {"tokens": w.sum()}


def _loss_only(mine, *args, **kw):
    return mine(*args, *kw.values())[0]


add(
    "padded_ce_jax_onehot_aux",
    "jax",
    lambda: token_nll,
    ("padded_cross_entropy", dict(pad_id=0)),
    call=_loss_only,
)


# ---------------------------------------------------------------- patches as rows


class SplitIntoPatches(nn.Module):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def forward(self, X):
        p = self.patch_size
        rows = X.permute(0, 2, 3, 1).split(p, dim=1)
        cells = [
            cell.reshape(cell.shape[0], -1) for row in rows for cell in row.split(p, dim=2)
        ]
        return torch.stack(cells, dim=1)


add(
    "patchify_d2l_split_stack",
    "d2l",
    lambda: SplitIntoPatches(8),
    ("patchify", dict(patch_size=8)),
)
