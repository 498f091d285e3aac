import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat, einsum
from einops.layers.torch import Rearrange

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


# ---------------------------------------------------------------- 1. minGPT
def build_mingpt():
    @dataclass
    class Config:
        vocab_size: int = 29
        block_size: int = 16
        n_layer: int = 2
        n_head: int = 4
        n_embd: int = 32

    class NewGELU(nn.Module):
        def forward(self, x):
            return (
                0.5
                * x
                * (
                    1.0
                    + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
                )
            )

    class SelfAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.key = nn.Linear(config.n_embd, config.n_embd)
            self.query = nn.Linear(config.n_embd, config.n_embd)
            self.value = nn.Linear(config.n_embd, config.n_embd)
            self.attn_drop = nn.Dropout(0.1)
            self.resid_drop = nn.Dropout(0.1)
            self.proj = nn.Linear(config.n_embd, config.n_embd)
            self.register_buffer(
                "mask",
                torch.tril(torch.ones(config.block_size, config.block_size)).view(
                    1, 1, config.block_size, config.block_size
                ),
            )
            self.n_head = config.n_head

        def forward(self, x, layer_past=None):
            B, T, C = x.size()
            k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_drop(att)
            y = att @ v
            y = y.transpose(1, 2).contiguous().view(B, T, C)
            return self.resid_drop(self.proj(y))

    class Block(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.ln1 = nn.LayerNorm(config.n_embd)
            self.ln2 = nn.LayerNorm(config.n_embd)
            self.attn = SelfAttention(config)
            self.mlp = nn.Sequential(
                nn.Linear(config.n_embd, 4 * config.n_embd),
                NewGELU(),
                nn.Linear(4 * config.n_embd, config.n_embd),
                nn.Dropout(0.1),
            )

        def forward(self, x):
            x = x + self.attn(self.ln1(x))
            x = x + self.mlp(self.ln2(x))
            return x

    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.block_size = config.block_size
            self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
            self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
            self.drop = nn.Dropout(0.1)
            self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
            self.ln_f = nn.LayerNorm(config.n_embd)
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.data.normal_(mean=0.0, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.data.zero_()

        def forward(self, idx, targets=None):
            b, t = idx.size()
            assert t <= self.block_size, "Cannot forward, model block size is exhausted."
            x = self.drop(self.tok_emb(idx) + self.pos_emb[:, :t, :])
            x = self.blocks(x)
            x = self.ln_f(x)
            logits = F.linear(x, self.tok_emb.weight)
            loss = None
            if targets is not None:
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
            return {"loss": loss, "logits": logits}

    return GPT(Config())


case(
    "mingpt_dict_posparam",
    "nanogpt",
    build_mingpt,
    ("gpt", dict(vocab_size=29, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    expected="equal; output is a dict, logits to be taken",
    call=lambda mine, tokens: mine(tokens)["logits"],
)


# ---------------------------------------------------------------- 2. Head list
def build_headlist():
    n_embd, n_head, block_size = 32, 4, 64

    class Head(nn.Module):
        def __init__(self, head_size):
            super().__init__()
            self.key = nn.Linear(n_embd, head_size)
            self.query = nn.Linear(n_embd, head_size)
            self.value = nn.Linear(n_embd, head_size)
            self.register_buffer(
                "tril", torch.tril(torch.ones(block_size, block_size)), persistent=False
            )

        def forward(self, x):
            B, T, C = x.shape
            k = self.key(x)
            q = self.query(x)
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
            wei = F.softmax(wei, dim=-1)
            return wei @ self.value(x)

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_heads, head_size):
            super().__init__()
            self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])
            self.proj = nn.Linear(head_size * num_heads, n_embd)
            self.dropout = nn.Dropout(0.2)

        def forward(self, x):
            out = torch.cat([h(x) for h in self.heads], dim=-1)
            return self.dropout(self.proj(out))

    return MultiHeadAttention(n_head, n_embd // n_head)


case(
    "karpathy_heads",
    "nanogpt",
    build_headlist,
    ("causal_attention", dict(embed_dim=32, num_heads=4, bias=True)),
    expected="equal; one module per head",
)


# ---------------------------------------------------------------- 3. llama, fused wqkv, complex rotary on halves
def build_llama():
    @dataclass
    class ModelArgs:
        dim: int = 32
        n_layers: int = 2
        n_heads: int = 4
        n_kv_heads: int = 2
        vocab_size: int = 31
        hidden_dim: int = 48
        norm_eps: float = 1e-5
        max_seq_len: int = 64

    def precompute_freqs_cis(dim, end, theta=10000.0):
        freqs = 1.0 / (
            theta ** (torch.arange(0, dim, 2, dtype=torch.float64)[: (dim // 2)] / dim)
        )
        t = torch.arange(end, dtype=torch.float64)
        freqs = torch.outer(t, freqs)
        return torch.polar(torch.ones_like(freqs), freqs)

    def apply_rotary_emb(x, freqs_cis):
        re, im = x.chunk(2, dim=-1)
        x_ = torch.complex(re, im) * freqs_cis[None, :, None, :]
        return torch.cat([x_.real, x_.imag], dim=-1).type_as(x)

    class RMSNorm(nn.Module):
        def __init__(self, dim, eps):
            super().__init__()
            self.eps = eps
            self.weight = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    class Attention(nn.Module):
        def __init__(self, args):
            super().__init__()
            self.n_heads, self.n_kv = args.n_heads, args.n_kv_heads
            self.head_dim = args.dim // args.n_heads
            self.wqkv = nn.Linear(
                args.dim, (args.n_heads + 2 * args.n_kv_heads) * self.head_dim, bias=False
            )
            self.wo = nn.Linear(args.dim, args.dim, bias=False)

        def forward(self, x, freqs_cis):
            b, s, _ = x.shape
            kv = self.n_kv * self.head_dim
            q, k, v = self.wqkv(x).split([self.n_heads * self.head_dim, kv, kv], dim=-1)
            q = apply_rotary_emb(q.view(b, s, self.n_heads, self.head_dim), freqs_cis)
            k = apply_rotary_emb(k.view(b, s, self.n_kv, self.head_dim), freqs_cis)
            v = v.view(b, s, self.n_kv, self.head_dim)
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            rep = self.n_heads // self.n_kv
            k, v = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.wo(y.transpose(1, 2).reshape(b, s, -1))

    class FeedForward(nn.Module):
        def __init__(self, dim, hidden_dim):
            super().__init__()
            self.w1 = nn.Linear(dim, hidden_dim, bias=False)
            self.w2 = nn.Linear(hidden_dim, dim, bias=False)
            self.w3 = nn.Linear(dim, hidden_dim, bias=False)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    class TransformerBlock(nn.Module):
        def __init__(self, layer_id, args):
            super().__init__()
            self.layer_id = layer_id
            self.attention = Attention(args)
            self.feed_forward = FeedForward(args.dim, args.hidden_dim)
            self.attention_norm = RMSNorm(args.dim, args.norm_eps)
            self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

        def forward(self, x, freqs_cis):
            h = x + self.attention(self.attention_norm(x), freqs_cis)
            return h + self.feed_forward(self.ffn_norm(h))

    class Transformer(nn.Module):
        def __init__(self, params):
            super().__init__()
            self.params = params
            self.tok_embeddings = nn.Embedding(params.vocab_size, params.dim)
            self.layers = nn.ModuleList(
                TransformerBlock(i, params) for i in range(params.n_layers)
            )
            self.norm = RMSNorm(params.dim, params.norm_eps)
            self.output = nn.Linear(params.dim, params.vocab_size, bias=False)
            self.tok_embeddings.weight = self.output.weight
            self.freqs_cis = precompute_freqs_cis(
                params.dim // params.n_heads, params.max_seq_len
            )

        def forward(self, tokens, start_pos=0):
            h = self.tok_embeddings(tokens)
            freqs_cis = self.freqs_cis[start_pos : start_pos + tokens.shape[1]].to(h.device)
            for layer in self.layers:
                h = layer(h, freqs_cis)
            return self.output(self.norm(h))

    return Transformer(ModelArgs())


LLAMA = dict(vocab_size=31, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=48)
case("llama_wqkv_complex", "nanogpt", build_llama, ("llama", LLAMA))


# ---------------------------------------------------------------- 4. einops cross attention
def build_cross():
    def exists(val):
        return val is not None

    def default(val, d):
        return val if exists(val) else d

    class CrossAttention(nn.Module):
        def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
            super().__init__()
            inner_dim = dim_head * heads
            context_dim = default(context_dim, query_dim)
            self.scale = dim_head**-0.5
            self.heads = heads
            self.to_q = nn.Linear(query_dim, inner_dim)
            self.to_kv = nn.Linear(context_dim, inner_dim * 2)
            self.dropout = nn.Dropout(dropout)
            self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

        def forward(self, x, context=None, mask=None):
            h = self.heads
            q = self.to_q(x)
            context = default(context, x)
            k, v = self.to_kv(context).chunk(2, dim=-1)
            q, k, v = map(lambda t: rearrange(t, "b n (h d) -> (b h) n d", h=h), (q, k, v))
            sim = torch.einsum("b i d, b j d -> b i j", q, k) * self.scale
            if exists(mask):
                mask = rearrange(mask, "b ... -> b (...)")
                max_neg_value = -torch.finfo(sim.dtype).max
                mask = repeat(mask, "b j -> (b h) () j", h=h)
                sim.masked_fill_(~mask, max_neg_value)
            attn = self.dropout(sim.softmax(dim=-1))
            out = torch.einsum("b i j, b j d -> b i d", attn, v)
            out = rearrange(out, "(b h) n d -> b n (h d)", h=h)
            return self.to_out(out)

    return CrossAttention(32, heads=4, dim_head=8)


case(
    "perceiver_cross",
    "einops",
    build_cross,
    ("cross_attention", dict(embed_dim=32, num_heads=4)),
    call=lambda mine, x, context, mask=None: mine(x, context=context, mask=mask),
)


# ---------------------------------------------------------------- 5. einops raw parameters
def build_raw():
    class MHSA(nn.Module):
        def __init__(self, c, heads):
            super().__init__()
            d = c // heads
            self.kernel = nn.Parameter(torch.randn(heads, c, 3, d) * c**-0.5)
            self.offset = nn.Parameter(torch.randn(3, heads, 1, d) * 0.1)
            self.combine = nn.Parameter(torch.randn(heads, d, c) * c**-0.5)
            self.shift = nn.Parameter(torch.zeros(c))

        def forward(self, inp, mask=None):
            t = einsum(inp, self.kernel, "b n c, h c three d -> three b h n d")
            v, k, q = (t + rearrange(self.offset, "three h one d -> three () h one d")).unbind(
                0
            )
            logits = einsum(q, k, "b h i d, b h j d -> b h i j") / q.shape[-1] ** 0.5
            if mask is not None:
                logits = torch.where(mask, logits, torch.full_like(logits, -torch.inf))
            weights = torch.softmax(logits, -1)
            return (
                einsum(weights, v, self.combine, "b h i j, b h j d, h d c -> b i c")
                + self.shift
            )

    return MHSA(32, 4)


case(
    "raw_kernel_vkq",
    "einops",
    build_raw,
    ("multihead", dict(embed_dim=32, num_heads=4)),
    expected="equal; raw 4-dimensional kernel in v, k, q order",
)


# ---------------------------------------------------------------- 6. einops prenorm encoder layer
def build_prenorm():
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
        def __init__(self, dim, heads):
            super().__init__()
            self.scale = (dim // heads) ** -0.5
            self.to_qkv = nn.Sequential(
                nn.Linear(dim, dim * 3),
                Rearrange("b n (h qkv d) -> qkv b h n d", h=heads, qkv=3),
            )
            self.to_out = nn.Sequential(Rearrange("b h n d -> b n (h d)"), nn.Linear(dim, dim))

        def forward(self, x):
            q, k, v = self.to_qkv(x)
            dots = (q * self.scale) @ rearrange(k, "b h n d -> b h d n")
            return self.to_out(dots.softmax(dim=-1) @ v)

    return nn.Sequential(
        Residual(PreNorm(32, Attention(32, 4))),
        Residual(PreNorm(32, FeedForward(32, 64))),
    )


case(
    "residual_prenorm_sequential",
    "einops",
    build_prenorm,
    (
        "encoder_layer",
        dict(d_model=32, nhead=4, dim_feedforward=64, norm_first=True, act="gelu"),
    ),
    expected="equal; takes no mask",
)


# ---------------------------------------------------------------- 7. decoder layer with Conv1d feed forward
def build_jadore_decoder():
    class ScaledDotProductAttention(nn.Module):
        def __init__(self, temperature, attn_dropout=0.1):
            super().__init__()
            self.temperature = temperature
            self.dropout = nn.Dropout(attn_dropout)

        def forward(self, q, k, v, mask=None):
            attn = torch.bmm(q, k.transpose(1, 2))
            attn = attn / self.temperature
            if mask is not None:
                attn = attn.masked_fill(mask, -np.inf)
            attn = self.dropout(F.softmax(attn, dim=2))
            return torch.bmm(attn, v), attn

    class MultiHeadAttention(nn.Module):
        def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
            super().__init__()
            self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
            self.w_qs = nn.Linear(d_model, n_head * d_k)
            self.w_ks = nn.Linear(d_model, n_head * d_k)
            self.w_vs = nn.Linear(d_model, n_head * d_v)
            self.attention = ScaledDotProductAttention(temperature=np.power(d_k, 0.5))
            self.layer_norm = nn.LayerNorm(d_model)
            self.fc = nn.Linear(n_head * d_v, d_model)
            self.dropout = nn.Dropout(dropout)

        def forward(self, q, k, v, mask=None):
            d_k, d_v, n_head = self.d_k, self.d_v, self.n_head
            sz_b, len_q, _ = q.size()
            sz_b, len_k, _ = k.size()
            residual = q
            q = self.w_qs(q).view(sz_b, len_q, n_head, d_k)
            k = self.w_ks(k).view(sz_b, len_k, n_head, d_k)
            v = self.w_vs(v).view(sz_b, len_k, n_head, d_v)
            q = q.permute(2, 0, 1, 3).contiguous().view(-1, len_q, d_k)
            k = k.permute(2, 0, 1, 3).contiguous().view(-1, len_k, d_k)
            v = v.permute(2, 0, 1, 3).contiguous().view(-1, len_k, d_v)
            if mask is not None:
                mask = mask.repeat(n_head, 1, 1)
            output, attn = self.attention(q, k, v, mask=mask)
            output = output.view(n_head, sz_b, len_q, d_v)
            output = output.permute(1, 2, 0, 3).contiguous().view(sz_b, len_q, -1)
            output = self.dropout(self.fc(output))
            return self.layer_norm(output + residual), attn

    class PositionwiseFeedForward(nn.Module):
        def __init__(self, d_in, d_hid, dropout=0.1):
            super().__init__()
            self.w_1 = nn.Conv1d(d_in, d_hid, 1)
            self.w_2 = nn.Conv1d(d_hid, d_in, 1)
            self.layer_norm = nn.LayerNorm(d_in)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            output = x.transpose(1, 2)
            output = self.w_2(F.relu(self.w_1(output)))
            output = self.dropout(output.transpose(1, 2))
            return self.layer_norm(output + x)

    class DecoderLayer(nn.Module):
        def __init__(self, d_model, d_inner, n_head, d_k, d_v):
            super().__init__()
            self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v)
            self.enc_attn = MultiHeadAttention(n_head, d_model, d_k, d_v)
            self.pos_ffn = PositionwiseFeedForward(d_model, d_inner)

        def forward(
            self,
            dec_input,
            enc_output,
            non_pad_mask=None,
            slf_attn_mask=None,
            dec_enc_attn_mask=None,
        ):
            dec_output, dec_slf_attn = self.slf_attn(
                dec_input, dec_input, dec_input, mask=slf_attn_mask
            )
            dec_output, dec_enc_attn = self.enc_attn(
                dec_output, enc_output, enc_output, mask=dec_enc_attn_mask
            )
            dec_output = self.pos_ffn(dec_output)
            return dec_output, dec_slf_attn, dec_enc_attn

    return DecoderLayer(32, 64, 4, 8, 8)


def call_jadore(mine, x, memory):
    n = x.shape[1]
    subsequent = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    return mine(x, memory, slf_attn_mask=subsequent.expand(x.shape[0], n, n))[0]


DEC = dict(d_model=32, nhead=4, dim_feedforward=64)
case(
    "jadore_decoder_conv1d",
    "d2l",
    build_jadore_decoder,
    ("decoder_layer", DEC),
    expected="equal; 1x1 convolutions, mask True where blocked, tuple output",
    call=call_jadore,
)


# ---------------------------------------------------------------- 8. d2l transformer
def build_d2l_transformer():
    class DotProductAttention(nn.Module):
        def forward(self, queries, keys, values, keep=None):
            d = queries.shape[-1]
            scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
            if keep is not None:
                scores = scores + (1 - keep.to(scores.dtype)) * -1e9
            self.attention_weights = torch.softmax(scores, dim=-1)
            return torch.bmm(self.attention_weights, values)

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.attention = DotProductAttention()
            self.W_q = nn.Linear(num_hiddens, num_hiddens)
            self.W_k = nn.Linear(num_hiddens, num_hiddens)
            self.W_v = nn.Linear(num_hiddens, num_hiddens)
            self.W_o = nn.Linear(num_hiddens, num_hiddens)

        def transpose_qkv(self, X):
            X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1)
            X = X.permute(0, 2, 1, 3)
            return X.reshape(-1, X.shape[2], X.shape[3])

        def transpose_output(self, X):
            X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2])
            X = X.permute(0, 2, 1, 3)
            return X.reshape(X.shape[0], X.shape[1], -1)

        def forward(self, queries, keys, values, keep=None):
            queries = self.transpose_qkv(self.W_q(queries))
            keys = self.transpose_qkv(self.W_k(keys))
            values = self.transpose_qkv(self.W_v(values))
            return self.W_o(self.transpose_output(self.attention(queries, keys, values, keep)))

    class PositionWiseFFN(nn.Module):
        def __init__(self, n_in, n_mid):
            super().__init__()
            self.dense1 = nn.Linear(n_in, n_mid)
            self.relu = nn.ReLU()
            self.dense2 = nn.Linear(n_mid, n_in)

        def forward(self, X):
            return self.dense2(self.relu(self.dense1(X)))

    class AddNorm(nn.Module):
        def __init__(self, norm_shape, dropout=0.1):
            super().__init__()
            self.dropout = nn.Dropout(dropout)
            self.ln = nn.LayerNorm(norm_shape)

        def forward(self, X, Y):
            return self.ln(self.dropout(Y) + X)

    class PositionalEncoding(nn.Module):
        def __init__(self, num_hiddens, dropout=0.1, max_len=100):
            super().__init__()
            self.dropout = nn.Dropout(dropout)
            self.P = torch.zeros((1, max_len, num_hiddens), dtype=torch.float64)
            X = torch.arange(max_len, dtype=torch.float64).reshape(-1, 1) / torch.pow(
                10000, torch.arange(0, num_hiddens, 2, dtype=torch.float64) / num_hiddens
            )
            self.P[:, :, 0::2] = torch.sin(X)
            self.P[:, :, 1::2] = torch.cos(X)

        def forward(self, X):
            return self.dropout(X + self.P[:, : X.shape[1], :].to(X))

    class EncoderBlock(nn.Module):
        def __init__(self, num_hiddens, ffn_hiddens, num_heads):
            super().__init__()
            self.attention = MultiHeadAttention(num_hiddens, num_heads)
            self.addnorm1 = AddNorm(num_hiddens)
            self.ffn = PositionWiseFFN(num_hiddens, ffn_hiddens)
            self.addnorm2 = AddNorm(num_hiddens)

        def forward(self, X):
            Y = self.addnorm1(X, self.attention(X, X, X))
            return self.addnorm2(Y, self.ffn(Y))

    class DecoderBlock(nn.Module):
        def __init__(self, num_hiddens, ffn_hiddens, num_heads, i):
            super().__init__()
            self.i = i
            self.attention1 = MultiHeadAttention(num_hiddens, num_heads)
            self.addnorm1 = AddNorm(num_hiddens)
            self.attention2 = MultiHeadAttention(num_hiddens, num_heads)
            self.addnorm2 = AddNorm(num_hiddens)
            self.ffn = PositionWiseFFN(num_hiddens, ffn_hiddens)
            self.addnorm3 = AddNorm(num_hiddens)

        def forward(self, X, state):
            steps = torch.arange(X.shape[1], device=X.device)
            keep = (steps[None, :] <= steps[:, None]).unsqueeze(0)
            Y = self.addnorm1(X, self.attention1(X, X, X, keep))
            Z = self.addnorm2(Y, self.attention2(Y, state[0], state[0]))
            return self.addnorm3(Z, self.ffn(Z)), state

    class TransformerEncoder(nn.Module):
        def __init__(self, embedding, num_hiddens, ffn_hiddens, num_heads, num_blks):
            super().__init__()
            self.num_hiddens = num_hiddens
            self.embedding = embedding
            self.pos_encoding = PositionalEncoding(num_hiddens)
            self.blks = nn.Sequential()
            for i in range(num_blks):
                self.blks.add_module(
                    "block" + str(i), EncoderBlock(num_hiddens, ffn_hiddens, num_heads)
                )

        def forward(self, X):
            X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
            for blk in self.blks:
                X = blk(X)
            return X

    class TransformerDecoder(nn.Module):
        def __init__(self, embedding, num_hiddens, ffn_hiddens, num_heads, num_blks):
            super().__init__()
            self.num_hiddens = num_hiddens
            self.embedding = embedding
            self.pos_encoding = PositionalEncoding(num_hiddens)
            self.blks = nn.Sequential()
            for i in range(num_blks):
                self.blks.add_module(
                    "block" + str(i), DecoderBlock(num_hiddens, ffn_hiddens, num_heads, i)
                )

        def init_state(self, enc_outputs):
            return [enc_outputs, [None] * len(self.blks)]

        def forward(self, X, state):
            X = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
            for blk in self.blks:
                X, state = blk(X, state)
            return X @ self.embedding.weight.t(), state

    class EncoderDecoder(nn.Module):
        def __init__(self, encoder, decoder):
            super().__init__()
            self.encoder = encoder
            self.decoder = decoder

        def forward(self, enc_X, dec_X):
            dec_state = self.decoder.init_state(self.encoder(enc_X))
            return self.decoder(dec_X, dec_state)[0]

    emb = nn.Embedding(23, 32)
    return EncoderDecoder(
        TransformerEncoder(emb, 32, 64, 4, 2), TransformerDecoder(emb, 32, 64, 4, 2)
    )


case(
    "d2l_encoder_decoder",
    "d2l",
    build_d2l_transformer,
    ("transformer", dict(vocab=23, d_model=32, nhead=4, layers=2, dim_feedforward=64)),
)


# ---------------------------------------------------------------- 9. attention as a module, tuple
def build_attention():
    class Attention(nn.Module):
        "Compute 'Scaled Dot Product Attention'"

        def __init__(self, dropout=0.1):
            super().__init__()
            self.dropout = nn.Dropout(p=dropout)

        def forward(self, query, key, value, mask=None):
            d_k = query.size(-1)
            scores = torch.matmul(query / d_k**0.25, (key / d_k**0.25).transpose(-2, -1))
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            scores = scores - scores.amax(dim=-1, keepdim=True)
            e = torch.exp(scores)
            p_attn = self.dropout(e / e.sum(-1, keepdim=True))
            return torch.matmul(p_attn, value), p_attn

    return Attention()


case(
    "annotated_attention_own_softmax",
    "d2l",
    build_attention,
    ("attention", dict()),
    expected="equal; tuple with weights",
    call=lambda mine, q, k, v, mask=None: mine(q, k, v, mask=mask)[0],
)


# ---------------------------------------------------------------- 10. torch swiglu, fused and renamed
def build_swiglu():
    class FFN(nn.Module):
        def __init__(self, in_features, hidden_features, out_features=None):
            super().__init__()
            out_features = out_features or in_features
            self.a = nn.Linear(in_features, 2 * hidden_features, bias=False)
            self.b = nn.Linear(hidden_features, out_features, bias=False)

        def forward(self, x):
            x1, x2 = self.a(x).chunk(2, dim=-1)
            return self.b(x1 * (x2 * torch.sigmoid(x2)))

    return FFN(24, 40)


case(
    "fused_swiglu_up_first",
    "torch",
    build_swiglu,
    ("swiglu", dict(dim=24, hidden=40)),
    expected="equal up to the packing (up first, gate second)",
)


# ---------------------------------------------------------------- 11. torch multihead, sequence first
def build_seqfirst():
    class SelfAttn(nn.Module):
        def __init__(self, d, h):
            super().__init__()
            self.h = h
            self.core = nn.MultiheadAttention(d, h, dropout=0.1)

        def forward(self, src, blocked=None):
            out, w = self.core(
                src, src, src, attn_mask=blocked, need_weights=True, average_attn_weights=False
            )
            return out, w

    return SelfAttn(32, 4)


def call_seqfirst(mine, x, mask=None):
    blocked = None
    if mask is not None:
        b, n, _ = x.shape
        blocked = ~mask.expand(b, 4, n, n).reshape(b * 4, n, n)
    out, _ = mine(x.transpose(0, 1), blocked)
    return out.transpose(0, 1)


case(
    "mha_sequence_first",
    "torch",
    build_seqfirst,
    ("multihead", dict(embed_dim=32, num_heads=4, bias=True)),
    expected="equal; sequence first, mask inverted",
    call=call_seqfirst,
)


# ---------------------------------------------------------------- 12. numpy GPT (picoGPT)
def build_picogpt():
    L, H, C, V, T = 2, 4, 32, 29, 16
    rng = np.random.default_rng(0)
    weights = {"wte": rng.normal(size=(V, C)) * 0.3, "wpe": rng.normal(size=(T, C)) * 0.1}

    def lin(name, i, o):
        weights[name + ".w"] = rng.normal(size=(i, o)) / np.sqrt(i)
        weights[name + ".b"] = rng.normal(size=o) * 0.1

    def ln(name):
        weights[name + ".g"] = 1 + 0.1 * rng.normal(size=C)
        weights[name + ".b"] = 0.1 * rng.normal(size=C)

    for i in range(L):
        ln(f"blocks.{i}.ln_1")
        lin(f"blocks.{i}.attn.c_attn", C, 3 * C)
        lin(f"blocks.{i}.attn.c_proj", C, C)
        ln(f"blocks.{i}.ln_2")
        lin(f"blocks.{i}.mlp.c_fc", C, 4 * C)
        lin(f"blocks.{i}.mlp.c_proj", 4 * C, C)
    ln("ln_f")

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def softmax(x):
        exp_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return exp_x / np.sum(exp_x, axis=-1, keepdims=True)

    def layer_norm(x, g, b, eps=1e-5):
        mean = np.mean(x, axis=-1, keepdims=True)
        variance = np.var(x, axis=-1, keepdims=True)
        return g * (x - mean) / np.sqrt(variance + eps) + b

    def linear(x, w, b):
        return x @ w + b

    def attention(q, k, v, mask):
        return softmax(q @ k.T / np.sqrt(q.shape[-1]) + mask) @ v

    def mha(x, p, name, n_head):
        x = linear(x, p[name + ".c_attn.w"], p[name + ".c_attn.b"])
        qkv = np.split(x, 3, axis=-1)
        qkv_heads = list(map(lambda x: np.split(x, n_head, axis=-1), qkv))
        causal_mask = (1 - np.tri(x.shape[0], dtype=x.dtype)) * -1e10
        out_heads = [attention(q, k, v, causal_mask) for q, k, v in zip(*qkv_heads)]
        return linear(np.hstack(out_heads), p[name + ".c_proj.w"], p[name + ".c_proj.b"])

    def ffn(x, p, name):
        return linear(
            gelu(linear(x, p[name + ".c_fc.w"], p[name + ".c_fc.b"])),
            p[name + ".c_proj.w"],
            p[name + ".c_proj.b"],
        )

    def gpt2_single(inputs, p):
        x = p["wte"][inputs] + p["wpe"][range(len(inputs))]
        for i in range(L):
            n = f"blocks.{i}"
            x = x + mha(layer_norm(x, p[n + ".ln_1.g"], p[n + ".ln_1.b"]), p, n + ".attn", H)
            x = x + ffn(layer_norm(x, p[n + ".ln_2.g"], p[n + ".ln_2.b"]), p, n + ".mlp")
        x = layer_norm(x, p["ln_f.g"], p["ln_f.b"])
        return x @ p["wte"].T

    def gpt2(params, tokens):
        return np.stack([gpt2_single(row, params) for row in np.asarray(tokens)])

    return gpt2, weights


case(
    "picogpt_row_by_row",
    "numpy",
    build_picogpt,
    ("gpt", dict(vocab_size=29, block_size=16, n_layer=2, n_head=4, n_embd=32)),
)


# ---------------------------------------------------------------- 13. numpy encoder layer, per-head 3-D arrays
def build_np_encoder():
    D, H, M = 32, 4, 64
    d = D // H
    r = np.random.RandomState(3)
    theta = {
        "Q": r.randn(H, D, d) / D**0.5,
        "K": r.randn(H, D, d) / D**0.5,
        "V": r.randn(H, D, d) / D**0.5,
        "q0": r.randn(H, d) * 0.1,
        "k0": r.randn(H, d) * 0.1,
        "v0": r.randn(H, d) * 0.1,
        "O": r.randn(H, d, D) / D**0.5,
        "o0": r.randn(D) * 0.1,
        "A": r.randn(M, D) / D**0.5,
        "a0": r.randn(M) * 0.1,
        "B": r.randn(D, M) / M**0.5,
        "b0": r.randn(D) * 0.1,
        "s1": 1 + 0.1 * r.randn(D),
        "t1": 0.1 * r.randn(D),
        "s2": 1 + 0.1 * r.randn(D),
        "t2": 0.1 * r.randn(D),
    }

    def norm(z, s, t):
        z = z - z.mean(-1, keepdims=True)
        return z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-5) * s + t

    def layer(theta, x, mask=None):
        total = np.zeros_like(x)
        for h in range(H):
            q = x @ theta["Q"][h] + theta["q0"][h]
            k = x @ theta["K"][h] + theta["k0"][h]
            v = x @ theta["V"][h] + theta["v0"][h]
            s = np.einsum("bid,bjd->bij", q, k) / np.sqrt(d)
            if mask is not None:
                s = np.where(mask[:, 0], s, -np.inf)
            s = np.exp(s - s.max(-1, keepdims=True))
            s = s / s.sum(-1, keepdims=True)
            total += s @ v @ theta["O"][h]
        x = norm(x + total + theta["o0"], theta["s1"], theta["t1"])
        hid = np.maximum(np.dot(x, theta["A"].T) + theta["a0"], 0)
        return norm(x + np.dot(hid, theta["B"].T) + theta["b0"], theta["s2"], theta["t2"])

    return layer, theta


case("greek_per_head_arrays", "numpy", build_np_encoder, ("encoder_layer", DEC))


# ---------------------------------------------------------------- 14. jax GPT with stacked layers and scan
def build_jax_gpt():
    import jax
    import jax.numpy as jnp

    L, H, C, V, T = 3, 4, 32, 29, 16
    rng = np.random.default_rng(5)

    def n(*shape, s=0.1):
        return jnp.asarray(rng.normal(size=shape) * s, dtype=jnp.float32)

    params = dict(
        embed=n(V, C, s=0.3),
        pos=n(T, C),
        ln1_scale=1 + n(L, C),
        ln1_bias=n(L, C),
        qkv_kernel=n(L, C, H, 3, C // H, s=C**-0.5),
        qkv_bias=n(L, H, 3, C // H),
        out_kernel=n(L, H, C // H, C, s=C**-0.5),
        out_bias=n(L, C),
        ln2_scale=1 + n(L, C),
        ln2_bias=n(L, C),
        up_kernel=n(L, C, 4 * C, s=C**-0.5),
        up_bias=n(L, 4 * C),
        down_kernel=n(L, 4 * C, C, s=0.5 * C**-0.5),
        down_bias=n(L, C),
        final_scale=1 + n(C),
        final_bias=n(C),
    )

    def ln(x, scale, bias):
        mu = x.mean(-1, keepdims=True)
        var = jnp.square(x - mu).mean(-1, keepdims=True)
        return (x - mu) * jax.lax.rsqrt(var + 1e-5) * scale + bias

    def apply(params, tokens):
        n_tok = tokens.shape[1]
        x = jnp.take(params["embed"], tokens, axis=0) + params["pos"][:n_tok]
        allowed = jnp.tril(jnp.ones((n_tok, n_tok), dtype=bool))
        per_layer = {
            k: v
            for k, v in params.items()
            if k.split("_")[0] in ("ln1", "ln2", "qkv", "out", "up", "down")
        }

        def block(x, p):
            y = ln(x, p["ln1_scale"], p["ln1_bias"])
            qkv = (
                jnp.einsum("btc,chkd->kbhtd", y, p["qkv_kernel"])
                + jnp.transpose(p["qkv_bias"], (1, 0, 2))[:, None, :, None, :]
            )
            q, k, v = qkv
            a = jnp.einsum("bhtd,bhsd->bhts", q, k) / jnp.sqrt(q.shape[-1])
            a = jax.nn.softmax(jnp.where(allowed, a, -1e30), axis=-1)
            y = jnp.einsum("bhts,bhsd->bhtd", a, v)
            x = x + jnp.einsum("bhtd,hdc->btc", y, p["out_kernel"]) + p["out_bias"]
            y = ln(x, p["ln2_scale"], p["ln2_bias"])
            y = jax.nn.gelu(y @ p["up_kernel"] + p["up_bias"], approximate=True)
            return x + y @ p["down_kernel"] + p["down_bias"], None

        x, _ = jax.lax.scan(block, x, per_layer)
        x = ln(x, params["final_scale"], params["final_bias"])
        return x @ params["embed"].T

    return apply, params


case(
    "jax_scan_stacked_gpt",
    "jax",
    build_jax_gpt,
    ("gpt", dict(vocab_size=29, block_size=16, n_layer=3, n_head=4, n_embd=32)),
    expected="equal; layers stacked on the first axis",
)


# ---------------------------------------------------------------- 15. jax grouped attention, 4-D kernels
def build_jax_grouped():
    import jax
    import jax.numpy as jnp

    C, H, K = 32, 8, 2
    G, d = H // K, C // H
    key = jax.random.split(jax.random.PRNGKey(1), 4)
    params = {
        "w_query": jax.random.normal(key[0], (C, K, G, d)) * C**-0.5,
        "w_mem": jax.random.normal(key[1], (2, C, K, d)) * C**-0.5,
        "w_out": jax.random.normal(key[2], (K, G, d, C)) * C**-0.5,
    }

    def gqa(params, x):
        q = jnp.einsum("bnc,ckgd->bnkgd", x, params["w_query"])
        k, v = jnp.einsum("bnc,eckd->ebnkd", x, params["w_mem"])
        s = jnp.einsum("bikgd,bjkd->bkgij", q, k) / d**0.5
        i = jnp.arange(x.shape[1])
        s = s + jnp.where(i[:, None] >= i[None, :], 0.0, -jnp.inf)
        p = jax.nn.softmax(s, -1)
        o = jnp.einsum("bkgij,bjkd->bikgd", p, v)
        return jnp.einsum("bikgd,kgdc->bic", o, params["w_out"])

    return gqa, params


case(
    "jax_gqa_grouped_kernels",
    "jax",
    build_jax_grouped,
    ("grouped_attention", dict(embed_dim=32, num_heads=8, num_kv_heads=2, bias=False)),
)


# ================================================================ second part
def build_nano_gpt():
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
            return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

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
            b, t = idx.size()
            pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
            x = self.transformer.wte(idx) + self.transformer.wpe(pos)
            for block in self.transformer.h:
                x = block(x)
            logits = self.lm_head(self.transformer.ln_f(x))
            return logits, None

    return GPT(29, 16, 2, 4, 32)


case(
    "nanogpt_second_residual",
    "nanogpt",
    build_nano_gpt,
    ("gpt", dict(vocab_size=29, block_size=16, n_layer=2, n_head=4, n_embd=32)),
    "wrong",
    "The MLP's residual connection starts from the normalized activations instead of the residual stream.",
    "residual of the MLP sublayer is taken after the norm",
    lambda mine, tokens: mine(tokens)[0],
)


def build_einops_cross():
    class CrossAttention(nn.Module):
        def __init__(self, dim, heads=4):
            super().__init__()
            self.heads = heads
            self.scale = (dim // heads) ** -0.5
            self.to_q = nn.Linear(dim, dim)
            self.to_k = nn.Linear(dim, dim)
            self.to_v = nn.Linear(dim, dim)
            self.to_out = nn.Linear(dim, dim)

        def forward(self, x, context, mask=None):
            q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
            q, k, v = map(
                lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), (q, k, v)
            )
            sim = einsum(q, k, "b h i d, b h j d -> b h i j") * self.scale
            attn = sim.softmax(dim=-1)
            if mask is not None:
                attn = attn.masked_fill(~mask, 0.0)
            out = einsum(attn, v, "b h i j, b h j d -> b h i d")
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    return CrossAttention(32)


case(
    "cross_mask_zeroed",
    "einops",
    build_einops_cross,
    ("cross_attention", dict(embed_dim=32, num_heads=4)),
    "wrong",
    "The mask zeroes the weights after the softmax, without renormalizing.",
    "mask is applied after the softmax; right without a mask",
)


def build_d2l_encoder():
    class FFN(nn.Module):
        def __init__(self, num_hiddens, ffn_num_hiddens):
            super().__init__()
            self.dense1 = nn.Linear(num_hiddens, ffn_num_hiddens)
            self.dense2 = nn.Linear(ffn_num_hiddens, num_hiddens)

        def forward(self, X):
            return self.dense2(torch.relu(self.dense1(X)))

    class AddNorm(nn.Module):
        def __init__(self, num_hiddens):
            super().__init__()
            self.ln = nn.LayerNorm(num_hiddens)

        def forward(self, X, Y):
            return self.ln(X + Y)

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.W_q = nn.Linear(num_hiddens, num_hiddens)
            self.W_k = nn.Linear(num_hiddens, num_hiddens)
            self.W_v = nn.Linear(num_hiddens, num_hiddens)
            self.W_o = nn.Linear(num_hiddens, num_hiddens)

        def split(self, X):
            return X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)

        def forward(self, queries, keys, values, mask=None):
            Q, K, V = (
                self.split(self.W_q(queries)),
                self.split(self.W_k(keys)),
                self.split(self.W_v(values)),
            )
            scores = Q @ K.transpose(2, 3) / math.sqrt(Q.shape[-1])
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e6)
            out = torch.softmax(scores, dim=-1) @ V
            return self.W_o(out.permute(0, 2, 1, 3).flatten(2))

    class TransformerEncoderBlock(nn.Module):
        def __init__(self, num_hiddens, ffn_num_hiddens, num_heads):
            super().__init__()
            self.attention = MultiHeadAttention(num_hiddens, num_heads)
            self.addnorm1 = AddNorm(num_hiddens)
            self.ffn = FFN(num_hiddens, ffn_num_hiddens)
            self.addnorm2 = AddNorm(num_hiddens)

        def forward(self, X, mask=None):
            Y = self.addnorm1(X, self.attention(X, X, X, mask))
            return self.addnorm2(X, self.ffn(Y))

    return TransformerEncoderBlock(32, 64, 4)


case(
    "d2l_encoder_residual_from_input",
    "d2l",
    build_d2l_encoder,
    ("encoder_layer", DEC),
    "wrong",
    "The second residual adds the layer's input instead of the first sublayer's output.",
    "second residual is taken from the layer's input",
)


def build_torch_decoder():
    class DecoderLayer(nn.Module):
        def __init__(self, d_model=32, nhead=4, dim_feedforward=64, dropout=0.1):
            super().__init__()
            self.nhead = nhead
            self.self_qkv = nn.Linear(d_model, 3 * d_model)
            self.self_out = nn.Linear(d_model, d_model)
            self.cross_q = nn.Linear(d_model, d_model)
            self.cross_kv = nn.Linear(d_model, 2 * d_model)
            self.cross_out = nn.Linear(d_model, d_model)
            self.linear1 = nn.Linear(d_model, dim_feedforward)
            self.linear2 = nn.Linear(dim_feedforward, d_model)
            self.norm1 = nn.LayerNorm(d_model)
            self.norm2 = nn.LayerNorm(d_model)
            self.norm3 = nn.LayerNorm(d_model)
            self.dropout = nn.Dropout(dropout)

        def _heads(self, x):
            return x.unflatten(-1, (self.nhead, -1)).transpose(1, 2)

        def _attend(self, q, k, v):
            q, k, v = self._heads(q), self._heads(k), self._heads(v)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1)
            return y.transpose(1, 2).flatten(2)

        def forward(self, tgt, memory):
            x = self.self_out(self._attend(*self.self_qkv(tgt).chunk(3, dim=-1)))
            tgt = self.norm1(tgt + self.dropout(x))
            x = self.cross_out(
                self._attend(self.cross_q(tgt), *self.cross_kv(memory).chunk(2, dim=-1))
            )
            tgt = self.norm2(tgt + self.dropout(x))
            x = self.linear2(self.dropout(F.relu(self.linear1(tgt))))
            return self.norm3(tgt + self.dropout(x))

    return DecoderLayer()


case(
    "sdpa_decoder_shared_attend",
    "torch",
    build_torch_decoder,
    ("decoder_layer", DEC),
    "wrong",
    "The causal mask is applied in the cross-attention as well.",
    "cross-attention is causal and should see the whole memory",
)


def build_np_layernorm():
    params = {
        "gamma": 1 + 0.1 * np.random.RandomState(0).randn(24),
        "beta": 0.1 * np.random.RandomState(1).randn(24),
    }

    def layernorm_forward(params, x, eps=1e-5):
        mu = x.mean(axis=-1, keepdims=True)
        xc = x - mu
        var = (xc**2).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1)
        return params["gamma"] * xc / np.sqrt(var + eps) + params["beta"]

    return layernorm_forward, params


