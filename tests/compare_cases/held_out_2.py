import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import einsum

GPT_CFG = dict(vocab_size=61, block_size=16, n_layer=2, n_head=4, n_embd=32)
LLAMA_CFG = dict(vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64)
TR_CFG = dict(vocab=53, d_model=32, nhead=4, layers=2, dim_feedforward=64)
CASES = []


# ---------------------------------------------------------------- positions


def w_sinusoids_jax():
    import jax.numpy as jnp

    def positional_encoding(max_len, d_model):
        position = jnp.arange(max_len)[:, None]
        i = jnp.arange(0, d_model, 2)
        angle = position / jnp.power(10000.0, 2 * i / d_model)
        pe = jnp.zeros((max_len, d_model))
        pe = pe.at[:, 0::2].set(jnp.sin(angle))
        pe = pe.at[:, 1::2].set(jnp.cos(angle))
        return pe

    return positional_encoding


CASES.append(
    dict(
        name="sinusoids_jax_exponent_doubled",
        style="jax",
        build=w_sinusoids_jax,
        reference=("sinusoids", dict()),
        label="wrong",
        mistake="The exponent multiplies by two a channel index that already steps by two, so the frequencies are squared.",
        expected="frequencies are 10000^(-2·2i/d) in place of 10000^(-2i/d); exponent doubled",
        call=None,
    )
)


def w_rotary_einops():
    def rotate_half(x):
        x1, x2 = rearrange(x, "... (r d) -> r ... d", r=2)
        return torch.cat((-x2, x1), dim=-1)

    def apply_rotary_emb(t, theta=10000):
        n, dim = t.shape[-2:]
        inv_freq = theta ** (-torch.arange(0, dim, 2, device=t.device, dtype=t.dtype) / dim)
        seq = torch.arange(n, device=t.device, dtype=t.dtype)
        freqs = einsum("i, j -> i j", seq, inv_freq)
        freqs = repeat(freqs, "n d -> n (d r)", r=2)
        return t * freqs.cos() + rotate_half(t) * freqs.sin()

    return apply_rotary_emb


CASES.append(
    dict(
        name="rotary_einops_mixed_layouts",
        style="einops",
        build=w_rotary_einops,
        reference=("rotary", dict()),
        label="wrong",
        mistake="The angles are repeated for adjacent channels (d r) while rotate_half pairs channel i with i + d/2.",
        expected="angle table interleaved but halves rotated; repeat as (r d) / concatenate the frequencies",
        call=None,
    )
)


def w_rotary_numpy():
    def rope(x, base=10000.0):
        n, d = x.shape[-2], x.shape[-1]
        half = d // 2
        freqs = base ** (-np.arange(half) / half)
        angles = np.outer(np.arange(n), freqs)
        cos, sin = np.cos(angles), np.sin(angles)
        out = x.copy()
        a, b = out[..., :half], out[..., half:]
        out[..., :half] = a * cos - b * sin
        out[..., half:] = a * sin + b * cos
        return out

    return rope


CASES.append(
    dict(
        name="rotary_numpy_aliased_half",
        style="numpy",
        build=w_rotary_numpy,
        reference=("rotary", dict()),
        label="wrong",
        mistake="The first half is a view of the output and has been overwritten when the second half is computed from it.",
        expected="first half agrees, second half is computed from the already rotated first half (numpy view)",
        call=None,
    )
)


# ---------------------------------------------------------------- GPT


def w_gpt_copied_head():
    class LayerNorm(nn.Module):
        def __init__(self, ndim, bias):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(ndim))
            self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

        def forward(self, input):
            return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)

    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head, block_size, bias=True):
            super().__init__()
            assert n_embd % n_head == 0
            self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
            self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
            self.n_head = n_head
            self.n_embd = n_embd
            self.register_buffer(
                "bias",
                torch.tril(torch.ones(block_size, block_size)).view(
                    1, 1, block_size, block_size
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
            y = att @ v
            y = y.transpose(1, 2).contiguous().view(B, T, C)
            return self.c_proj(y)

    class MLP(nn.Module):
        def __init__(self, n_embd, bias=True):
            super().__init__()
            self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
            self.gelu = nn.GELU(approximate="tanh")
            self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)

        def forward(self, x):
            return self.c_proj(self.gelu(self.c_fc(x)))

    class Block(nn.Module):
        def __init__(self, n_embd, n_head, block_size):
            super().__init__()
            self.ln_1 = LayerNorm(n_embd, bias=True)
            self.attn = CausalSelfAttention(n_embd, n_head, block_size)
            self.ln_2 = LayerNorm(n_embd, bias=True)
            self.mlp = MLP(n_embd)

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            x = x + self.mlp(self.ln_2(x))
            return x

    class GPT(nn.Module):
        def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
            super().__init__()
            self.block_size = block_size
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(vocab_size, n_embd),
                    wpe=nn.Embedding(block_size, n_embd),
                    h=nn.ModuleList(
                        [Block(n_embd, n_head, block_size) for _ in range(n_layer)]
                    ),
                    ln_f=LayerNorm(n_embd, bias=True),
                )
            )
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.apply(self._init_weights)
            self.lm_head.load_state_dict(self.transformer.wte.state_dict())

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

        def forward(self, idx):
            b, t = idx.size()
            assert t <= self.block_size
            pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
            x = self.transformer.wte(idx) + self.transformer.wpe(pos)
            for block in self.transformer.h:
                x = block(x)
            x = self.transformer.ln_f(x)
            return self.lm_head(x)

    return GPT(**GPT_CFG)


CASES.append(
    dict(
        name="gpt_nanogpt_head_copied_not_tied",
        style="nanogpt",
        build=w_gpt_copied_head,
        reference=("gpt", dict(GPT_CFG)),
        label="wrong",
        mistake="The head starts as a copy of the token embedding but is a parameter of its own, so it is not tied.",
        expected="head and token embedding are two parameters; values equal at the start, gradients differ",
        call=None,
    )
)


