import math
from collections import namedtuple
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat, einsum
from einops.layers.torch import Rearrange

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError:
    jax = None

CASES = []


def case(
    name, style, build, reference, label="correct", mistake="", expected="equal", call=None
):
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


# --------------------------------------------------------------------------- 1
class NeoXSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, max_position_embeddings=64):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.norm_factor = math.sqrt(self.head_size)
        self.register_buffer(
            "bias",
            torch.tril(
                torch.ones(max_position_embeddings, max_position_embeddings, dtype=torch.bool)
            ).view(1, 1, max_position_embeddings, max_position_embeddings),
            persistent=False,
        )
        self.register_buffer("masked_bias", torch.tensor(-1e9), persistent=False)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(0.1)

    def forward(self, hidden_states, use_cache=True):
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(*qkv.size()[:-1], self.num_attention_heads, 3 * self.head_size)
        query = qkv[..., : self.head_size].permute(0, 2, 1, 3)
        key = qkv[..., self.head_size : 2 * self.head_size].permute(0, 2, 1, 3)
        value = qkv[..., 2 * self.head_size :].permute(0, 2, 1, 3)

        b, h, t, d = query.size()
        scores = torch.zeros(b * h, t, t, dtype=query.dtype, device=query.device)
        scores = torch.baddbmm(
            scores,
            query.reshape(b * h, t, d),
            key.reshape(b * h, t, d).transpose(1, 2),
            beta=1.0,
            alpha=1.0 / self.norm_factor,
        ).view(b, h, t, t)
        scores = torch.where(self.bias[:, :, :t, :t], scores, self.masked_bias.to(scores.dtype))
        probs = self.attention_dropout(F.softmax(scores, dim=-1))
        out = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous().view(b, t, h * d)
        present = (key, value) if use_cache else None
        return self.dense(out), present


case(
    "neox_fused_interleaved",
    "nanogpt",
    lambda: NeoXSelfAttention(48, 4),
    ("causal_attention", dict(embed_dim=48, num_heads=4)),
    expected="equal up to the per-head interleaved q/k/v packing; the second output is a cache",
)


# --------------------------------------------------------------------------- 2
class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.1))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class NewGELU(nn.Module):
    def forward(self, x):
        return (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        )


