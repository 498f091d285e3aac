"""What is cut among ranks is what one rank computes; threads stand for the ranks."""

import itertools
import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from draws import batches, drawn, layouts, normal, seeds, tolerance
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from attnlib import scaling
from attnlib.attention import attention_backend
from attnlib.gpt import GPT, GPTConfig
from attnlib.scaling import (
    Cluster,
    GPTStage,
    Plan,
    _block_attention,
    _block_gradients,
    _block_weights,
    _possible_plans,
    ring_all_reduce,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)

ranks_ = st.integers(1, 4)


class Threads:
    """What `scaling` needs of torch.distributed, among threads that exchange tensors."""

    isend, irecv = "isend", "irecv"

    def __init__(self, ranks):
        self.ranks, self.own = ranks, threading.local()
        self.group = SimpleNamespace(WORLD=type("World", (), {})())
        self.mail, self.lock = {}, threading.Lock()
        self.counts = Counter()  # of messages sent and expected, from one rank to another
        self.told, self.meeting = [None] * ranks, threading.Barrier(ranks)

    def get_rank(self, group=None):
        return self.own.rank

    def get_world_size(self, group=None):
        return self.ranks

    def is_initialized(self):
        return True

    def P2POp(self, kind, x, group=None, group_peer=None):
        return kind, x, group_peer

    def letter(self, kind, source, target):
        """Room for the next message from a rank to another, as they count it."""
        with self.lock:
            number = self.counts[kind, source, target]
            self.counts[kind, source, target] += 1
            return self.mail.setdefault((source, target, number), queue.Queue())

    def batch_isend_irecv(self, operations):
        works = []
        for kind, x, peer in operations:
            if kind == self.isend:
                assert x.is_contiguous()  # as backends want it
                self.letter(kind, self.own.rank, peer).put(x.clone())
            else:
                letter = self.letter(kind, peer, self.own.rank)
                works.append(SimpleNamespace(wait=partial(receive, x, letter)))
        return works

    def all_gather_object(self, out, own, group=None):
        self.told[self.own.rank] = own
        self.meeting.wait(30)
        out[:] = self.told
        self.meeting.wait(30)


def receive(x, letter):
    x.copy_(letter.get(timeout=30))


def on_ranks(ranks, function):
    """What a function of the rank returns on each of them."""
    threads, real = Threads(ranks), scaling.dist

    def run(rank):
        threads.own.rank = rank
        return function(rank)

    scaling.dist = threads
    try:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(run, range(ranks)))
    finally:
        scaling.dist = real