def w_gpt_causal_training():
    class CausalSelfAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.c_attn = nn.Linear(config["n_embd"], 3 * config["n_embd"])
            self.c_proj = nn.Linear(config["n_embd"], config["n_embd"])
            self.resid_dropout = nn.Dropout(config["dropout"])
            self.n_head = config["n_head"]
            self.dropout = config["dropout"]

        def forward(self, x):
            B, T, C = x.size()
            qkv = (
                self.c_attn(x)
                .view(B, T, 3, self.n_head, C // self.n_head)
                .permute(2, 0, 3, 1, 4)
            )
            q, k, v = qkv[0], qkv[1], qkv[2]
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None,
                dropout_p=self.dropout if self.training else 0,
                is_causal=self.training,
            )
            y = y.transpose(1, 2).reshape(B, T, C)
            return self.resid_dropout(self.c_proj(y))

    class Block(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.ln_1 = nn.LayerNorm(config["n_embd"])
            self.attn = CausalSelfAttention(config)
            self.ln_2 = nn.LayerNorm(config["n_embd"])
            self.mlp = nn.ModuleDict(
                dict(
                    c_fc=nn.Linear(config["n_embd"], 4 * config["n_embd"]),
                    act=nn.GELU(approximate="tanh"),
                    c_proj=nn.Linear(4 * config["n_embd"], config["n_embd"]),
                    dropout=nn.Dropout(config["dropout"]),
                )
            )

        def mlpf(self, x):
            m = self.mlp
            return m.dropout(m.c_proj(m.act(m.c_fc(x))))

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            x = x + self.mlpf(self.ln_2(x))
            return x

    class GPT(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.wte = nn.Embedding(config["vocab_size"], config["n_embd"])
            self.wpe = nn.Embedding(config["block_size"], config["n_embd"])
            self.drop = nn.Dropout(config["dropout"])
            self.blocks = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
            self.ln_f = nn.LayerNorm(config["n_embd"])
            self.lm_head = nn.Linear(config["n_embd"], config["vocab_size"], bias=False)
            self.lm_head.weight = self.wte.weight
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.08)

        def forward(self, idx, targets=None):
            b, t = idx.shape
            pos = torch.arange(t, device=idx.device).unsqueeze(0)
            x = self.drop(self.wte(idx) + self.wpe(pos))
            for block in self.blocks:
                x = block(x)
            logits = self.lm_head(self.ln_f(x))
            loss = None
            if targets is not None:
                loss = F.cross_entropy(
                    logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
                )
            return logits, loss

    return GPT(dict(GPT_CFG, dropout=0.0))


CASES.append(
    dict(
        name="gpt_nanogpt_causal_only_in_training",
        style="nanogpt",
        build=w_gpt_causal_training,
        reference=("gpt", dict(GPT_CFG)),
        label="wrong",
        mistake="is_causal is tied to self.training, so in evaluation each token attends to future ones.",
        expected="no causal mask in evaluation mode; right in training mode",
        call=None,
    )
)


def w_gpt_shared_norm():
    def exists(v):
        return v is not None

    class Attention(nn.Module):
        def __init__(self, dim, heads=8):
            super().__init__()
            self.heads = heads
            self.scale = (dim // heads) ** -0.5
            self.to_q = nn.Linear(dim, dim)
            self.to_kv = nn.Linear(dim, dim * 2)
            self.to_out = nn.Linear(dim, dim)

        def forward(self, x, mask=None):
            q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
            q, k, v = map(
                lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.heads), (q, k, v)
            )
            sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
            i, j = sim.shape[-2:]
            causal_mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
            sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
            if exists(mask):
                sim = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max)
            attn = sim.softmax(dim=-1)
            out = einsum("b h i j, b h j d -> b h i d", attn, v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    def FeedForward(dim, mult=4):
        return nn.Sequential(
            nn.Linear(dim, dim * mult), nn.GELU(approximate="tanh"), nn.Linear(dim * mult, dim)
        )

    class PreNorm(nn.Module):
        def __init__(self, norm, fn):
            super().__init__()
            self.norm = norm
            self.fn = fn

        def forward(self, x, **kwargs):
            return self.fn(self.norm(x), **kwargs)

    class Transformer(nn.Module):
        def __init__(self, dim, depth, heads):
            super().__init__()
            self.layers = nn.ModuleList([])
            for _ in range(depth):
                norm = nn.LayerNorm(dim)
                self.layers.append(
                    nn.ModuleList(
                        [
                            PreNorm(norm, Attention(dim, heads)),
                            PreNorm(norm, FeedForward(dim)),
                        ]
                    )
                )

        def forward(self, x):
            for attn, ff in self.layers:
                x = attn(x) + x
                x = ff(x) + x
            return x

    class TransformerLM(nn.Module):
        def __init__(self, *, num_tokens, max_seq_len, dim, depth, heads):
            super().__init__()
            self.token_emb = nn.Embedding(num_tokens, dim)
            self.pos_emb = nn.Embedding(max_seq_len, dim)
            nn.init.normal_(self.token_emb.weight, std=0.1)
            nn.init.normal_(self.pos_emb.weight, std=0.1)
            self.transformer = Transformer(dim, depth, heads)
            self.norm = nn.LayerNorm(dim)

        def forward(self, x):
            n, device = x.shape[-1], x.device
            x = self.token_emb(x)
            pos = self.pos_emb(torch.arange(n, device=device))
            x = x + rearrange(pos, "n d -> 1 n d")
            x = self.norm(self.transformer(x))
            return einsum("b n d, v d -> b n v", x, self.token_emb.weight)

    c = GPT_CFG
    return TransformerLM(
        num_tokens=c["vocab_size"],
        max_seq_len=c["block_size"],
        dim=c["n_embd"],
        depth=c["n_layer"],
        heads=c["n_head"],
    )


CASES.append(
    dict(
        name="gpt_einops_one_norm_per_block",
        style="einops",
        build=w_gpt_shared_norm,
        reference=("gpt", dict(GPT_CFG)),
        label="wrong",
        mistake="Attention and feed-forward of a block share one LayerNorm object.",
        expected="one norm used twice in each block; two separate norms expected (parameters missing)",
        call=None,
    )
)


def w_gpt_numpy_mask():
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

    def ffn(x, p, pre):
        return linear(
            gelu(linear(x, p[pre + "c_fc.w"], p[pre + "c_fc.b"])),
            p[pre + "c_proj.w"],
            p[pre + "c_proj.b"],
        )

    def attention(q, k, v, mask):
        return softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]) + mask) @ v

    def mha(x, p, pre, n_head):
        x = linear(x, p[pre + "c_attn.w"], p[pre + "c_attn.b"])
        q, k, v = np.split(x, 3, axis=-1)
        heads = list(zip(*[np.split(t, n_head, axis=-1) for t in (q, k, v)]))
        causal_mask = (1 - np.tri(x.shape[-2], dtype=x.dtype)) * -1e-10
        out_heads = [attention(q, k, v, causal_mask) for q, k, v in heads]
        return linear(
            np.concatenate(out_heads, axis=-1), p[pre + "c_proj.w"], p[pre + "c_proj.b"]
        )

    def gpt2(params, inputs):
        p = params
        n_layer, n_head = GPT_CFG["n_layer"], GPT_CFG["n_head"]
        x = p["wte"][inputs] + p["wpe"][np.arange(inputs.shape[1])]
        for i in range(n_layer):
            pre = f"h{i}."
            x = x + mha(
                layer_norm(x, p[pre + "ln_1.g"], p[pre + "ln_1.b"]), p, pre + "attn.", n_head
            )
            x = x + ffn(layer_norm(x, p[pre + "ln_2.g"], p[pre + "ln_2.b"]), p, pre + "mlp.")
        x = layer_norm(x, p["ln_f.g"], p["ln_f.b"])
        return x @ p["wte"].T

    rng = np.random.default_rng(0)
    c = GPT_CFG["n_embd"]
    w = lambda *s: rng.normal(0, 0.2, s)
    params = {"wte": w(GPT_CFG["vocab_size"], c), "wpe": w(GPT_CFG["block_size"], c)}
    for i in range(GPT_CFG["n_layer"]):
        pre = f"h{i}."
        params.update(
            {
                pre + "ln_1.g": 1 + w(c),
                pre + "ln_1.b": w(c),
                pre + "attn.c_attn.w": w(c, 3 * c),
                pre + "attn.c_attn.b": w(3 * c),
                pre + "attn.c_proj.w": w(c, c),
                pre + "attn.c_proj.b": w(c),
                pre + "ln_2.g": 1 + w(c),
                pre + "ln_2.b": w(c),
                pre + "mlp.c_fc.w": w(c, 4 * c),
                pre + "mlp.c_fc.b": w(4 * c),
                pre + "mlp.c_proj.w": w(4 * c, c),
                pre + "mlp.c_proj.b": w(c),
            }
        )
    params.update({"ln_f.g": 1 + w(c), "ln_f.b": w(c)})
    return gpt2, params