class GPT2Attention(nn.Module):
    def __init__(self, nx, n_head, n_ctx):
        super().__init__()
        self.register_buffer(
            "bias", torch.tril(torch.ones(n_ctx, n_ctx)).view(1, 1, n_ctx, n_ctx)
        )
        self.n_head = n_head
        self.split_size = nx
        self.c_attn = Conv1D(nx * 3, nx)
        self.c_proj = Conv1D(nx, nx)

    def _attn(self, q, k, v):
        w = torch.matmul(q, k)
        w = w / math.sqrt(v.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        b = self.bias[:, :, ns - nd : ns, :ns]
        w = w * b - 1e10 * (1 - b)
        w = F.softmax(w, dim=-1)
        return torch.matmul(w, v)

    def split_heads(self, x, k=False):
        x = x.view(*x.size()[:-1], self.n_head, x.size(-1) // self.n_head)
        return x.permute(0, 2, 3, 1) if k else x.permute(0, 2, 1, 3)

    def forward(self, x):
        query, key, value = self.c_attn(x).split(self.split_size, dim=2)
        a = self._attn(
            self.split_heads(query), self.split_heads(key, k=True), self.split_heads(value)
        )
        a = a.permute(0, 2, 1, 3).contiguous()
        return self.c_proj(a.view(*a.size()[:-2], -1))


class GPT2MLP(nn.Module):
    def __init__(self, nx):
        super().__init__()
        self.c_fc = Conv1D(4 * nx, nx)
        self.c_proj = Conv1D(nx, 4 * nx)
        self.act = NewGELU()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPT2Block(nn.Module):
    def __init__(self, nx, n_head, n_ctx):
        super().__init__()
        self.ln_1 = nn.LayerNorm(nx, eps=1e-5)
        self.attn = GPT2Attention(nx, n_head, n_ctx)
        self.ln_2 = nn.LayerNorm(nx, eps=1e-5)
        self.mlp = GPT2MLP(nx)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2LM(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([GPT2Block(n_embd, n_head, block_size) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd, eps=1e-5)
        self.register_buffer("position_ids", torch.arange(block_size)[None], persistent=False)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = self.position_ids[:, : input_ids.size(-1)]
        hidden = self.wte(input_ids) + self.wpe(position_ids)
        states = []
        for block in self.h:
            states.append(hidden)
            hidden = block(hidden)
        hidden = self.ln_f(hidden)
        return {
            "logits": hidden @ self.wte.weight.t(),
            "hidden_states": states,
            "last_hidden_state": hidden,
        }


case(
    "gpt2_conv1d_dict",
    "nanogpt",
    lambda: GPT2LM(53, 16, 2, 4, 32),
    ("gpt", dict(vocab_size=53, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    expected="equal up to the Conv1D layout; logits under a key",
)


# --------------------------------------------------------------------------- 3
class Head(nn.Module):
    """one head of self-attention"""

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
        wei.masked_fill_(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        wei = self.dropout(wei)
        return wei @ self.value(x)


class HeadsTogether(nn.Module):
    def __init__(self, n_embd, num_heads, block_size=32, dropout=0.2):
        super().__init__()
        self.heads = nn.ModuleList(
            [Head(n_embd, n_embd // num_heads, block_size, dropout) for _ in range(num_heads)]
        )
        self.proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


case(
    "lecture_heads_modulelist",
    "nanogpt",
    lambda: HeadsTogether(48, 6),
    ("causal_attention", dict(embed_dim=48, num_heads=6)),
    expected="equal; one module per head",
)


# --------------------------------------------------------------------------- 4
def exists(v):
    return v is not None


def default(v, d):
    return v if exists(v) else d


class ContextAttention(nn.Module):
    def __init__(self, dim, heads=8, dim_head=None):
        super().__init__()
        dim_head = default(dim_head, dim // heads)
        self.scale = dim_head**-0.5
        self.to_q = nn.Sequential(
            nn.Linear(dim, heads * dim_head), Rearrange("b n (h d) -> b h n d", h=heads)
        )
        self.to_kv = nn.Sequential(
            nn.Linear(dim, 2 * heads * dim_head),
            Rearrange("b n (h kv d) -> kv b h n d", h=heads, kv=2),
        )
        self.to_out = nn.Sequential(
            Rearrange("b h n d -> b n (h d)"), nn.Linear(heads * dim_head, dim), nn.Dropout(0.1)
        )

    def forward(self, x, context=None, mask=None):
        context = default(context, x)
        q = self.to_q(x)
        q.mul_(self.scale)
        k, v = self.to_kv(context)
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k)
        if exists(mask):
            sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1)
        return self.to_out(torch.einsum("b h i j, b h j d -> b h i d", attn, v))


case(
    "context_attention_kv_per_head",
    "einops",
    lambda: ContextAttention(48, heads=4),
    ("cross_attention", dict(embed_dim=48, num_heads=4)),
    expected="equal up to k/v packed per head",
)


# --------------------------------------------------------------------------- 5
class EinMix(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        d = c // n
        self.w = nn.ParameterList(
            [nn.Parameter(torch.randn(n, c, d) * c**-0.5) for _ in range(3)]
        )
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(n, 1, d)) for _ in range(3)])
        self.o = nn.Parameter(torch.randn(n, d, c) * c**-0.5)
        self.ob = nn.Parameter(torch.zeros(c))

    def forward(self, x, mask=None):
        a, b, c = (einsum(x, w, "b i c, h c d -> b h i d") + t for w, t in zip(self.w, self.b))
        s = einsum(a, b, "b h i d, b h j d -> b h i j") / math.sqrt(a.shape[-1])
        if mask is not None:
            s = s.masked_fill(mask.logical_not(), float("-inf"))
        y = einsum(s.softmax(-1), c, "b h i j, b h j d -> b h i d")
        return einsum(y, self.o, "b h i d, h d c -> b i c") + self.ob


case(
    "parameterlist_head_tensors",
    "einops",
    lambda: EinMix(40, 5),
    ("multihead", dict(embed_dim=40, num_heads=5)),
    expected="equal up to layout (raw arrays by head)",
)


# --------------------------------------------------------------------------- 6
class GammaBetaNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(x, **kwargs) + x


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = GammaBetaNorm(dim)
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


class KQVAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_kqv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        k, q, v = map(
            lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads),
            self.to_kqv(x).chunk(3, dim=-1),
        )
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        if exists(mask):
            dots = dots.masked_fill(~mask, -torch.finfo(dots.dtype).max)
        out = rearrange(dots.softmax(dim=-1) @ v, "b h n d -> b n (h d)")
        return self.to_out(out)


class PreNormLayer(nn.Module):
    def __init__(self, dim, heads, mlp_dim, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                Residual(PreNorm(dim, KQVAttention(dim, heads))),
                Residual(PreNorm(dim, FeedForward(dim, mlp_dim, dropout))),
            ]
        )

    def forward(self, x, mask=None):
        attn, ff = self.layers
        x = attn(x, mask=mask)
        return ff(x)


case(
    "prenorm_wrappers_kqv",
    "einops",
    lambda: PreNormLayer(48, 4, 80),
    (
        "encoder_layer",
        dict(d_model=48, nhead=4, dim_feedforward=80, norm_first=True, act="gelu"),
    ),
    expected="equal up to the packing order k, q, v",
)


# --------------------------------------------------------------------------- 7
class GroupedQuery(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.dim_head = dim // heads
        self.fused_dims = (dim, self.dim_head * kv_heads, self.dim_head * kv_heads)
        self.fused_proj = nn.Linear(dim, sum(self.fused_dims))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = self.fused_proj(x).split(self.fused_dims, dim=-1)
        q = rearrange(q, "b n (g r d) -> b g r n d", g=self.kv_heads, d=self.dim_head)
        k, v = (rearrange(t, "b n (g d) -> b g n d", g=self.kv_heads) for t in (k, v))
        sim = einsum(q, k, "b g r i d, b g j d -> b g r i j") * self.dim_head**-0.5
        i, j = torch.arange(n, device=x.device), torch.arange(n, device=x.device)
        future = rearrange(j, "j -> 1 j") > rearrange(i, "i -> i 1")
        sim = sim.masked_fill(future, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = einsum(attn, v, "b g r i j, b g j d -> b g r i d")
        return self.out(rearrange(out, "b g r n d -> b n (g r d)"))


case(
    "gqa_five_axes_fused",
    "einops",
    lambda: GroupedQuery(48, 6, 2),
    ("grouped_attention", dict(embed_dim=48, num_heads=6, num_kv_heads=2)),
    expected="equal up to one fused q/k/v projection",
)


# --------------------------------------------------------------------------- 8
Intermediates = namedtuple("Intermediates", ["qk_similarities", "post_softmax_attn"])


class Attend(nn.Module):
    def __init__(self, dropout=0.1, scale=None):
        super().__init__()
        self.scale = scale
        self.attn_dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        scale = default(self.scale, q.shape[-1] ** -0.5)
        dots = einsum(q * scale, k, "b h i d, b h j d -> b h i j")
        qk = dots.clone()
        if exists(mask):
            bias = torch.zeros_like(mask, dtype=dots.dtype)
            bias.masked_fill_(~mask, -torch.finfo(dots.dtype).max / 2)
            dots = dots + bias
        dots = dots - dots.amax(dim=-1, keepdim=True).detach()
        e = dots.exp()
        attn = e / e.sum(dim=-1, keepdim=True)
        out = einsum(self.attn_dropout(attn), v, "b h i j, b h j d -> b h i d")
        return out, Intermediates(qk, attn)


case(
    "attend_with_intermediates",
    "einops",
    lambda: Attend(),
    ("attention", dict()),
    expected="equal; first of the outputs",
)


# --------------------------------------------------------------------------- 9
def clones(module_fn, n):
    return nn.ModuleList([module_fn() for _ in range(n)])


def attention_fn(query, key, value, mask=None, dropout=None):
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
        self.linears = clones(lambda: nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x, self.attn = attention_fn(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        del query, key, value
        return self.linears[-1](x)


case(
    "annotated_four_linears",
    "d2l",
    lambda: MultiHeadedAttention(4, 32),
    ("multihead", dict(embed_dim=32, num_heads=4)),
    expected="equal",
    call=lambda mine, x, mask=None: mine(x, x, x, mask),
)


# -------------------------------------------------------------------------- 10
class AnnotatedNorm(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = (x - mean).square().mean(-1, keepdim=True)
        return self.a_2 * (x - mean) / torch.sqrt(var + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = AnnotatedNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(self.w_1(x).relu_()))


def subsequent_mask(size):
    return torch.triu(torch.ones(1, size, size), diagonal=1).type(torch.uint8) == 0


class AnnotatedDecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(lambda: SublayerConnection(size, dropout), 3)

    def forward(self, x, memory, src_mask=None, tgt_mask=None):
        m = memory
        if tgt_mask is None:
            tgt_mask = subsequent_mask(x.size(1)).to(x.device)
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, m, m, src_mask))
        return self.sublayer[2](x, self.feed_forward)


case(
    "annotated_decoder_sublayers",
    "d2l",
    lambda: AnnotatedDecoderLayer(
        32,
        MultiHeadedAttention(4, 32),
        MultiHeadedAttention(4, 32),
        PositionwiseFeedForward(32, 72),
        0.1,
    ),
    ("decoder_layer", dict(d_model=32, nhead=4, dim_feedforward=72, norm_first=True)),
    expected="equal",
)


# -------------------------------------------------------------------------- 11
def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return F.softmax(X, dim=-1)
    shape = X.shape
    if valid_lens.dim() == 1:
        valid_lens = torch.repeat_interleave(valid_lens, shape[1])
    else:
        valid_lens = valid_lens.reshape(-1)
    X = X.reshape(-1, shape[-1])
    keep = torch.arange(X.size(1), device=X.device)[None, :] < valid_lens[:, None]
    X = X.masked_fill(~keep, -1e6)
    return F.softmax(X.reshape(shape), dim=-1)


class D2LMultiHead(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout=0.1, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
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

    def forward(self, queries, keys, values, valid_lens=None):
        queries = self.transpose_qkv(self.W_q(queries))
        keys = self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        self.attention_weights = masked_softmax(scores, valid_lens)
        output = torch.bmm(self.dropout(self.attention_weights), values)
        return self.W_o(self.transpose_output(output))


class PositionalEncoding(nn.Module):
    def __init__(self, num_hiddens, dropout, max_len=128):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.P = torch.zeros((1, max_len, num_hiddens), dtype=torch.float64)
        X = torch.arange(max_len, dtype=torch.float64).reshape(-1, 1) / torch.pow(
            10000, torch.arange(0, num_hiddens, 2, dtype=torch.float64) / num_hiddens
        )
        self.P[:, :, 0::2] = torch.sin(X)
        self.P[:, :, 1::2] = torch.cos(X)

    def forward(self, X):
        X = X + self.P[:, : X.shape[1], :].to(X)
        return self.dropout(X)


class AddNorm(nn.Module):
    def __init__(self, norm_shape, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.ln = nn.LayerNorm(norm_shape)

    def forward(self, X, Y):
        return self.ln(self.dropout(Y) + X)


class PositionWiseFFN(nn.Module):
    def __init__(self, num_hiddens, ffn_num_hiddens):
        super().__init__()
        self.dense1 = nn.Linear(num_hiddens, ffn_num_hiddens)
        self.relu = nn.ReLU()
        self.dense2 = nn.Linear(ffn_num_hiddens, num_hiddens)

    def forward(self, X):
        return self.dense2(self.relu(self.dense1(X)))


class D2LEncoderBlock(nn.Module):
    def __init__(self, num_hiddens, ffn_num_hiddens, num_heads, dropout):
        super().__init__()
        self.attention = D2LMultiHead(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(num_hiddens, ffn_num_hiddens)
        self.addnorm2 = AddNorm(num_hiddens, dropout)

    def forward(self, X, valid_lens=None):
        Y = self.addnorm1(X, self.attention(X, X, X, valid_lens))
        return self.addnorm2(Y, self.ffn(Y))


class D2LDecoderBlock(nn.Module):
    def __init__(self, num_hiddens, ffn_num_hiddens, num_heads, dropout, i):
        super().__init__()
        self.i = i
        self.attention1 = D2LMultiHead(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.attention2 = D2LMultiHead(num_hiddens, num_heads, dropout)
        self.addnorm2 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(num_hiddens, ffn_num_hiddens)
        self.addnorm3 = AddNorm(num_hiddens, dropout)

    def forward(self, X, state):
        enc_outputs, enc_valid_lens = state
        batch_size, num_steps, _ = X.shape
        dec_valid_lens = torch.arange(1, num_steps + 1, device=X.device).repeat(batch_size, 1)
        X2 = self.attention1(X, X, X, dec_valid_lens)
        Y = self.addnorm1(X, X2)
        Y2 = self.attention2(Y, enc_outputs, enc_outputs, enc_valid_lens)
        Z = self.addnorm2(Y, Y2)
        return self.addnorm3(Z, self.ffn(Z)), state


class D2LEncoder(nn.Module):
    def __init__(self, embedding, num_hiddens, ffn_num_hiddens, num_heads, num_blks, dropout):
        super().__init__()
        self.num_hiddens = num_hiddens
        self.embedding = embedding
        self.pos_encoding = PositionalEncoding(num_hiddens, dropout)
        self.blks = nn.Sequential()
        for i in range(num_blks):
            self.blks.add_module(
                "block" + str(i),
                D2LEncoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout),
            )

    def forward(self, X, valid_lens=None):
        X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
        for blk in self.blks:
            X = blk(X, valid_lens)
        return X


class D2LDecoder(nn.Module):
    def __init__(self, embedding, num_hiddens, ffn_num_hiddens, num_heads, num_blks, dropout):
        super().__init__()
        self.num_hiddens = num_hiddens
        self.embedding = embedding
        self.pos_encoding = PositionalEncoding(num_hiddens, dropout)
        self.blks = nn.Sequential()
        for i in range(num_blks):
            self.blks.add_module(
                "block" + str(i),
                D2LDecoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout, i),
            )
        self.dense = nn.Linear(num_hiddens, embedding.num_embeddings, bias=False)
        self.dense.weight = embedding.weight

    def forward(self, X, state):
        X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
        for blk in self.blks:
            X, state = blk(X, state)
        return self.dense(X), state


class EncoderDecoder(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, enc_X, dec_X):
        enc_all_outputs = self.encoder(enc_X)
        return self.decoder(dec_X, (enc_all_outputs, None))[0]


def build_d2l_transformer():
    emb = nn.Embedding(41, 32)
    nn.init.normal_(emb.weight, std=32**-0.5)
    return EncoderDecoder(
        D2LEncoder(emb, 32, 64, 4, 2, 0.1), D2LDecoder(emb, 32, 64, 4, 2, 0.1)
    )


case(
    "d2l_encoder_decoder",
    "d2l",
    build_d2l_transformer,
    ("transformer", dict(vocab=41, d_model=32, nhead=4, layers=2, dim_feedforward=64)),
    expected="equal",
)


# -------------------------------------------------------------------------- 12
class TimeFirstEncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward, dropout=0.1):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.fc = nn.Sequential()
        self.fc.add_module("expand", nn.Linear(d_model, dim_feedforward))
        self.fc.add_module("act", nn.ReLU(inplace=True))
        self.fc.add_module("drop", nn.Dropout(dropout))
        self.fc.add_module("contract", nn.Linear(dim_feedforward, d_model))
        self.norms = nn.ModuleDict(
            {"post_attn": nn.LayerNorm(d_model), "post_fc": nn.LayerNorm(d_model)}
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, src):
        """src: (time, batch, channels)"""
        ctx, _ = self.mha(src, src, src, need_weights=False)
        src = self.norms["post_attn"](src + self.drop(ctx))
        src = self.norms["post_fc"](src + self.drop(self.fc(src)))
        return src


case(
    "time_first_encoder_layer",
    "torch",
    lambda: TimeFirstEncoderLayer(40, 5, 96),
    ("encoder_layer", dict(d_model=40, nhead=5, dim_feedforward=96)),
    expected="equal up to sequence-first input",
)


# -------------------------------------------------------------------------- 13
class SwiGLUFFNFused(nn.Module):
    def __init__(self, in_features, hidden_features):
        super().__init__()
        self.hidden_features = hidden_features
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=False)
        self.w3 = nn.Linear(hidden_features, in_features, bias=False)

    def forward(self, x):
        shape = x.shape
        h = self.w12(x.reshape(-1, shape[-1]))
        up, gate = h[:, : self.hidden_features], h[:, self.hidden_features :]
        act = F.silu(gate)
        act *= up
        return self.w3(act).view(shape)


case(
    "swiglu_fused_up_first",
    "torch",
    lambda: SwiGLUFFNFused(24, 56),
    ("swiglu", dict(dim=24, hidden=56)),
    expected="equal up to packed up/gate",
)


# -------------------------------------------------------------------------- 14
class GemmaNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x)
        return output * (1.0 + self.weight)

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


case(
    "gemma_norm_zero_centred",
    "torch",
    lambda: GemmaNorm(36),
    ("rms_norm", dict(dim=36)),
    expected="equal up to the weight stored minus one",
)


# -------------------------------------------------------------------------- 15
def np_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(axis=-1, keepdims=True)
    return z


def heads_by_loop(p, x, mask=None):
    B, N, C = x.shape
    n = p["M1"].shape[0]
    out = np.zeros((B, N, C)) + p["v4"]
    weights = []
    for i in range(n):
        a = x @ p["M1"][i] + p["v1"][i]
        b = x @ p["M2"][i] + p["v2"][i]
        c = x @ p["M3"][i] + p["v3"][i]
        s = np.einsum("bid,bjd->bij", a, b) / np.sqrt(a.shape[-1])
        if mask is not None:
            m = np.broadcast_to(mask, (B, 1, N, N))[:, 0]
            s = np.where(m, s, -np.inf)
        w = np_softmax(s)
        weights.append(w)
        out += (w @ c) @ p["M4"][i]
    return out, np.stack(weights, axis=1)


def build_heads_by_loop():
    rng = np.random.default_rng(0)
    C, n = 30, 3
    p = {}
    for i in (1, 2, 3):
        p[f"M{i}"] = rng.normal(0, C**-0.5, (n, C, C // n))
        p[f"v{i}"] = np.zeros((n, C // n))
    p["M4"] = rng.normal(0, C**-0.5, (n, C // n, C))
    p["v4"] = np.zeros(C)
    return heads_by_loop, p


case(
    "loop_over_heads_letters",
    "numpy",
    build_heads_by_loop,
    ("multihead", dict(embed_dim=30, num_heads=3)),
    expected="equal up to layout (arrays by head, in × out)",
)


# -------------------------------------------------------------------------- 16
def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(x, g, b, eps=1e-5):
    mean = np.mean(x, axis=-1, keepdims=True)
    variance = np.var(x, axis=-1, keepdims=True)
    return g * ((x - mean) / np.sqrt(variance + eps)) + b


def linear(x, w, b):
    return x @ w + b


def ffn(x, p, pre):
    return linear(
        gelu(linear(x, p[pre + "c_fc.w"], p[pre + "c_fc.b"])),
        p[pre + "c_proj.w"],
        p[pre + "c_proj.b"],
    )


def np_attention(q, k, v, mask):
    return np_softmax(q @ k.T / np.sqrt(q.shape[-1]) + mask) @ v


def mha(x, p, pre, n_head):
    x = linear(x, p[pre + "c_attn.w"], p[pre + "c_attn.b"])
    qkv_heads = list(map(lambda t: np.split(t, n_head, axis=-1), np.split(x, 3, axis=-1)))
    causal_mask = (1 - np.tri(x.shape[0])) * -1e10
    out_heads = [np_attention(q, k, v, causal_mask) for q, k, v in zip(*qkv_heads)]
    return linear(np.hstack(out_heads), p[pre + "c_proj.w"], p[pre + "c_proj.b"])


def gpt2(p, inputs, n_head, n_layer):
    batch = []
    for row in np.asarray(inputs):
        x = p["wte"][row] + p["wpe"][range(len(row))]
        for i in range(n_layer):
            h = f"h{i}."
            x = x + mha(layer_norm(x, p[h + "ln_1.g"], p[h + "ln_1.b"]), p, h + "attn.", n_head)
            x = x + ffn(layer_norm(x, p[h + "ln_2.g"], p[h + "ln_2.b"]), p, h + "mlp.")
        x = layer_norm(x, p["ln_f.g"], p["ln_f.b"])
        batch.append(x @ p["wte"].T)
    return np.stack(batch)


def build_pico():
    rng = np.random.default_rng(1)
    V, T, L, H, C = 37, 12, 2, 3, 24
    w = lambda *s: rng.standard_normal(s) * 0.08
    p = {"wte": w(V, C), "wpe": w(T, C), "ln_f.g": np.ones(C), "ln_f.b": np.zeros(C)}
    for i in range(L):
        h = f"h{i}."
        for ln in ("ln_1", "ln_2"):
            p[h + ln + ".g"], p[h + ln + ".b"] = np.ones(C), np.zeros(C)
        for name, a, b in (
            ("attn.c_attn", C, 3 * C),
            ("attn.c_proj", C, C),
            ("mlp.c_fc", C, 4 * C),
            ("mlp.c_proj", 4 * C, C),
        ):
            p[h + name + ".w"], p[h + name + ".b"] = w(a, b), np.zeros(b)
    return partial(gpt2, n_head=H, n_layer=L), p


case(
    "pico_flat_dict",
    "numpy",
    build_pico,
    ("gpt", dict(vocab_size=37, block_size=12, n_layer=2, n_head=3, n_embd=24)),
    expected="equal up to the in × out layout",
)


# -------------------------------------------------------------------------- 17
def batch_stats_norm(theta, x):
    flat = x.reshape(-1, x.shape[-1]).T
    m1 = flat.sum(0) / flat.shape[0]
    m2 = (flat * flat).sum(0) / flat.shape[0]
    inv = 1.0 / np.sqrt(m2 - m1**2 + 1e-5)
    y = (flat - m1) * inv
    y *= theta["alpha"][:, None]
    y += theta["delta"][:, None]
    return y.T.reshape(x.shape)


case(
    "norm_two_moments",
    "numpy",
    lambda: (batch_stats_norm, {"alpha": np.ones(20), "delta": np.zeros(20)}),
    ("layer_norm", dict(dim=20)),
    expected="equal",
)


# -------------------------------------------------------------------------- 18
def flax_ln(x, scale, bias):
    mu = x.mean(-1, keepdims=True)
    return (x - mu) * jax.lax.rsqrt(
        jnp.square(x - mu).mean(-1, keepdims=True) + 1e-5
    ) * scale + bias


def flax_encoder(params, x, mask=None):
    pre = "encoder/self_attention/"
    q, k, v = (
        jnp.einsum("bnc,chd->bnhd", x, params[pre + n + "/kernel"]) + params[pre + n + "/bias"]
        for n in ("query", "key", "value")
    )
    logits = jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(q.shape[-1]), k)
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    w = jax.nn.softmax(logits)
    y = jnp.einsum("bhqk,bkhd->bqhd", w, v)
    y = jnp.einsum("bqhd,hdc->bqc", y, params[pre + "out/kernel"]) + params[pre + "out/bias"]
    x = flax_ln(x + y, params["encoder/LayerNorm_0/scale"], params["encoder/LayerNorm_0/bias"])
    h = jax.nn.relu(x @ params["encoder/Dense_0/kernel"] + params["encoder/Dense_0/bias"])
    h = h @ params["encoder/Dense_1/kernel"] + params["encoder/Dense_1/bias"]
    return flax_ln(
        x + h, params["encoder/LayerNorm_1/scale"], params["encoder/LayerNorm_1/bias"]
    )


def build_flax_encoder():
    C, H, D, Fh = 32, 4, 8, 48
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 16))
    w = lambda *s: jax.random.normal(next(keys), s) * C**-0.5
    p = {}
    for n in ("query", "key", "value"):
        p[f"encoder/self_attention/{n}/kernel"] = w(C, H, D)
        p[f"encoder/self_attention/{n}/bias"] = jnp.zeros((H, D))
    p["encoder/self_attention/out/kernel"] = w(H, D, C)
    p["encoder/self_attention/out/bias"] = jnp.zeros(C)
    p["encoder/Dense_0/kernel"], p["encoder/Dense_0/bias"] = w(C, Fh), jnp.zeros(Fh)
    p["encoder/Dense_1/kernel"], p["encoder/Dense_1/bias"] = w(Fh, C), jnp.zeros(C)
    for i in range(2):
        p[f"encoder/LayerNorm_{i}/scale"], p[f"encoder/LayerNorm_{i}/bias"] = (
            jnp.ones(C),
            jnp.zeros(C),
        )
    return flax_encoder, p


case(
    "flax_names_three_axis_kernels",
    "jax",
    build_flax_encoder,
    ("encoder_layer", dict(d_model=32, nhead=4, dim_feedforward=48)),
    expected="equal up to layout (kernels of in × heads × head width)",
)


# -------------------------------------------------------------------------- 19
def rms(x, g):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * g


def rope(x):
    n, d = x.shape[1], x.shape[-1]
    ang = jnp.arange(n)[:, None] * 10000.0 ** (-jnp.arange(0, d, 2) / d)
    cos, sin = jnp.cos(ang)[:, None], jnp.sin(ang)[:, None]
    lo, hi = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)


def scan_llama(params, tokens):
    stacked = {k[6:]: v for k, v in params.items() if k.startswith("layer_")}
    n = tokens.shape[1]
    causal = jnp.tril(jnp.ones((n, n), dtype=bool))

    def body(x, w):
        h = rms(x, w["ln1"])
        q = rope(jnp.einsum("btc,chd->bthd", h, w["q"]))
        k = rope(jnp.einsum("btc,chd->bthd", h, w["kv"][0]))
        v = jnp.einsum("btc,chd->bthd", h, w["kv"][1])
        g = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, g, axis=2), jnp.repeat(v, g, axis=2)
        s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        a = jax.nn.softmax(jnp.where(causal, s, -1e30), axis=-1)
        x = x + jnp.einsum("bhts,bshd,hdc->btc", a, v, w["o"])
        h = rms(x, w["ln2"])
        u = jnp.einsum("btc,zcf->zbtf", h, w["wi"])
        return x + (jax.nn.silu(u[0]) * u[1]) @ w["wo"], None

    x, _ = jax.lax.scan(body, params["embed"][tokens], stacked)
    return rms(x, params["final_ln"]) @ params["embed"].T


def build_scan_llama():
    V, L, H, K, C, Fh = 43, 3, 4, 2, 32, 40
    D = C // H
    keys = iter(jax.random.split(jax.random.PRNGKey(3), 16))
    w = lambda *s: jax.random.normal(next(keys), s) * 0.12
    return scan_llama, {
        "embed": w(V, C),
        "final_ln": jnp.ones(C),
        "layer_ln1": jnp.ones((L, C)),
        "layer_ln2": jnp.ones((L, C)),
        "layer_q": w(L, C, H, D),
        "layer_kv": w(L, 2, C, K, D),
        "layer_o": w(L, H, D, C),
        "layer_wi": w(L, 2, C, Fh),
        "layer_wo": w(L, Fh, C),
    }


case(
    "scan_over_stacked_layers",
    "jax",
    build_scan_llama,
    ("llama", dict(vocab_size=43, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, n_inner=40)),
    expected="equal up to layout (layers stacked in each array)",
)


# -------------------------------------------------------------------------- 20
def dense(p, x):
    return jnp.dot(x, p["w"]) + p["b"]


def one_head(q, k, v, m):
    s = q @ k.T / q.shape[-1] ** 0.5
    s = jnp.where(m[None, :], s, -1e9)
    return jax.nn.softmax(s, axis=-1) @ v


def perceive(params, x, context, mask=None):
    nh = 4
    if mask is None:
        mask = jnp.ones((x.shape[0], 1, 1, context.shape[1]), dtype=bool)

    def single(x, c, m):
        split = lambda t: t.reshape(t.shape[0], nh, -1)
        q, k, v = (
            split(dense(params["latents"]["q"], x)),
            split(dense(params["bytes"]["k"], c)),
            split(dense(params["bytes"]["v"], c)),
        )
        o = jax.vmap(one_head, in_axes=(1, 1, 1, None), out_axes=1)(q, k, v, m.reshape(-1))
        return dense(params["latents"]["o"], o.reshape(x.shape[0], -1))

    mask = jnp.broadcast_to(mask, (x.shape[0], 1, 1, context.shape[1]))
    return jax.vmap(single)(x, context, mask)


def build_perceive():
    ks = jax.random.split(jax.random.PRNGKey(7), 4)
    d = lambda k: {"w": jax.random.normal(k, (32, 32)) * 32**-0.5, "b": jnp.zeros(32)}
    return perceive, {
        "latents": {"q": d(ks[0]), "o": d(ks[1])},
        "bytes": {"k": d(ks[2]), "v": d(ks[3])},
    }


case(
    "vmap_nested_dict_cross",
    "jax",
    build_perceive,
    ("cross_attention", dict(embed_dim=32, num_heads=4)),
    expected="equal up to the in × out layout (nested dict)",
)


# ========================================================================= wrong
# -------------------------------------------------------------------------- w1
class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.n_embd = n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = self.ln_2(x)
        x = x + self.mlp(x)
        return x


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab_size, n_embd),
                wpe=nn.Embedding(block_size, n_embd),
                h=nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)]),
                ln_f=nn.LayerNorm(n_embd),
            )
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


case(
    "w_gpt_mlp_residual",
    "nanogpt",
    lambda: GPT(47, 16, 2, 4, 32),
    ("gpt", dict(vocab_size=47, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "wrong",
    "The MLP's residual adds the normed input instead of the block's stream.",
    "residual around the MLP starts after ln_2",
)


# -------------------------------------------------------------------------- w2
class GroupedCausal(nn.Module):
    def __init__(self, dim, heads=8, kv_heads=2):
        super().__init__()
        dim_head = dim // heads
        self.scale = dim_head**-0.5
        self.groups = heads // kv_heads
        self.to_q = nn.Linear(dim, heads * dim_head)
        self.to_k = nn.Linear(dim, kv_heads * dim_head)
        self.to_v = nn.Linear(dim, kv_heads * dim_head)
        self.to_out = nn.Linear(heads * dim_head, dim)
        self.split = Rearrange("b n (h d) -> b h n d", d=dim_head)

    def forward(self, x):
        n, device = x.shape[1], x.device
        q, k, v = map(self.split, (self.to_q(x), self.to_k(x), self.to_v(x)))
        k, v = (repeat(t, "b h n d -> b (h g) n d", g=self.groups) for t in (k, v))
        sim = einsum(q, k, "b h i d, b h j d -> b h i j") * self.scale
        causal_mask = torch.ones((n, n), dtype=torch.bool, device=device).triu(1)
        attn = sim.softmax(dim=-1)
        attn = attn.masked_fill(causal_mask, 0.0)
        out = einsum(attn, v, "b h i j, b h j d -> b h i d")
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


case(
    "w_gqa_mask_order",
    "einops",
    lambda: GroupedCausal(48, 6, 3),
    ("grouped_attention", dict(embed_dim=48, num_heads=6, num_kv_heads=3)),
    "wrong",
    "The causal mask zeroes probabilities after the softmax; rows no longer sum to one.",
    "mask after the softmax / future keys count in the normalisation",
)


# -------------------------------------------------------------------------- w3
class SharedEmbedding(nn.Module):
    def __init__(self, vocab, d_model, dropout=0.1):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model
        self.dropout = nn.Dropout(dropout)

    def table(self, n, ref):
        position = torch.arange(0, n, dtype=ref.dtype, device=ref.device).unsqueeze(1)
        div_term = torch.exp(
            torch.arange(0, self.d_model, 2, dtype=ref.dtype, device=ref.device)
            * -(math.log(10000.0) / self.d_model)
        )
        pe = torch.zeros(n, self.d_model, dtype=ref.dtype, device=ref.device)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        return pe

    def forward(self, tokens):
        x = self.lut(tokens)
        x = (x + self.table(tokens.size(1), x)) * math.sqrt(self.d_model)
        return self.dropout(x)


class PostNormLayer(nn.Module):
    def __init__(self, d_model, h, d_ff, cross=False, dropout=0.1):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, d_model, dropout)
        self.src_attn = MultiHeadedAttention(h, d_model, dropout) if cross else None
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.norms = clones(lambda: AnnotatedNorm(d_model), 3 if cross else 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory=None, mask=None):
        x = self.norms[0](x + self.dropout(self.self_attn(x, x, x, mask)))
        if self.src_attn is not None:
            x = self.norms[1](x + self.dropout(self.src_attn(x, memory, memory)))
        return self.norms[-1](x + self.dropout(self.feed_forward(x)))


class AnnotatedTransformer(nn.Module):
    def __init__(self, vocab, N=2, d_model=32, d_ff=64, h=4):
        super().__init__()
        self.embed = SharedEmbedding(vocab, d_model)
        self.encoder = clones(lambda: PostNormLayer(d_model, h, d_ff), N)
        self.decoder = clones(lambda: PostNormLayer(d_model, h, d_ff, cross=True), N)

    def encode(self, src):
        x = self.embed(src)
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, memory, tgt):
        x = self.embed(tgt)
        mask = subsequent_mask(tgt.size(1)).to(tgt.device)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return x

    def forward(self, src, tgt):
        return F.linear(self.decode(self.encode(src), tgt), self.embed.lut.weight)


case(
    "w_transformer_embedding",
    "d2l",
    lambda: AnnotatedTransformer(39),
    ("transformer", dict(vocab=39, d_model=32, nhead=4, layers=2, dim_feedforward=64)),
    "wrong",
    "The sinusoids are multiplied by sqrt(d_model) together with the embedding.",
    "positions scaled by √d_model too",
)


# -------------------------------------------------------------------------- w4
class PreNormEncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward, dropout=0.1):
        super().__init__()
        self.nhead = nhead
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def _sa_block(self, x, mask):
        q, k, v = (
            t.unflatten(-1, (self.nhead, -1)).transpose(1, 2)
            for t in self.in_proj(x).chunk(3, dim=-1)
        )
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dropout(self.out_proj(x.transpose(1, 2).flatten(2)))

    def _ff_block(self, x):
        return self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x)))))

    def forward(self, x, mask=None):
        x = x + self._sa_block(self.norm1(x), mask)
        x = x + self._ff_block(self.norm1(x))
        return x


