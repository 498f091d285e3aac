import copy
import math

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError:
    jax = None
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import einsum


# ---------------------------------------------------------------- nanogpt 1
class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout=0.1, bias=True):
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.n_embd = n_embd
        self.dropout = dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        y = self.resid_dropout(self.c_proj(y))
        return y


# ---------------------------------------------------------------- nanogpt 2
class MaskedSelfAttention(nn.Module):
    """keeps the last attention map around so that it can be plotted"""

    def __init__(self, n_embd, n_head, block_size=64):
        super().__init__()
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.register_buffer(
            "tril",
            torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size),
        )
        self.n_head = n_head
        self.last_att = None

    def forward(self, x):
        B, T, C = x.size()
        hs = C // self.n_head
        k = self.key(x).view(B, T, self.n_head, hs).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, hs).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, hs).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(hs))
        att = att.masked_fill(self.tril[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        self.last_att = att.detach()
        y = self.last_att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


# ---------------------------------------------------------------- nanogpt, correct
class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) / math.sqrt(nx))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.weight.size(1),)
        x = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class GroupedCausalAttention(nn.Module):
    def __init__(self, n_embd, n_head, n_kv_head):
        super().__init__()
        self.hd = n_embd // n_head
        self.n_kv_head = n_kv_head
        self.n_rep = n_head // n_kv_head
        self.wqkv = Conv1D((n_head + 2 * n_kv_head) * self.hd, n_embd)
        self.wo = Conv1D(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        qkv = self.wqkv(x).view(B, T, self.n_kv_head, self.n_rep + 2, self.hd)
        q = qkv[..., : self.n_rep, :].reshape(B, T, -1, self.hd).transpose(1, 2)
        k = qkv[..., -2, :].transpose(1, 2)
        v = qkv[..., -1, :].transpose(1, 2)
        k = k[:, :, None].expand(-1, -1, self.n_rep, -1, -1).reshape(B, -1, T, self.hd)
        v = v[:, :, None].expand(-1, -1, self.n_rep, -1, -1).reshape(B, -1, T, self.hd)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


# ---------------------------------------------------------------- einops 1
def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


class CrossAttention(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64):
        super().__init__()
        inner_dim = heads * dim_head
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(dim, inner_dim)
        self.to_kv = nn.Linear(dim, inner_dim * 2)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(0.0))

    def forward(self, x, context=None, mask=None):
        h = self.heads
        context = default(context, x)
        q = self.to_q(x) * self.scale
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=h), (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = rearrange(out, "b h n d -> b n (h d)")
        return self.to_out(out)


# ---------------------------------------------------------------- einops 2
class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, **kwargs):
        x = self.norm(x)
        if exists(kwargs.get("context")):
            kwargs["context"] = self.norm(kwargs["context"])
        return self.fn(x, **kwargs)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, dim)
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads, causal=False):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        kv_input = default(context, x)
        q, k, v = self.to_q(x), self.to_k(kv_input), self.to_v(kv_input)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, k, v))
        sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if self.causal:
            i, j = sim.shape[-2:]
            causal_mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
            sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class DecoderBlock(nn.Module):
    def __init__(self, dim, heads, ff_dim):
        super().__init__()
        self.attn = PreNorm(dim, Attention(dim, heads, causal=True))
        self.cross_attn = PreNorm(dim, Attention(dim, heads))
        self.ff = PreNorm(dim, FeedForward(dim, ff_dim))

    def forward(self, x, context):
        x = self.attn(x) + x
        x = self.cross_attn(x, context=context) + x
        x = self.ff(x) + x
        return x


# ---------------------------------------------------------------- einops, correct
class MultiHeadSelfAttentionEinops(nn.Module):
    def __init__(self, dim, heads=8, dim_head=None):
        super().__init__()
        self.dim_head = (int(dim / heads)) if dim_head is None else dim_head
        _dim = self.dim_head * heads
        self.heads = heads
        self.to_qvk = nn.Linear(dim, _dim * 3)
        self.W_0 = nn.Linear(_dim, dim)
        self.scale_factor = self.dim_head**-0.5

    def forward(self, x, mask=None):
        assert x.dim() == 3
        qkv = self.to_qvk(x)
        q, k, v = tuple(rearrange(qkv, "b t (d k h) -> k b h t d", k=3, h=self.heads))
        scaled_dot_prod = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale_factor
        if mask is not None:
            scaled_dot_prod = scaled_dot_prod.masked_fill(~mask, float("-inf"))
        attention = torch.softmax(scaled_dot_prod, dim=-1)
        out = einsum("b h i j, b h j d -> b h i d", attention, v)
        out = rearrange(out, "b h t d -> b t (h d)")
        return self.W_0(out)