CASES.append(
    dict(
        name="gpt_numpy_mask_tiny_constant",
        style="numpy",
        build=w_gpt_numpy_mask,
        reference=("gpt", dict(GPT_CFG)),
        label="wrong",
        mistake="The additive causal mask is -1e-10 in place of -1e10, so nothing is masked.",
        expected="no effective causal mask; the future leaks",
        call=None,
    )
)


# ---------------------------------------------------------------- Llama


def w_llama_d2l_swiglu():
    class RMSNorm(nn.Module):
        def __init__(self, num_hiddens, eps=1e-5):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(num_hiddens))
            self.eps = eps

        def forward(self, X):
            return X / torch.sqrt((X**2).mean(dim=-1, keepdim=True) + self.eps) * self.gain

    class RotaryEncoding(nn.Module):
        def __init__(self, head_dim, base=10000.0):
            super().__init__()
            self.head_dim, self.base = head_dim, base

        def forward(self, X):
            n, half = X.shape[2], self.head_dim // 2
            theta = self.base ** (-torch.arange(half, dtype=X.dtype, device=X.device) / half)
            angle = torch.arange(n, dtype=X.dtype, device=X.device).reshape(-1, 1) * theta
            c, s = torch.cos(angle), torch.sin(angle)
            X1, X2 = X[..., :half], X[..., half:]
            return torch.cat((X1 * c - X2 * s, X2 * c + X1 * s), dim=-1)

    class GroupedQueryAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads, num_kv_heads):
            super().__init__()
            self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
            self.head_dim = num_hiddens // num_heads
            self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=False)
            self.W_k = nn.Linear(num_hiddens, num_kv_heads * self.head_dim, bias=False)
            self.W_v = nn.Linear(num_hiddens, num_kv_heads * self.head_dim, bias=False)
            self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=False)
            self.rope = RotaryEncoding(self.head_dim)

        def transpose_qkv(self, X, heads):
            return X.reshape(X.shape[0], X.shape[1], heads, -1).permute(0, 2, 1, 3)

        def forward(self, X):
            queries = self.rope(self.transpose_qkv(self.W_q(X), self.num_heads))
            keys = self.rope(self.transpose_qkv(self.W_k(X), self.num_kv_heads))
            values = self.transpose_qkv(self.W_v(X), self.num_kv_heads)
            group = self.num_heads // self.num_kv_heads
            keys = torch.repeat_interleave(keys, group, dim=1)
            values = torch.repeat_interleave(values, group, dim=1)
            scores = torch.matmul(queries, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
            n = X.shape[1]
            valid = (
                torch.arange(n, device=X.device)[None, :]
                <= torch.arange(n, device=X.device)[:, None]
            )
            scores = scores.masked_fill(~valid, -1e9)
            self.attention_weights = torch.softmax(scores, dim=-1)
            output = torch.matmul(self.attention_weights, values).permute(0, 2, 1, 3)
            return self.W_o(output.reshape(X.shape[0], n, -1))

    class PositionWiseFFN(nn.Module):
        def __init__(self, num_hiddens, ffn_num_hiddens):
            super().__init__()
            self.gate = nn.Linear(num_hiddens, ffn_num_hiddens, bias=False)
            self.dense1 = nn.Linear(num_hiddens, ffn_num_hiddens, bias=False)
            self.dense2 = nn.Linear(ffn_num_hiddens, num_hiddens, bias=False)

        def forward(self, X):
            return self.dense2(F.silu(self.gate(X) * self.dense1(X)))

    class LlamaBlock(nn.Module):
        def __init__(self, num_hiddens, ffn_num_hiddens, num_heads, num_kv_heads):
            super().__init__()
            self.norm1 = RMSNorm(num_hiddens)
            self.attention = GroupedQueryAttention(num_hiddens, num_heads, num_kv_heads)
            self.norm2 = RMSNorm(num_hiddens)
            self.ffn = PositionWiseFFN(num_hiddens, ffn_num_hiddens)

        def forward(self, X):
            Y = X + self.attention(self.norm1(X))
            return Y + self.ffn(self.norm2(Y))

    class LlamaLM(nn.Module):
        def __init__(
            self, vocab_size, num_hiddens, ffn_num_hiddens, num_heads, num_kv_heads, num_blks
        ):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, num_hiddens)
            self.blks = nn.Sequential()
            for i in range(num_blks):
                self.blks.add_module(
                    "block" + str(i),
                    LlamaBlock(num_hiddens, ffn_num_hiddens, num_heads, num_kv_heads),
                )
            self.norm = RMSNorm(num_hiddens)

        def forward(self, X):
            X = self.embedding(X)
            for blk in self.blks:
                X = blk(X)
            return torch.matmul(self.norm(X), self.embedding.weight.T)

    c = LLAMA_CFG
    return LlamaLM(
        c["vocab_size"], c["n_embd"], c["n_inner"], c["n_head"], c["n_kv_head"], c["n_layer"]
    )


CASES.append(
    dict(
        name="llama_d2l_silu_of_product",
        style="d2l",
        build=w_llama_d2l_swiglu,
        reference=("llama", dict(LLAMA_CFG)),
        label="wrong",
        mistake="SiLU is applied to the product of gate and up projection rather than to the gate alone.",
        expected="SwiGLU: silu(gate * up) in place of silu(gate) * up",
        call=None,
    )
)