case(
    "w_encoder_layer_norms",
    "torch",
    lambda: PreNormEncoderLayer(48, 4, 96),
    ("encoder_layer", dict(d_model=48, nhead=4, dim_feedforward=96, norm_first=True)),
    "wrong",
    "The MLP uses the first norm again; norm2 is never used.",
    "norm1 used twice, norm2 without gradient",
)


# -------------------------------------------------------------------------- w5
def fast_gelu(z):
    c = np.sqrt(2.0 / np.pi)
    return 0.5 * z * (1.0 + np.tanh(c * (z + 0.44715 * z * z * z)))


def two_layer_net(params, X):
    z1 = np.tensordot(X, params["W1"], axes=([-1], [1])) + params["b1"]
    a1 = fast_gelu(z1)
    return np.tensordot(a1, params["W2"], axes=([-1], [1])) + params["b2"]


def build_two_layer_net():
    rng = np.random.RandomState(4)
    return two_layer_net, {
        "W1": rng.randn(60, 20) / np.sqrt(20),
        "b1": np.zeros(60),
        "W2": rng.randn(20, 60) / np.sqrt(60),
        "b2": np.zeros(20),
    }


case(
    "w_mlp_activation",
    "numpy",
    build_two_layer_net,
    ("mlp", dict(dim=20, hidden=60)),
    "wrong",
    "The cubic coefficient of the tanh GELU is 0.44715 instead of 0.044715.",
    "activation is not GELU",
)