def direct(q, k, v, causal=False):
    """Attention in the dtype of its inputs, and the logarithms of its sums."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def close(a, b, dtype):
    limit = tolerance(dtype) * max(1.0, b.abs().max().item() if b.numel() else 1.0)
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=max(limit, 1e-13))


# --- sums and rings ---------------------------------------------------------------------------


@drawn(ranks_, st.integers(0, 3), st.sampled_from((torch.float64, torch.int64)), layouts)
def test_a_ring_sums(ranks, each, dtype, layout):
    """Numbers whose sum is exact, in any shape and memory; also none."""
    shape = (ranks, each) if each != 1 else (1, ranks)
    xs = [
        (8 * normal(shape, seed=rank, layout=layout)).round().to(dtype) for rank in range(ranks)
    ]
    found = on_ranks(ranks, lambda rank: ring_all_reduce(xs[rank]))
    assert all(torch.equal(x, sum(xs)) for x in found)


@drawn(ranks_, st.integers(1, 3))
def test_what_goes_round_visits_every_rank(ranks, length):
    """Each rank has its own first, and then that of the rank before it, and so on."""

    def visitors(rank):
        x = torch.full((length,), float(rank))
        received, arrive = scaling._send_on(x)
        arrive()
        return received[0].item(), [y[0].item() for y in scaling._ring_iter(x)]

    for rank, (last, found) in enumerate(on_ranks(ranks, visitors)):
        assert last == (rank - 1) % ranks
        assert found == [(rank - step) % ranks for step in range(ranks)]


@drawn(
    st.data(),
    ranks_,
    st.integers(1, 2),
    batches,
    st.booleans(),
    st.booleans(),
    seeds,
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
def test_ring_attention(data, ranks, each, batch, causal, balanced, seed, dtype):
    """One token of a rank or more; leading axes that broadcast; outputs and gradients."""
    n = ranks * each * (1 + balanced)
    q_lead, k_lead = data.draw(
        st.sampled_from((((batch, 2), (batch, 2)), ((batch, 1), (2,)), ((2,), (batch, 1, 1))))
    )
    shapes = (*q_lead, n, 4), (*k_lead, n, 4), (*k_lead, n, 3)
    qkv = [normal(shape, dtype, seed + i, data.draw(layouts)) for i, shape in enumerate(shapes)]
    exact = [x.double().requires_grad_() for x in qkv]
    wanted, _ = direct(*exact, causal)
    grad = normal(wanted.shape, dtype, 7)
    gradients = torch.autograd.grad(wanted, exact, grad.double())

    def attend(rank):
        def cut(x):
            return shard_sequence(x, rank, ranks, balanced=balanced)

        own = [cut(x).detach().requires_grad_() for x in qkv]
        out = ring_attention(*own, causal=causal, balanced=balanced)
        return [out.detach(), *torch.autograd.grad(out, own, cut(grad))]

    for shards, x in zip(zip(*on_ranks(ranks, attend)), (wanted, *gradients)):
        assert shards[0].dtype == dtype
        close(unshard_sequence(list(shards), balanced=balanced), x.detach(), dtype)


def test_shards_of_several_lengths_are_named():
    def attend(rank):
        x = torch.randn(1, 2 + (rank == 1), 4)
        with pytest.raises(ValueError, match=r"rank 1 has q .*\(1, 3, 4\).* and rank 0"):
            scaling._check_shards(x, x, x, False, None)
        return True

    assert all(on_ranks(3, attend))


# --- shares of sequences and layers -----------------------------------------------------------


@drawn(ranks_, st.integers(1, 3), st.booleans(), st.integers(-3, 2), layouts)
def test_sequences_are_shared(ranks, each, balanced, dim, layout):
    """Along any axis: the tokens with the numbers that `chunks_of` gives."""
    n = ranks * each * (1 + balanced)
    shape = [2, 3, 4]
    shape[dim] = n
    x = normal(shape, layout=layout)
    shards = [shard_sequence(x, r, ranks, dim=dim, balanced=balanced) for r in range(ranks)]
    assert torch.equal(unshard_sequence(shards, dim=dim, balanced=balanced), x)
    for rank, shard in enumerate(shards):
        chunks = scaling.sequence_chunks(rank, ranks, balanced)
        tokens = [c * each + i for c in chunks for i in range(each)]
        assert torch.equal(shard, x.index_select(dim, torch.tensor(tokens)))
        assert not balanced or sum(chunks) == 2 * ranks - 1  # the same work for all


@drawn(st.integers(1, 6), st.booleans(), st.booleans())
def test_visits_join_what_may_meet(ranks, causal, balanced):
    chunks, met = ranks * (1 + balanced), []
    for rank in range(ranks):
        steps = scaling.ring_schedule(rank, ranks, causal, balanced)
        assert len(steps) == ranks
        own = scaling.sequence_chunks(rank, ranks, balanced)
        for step, pairs in enumerate(steps):
            theirs = scaling.sequence_chunks((rank - step) % ranks, ranks, balanced)
            met += [(own[i], theirs[j], diagonal) for i, j, diagonal in pairs]
    pairs = itertools.product(range(chunks), repeat=2)
    assert sorted(met) == [(a, b, causal and a == b) for a, b in pairs if a >= b or not causal]


@drawn(ranks_, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3))
def test_rows_of_a_rank_are_whole_units(ranks, shares, width):
    """Of each part of a fused layer the rank has its share of units, part by part."""
    units = [share * ranks for share in shares]
    rows = sum(units) * width
    labels = [
        (part, unit) for part, count in enumerate(units) for unit in range(count)
    ]  # of each unit
    wanted = [
        number * width + i
        for rank in range(ranks)
        for number, (part, unit) in enumerate(labels)
        if unit // shares[part] == rank
        for i in range(width)
    ]
    assert scaling._rank_order(units, rows, ranks).tolist() == wanted


@drawn(st.data(), batches, st.integers(1, 5), st.integers(1, 5), st.booleans(), seeds)
def test_blocks_of_keys_add_up(data, batch, n, m, causal, seed):
    """Weights, outputs and gradients of a block, alone and as a part of more keys."""
    m = n if causal else m
    q, k, v = (
        normal(s, seed=seed + i, layout=data.draw(layouts)).requires_grad_()
        for i, s in enumerate(((batch, 2, n, 4), (2, m, 4), (2, m, 3)))
    )
    wanted, lse = direct(q, k, v, causal)
    out, found = _block_attention(q, k, v, causal)
    close(out.detach(), wanted.detach(), torch.float64)
    close(found.detach(), lse.detach(), torch.float64)
    p, _ = _block_weights(q, k, lse + 1, causal)  # of more keys: e times as much in all
    close(p.sum(-1).detach(), torch.full_like(lse, torch.e**-1).detach(), torch.float64)
    grad = normal(wanted.shape, seed=9)
    exact = torch.autograd.grad(wanted, (q, k, v), grad)
    with torch.no_grad():
        made = _block_gradients(q, k, v, wanted, lse, grad, causal)
    for a, b in zip(made, exact, strict=True):
        assert a.shape == b.shape
        close(a, b, torch.float64)


# --- stages -----------------------------------------------------------------------------------


@st.composite
def configs(draw, tied=None):
    """A tiny `GPT`, of any of its kinds."""
    kv, width = draw(st.sampled_from((1, 2))), draw(st.sampled_from((2, 4)))
    heads = kv * draw(st.sampled_from((1, 2)))
    return GPTConfig(
        vocab_size=draw(st.integers(1, 20)),
        block_size=8,
        n_layer=draw(st.integers(1, 4)),
        n_head=heads,
        n_kv_head=kv,
        n_embd=heads * width,
        head_dim=draw(st.sampled_from((None, 6))),
        position=draw(st.sampled_from(("rotary", "learned", "none"))),
        mlp=draw(st.sampled_from(("swiglu", "gelu"))),
        norm=draw(st.sampled_from(("rms", "layer"))),
        qk_norm=draw(st.booleans()),
        window=draw(st.sampled_from((None, 1, 3))),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()) if tied is None else tied,
    )


@drawn(configs(tied=False), st.data(), st.integers(1, 8), st.integers(1, 2))
def test_stages_one_after_the_other_are_the_model(config, data, n, batch):
    """In any number of stages, also unequal ones; each parameter is in one of them."""
    model = GPT(config).double()
    stages = data.draw(st.integers(1, config.n_layer))
    parts = [GPTStage(model, i, stages) for i in range(stages)]
    own = [p for part in parts for p in part.parameters()]
    assert len(own) == len({*own}) and {*own} == {*model.parameters()}
    sizes = [len(part.h) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    x = wanted = torch.randint(config.vocab_size, (batch, n))
    for part in parts:
        x = part(x)
    wanted = model(wanted)
    close(x.detach(), wanted.detach(), torch.float64)


@drawn(st.sampled_from((0.0, 0.3)), st.sampled_from((0.0, 0.3)), st.booleans())
def test_dropout_is_found(layer, attention, as_module):
    module = nn.Sequential(nn.Linear(1, 1), nn.Dropout(layer))
    module.attn_drop = nn.Dropout(attention) if as_module else attention
    assert scaling._has_dropout(module) is (layer > 0 or attention > 0)


# --- plans ------------------------------------------------------------------------------------


@drawn(configs())
def test_sizes_and_operations_are_those_of_the_model(config):
    """Of every kind of GPT: PyTorch counts the products of a step with whole attention."""
    model = GPT(config)
    block, ends = scaling._parameter_counts(config)
    matrices = [p.numel() for p in model.h[0].parameters() if p.ndim == 2]
    assert block == sum(matrices)
    own = {model.wte.weight, model.lm_head.weight}
    assert ends == sum(p.numel() for p in own)
    tokens = torch.zeros(1, config.block_size, dtype=torch.int64)
    with attention_backend("reference"), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    attention, operations = scaling.flops_per_token(config)
    counted = counter.get_total_flops() / config.block_size
    channels = config.n_layer * config.n_head * config.resolved_head_dim
    assert counted == operations - attention + 12 * channels * config.block_size
    window = min(config.window or config.block_size, config.block_size)
    seen = window * (config.block_size - window) + window**2 / 2  # of the first ones half
    assert attention == int(12 * channels * seen / config.block_size)


@drawn(st.sampled_from((1, 2, 4, 16)), st.integers(1, 4))
def test_a_block_of_2019_keeps_32_numbers_a_channel(width, heads):
    """Korthikanti et al. 2023, section 4.1: 34 bytes, and 32 without masks of dropout."""
    sizes = dict(n_head=heads, n_embd=heads * width, mlp="gelu", position="learned")
    config = GPTConfig(**sizes, n_layer=1, vocab_size=8, block_size=8)
    assert scaling._activation_bytes(config) == 32 * heads * width


@drawn(
    configs(),
    *[st.sampled_from((1, 2, 4)) for _ in range(5)],
    st.sampled_from((0, 1, 3)),
    st.booleans(),
)
def test_a_plan_by_its_formulas(
    config, data, tensor, pipeline, context, micro, zero, recompute
):
    """Memory and seconds, each written anew."""
    own = Plan(data, tensor, pipeline, context, micro, 1, zero, recompute)
    cluster, batch = Cluster(own.devices, node=4), 4 * data * micro
    block, ends = scaling._parameter_counts(config)
    depth = -(-config.n_layer // pipeline)
    assert own.devices == data * tensor * pipeline * context and own.depth(config) == depth
    weights = (depth * block + ends / (1 if pipeline == 1 else 2)) / tensor
    assert own.parameters(config) == weights and own.micros(batch) == 4
    states = {0: 16, 1: 4 + 12 / (data * context), 3: 16 / (data * context)}[zero] * weights
    states += 2 * (2 * block + ends) / tensor if zero == 3 else 0
    kept, inputs = scaling._activation_bytes(config), 2 * config.n_embd
    held = min(pipeline, 4) * depth * (inputs if recompute else kept)
    held += kept if recompute else 0
    tokens = micro * config.block_size / (tensor * context)
    memory = scaling.memory_per_device(own, config, batch)
    assert memory["states"] == pytest.approx(states)
    assert memory["activations"] == pytest.approx(tokens * (held + 6 * config.vocab_size))

    attention, operations = scaling.flops_per_token(config)
    work = batch * config.block_size * operations * (4 / 3 if recompute else 1)
    alone = work / (own.devices * cluster.flops * cluster.efficiency)
    alone *= depth * pipeline / config.n_layer  # all wait for the fullest stage
    compute, share = scaling._compute_seconds(own, config, cluster, batch)
    assert (compute, share) == pytest.approx((alone, alone * attention / operations))
    parts = scaling.step_time(own, config, cluster, batch)
    assert parts["compute"] == compute and min(parts.values()) >= 0
    waits = compute + parts["tensor"] + parts["sequence"]
    assert parts["bubble"] == pytest.approx((pipeline - 1) / 4 * waits)
    for name, count in (
        ("tensor", tensor),
        ("sequence", context),
        ("pipeline", pipeline),
        ("data", data * context),
    ):
        assert count > 1 or parts[name] == 0
    summed = 2 * (tensor - 1) / tensor * 2 * micro * config.block_size / context
    calls = (6 if recompute else 4) * depth * 4
    assert parts["tensor"] == pytest.approx(calls * summed * config.n_embd / cluster.inside)


@drawn(configs(), st.integers(1, 12), st.integers(1, 8), st.integers(1, 12))
def test_plans_that_are_possible(config, devices, node, batch):
    """They divide what they cut, and the shortest that fits is chosen."""
    cluster = Cluster(devices, node)
    plans = list(_possible_plans(config, cluster, batch))
    for own in plans:
        assert own.devices <= devices and own.tensor <= node
        assert batch % (own.data * own.micro) == 0
        assert config.n_head % own.tensor == config.resolved_n_kv_head % own.tensor == 0
        assert own.pipeline == 1 or not config.tied
        assert own.pipeline * own.interleave <= max(config.n_layer, own.pipeline)
        assert own.zero == 0 or own.data * own.context > 1
        assert own.context == 1 or config.block_size % (2 * own.context) == 0
    assert len({*plans}) == len(plans) > 0

    def seconds(own):
        return sum(scaling.step_time(own, config, cluster, batch).values())

    assert seconds(scaling.plan(config, cluster, batch)) == min(map(seconds, plans))
    name = ("devices", "node", "memory", "flops", "inside", "between", "efficiency")[batch % 7]
    with pytest.raises(ValueError, match=rf"{name} \(0\)"):
        Cluster(**{"devices": 1, name: 0})


ORACLES = {
    "ring_all_reduce": test_a_ring_sums,
    "_send_on": test_what_goes_round_visits_every_rank,
    "_ring_iter": test_what_goes_round_visits_every_rank,
    "ring_attention": test_ring_attention,
    "_check_shards": test_shards_of_several_lengths_are_named,
    "sequence_chunks": test_sequences_are_shared,
    "shard_sequence": test_sequences_are_shared,
    "unshard_sequence": test_sequences_are_shared,
    "ring_schedule": test_visits_join_what_may_meet,
    "_rank_order": test_rows_of_a_rank_are_whole_units,
    "_block_weights": test_blocks_of_keys_add_up,
    "_block_attention": test_blocks_of_keys_add_up,
    "_block_gradients": test_blocks_of_keys_add_up,
    "GPTStage": test_stages_one_after_the_other_are_the_model,
    "_has_dropout": test_dropout_is_found,
    "_parameter_counts": test_sizes_and_operations_are_those_of_the_model,
    "flops_per_token": test_sizes_and_operations_are_those_of_the_model,
    "_activation_bytes": test_a_block_of_2019_keeps_32_numbers_a_channel,
    "Plan": test_a_plan_by_its_formulas,
    "memory_per_device": test_a_plan_by_its_formulas,
    "_compute_seconds": test_a_plan_by_its_formulas,
    "step_time": test_a_plan_by_its_formulas,
    "_possible_plans": test_plans_that_are_possible,
    "plan": test_plans_that_are_possible,
    "Cluster": test_plans_that_are_possible,
}
PROCESSES = "needs processes: tests/test_scaling.py"
NOT_HERE = {
    "_SHARDED": "a table, read by `tensor_parallel`",
    "_COUNTS": "names of attributes",
    "tensor_parallel": PROCESSES,
    "_LocalRows": PROCESSES,
    "copy_to_group": PROCESSES,
    "_OwnRandomness": PROCESSES,
    "sum_gradient": PROCESSES,
    "shard_module": PROCESSES,
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(scaling.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