def w_llama_torch_freq():
    class Attention(nn.Module):
        def __init__(self, hidden_size, num_heads, num_kv_heads, rope_theta=10000.0):
            super().__init__()
            self.hidden_size = hidden_size
            self.num_heads = num_heads
            self.num_kv_heads = num_kv_heads
            self.head_dim = hidden_size // num_heads
            self.rope_theta = rope_theta
            self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
            self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
            self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
            self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

        def rope_tables(self, seq_len, device, dtype):
            exponent = (
                torch.arange(0, self.head_dim, 2, device=device, dtype=dtype) / self.hidden_size
            )
            inv_freq = 1.0 / (self.rope_theta**exponent)
            freqs = torch.outer(torch.arange(seq_len, device=device, dtype=dtype), inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1)
            return emb.cos(), emb.sin()

        @staticmethod
        def rotate_half(x):
            x1, x2 = x.chunk(2, dim=-1)
            return torch.cat((-x2, x1), dim=-1)

        def forward(self, hidden_states):
            bsz, q_len, _ = hidden_states.shape
            q = (
                self.q_proj(hidden_states)
                .view(bsz, q_len, self.num_heads, self.head_dim)
                .transpose(1, 2)
            )
            k = (
                self.k_proj(hidden_states)
                .view(bsz, q_len, self.num_kv_heads, self.head_dim)
                .transpose(1, 2)
            )
            v = (
                self.v_proj(hidden_states)
                .view(bsz, q_len, self.num_kv_heads, self.head_dim)
                .transpose(1, 2)
            )
            cos, sin = self.rope_tables(q_len, q.device, q.dtype)
            q = q * cos + self.rotate_half(q) * sin
            k = k * cos + self.rotate_half(k) * sin
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out = out.transpose(1, 2).reshape(bsz, q_len, -1)
            return self.o_proj(out)

    class MLP(nn.Module):
        def __init__(self, hidden_size, intermediate_size):
            super().__init__()
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
            self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class DecoderLayer(nn.Module):
        def __init__(self, hidden_size, num_heads, num_kv_heads, intermediate_size):
            super().__init__()
            self.self_attn = Attention(hidden_size, num_heads, num_kv_heads)
            self.mlp = MLP(hidden_size, intermediate_size)
            self.input_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)
            self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)

        def forward(self, hidden_states):
            hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    class LlamaForCausalLM(nn.Module):
        def __init__(self, vocab_size, n_layer, n_head, n_kv_head, n_embd, n_inner):
            super().__init__()
            self.embed_tokens = nn.Embedding(vocab_size, n_embd)
            self.layers = nn.ModuleList(
                [DecoderLayer(n_embd, n_head, n_kv_head, n_inner) for _ in range(n_layer)]
            )
            self.norm = nn.RMSNorm(n_embd, eps=1e-5)
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

        def forward(self, input_ids):
            h = self.embed_tokens(input_ids)
            for layer in self.layers:
                h = layer(h)
            return {"logits": self.lm_head(self.norm(h))}

    return LlamaForCausalLM(**LLAMA_CFG)


CASES.append(
    dict(
        name="llama_torch_rope_exponent_by_model_width",
        style="torch",
        build=w_llama_torch_freq,
        reference=("llama", dict(LLAMA_CFG)),
        label="wrong",
        mistake="The rotary exponents are divided by the model width in place of the head width.",
        expected="rotary frequencies wrong (exponent 2i/n_embd rather than 2i/head_dim)",
        call=None,
    )
)