# -------------------------------------------------------------------------- w6
def jattend(p, name, xq, xkv, nh):
    B, N, C = xq.shape
    M = xkv.shape[1]
    q = (xq @ p[name + "_wq"] + p[name + "_bq"]).reshape(B, N, nh, -1)
    k = (xkv @ p[name + "_wk"] + p[name + "_bk"]).reshape(B, M, nh, -1)
    v = (xkv @ p[name + "_wv"] + p[name + "_bv"]).reshape(B, M, nh, -1)
    s = jnp.einsum("bnhd,bmhd->bhnm", q, k) / jnp.sqrt(q.shape[-1])
    s = jnp.where(jnp.tril(jnp.ones((N, M))) == 1, s, -1e9)
    o = jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(s, -1), v).reshape(B, N, C)
    return o @ p[name + "_wo"] + p[name + "_bo"]


def jdecoder(p, x, memory, nh=4):
    x = flax_ln(x + jattend(p, "self", x, x, nh), p["ln1_g"], p["ln1_b"])
    x = flax_ln(x + jattend(p, "cross", x, memory, nh), p["ln2_g"], p["ln2_b"])
    h = jax.nn.relu(x @ p["ff_w1"] + p["ff_b1"]) @ p["ff_w2"] + p["ff_b2"]
    return flax_ln(x + h, p["ln3_g"], p["ln3_b"])