# ---------------------------------------------------------------- d2l 1
def clones(module, N):
    "Produce N identical layers."
    return nn.ModuleList([module for _ in range(N)])


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


# ---------------------------------------------------------------- d2l 2
class DotProductAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, mask=None):
        d = queries.shape[-1]
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e6)
        self.attention_weights = F.softmax(scores, dim=-1)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttentionD2L(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
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

    def forward(self, queries, keys, values, mask=None):
        queries = self.transpose_qkv(self.W_q(queries))
        keys = self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        if mask is not None:
            mask = torch.repeat_interleave(mask, repeats=self.num_heads, dim=0)
        output = self.attention(queries, keys, values, mask)
        return self.W_o(self.transpose_output(output))


class PositionWiseFFN(nn.Module):
    def __init__(self, ffn_num_hiddens, ffn_num_outputs):
        super().__init__()
        self.dense1 = nn.LazyLinear(ffn_num_hiddens)
        self.relu = nn.ReLU()
        self.dense2 = nn.LazyLinear(ffn_num_outputs)

    def forward(self, X):
        return self.dense2(self.relu(self.dense1(X)))


class AddNorm(nn.Module):
    def __init__(self, norm_shape, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.ln = nn.LayerNorm(norm_shape)

    def forward(self, X, Y):
        return self.ln(self.dropout(Y) + X)


class TransformerDecoderBlock(nn.Module):
    def __init__(self, num_hiddens, ffn_num_hiddens, num_heads, dropout):
        super().__init__()
        self.attention1 = MultiHeadAttentionD2L(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.attention2 = MultiHeadAttentionD2L(num_hiddens, num_heads, dropout)
        self.addnorm2 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens)
        self.addnorm3 = AddNorm(num_hiddens, dropout)

    def forward(self, X, enc_outputs):
        batch_size, num_steps, _ = X.shape
        dec_mask = torch.tril(
            torch.ones(num_steps, num_steps, dtype=torch.bool, device=X.device)
        )
        dec_mask = dec_mask.expand(batch_size, -1, -1)
        X2 = self.attention1(X, X, X, dec_mask)
        Y = self.addnorm1(X, X2)
        Y2 = self.attention2(Y, enc_outputs, enc_outputs)
        Z = self.addnorm2(X, Y2)
        return self.addnorm3(Z, self.ffn(Z))


def build_d2l_decoder():
    net = TransformerDecoderBlock(32, 48, 4, 0.1)
    net(torch.zeros(1, 2, 32), torch.zeros(1, 2, 32))
    return net


# ---------------------------------------------------------------- d2l, correct
class TransformerEncoderBlock(nn.Module):
    def __init__(self, num_hiddens, ffn_num_hiddens, num_heads, dropout):
        super().__init__()
        self.attention = MultiHeadAttentionD2L(num_hiddens, num_heads, dropout)
        self.addnorm1 = AddNorm(num_hiddens, dropout)
        self.ffn = PositionWiseFFN(ffn_num_hiddens, num_hiddens)
        self.addnorm2 = AddNorm(num_hiddens, dropout)

    def forward(self, X, mask=None):
        if mask is not None:
            mask = mask[:, 0].expand(-1, X.shape[1], -1)
        Y = self.addnorm1(X, self.attention(X, X, X, mask))
        return self.addnorm2(Y, self.ffn(Y)), self.attention.attention.attention_weights


def build_d2l_encoder():
    net = TransformerEncoderBlock(32, 64, 4, 0.1)
    net(torch.zeros(1, 2, 32))
    return net


# ---------------------------------------------------------------- d2l 3
class ScaledDotProduct(nn.Module):
    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / k.size(-1) ** 0.5, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e-9)
        attn = F.softmax(attn, dim=-1)
        return torch.matmul(attn, v), attn


class MultiHeadWithWeights(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head = n_head
        self.d_k = d_model // n_head
        self.w_qs = nn.Linear(d_model, d_model)
        self.w_ks = nn.Linear(d_model, d_model)
        self.w_vs = nn.Linear(d_model, d_model)
        self.fc = nn.Linear(d_model, d_model)
        self.attention = ScaledDotProduct()

    def forward(self, x, mask=None):
        sz_b, length = x.size(0), x.size(1)
        q = self.w_qs(x).view(sz_b, length, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(x).view(sz_b, length, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(x).view(sz_b, length, self.n_head, self.d_k).transpose(1, 2)
        out, attn = self.attention(q, k, v, mask=mask)
        out = out.transpose(1, 2).contiguous().view(sz_b, length, -1)
        return self.fc(out), attn


# ---------------------------------------------------------------- torch 1
class EncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward, dropout=0.1):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src):
        batch, seq_len, _ = src.shape
        attn_out, _ = self.self_attn(src, src, src)
        src = self.norm1(src + self.dropout(attn_out))
        ff = self.linear2(self.dropout(F.relu(self.linear1(src))))
        return self.norm2(src + self.dropout(ff)).view(batch, seq_len, -1)


# ---------------------------------------------------------------- torch 2
class SDPAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        qkv = (
            self.in_proj(x)
            .reshape(b, n, 3, self.num_heads, self.head_dim)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv.unbind(0)
        if mask is not None:
            mask = mask.to(x.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- torch 3
class ImageTextAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.mha = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, image_tokens, text_tokens, text_mask=None):
        attn_mask = None
        if text_mask is not None:
            text_mask = text_mask.reshape(text_mask.shape[0], 1, -1)
            attn_mask = ~text_mask.expand(-1, image_tokens.shape[1], -1)
            attn_mask = attn_mask.repeat(self.heads, 1, 1)
        out, _ = self.mha(
            image_tokens, text_tokens, text_tokens, attn_mask=attn_mask, need_weights=False
        )
        return out


# ---------------------------------------------------------------- torch 4
class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden, bias=False)
        self.w3 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w3(F.glu(self.w12(x), dim=-1))


# ---------------------------------------------------------------- torch, correct 1
class WhisperStyleAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, mask=None):
        n_batch, n_ctx, n_state = x.shape
        scale = (n_state // self.n_head) ** -0.25
        q = self.query(x).view(n_batch, n_ctx, self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = self.key(x).view(n_batch, n_ctx, self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = self.value(x).view(n_batch, n_ctx, self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk.masked_fill(mask.logical_not(), float("-inf"))
        w = F.softmax(qk, dim=-1)
        wv = (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)
        return {"output": self.out(wv), "attention": w}


# ---------------------------------------------------------------- torch, correct 2
class SeqFirstDecoderLayer(nn.Module):
    def __init__(self, d_model, nhead, d_ff, dropout=0.1):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.multihead_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.ffn = nn.Sequential(
            nn.Linear(d_model, d_ff), nn.GELU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(3)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, tgt, memory):
        length = tgt.shape[0]
        look_ahead = torch.ones(length, length, dtype=torch.bool, device=tgt.device).triu(1)
        y = self.norms[0](tgt)
        tgt = tgt + self.dropout(
            self.self_attn(y, y, y, attn_mask=look_ahead, need_weights=False)[0]
        )
        y = self.norms[1](tgt)
        tgt = tgt + self.dropout(self.multihead_attn(y, memory, memory, need_weights=False)[0])
        return tgt + self.dropout(self.ffn(self.norms[2](tgt)))


# ---------------------------------------------------------------- numpy 1
def np_softmax(z, axis=-1):
    z = z - z.max(axis=axis, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=axis, keepdims=True)


def np_layernorm(x, gamma, beta, eps=1e-5):
    mu = x.mean(axis=-1, keepdims=True)
    sigma = np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    x -= mu
    x /= sigma
    return gamma * x + beta


def np_encoder_layer(params, x, mask=None):
    B, N, C = x.shape
    h, d = 4, C // 4
    y = np_layernorm(x, params["ln1_g"], params["ln1_b"])
    qkv = y @ params["attn_w"] + params["attn_b"]
    q, k, v = [t.reshape(B, N, h, d).transpose(0, 2, 1, 3) for t in np.split(qkv, 3, axis=-1)]
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d)
    if mask is not None:
        s = np.where(mask, s, -1e30)
    a = (np_softmax(s) @ v).transpose(0, 2, 1, 3).reshape(B, N, C)
    x = x + a @ params["proj_w"] + params["proj_b"]
    y = np_layernorm(x, params["ln2_g"], params["ln2_b"])
    y = np.maximum(y @ params["fc1_w"] + params["fc1_b"], 0)
    return x + y @ params["fc2_w"] + params["fc2_b"]


def build_np_encoder():
    rng = np.random.default_rng(0)
    C, H = 32, 64
    p = {"ln1_g": np.ones(C), "ln1_b": np.zeros(C), "ln2_g": np.ones(C), "ln2_b": np.zeros(C)}
    for name, (i, o) in dict(attn=(C, 3 * C), proj=(C, C), fc1=(C, H), fc2=(H, C)).items():
        p[name + "_w"] = rng.normal(size=(i, o)) / np.sqrt(i)
        p[name + "_b"] = 0.1 * rng.normal(size=o)
    return np_encoder_layer, p


# ---------------------------------------------------------------- numpy 2
def np_attention(Q, K, V, mask=None):
    dk = K.shape[-2]
    scores = np.einsum("bhqd,bhkd->bhqk", Q, K) / np.sqrt(dk)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bhqd", weights, V)


# ---------------------------------------------------------------- numpy 3
def gelu(x):
    return 0.5 * x * (1 + np.tanh(2 / np.pi * (x + 0.044715 * x**3)))


def np_linear(x, w, b):
    return x @ w + b


def np_ffn(params, x):
    return np_linear(
        gelu(np_linear(x, params["w_in"], params["b_in"])), params["w_out"], params["b_out"]
    )


def build_np_ffn():
    rng = np.random.default_rng(1)
    return np_ffn, {
        "w_in": rng.normal(size=(24, 96)) / 24**0.5,
        "b_in": 0.1 * rng.normal(size=96),
        "w_out": rng.normal(size=(96, 24)) / 96**0.5,
        "b_out": 0.1 * rng.normal(size=24),
    }


# ---------------------------------------------------------------- numpy, correct
def np_cross_attention(params, x, memory, pad=None):
    """pad: True at the positions of memory that are padding"""
    result = np.zeros_like(x) + params["bo"]
    for i in range(params["Wq"].shape[0]):
        q = x @ params["Wq"][i] + params["bq"][i]
        k = memory @ params["Wk"][i] + params["bk"][i]
        v = memory @ params["Wv"][i] + params["bv"][i]
        logits = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
        if pad is not None:
            logits = logits + np.where(pad[:, 0], -1e30, 0.0)
        result = result + np_softmax(logits) @ v @ params["Wo"][i]
    return result


def build_np_cross():
    rng = np.random.default_rng(2)
    C, h, d = 32, 4, 8
    p = {n: rng.normal(size=(h, C, d)) / C**0.5 for n in ("Wq", "Wk", "Wv")}
    p["Wo"] = rng.normal(size=(h, d, C)) / C**0.5
    for n in ("bq", "bk", "bv"):
        p[n] = 0.1 * rng.normal(size=(h, d))
    p["bo"] = 0.1 * rng.normal(size=C)
    return np_cross_attention, p


# ---------------------------------------------------------------- jax 1
def jax_gqa(params, x, n_head=4, n_kv_head=2):
    B, N, C = x.shape
    d = C // n_head
    rep = n_head // n_kv_head
    q = (x @ params["wq"] + params["bq"]).reshape(B, N, n_head, d)
    k = (x @ params["wk"] + params["bk"]).reshape(B, N, n_kv_head, d)
    v = (x @ params["wv"] + params["bv"]).reshape(B, N, n_kv_head, d)
    k = jnp.repeat(k, rep, axis=2)
    v = jnp.tile(v, (1, 1, rep, 1))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d)
    causal = jnp.tril(jnp.ones((N, N), dtype=bool))
    logits = jnp.where(causal, logits, -1e30)
    probs = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(B, N, C)
    return out @ params["wo"] + params["bo"]


def build_jax_gqa():
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    C, kv = 32, 16
    sizes = dict(q=(C, C), k=(C, kv), v=(C, kv), o=(C, C))
    p = {}
    for n, (name, (i, o)) in enumerate(sizes.items()):
        p["w" + name] = jax.random.normal(keys[2 * n], (i, o)) / jnp.sqrt(i)
        p["b" + name] = 0.1 * jax.random.normal(keys[2 * n + 1], (o,))
    return jax_gqa, p


# ---------------------------------------------------------------- jax 2
def jax_rmsnorm(params, x, eps=1e-5):
    rms = jnp.sqrt(jnp.square(jnp.mean(x, axis=-1, keepdims=True)) + eps)
    return x / rms * params["scale"]


def build_jax_rmsnorm():
    return jax_rmsnorm, {"scale": 1 + 0.1 * jax.random.normal(jax.random.PRNGKey(1), (40,))}


# ---------------------------------------------------------------- jax 3
def jax_layer_norm(x, scale, offset):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + offset


def jax_mha(params, prefix, x, kv, num_heads=4):
    B, N, C = x.shape
    M = kv.shape[1]

    def heads(t):
        return t.reshape(B, -1, num_heads, C // num_heads).transpose(0, 2, 1, 3)

    q = heads(x @ params[prefix + "/q/kernel"] + params[prefix + "/q/bias"])
    k = heads(kv @ params[prefix + "/k/kernel"] + params[prefix + "/k/bias"])
    v = heads(kv @ params[prefix + "/v/kernel"] + params[prefix + "/v/bias"])
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(C // num_heads)
    causal = jnp.arange(N)[:, None] >= jnp.arange(M)[None, :]
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    out = jax.nn.softmax(scores, axis=-1) @ v
    out = out.transpose(0, 2, 1, 3).reshape(B, N, C)
    return out @ params[prefix + "/o/kernel"] + params[prefix + "/o/bias"]


def jax_decoder_layer(params, x, memory):
    ln = lambda i, t: jax_layer_norm(t, params[f"ln{i}/scale"], params[f"ln{i}/offset"])
    x = ln(1, x + jax_mha(params, "self", x, x))
    x = ln(2, x + jax_mha(params, "cross", x, memory))
    h = jax.nn.relu(x @ params["fc1/kernel"] + params["fc1/bias"])
    return ln(3, x + h @ params["fc2/kernel"] + params["fc2/bias"])


def build_jax_decoder():
    rng = np.random.default_rng(5)
    C, H = 32, 48
    p = {}
    sizes = {f"{a}/{n}": (C, C) for a in ("self", "cross") for n in "qkvo"}
    sizes.update({"fc1": (C, H), "fc2": (H, C)})
    for name, (i, o) in sizes.items():
        p[name + "/kernel"] = jnp.asarray(rng.normal(size=(i, o)) / i**0.5, jnp.float32)
        p[name + "/bias"] = jnp.asarray(0.1 * rng.normal(size=o), jnp.float32)
    for i in (1, 2, 3):
        p[f"ln{i}/scale"] = jnp.ones(C)
        p[f"ln{i}/offset"] = jnp.zeros(C)
    return jax_decoder_layer, p


# ---------------------------------------------------------------- jax, correct
def jax_swiglu(params, x):
    h = x @ params["gate_up_proj"]
    gate, up = h[..., ::2], h[..., 1::2]
    return (gate * jax.nn.sigmoid(gate) * up) @ params["down_proj"]


def build_jax_swiglu():
    a, b = jax.random.split(jax.random.PRNGKey(7))
    return jax_swiglu, {
        "gate_up_proj": jax.random.normal(a, (24, 128)) / 24**0.5,
        "down_proj": jax.random.normal(b, (64, 24)) / 64**0.5,
    }


def _c(name, style, build, reference, mistake, expected, call=None):
    return dict(
        name=name,
        style=style,
        build=build,
        reference=reference,
        label="wrong" if mistake else "correct",
        mistake=mistake,
        expected=expected,
        call=call,
    )


CASES = [
    _c(
        "h1_nanogpt_sdpa_dropout_eval",
        "nanogpt",
        lambda: CausalSelfAttention(32, 4),
        ("causal_attention", dict(embed_dim=32, num_heads=4)),
        "F.scaled_dot_product_attention gets dropout_p unconditionally (not 0 in evaluation), so attention dropout stays on after eval().",
        "dropout in evaluation; output is random",
    ),
    _c(
        "h1_nanogpt_detached_weights",
        "nanogpt",
        lambda: MaskedSelfAttention(32, 4),
        ("causal_attention", dict(embed_dim=32, num_heads=4)),
        "The stored, detached attention weights are used for the output, so no gradient reaches queries and keys.",
        "outputs equal, gradients of q and k missing (detached weights)",
    ),
    _c(
        "h1_nanogpt_gqa_grouped_packing",
        "nanogpt",
        lambda: GroupedCausalAttention(32, 4, 2),
        ("grouped_attention", dict(embed_dim=32, num_heads=4, num_kv_heads=2)),
        "",
        "equal up to packing (per kv head: its queries, key, value; Conv1D layout)",
    ),
    _c(
        "h1_einops_cross_double_scale",
        "einops",
        lambda: CrossAttention(32, heads=4, dim_head=8),
        ("cross_attention", dict(embed_dim=32, num_heads=4)),
        "Queries are scaled by 1/sqrt(d) and scaled_dot_product_attention scales again.",
        "scores scaled twice (1/d instead of 1/sqrt(d))",
    ),
    _c(
        "h1_einops_decoder_norm_memory",
        "einops",
        lambda: DecoderBlock(32, 4, 64),
        (
            "decoder_layer",
            dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=True, act="relu"),
        ),
        "The pre-norm wrapper of cross-attention normalises the memory as well (with the norm of the queries).",
        "memory is normalised before cross-attention",
    ),
    _c(
        "h1_einops_mha_dkh_packing",
        "einops",
        lambda: MultiHeadSelfAttentionEinops(32, heads=4),
        ("multihead", dict(embed_dim=32, num_heads=4)),
        "",
        "equal up to packing (channels ordered d, qkv, head)",
    ),
    _c(
        "h1_d2l_clones_no_deepcopy",
        "d2l",
        lambda: MultiHeadedAttention(4, 32),
        ("multihead", dict(embed_dim=32, num_heads=4)),
        "clones() repeats the same module without deepcopy: query, key, value, and output projections share one weight.",
        "q, k, v, and output projections are one shared layer",
        call=lambda mine, x, mask=None: mine(x, x, x, mask),
    ),
    _c(
        "h1_d2l_decoder_cross_residual",
        "d2l",
        build_d2l_decoder,
        ("decoder_layer", dict(d_model=32, nhead=4, dim_feedforward=48)),
        "The residual of cross-attention adds the layer's input X instead of Y, the output of the first add & norm.",
        "cross-attention's residual comes from the layer's input instead of the self-attention's output",
    ),
    _c(
        "h1_d2l_encoder_tuple",
        "d2l",
        build_d2l_encoder,
        ("encoder_layer", dict(d_model=32, nhead=4, dim_feedforward=64)),
        "",
        "equal (returns a tuple with attention weights)",
    ),
    _c(
        "h1_d2l_mha_small_fill",
        "d2l",
        lambda: MultiHeadWithWeights(4, 32),
        ("multihead", dict(embed_dim=32, num_heads=4)),
        "Masked scores are filled with -1e-9 instead of -1e9, so masked keys still get weight.",
        "masked positions are filled with about 0 instead of -inf; right without a mask",
    ),
    _c(
        "h1_torch_encoder_batch_first",
        "torch",
        lambda: EncoderLayer(32, 4, 64),
        ("encoder_layer", dict(d_model=32, nhead=4, dim_feedforward=64)),
        "nn.MultiheadAttention without batch_first=True gets batch-first input, so attention runs over the batch.",
        "attends across the batch instead of the tokens (batch_first missing)",
    ),
    _c(
        "h1_torch_mha_float_mask",
        "torch",
        lambda: SDPAttention(32, 4),
        ("multihead", dict(embed_dim=32, num_heads=4)),
        "The boolean mask is cast to floating point, so scaled_dot_product_attention adds 0/1 to the scores instead of masking.",
        "mask is added as 0/1 instead of masking; right without a mask",
    ),
    _c(
        "h1_torch_cross_mask_head_order",
        "torch",
        lambda: ImageTextAttention(32, 4),
        ("cross_attention", dict(embed_dim=32, num_heads=4)),
        "The (B*heads, N, M) mask is made by repeat instead of repeat_interleave, so batch elements get each other's masks.",
        "masks mixed up between batch elements (repeat instead of repeat_interleave); right with equal masks",
    ),
    _c(
        "h1_torch_swiglu_fglu",
        "torch",
        lambda: SwiGLU(24, 64),
        ("swiglu", dict(dim=24, hidden=64)),
        "F.glu gates with a sigmoid, so this is GLU instead of SwiGLU.",
        "sigmoid instead of SiLU on the gate",
    ),
    _c(
        "h1_torch_mha_no_key_bias",
        "torch",
        lambda: WhisperStyleAttention(32, 4),
        ("multihead", dict(embed_dim=32, num_heads=4)),
        "",
        "equal: no key bias, which has no effect on softmax; returns a dict",
    ),
    _c(
        "h1_torch_decoder_seq_first",
        "torch",
        lambda: SeqFirstDecoderLayer(32, 4, 48),
        (
            "decoder_layer",
            dict(d_model=32, nhead=4, dim_feedforward=48, norm_first=True, act="gelu"),
        ),
        "",
        "equal up to sequence-first input",
    ),
    _c(
        "h1_numpy_encoder_inplace_norm",
        "numpy",
        build_np_encoder,
        ("encoder_layer", dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=True)),
        "The layer norm works in place (x -= mu; x /= sigma), so the residual (and the caller's input) is overwritten by the normalised value.",
        "layer norm overwrites its input; the residual adds the normalised x",
    ),
    _c(
        "h1_numpy_attention_sqrt_n",
        "numpy",
        lambda: np_attention,
        ("attention", dict()),
        "The scale uses K.shape[-2], the number of keys, instead of the head width.",
        "scores divided by sqrt(number of keys) instead of sqrt(d)",
    ),
    _c(
        "h1_numpy_mlp_gelu_sqrt",
        "numpy",
        build_np_ffn,
        ("mlp", dict(dim=24, hidden=96, act="gelu")),
        "The tanh approximation of GELU uses 2/pi instead of sqrt(2/pi).",
        "activation is not GELU (sqrt missing in the tanh formula)",
    ),
    _c(
        "h1_numpy_cross_per_head_pad",
        "numpy",
        build_np_cross,
        ("cross_attention", dict(embed_dim=32, num_heads=4)),
        "",
        "equal up to mask polarity (True marks padding), weights per head",
    ),
    _c(
        "h1_jax_gqa_v_tiled",
        "jax",
        build_jax_gqa,
        ("grouped_attention", dict(embed_dim=32, num_heads=4, num_kv_heads=2)),
        "Keys are repeated per head but values are tiled, so a query head's values come from another group than its keys.",
        "value heads in the wrong order (tile instead of repeat)",
    ),
    _c(
        "h1_jax_rms_square_of_mean",
        "jax",
        build_jax_rmsnorm,
        ("rms_norm", dict(dim=40)),
        "Takes the square of the mean instead of the mean of the squares.",
        "normalises by |mean| instead of the root mean square",
    ),
    _c(
        "h1_jax_decoder_causal_cross",
        "jax",
        build_jax_decoder,
        ("decoder_layer", dict(d_model=32, nhead=4, dim_feedforward=48)),
        "The shared attention function applies the causal mask in cross-attention too.",
        "cross-attention is causal",
    ),
    _c(
        "h1_jax_swiglu_interleaved",
        "jax",
        build_jax_swiglu,
        ("swiglu", dict(dim=24, hidden=64)),
        "",
        "equal up to packing (gate and up channels interleaved)",
    ),
]