def w_llama_jax_rope_width():
    import jax
    import jax.numpy as jnp

    def rms_norm(x, scale, eps=1e-5):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale

    def rope(x):
        n, d = x.shape[-2:]
        freq = 10000.0 ** (-jnp.arange(0, d, 2) / d)
        ang = jnp.arange(n)[:, None] * freq[None, :]
        cos, sin = jnp.cos(ang), jnp.sin(ang)
        x1, x2 = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)

    def split_heads(x, h):
        b, n, c = x.shape
        return x.reshape(b, n, h, c // h).transpose(0, 2, 1, 3)

    def attn(p, i, x, n_head, n_kv):
        q = split_heads(rope(x @ p[f"layers_{i}_wq"]), n_head)
        k = split_heads(rope(x @ p[f"layers_{i}_wk"]), n_kv)
        v = split_heads(x @ p[f"layers_{i}_wv"], n_kv)
        k = jnp.repeat(k, n_head // n_kv, axis=1)
        v = jnp.repeat(v, n_head // n_kv, axis=1)
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        n = x.shape[1]
        logits = jnp.where(jnp.tril(jnp.ones((n, n), bool)), logits, -jnp.inf)
        w = jax.nn.softmax(logits, axis=-1)
        o = jnp.einsum("bhqk,bhkd->bqhd", w, v)
        return o.reshape(x.shape) @ p[f"layers_{i}_wo"]

    def ffn(p, i, x):
        return (jax.nn.silu(x @ p[f"layers_{i}_w1"]) * (x @ p[f"layers_{i}_w3"])) @ p[
            f"layers_{i}_w2"
        ]

    def llama(params, tokens):
        p = params
        x = p["embed"][tokens]
        for i in range(LLAMA_CFG["n_layer"]):
            x = x + attn(
                p,
                i,
                rms_norm(x, p[f"layers_{i}_attn_norm"]),
                LLAMA_CFG["n_head"],
                LLAMA_CFG["n_kv_head"],
            )
            x = x + ffn(p, i, rms_norm(x, p[f"layers_{i}_ffn_norm"]))
        return rms_norm(x, p["norm"]) @ p["embed"].T

    c, f = LLAMA_CFG["n_embd"], LLAMA_CFG["n_inner"]
    kv = c // LLAMA_CFG["n_head"] * LLAMA_CFG["n_kv_head"]
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 100))
    w = lambda *s: jax.random.normal(next(keys), s) * 0.15
    params = {"embed": w(LLAMA_CFG["vocab_size"], c), "norm": jnp.ones(c)}
    for i in range(LLAMA_CFG["n_layer"]):
        params.update(
            {
                f"layers_{i}_wq": w(c, c),
                f"layers_{i}_wk": w(c, kv),
                f"layers_{i}_wv": w(c, kv),
                f"layers_{i}_wo": w(c, c),
                f"layers_{i}_w1": w(c, f),
                f"layers_{i}_w3": w(c, f),
                f"layers_{i}_w2": w(f, c),
                f"layers_{i}_attn_norm": jnp.ones(c),
                f"layers_{i}_ffn_norm": jnp.ones(c),
            }
        )
    return llama, params


CASES.append(
    dict(
        name="llama_jax_rope_before_head_split",
        style="jax",
        build=w_llama_jax_rope_width,
        reference=("llama", dict(LLAMA_CFG)),
        label="wrong",
        mistake="Queries and keys are rotated over the full width before they are split into heads.",
        expected="rotary applied before the head split (pairs across heads, wrong frequencies)",
        call=None,
    )
)


# ---------------------------------------------------------------- transformer of 2017


def w_transformer_torch_final_norms():
    def sinusoids(n, d, device, dtype):
        pos = torch.arange(n, device=device, dtype=dtype).unsqueeze(1)
        div = torch.exp(
            torch.arange(0, d, 2, device=device, dtype=dtype) * (-math.log(10000.0) / d)
        )
        pe = torch.zeros(n, d, device=device, dtype=dtype)
        pe[:, 0::2] = torch.sin(pos * div)
        pe[:, 1::2] = torch.cos(pos * div)
        return pe

    class Seq2SeqTransformer(nn.Module):
        def __init__(self, vocab, d_model, nhead, layers, dim_feedforward):
            super().__init__()
            self.d_model = d_model
            self.embedding = nn.Embedding(vocab, d_model)
            self.transformer = nn.Transformer(
                d_model=d_model,
                nhead=nhead,
                num_encoder_layers=layers,
                num_decoder_layers=layers,
                dim_feedforward=dim_feedforward,
                dropout=0.0,
                activation="relu",
                batch_first=True,
            )
            self.generator = nn.Linear(d_model, vocab, bias=False)
            self.generator.weight = self.embedding.weight
            nn.init.normal_(self.embedding.weight, std=d_model**-0.5)

        def embed(self, tokens):
            x = self.embedding(tokens) * math.sqrt(self.d_model)
            return x + sinusoids(tokens.size(1), self.d_model, x.device, x.dtype)

        def forward(self, src, tgt):
            n = tgt.size(1)
            tgt_mask = torch.triu(
                torch.ones(n, n, dtype=torch.bool, device=tgt.device), diagonal=1
            )
            out = self.transformer(self.embed(src), self.embed(tgt), tgt_mask=tgt_mask)
            return self.generator(out)

    return Seq2SeqTransformer(**TR_CFG)


CASES.append(
    dict(
        name="transformer_torch_final_norms",
        style="torch",
        build=w_transformer_torch_final_norms,
        reference=("transformer", dict(TR_CFG)),
        label="wrong",
        mistake="nn.Transformer adds a LayerNorm after the encoder and one after the decoder, which the 2017 model lacks.",
        expected="extra final norms of encoder and decoder",
        call=None,
    )
)


def w_transformer_d2l_var():
    def transpose_qkv(X, num_heads):
        X = X.reshape(X.shape[0], X.shape[1], num_heads, -1)
        return X.permute(0, 2, 1, 3)

    def transpose_output(X):
        X = X.permute(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)

    class LayerNorm(nn.Module):
        def __init__(self, features, eps=1e-5):
            super().__init__()
            self.a_2 = nn.Parameter(torch.ones(features))
            self.b_2 = nn.Parameter(torch.zeros(features))
            self.eps = eps

        def forward(self, x):
            mean = x.mean(-1, keepdim=True)
            var = x.var(-1, keepdim=True)
            return self.a_2 * (x - mean) / torch.sqrt(var + self.eps) + self.b_2

    class PositionalEncoding(nn.Module):
        def __init__(self, num_hiddens, dropout=0.0, max_len=200):
            super().__init__()
            self.dropout = nn.Dropout(dropout)
            P = torch.zeros((1, max_len, num_hiddens), dtype=torch.float64)
            X = torch.arange(max_len, dtype=torch.float64).reshape(-1, 1) / torch.pow(
                10000, torch.arange(0, num_hiddens, 2, dtype=torch.float64) / num_hiddens
            )
            P[:, :, 0::2] = torch.sin(X)
            P[:, :, 1::2] = torch.cos(X)
            self.P = P

        def forward(self, X):
            return self.dropout(X + self.P[:, : X.shape[1], :].to(X))

    class MultiHeadAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.W_q = nn.Linear(num_hiddens, num_hiddens)
            self.W_k = nn.Linear(num_hiddens, num_hiddens)
            self.W_v = nn.Linear(num_hiddens, num_hiddens)
            self.W_o = nn.Linear(num_hiddens, num_hiddens)

        def forward(self, queries, keys, values, causal=False):
            queries = transpose_qkv(self.W_q(queries), self.num_heads)
            keys = transpose_qkv(self.W_k(keys), self.num_heads)
            values = transpose_qkv(self.W_v(values), self.num_heads)
            scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[-1])
            if causal:
                n = scores.shape[-1]
                scores = scores.masked_fill(
                    torch.triu(torch.ones(n, n, device=scores.device), 1).bool(), -1e9
                )
            self.attention_weights = F.softmax(scores, dim=-1)
            return self.W_o(transpose_output(self.attention_weights @ values))

    class PositionWiseFFN(nn.Module):
        def __init__(self, num_hiddens, ffn_num_hiddens):
            super().__init__()
            self.dense1 = nn.Linear(num_hiddens, ffn_num_hiddens)
            self.relu = nn.ReLU()
            self.dense2 = nn.Linear(ffn_num_hiddens, num_hiddens)

        def forward(self, X):
            return self.dense2(self.relu(self.dense1(X)))

    class AddNorm(nn.Module):
        def __init__(self, num_hiddens, dropout=0.0):
            super().__init__()
            self.dropout = nn.Dropout(dropout)
            self.ln = LayerNorm(num_hiddens)

        def forward(self, X, Y):
            return self.ln(self.dropout(Y) + X)

    class EncoderBlock(nn.Module):
        def __init__(self, num_hiddens, ffn_num_hiddens, num_heads):
            super().__init__()
            self.attention = MultiHeadAttention(num_hiddens, num_heads)
            self.addnorm1 = AddNorm(num_hiddens)
            self.ffn = PositionWiseFFN(num_hiddens, ffn_num_hiddens)
            self.addnorm2 = AddNorm(num_hiddens)

        def forward(self, X):
            Y = self.addnorm1(X, self.attention(X, X, X))
            return self.addnorm2(Y, self.ffn(Y))

    class DecoderBlock(nn.Module):
        def __init__(self, num_hiddens, ffn_num_hiddens, num_heads):
            super().__init__()
            self.attention1 = MultiHeadAttention(num_hiddens, num_heads)
            self.addnorm1 = AddNorm(num_hiddens)
            self.attention2 = MultiHeadAttention(num_hiddens, num_heads)
            self.addnorm2 = AddNorm(num_hiddens)
            self.ffn = PositionWiseFFN(num_hiddens, ffn_num_hiddens)
            self.addnorm3 = AddNorm(num_hiddens)

        def forward(self, X, enc_outputs):
            Y = self.addnorm1(X, self.attention1(X, X, X, causal=True))
            Z = self.addnorm2(Y, self.attention2(Y, enc_outputs, enc_outputs))
            return self.addnorm3(Z, self.ffn(Z))

    class EncoderDecoder(nn.Module):
        def __init__(self, vocab_size, num_hiddens, ffn_num_hiddens, num_heads, num_blks):
            super().__init__()
            self.num_hiddens = num_hiddens
            self.embedding = nn.Embedding(vocab_size, num_hiddens)
            self.pos_encoding = PositionalEncoding(num_hiddens)
            self.encoder = nn.ModuleList(
                [EncoderBlock(num_hiddens, ffn_num_hiddens, num_heads) for _ in range(num_blks)]
            )
            self.decoder = nn.ModuleList(
                [DecoderBlock(num_hiddens, ffn_num_hiddens, num_heads) for _ in range(num_blks)]
            )
            nn.init.normal_(self.embedding.weight, std=num_hiddens**-0.5)

        def forward(self, enc_X, dec_X):
            X = self.pos_encoding(self.embedding(enc_X) * math.sqrt(self.num_hiddens))
            for blk in self.encoder:
                X = blk(X)
            Y = self.pos_encoding(self.embedding(dec_X) * math.sqrt(self.num_hiddens))
            for blk in self.decoder:
                Y = blk(Y, X)
            return Y @ self.embedding.weight.T

    c = TR_CFG
    return EncoderDecoder(
        c["vocab"], c["d_model"], c["dim_feedforward"], c["nhead"], c["layers"]
    )