def build_jdecoder():
    C, Fh = 32, 56
    keys = iter(jax.random.split(jax.random.PRNGKey(11), 16))
    w = lambda *s: jax.random.normal(next(keys), s) * C**-0.5
    p = {}
    for a in ("self", "cross"):
        for n in "qkvo":
            p[f"{a}_w{n}"], p[f"{a}_b{n}"] = w(C, C), jnp.zeros(C)
    p.update(ff_w1=w(C, Fh), ff_b1=jnp.zeros(Fh), ff_w2=w(Fh, C), ff_b2=jnp.zeros(C))
    for i in (1, 2, 3):
        p[f"ln{i}_g"], p[f"ln{i}_b"] = jnp.ones(C), jnp.zeros(C)
    return jdecoder, p


case(
    "w_decoder_layer_cross",
    "jax",
    build_jdecoder,
    ("decoder_layer", dict(d_model=32, nhead=4, dim_feedforward=56)),
    "wrong",
    "The causal mask is applied to the cross-attention as well.",
    "cross-attention is masked causally",
)


# -------------------------------------------------------------------------- w7
class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, n_embd, n_head, n_kv_head, n_inner):
        super().__init__()
        self.n_embd, self.n_head, self.n_kv_head = n_embd, n_head, n_kv_head
        self.head_dim = n_embd // n_head
        self.input_layernorm = LlamaRMSNorm(n_embd)
        self.q_proj = nn.Linear(n_embd, n_head * self.head_dim, bias=False)
        self.k_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias=False)
        self.v_proj = nn.Linear(n_embd, n_kv_head * self.head_dim, bias=False)
        self.o_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.post_attention_layernorm = LlamaRMSNorm(n_embd)
        self.gate_proj = nn.Linear(n_embd, n_inner, bias=False)
        self.up_proj = nn.Linear(n_embd, n_inner, bias=False)
        self.down_proj = nn.Linear(n_inner, n_embd, bias=False)

    def rotary(self, x):
        T = x.size(-2)
        inv_freq = 10000.0 ** (
            -torch.arange(0, self.head_dim, 2, dtype=x.dtype, device=x.device) / self.n_embd
        )
        freqs = torch.outer(torch.arange(T, dtype=x.dtype, device=x.device), inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return x * emb.cos() + rotate_half(x) * emb.sin()

    def forward(self, x):
        B, T, C = x.shape
        h = self.input_layernorm(x)
        q = self.q_proj(h).view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        k = self.k_proj(h).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
        v = self.v_proj(h).view(B, T, self.n_kv_head, self.head_dim).transpose(1, 2)
        q, k = self.rotary(q), self.rotary(k)
        rep = self.n_head // self.n_kv_head
        k, v = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(B, T, C))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class LlamaLM(nn.Module):
    def __init__(self, vocab_size, n_layer, n_head, n_kv_head, n_embd, n_inner):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(n_embd, n_head, n_kv_head, n_inner) for _ in range(n_layer)]
        )
        self.norm = LlamaRMSNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