case(
    "np_layernorm_sample_variance",
    "numpy",
    build_np_layernorm,
    ("layer_norm", dict(dim=24, eps=1e-5)),
    "wrong",
    "The variance is divided by C - 1 instead of C.",
    "unbiased variance; divide by C",
)


def build_jax_llama():
    import jax
    import jax.numpy as jnp

    V, L, H, K, C, M = 31, 2, 4, 2, 32, 48
    d = C // H
    rng = np.random.default_rng(8)

    def w(i, o):
        return jnp.asarray(rng.normal(size=(i, o)) * i**-0.5, dtype=jnp.float32)

    params = {"tok": jnp.asarray(rng.normal(size=(V, C)) * 0.3, dtype=jnp.float32)}
    for i in range(L):
        params.update(
            {
                f"l{i}/attn_norm": jnp.asarray(1 + 0.1 * rng.normal(size=C), dtype=jnp.float32),
                f"l{i}/wq": w(C, H * d),
                f"l{i}/wk": w(C, K * d),
                f"l{i}/wv": w(C, K * d),
                f"l{i}/wo": w(C, C),
                f"l{i}/ffn_norm": jnp.asarray(1 + 0.1 * rng.normal(size=C), dtype=jnp.float32),
                f"l{i}/gate": w(C, M),
                f"l{i}/up": w(C, M),
                f"l{i}/down": w(M, C),
            }
        )
    params["norm"] = jnp.asarray(1 + 0.1 * rng.normal(size=C), dtype=jnp.float32)

    def rms(x, g):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g

    def rope(x):
        half = x.shape[-1] // 2
        inv = 10000.0 ** (-jnp.arange(half) / x.shape[-1])
        ang = jnp.arange(x.shape[1])[:, None] * inv
        cos, sin = jnp.cos(ang)[:, None, :], jnp.sin(ang)[:, None, :]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(params, tokens):
        x = params["tok"][tokens]
        B, N, _ = x.shape
        for i in range(L):
            p = lambda name: params[f"l{i}/{name}"]
            y = rms(x, p("attn_norm"))
            q = rope((y @ p("wq")).reshape(B, N, H, d))
            k = rope((y @ p("wk")).reshape(B, N, K, d))
            v = (y @ p("wv")).reshape(B, N, K, d)
            k, v = jnp.repeat(k, H // K, axis=2), jnp.repeat(v, H // K, axis=2)
            s = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(d)
            s = jnp.where(jnp.tril(jnp.ones((N, N), bool)), s, -jnp.inf)
            o = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s, -1), v).reshape(B, N, C)
            x = x + o @ p("wo")
            y = rms(x, p("ffn_norm"))
            x = x + (jax.nn.silu(y @ p("gate")) * (y @ p("up"))) @ p("down")
        return rms(x, params["norm"]) @ params["tok"].T

    return forward, params


case(
    "jax_llama_frequencies",
    "jax",
    build_jax_llama,
    ("llama", LLAMA),
    "wrong",
    "The rotary frequencies are base^(-i/d) instead of base^(-2i/d).",
    "rotary frequencies fall too slowly",
)