CASES.append(
    dict(
        name="transformer_d2l_unbiased_variance",
        style="d2l",
        build=w_transformer_d2l_var,
        reference=("transformer", dict(TR_CFG)),
        label="wrong",
        mistake="The hand-written LayerNorm uses torch's default unbiased variance (divides by d - 1).",
        expected="layer norm variance divided by d - 1 in place of d (unbiased)",
        call=None,
    )
)


def w_transformer_jax_levels():
    import jax
    import jax.numpy as jnp

    def layernorm(p, name, x, eps=1e-5):
        mu = x.mean(-1, keepdims=True)
        var = x.var(-1, keepdims=True)
        return (x - mu) / jnp.sqrt(var + eps) * p[name + "/scale"] + p[name + "/offset"]

    def dense(p, name, x):
        return jnp.dot(x, p[name + "/w"]) + p[name + "/b"]

    def attention(p, name, xq, xkv, causal, heads):
        b, n, c = xq.shape
        m = xkv.shape[1]
        q = dense(p, name + "/query", xq).reshape(b, n, heads, -1)
        k = dense(p, name + "/key", xkv).reshape(b, m, heads, -1)
        v = dense(p, name + "/value", xkv).reshape(b, m, heads, -1)
        s = jnp.einsum("bnhd,bmhd->bhnm", q, k) / jnp.sqrt(c // heads)
        if causal:
            s = jnp.where(jnp.arange(n)[:, None] >= jnp.arange(m)[None, :], s, -1e30)
        o = jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(s, -1), v)
        return dense(p, name + "/out", o.reshape(b, n, c))

    def ffn(p, name, x):
        return dense(p, name + "/fc2", jax.nn.relu(dense(p, name + "/fc1", x)))

    def embed(p, tokens):
        d = p["embedding"].shape[1]
        n = tokens.shape[1]
        ang = jnp.arange(n)[:, None] / 10000.0 ** (jnp.arange(0, d, 2) / d)[None, :]
        pe = jnp.stack([jnp.sin(ang), jnp.cos(ang)], axis=-1).reshape(n, d)
        return p["embedding"][tokens] * d**0.5 + pe

    def encode(p, src, layers, heads):
        x = embed(p, src)
        outputs = []
        for i in range(layers):
            x = layernorm(
                p, f"enc{i}/ln1", x + attention(p, f"enc{i}/attn", x, x, False, heads)
            )
            x = layernorm(p, f"enc{i}/ln2", x + ffn(p, f"enc{i}/mlp", x))
            outputs.append(x)
        return outputs

    def decode(p, tgt, memory, layers, heads):
        y = embed(p, tgt)
        for i in range(layers):
            m = memory[i]
            y = layernorm(p, f"dec{i}/ln1", y + attention(p, f"dec{i}/self", y, y, True, heads))
            y = layernorm(
                p, f"dec{i}/ln2", y + attention(p, f"dec{i}/cross", y, m, False, heads)
            )
            y = layernorm(p, f"dec{i}/ln3", y + ffn(p, f"dec{i}/mlp", y))
        return y @ p["embedding"].T

    def transformer(params, src, tgt):
        layers, heads = TR_CFG["layers"], TR_CFG["nhead"]
        return decode(params, tgt, encode(params, src, layers, heads), layers, heads)

    d, f = TR_CFG["d_model"], TR_CFG["dim_feedforward"]
    keys = iter(jax.random.split(jax.random.PRNGKey(1), 200))
    w = lambda *s: jax.random.normal(next(keys), s) * 0.2
    params = {"embedding": w(TR_CFG["vocab"], d)}

    def add_dense(name, i, o):
        params[name + "/w"], params[name + "/b"] = w(i, o), w(o)

    def add_norm(name):
        params[name + "/scale"], params[name + "/offset"] = 1 + w(d), w(d)

    for i in range(TR_CFG["layers"]):
        for a in (f"enc{i}/attn", f"dec{i}/self", f"dec{i}/cross"):
            for t in ("query", "key", "value", "out"):
                add_dense(f"{a}/{t}", d, d)
        for a in (f"enc{i}/mlp", f"dec{i}/mlp"):
            add_dense(a + "/fc1", d, f)
            add_dense(a + "/fc2", f, d)
        for a in (f"enc{i}/ln1", f"enc{i}/ln2", f"dec{i}/ln1", f"dec{i}/ln2", f"dec{i}/ln3"):
            add_norm(a)
    return transformer, params


CASES.append(
    dict(
        name="transformer_jax_memory_level_by_level",
        style="jax",
        build=w_transformer_jax_levels,
        reference=("transformer", dict(TR_CFG)),
        label="wrong",
        mistake="Decoder layer i attends to the output of encoder layer i in place of the last encoder layer's.",
        expected="cross-attention reads an intermediate encoder layer; every decoder layer must read the last one's output",
        call=None,
    )
)


# ---------------------------------------------------------------- losses


def w_next_token_flat_shift():
    def get_loss(logits, idx):
        B, T, C = logits.shape
        logits = logits.view(B * T, C)
        idx = idx.view(B * T)
        loss = F.cross_entropy(logits[:-1], idx[1:])
        return loss

    return get_loss


CASES.append(
    dict(
        name="next_token_nanogpt_shift_after_flatten",
        style="nanogpt",
        build=w_next_token_flat_shift,
        reference=("next_token_loss", dict()),
        label="wrong",
        mistake="The shift is made after batch and time are flattened, so a row's last position predicts the next row's first token.",
        expected="pairs across sequences in the batch are counted; shift per row before flattening",
        call=None,
    )
)


def w_padded_d2l_row_means():
    def masked_softmax_ce(pred, label, pad_id=0):
        weights = (label != pad_id).to(pred.dtype)
        unweighted_loss = F.cross_entropy(pred.permute(0, 2, 1), label, reduction="none")
        valid_len = weights.sum(dim=1).clamp(min=1)
        weighted_loss = (unweighted_loss * weights).sum(dim=1) / valid_len
        return weighted_loss.mean()

    return masked_softmax_ce