case(
    "w_llama_frequencies",
    "torch",
    lambda: LlamaLM(45, 2, 4, 2, 32, 48),
    ("llama", dict(vocab_size=45, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=48)),
    "wrong",
    "The rotary exponents are divided by the model width instead of the head width.",
    "rotary frequencies wrong",
)


# -------------------------------------------------------------------------- w8
class EncDecAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(num_hiddens, num_hiddens)
        self.W_k = nn.Linear(num_hiddens, num_hiddens)
        self.W_v = nn.Linear(num_hiddens, num_hiddens)
        self.W_o = nn.Linear(num_hiddens, num_hiddens)
        self.dropout = nn.Dropout(dropout)

    def split(self, X):
        batch, steps, width = X.shape
        return X.reshape(batch, self.num_heads, steps, width // self.num_heads)

    def merge(self, X):
        return X.permute(0, 2, 1, 3).flatten(2)

    def forward(self, X, enc_outputs, mask=None):
        Q, K, V = (
            self.split(self.W_q(X)),
            self.split(self.W_k(enc_outputs)),
            self.split(self.W_v(enc_outputs)),
        )
        scores = Q @ K.transpose(-1, -2) / math.sqrt(Q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return self.W_o(self.merge(self.dropout(F.softmax(scores, dim=-1)) @ V))


case(
    "w_encdec_split",
    "d2l",
    lambda: EncDecAttention(32, 4),
    ("cross_attention", dict(embed_dim=32, num_heads=4)),
    "wrong",
    "Heads are split by a reshape to (B, h, N, d) without a transpose, so positions and heads mix.",
    "head split mixes positions and channels",
    call=lambda mine, x, context, mask=None: mine(x, context, mask),
)