CASES.append(
    dict(
        name="padded_ce_d2l_mean_of_row_means",
        style="d2l",
        build=w_padded_d2l_row_means,
        reference=("padded_cross_entropy", dict(pad_id=0)),
        label="wrong",
        mistake="The loss is averaged within each sequence and then over sequences, so tokens of short rows weigh more.",
        expected="mean of per-sequence means rather than mean over all real tokens",
        call=None,
    )
)


def w_ce_numpy_indexing():
    def cross_entropy(logits, labels):
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return -log_probs[:, labels].mean()

    return cross_entropy


CASES.append(
    dict(
        name="cross_entropy_numpy_all_pairs",
        style="numpy",
        build=w_ce_numpy_indexing,
        reference=("cross_entropy", dict()),
        label="wrong",
        mistake="log_probs[:, labels] takes each example's log-probability at every example's label (B x B) before the mean.",
        expected="all pairs are averaged; index with [arange(B), labels]",
        call=None,
    )
)


def w_ce_torch_double_softmax():
    criterion = nn.CrossEntropyLoss()

    def loss_fn(outputs, labels):
        probs = torch.softmax(outputs, dim=1)
        return criterion(probs, labels)

    return loss_fn


CASES.append(
    dict(
        name="cross_entropy_torch_double_softmax",
        style="torch",
        build=w_ce_torch_double_softmax,
        reference=("cross_entropy", dict()),
        label="wrong",
        mistake="Softmax is applied before nn.CrossEntropyLoss, which applies log-softmax itself.",
        expected="softmax applied twice",
        call=None,
    )
)


# ---------------------------------------------------------------- correct ones


def c_sinusoids_numpy():
    def get_position_angle_vec(position, d_hid):
        return [position / np.power(10000, 2 * (hid_j // 2) / d_hid) for hid_j in range(d_hid)]

    def get_sinusoid_encoding_table(n_position, d_hid):
        table = np.array([get_position_angle_vec(pos_i, d_hid) for pos_i in range(n_position)])
        table[:, 0::2] = np.sin(table[:, 0::2])
        table[:, 1::2] = np.cos(table[:, 1::2])
        return table

    return get_sinusoid_encoding_table


CASES.append(
    dict(
        name="sinusoids_numpy_table",
        style="numpy",
        build=c_sinusoids_numpy,
        reference=("sinusoids", dict()),
        label="correct",
        mistake="",
        expected="equal",
        call=None,
    )
)


def c_rotary_einops_complex():
    def rotate(x, base=10000.0):
        n, d = x.shape[-2:]
        half = d // 2
        freqs = torch.exp(
            torch.arange(half, device=x.device, dtype=x.dtype) * (-math.log(base) / half)
        )
        theta = einsum("n, f -> n f", torch.arange(n, device=x.device, dtype=x.dtype), freqs)
        re, im = rearrange(x, "b h n (c f) -> c b h n f", c=2)
        z = torch.complex(re, im) * torch.polar(torch.ones_like(theta), theta)
        return rearrange(torch.view_as_real(z), "b h n f c -> b h n (c f)")

    return rotate


CASES.append(
    dict(
        name="rotary_einops_complex_halves",
        style="einops",
        build=c_rotary_einops_complex,
        reference=("rotary", dict()),
        label="correct",
        mistake="",
        expected="equal",
        call=None,
    )
)


def c_gpt_nanogpt_interleaved():
    class Conv1D(nn.Module):
        def __init__(self, nf, nx):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
            self.bias = nn.Parameter(torch.zeros(nf))

        def forward(self, x):
            return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(
                *x.shape[:-1], -1
            )

    class Attention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.n_head = n_head
            self.query_key_value = Conv1D(3 * n_embd, n_embd)
            self.dense = Conv1D(n_embd, n_embd)

        def forward(self, x):
            B, T, C = x.size()
            qkv = self.query_key_value(x).view(B, T, self.n_head, 3 * (C // self.n_head))
            q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
            w = q @ k.transpose(-2, -1) * (C // self.n_head) ** -0.5
            mask = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device))
            w = w.masked_fill(~mask, torch.finfo(w.dtype).min)
            y = w.softmax(-1) @ v
            return self.dense(y.transpose(1, 2).flatten(2))

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

    class Block(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.ln1 = nn.LayerNorm(n_embd)
            self.ln2 = nn.LayerNorm(n_embd)
            self.attn = Attention(n_embd, n_head)
            self.mlp = nn.Sequential(
                Conv1D(4 * n_embd, n_embd), NewGELU(), Conv1D(n_embd, 4 * n_embd)
            )

        def forward(self, x):
            x = x + self.attn(self.ln1(x))
            return x + self.mlp(self.ln2(x))

    class GPT(nn.Module):
        def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
            super().__init__()
            self.tok_emb = nn.Embedding(vocab_size, n_embd)
            self.pos_emb = nn.Parameter(torch.randn(1, block_size, n_embd) * 0.01)
            self.blocks = nn.Sequential(*[Block(n_embd, n_head) for _ in range(n_layer)])
            self.ln_f = nn.LayerNorm(n_embd)
            nn.init.normal_(self.tok_emb.weight, std=0.02)

        def forward(self, idx):
            x = self.tok_emb(idx) + self.pos_emb[:, : idx.size(1), :]
            x = self.ln_f(self.blocks(x))
            return F.linear(x, self.tok_emb.weight)

    return GPT(**GPT_CFG)


CASES.append(
    dict(
        name="gpt_nanogpt_neox_packed_conv1d",
        style="nanogpt",
        build=c_gpt_nanogpt_interleaved,
        reference=("gpt", dict(GPT_CFG)),
        label="correct",
        mistake="",
        expected="equal up to packing (q, k, v interleaved per head, Conv1D layout)",
        call=None,
    )
)


def c_llama_einops():
    class RMSNorm(nn.Module):
        def __init__(self, dim, eps=1e-5):
            super().__init__()
            self.eps = eps
            self.g = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.g

    def rotary_freqs(n, dim, like):
        inv_freq = 1.0 / (
            10000 ** (torch.arange(0, dim, 2, device=like.device, dtype=like.dtype) / dim)
        )
        t = torch.arange(n, device=like.device, dtype=like.dtype)
        freqs = einsum("i , j -> i j", t, inv_freq)
        return repeat(freqs, "n d -> n (r d)", r=2)

    def rotate_half(x):
        x1, x2 = rearrange(x, "... (r d) -> r ... d", r=2)
        return torch.cat((-x2, x1), dim=-1)

    class Attention(nn.Module):
        def __init__(self, dim, heads, kv_heads):
            super().__init__()
            self.heads, self.kv_heads, self.dim_head = heads, kv_heads, dim // heads
            self.norm = RMSNorm(dim)
            self.to_qkv = nn.Linear(dim, self.dim_head * (heads + 2 * kv_heads), bias=False)
            self.to_out = nn.Linear(dim, dim, bias=False)

        def forward(self, x):
            n = x.shape[1]
            x = self.norm(x)
            qkv = rearrange(self.to_qkv(x), "b n (h d) -> b h n d", d=self.dim_head)
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            pos = rotary_freqs(n, self.dim_head, x)
            q, k = map(lambda t: t * pos.cos() + rotate_half(t) * pos.sin(), (q, k))
            q = rearrange(q, "b (h g) n d -> b h g n d", h=self.kv_heads) * self.dim_head**-0.5
            sim = einsum("b h g i d, b h j d -> b h g i j", q, k)
            mask = torch.ones((n, n), device=x.device, dtype=torch.bool).triu(1)
            attn = sim.masked_fill(mask, -torch.finfo(sim.dtype).max).softmax(dim=-1)
            out = einsum("b h g i j, b h j d -> b h g i d", attn, v)
            return self.to_out(rearrange(out, "b h g n d -> b n (h g d)"))

    class SwiGLU(nn.Module):
        def forward(self, x):
            x, gate = x.chunk(2, dim=-1)
            return F.silu(gate) * x

    def FeedForward(dim, inner):
        return nn.Sequential(
            RMSNorm(dim),
            nn.Linear(dim, inner * 2, bias=False),
            SwiGLU(),
            nn.Linear(inner, dim, bias=False),
        )

    class Llama(nn.Module):
        def __init__(self, *, num_tokens, dim, depth, heads, kv_heads, ff_inner):
            super().__init__()
            self.emb = nn.Embedding(num_tokens, dim)
            self.layers = nn.ModuleList([])
            for _ in range(depth):
                self.layers.append(
                    nn.ModuleList([Attention(dim, heads, kv_heads), FeedForward(dim, ff_inner)])
                )
            self.to_logits = nn.Sequential(RMSNorm(dim), nn.Linear(dim, num_tokens, bias=False))
            self.to_logits[-1].weight = self.emb.weight

        def forward(self, x):
            x = self.emb(x)
            for attn, ff in self.layers:
                x = attn(x) + x
                x = ff(x) + x
            return self.to_logits(x)

    c = LLAMA_CFG
    return Llama(
        num_tokens=c["vocab_size"],
        dim=c["n_embd"],
        depth=c["n_layer"],
        heads=c["n_head"],
        kv_heads=c["n_kv_head"],
        ff_inner=c["n_inner"],
    )


CASES.append(
    dict(
        name="llama_einops_fused_value_gate",
        style="einops",
        build=c_llama_einops,
        reference=("llama", dict(LLAMA_CFG)),
        label="correct",
        mistake="",
        expected="equal up to packing (q, k, v in one projection; up first, then gate in another)",
        call=None,
    )
)


def c_transformer_torch():
    class EncoderLayer(nn.Module):
        def __init__(self, d_model, nhead, d_ff):
            super().__init__()
            self.attn = nn.MultiheadAttention(d_model, nhead)
            self.ff = nn.Sequential(
                nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)
            )
            self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(2)])

        def forward(self, x):
            x = self.norms[0](x + self.attn(x, x, x, need_weights=False)[0])
            return self.norms[1](x + self.ff(x))

    class DecoderLayer(nn.Module):
        def __init__(self, d_model, nhead, d_ff):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(d_model, nhead)
            self.src_attn = nn.MultiheadAttention(d_model, nhead)
            self.ff = nn.Sequential(
                nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)
            )
            self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(3)])

        def forward(self, y, memory):
            n = y.size(0)
            blocked = torch.ones(n, n, dtype=torch.bool, device=y.device).triu(1)
            y = self.norms[0](y + self.self_attn(y, y, y, attn_mask=blocked)[0])
            attended, self.weights = self.src_attn(y, memory, memory)
            y = self.norms[1](y + attended)
            return self.norms[2](y + self.ff(y))

    class Transformer(nn.Module):
        def __init__(self, vocab, d_model, nhead, layers, dim_feedforward):
            super().__init__()
            self.d_model = d_model
            self.shared = nn.Parameter(torch.randn(vocab, d_model) / math.sqrt(d_model))
            self.encoder = nn.ModuleList(
                [EncoderLayer(d_model, nhead, dim_feedforward) for _ in range(layers)]
            )
            self.decoder = nn.ModuleList(
                [DecoderLayer(d_model, nhead, dim_feedforward) for _ in range(layers)]
            )

        def positions(self, n, like):
            i = torch.arange(self.d_model, dtype=like.dtype, device=like.device)
            rate = 10000 ** (-2 * torch.div(i, 2, rounding_mode="floor") / self.d_model)
            angle = torch.arange(n, dtype=like.dtype, device=like.device)[:, None] * rate
            return torch.where(i % 2 == 0, angle.sin(), angle.cos())

        def embed(self, tokens):
            x = F.embedding(tokens.t(), self.shared) * math.sqrt(self.d_model)
            return x + self.positions(tokens.size(1), x).unsqueeze(1)

        def forward(self, src, tgt):
            memory = self.embed(src)
            for layer in self.encoder:
                memory = layer(memory)
            y = self.embed(tgt)
            for layer in self.decoder:
                y = layer(y, memory)
            return F.linear(y.transpose(0, 1), self.shared)

    return Transformer(**TR_CFG)


CASES.append(
    dict(
        name="transformer_torch_sequence_first_inside",
        style="torch",
        build=c_transformer_torch,
        reference=("transformer", dict(TR_CFG)),
        label="correct",
        mistake="",
        expected="equal",
        call=None,
    )
)


def c_next_token_jax():
    import jax
    import jax.numpy as jnp

    def loss_fn(logits, tokens):
        logits = logits[:, :-1]
        labels = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1], dtype=logits.dtype)
        logprobs = logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        return -jnp.mean(jnp.sum(labels * logprobs, axis=-1))

    return loss_fn


CASES.append(
    dict(
        name="next_token_jax_one_hot",
        style="jax",
        build=c_next_token_jax,
        reference=("next_token_loss", dict()),
        label="correct",
        mistake="",
        expected="equal",
        call=None,
    )
)


def c_padded_d2l():
    def compute_loss(Y_hat, Y, pad_id=0):
        Y_hat = Y_hat.reshape((-1, Y_hat.shape[-1]))
        Y = Y.reshape((-1,))
        loss = F.cross_entropy(Y_hat, Y, reduction="none")
        mask = (Y != pad_id).type(loss.dtype)
        return (loss * mask).sum() / mask.sum()

    return compute_loss


CASES.append(
    dict(
        name="padded_ce_d2l_masked_sum",
        style="d2l",
        build=c_padded_d2l,
        reference=("padded_cross_entropy", dict(pad_id=0)),
        label="correct",
        mistake="",
        expected="equal",
        call=None,
    )
)
