"""Many devices: real processes give what one gives, and send what the formulas say."""

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from page_modules import write_modules
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from attnlib import scaling
from attnlib.attention import attention
from attnlib.gpt import GPT, PUBLISHED, GPTConfig
from attnlib.scaling import (
    Cluster,
    GPTStage,
    Plan,
    _possible_plans,
    flops_per_token,
    memory_per_device,
    plan,
    ring_all_reduce,
    ring_attention,
    ring_schedule,
    shard_sequence,
    step_time,
    tensor_parallel,
    unshard_sequence,
)
from attnlib.spatial import RewardBaseline
from attnlib.transformer import Transformer
from attnlib.vit import Attention, Mlp, VisionTransformer

SMALL = dict(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32, tied=False)


@pytest.fixture(scope="module", autouse=True)
def chapter(tmp_path_factory):
    """The chapter's modules, which processes import, too."""
    folder = tmp_path_factory.mktemp("modules")
    write_modules("55_scaling", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def four(chapter):
    from workers import Workers

    with Workers(4) as workers:
        yield workers


# --- what the workers run ---------------------------------------------------------------------


def updated_baseline(lengths):
    """The means after an update by one of several ranks, whose captions differ in length."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    reward = torch.randn(3, lengths[rank], generator=generator)
    words = torch.rand(3, lengths[rank], generator=generator) < 0.7
    baseline = RewardBaseline(6)
    baseline.update(reward, words)
    return baseline.means, reward, words


def reduce_in_groups(n):
    """For groups of 2 to 4 ranks: whether the ring sums, and the bytes it sends at n and 2n."""
    from wire import wire_bytes  # of the chapter

    found = {}
    for ranks in (2, 3, 4):
        group = dist.new_group(range(ranks))
        if dist.get_rank() < ranks:
            sent = []
            for size in (n, 2 * n):
                x = torch.arange(float(size)) + dist.get_rank()
                out = ring_all_reduce(x, group)
                right = ranks * torch.arange(float(size)) + ranks * (ranks - 1) / 2
                assert torch.equal(out, right)
                dist.barrier(group)
                before = wire_bytes()
                ring_all_reduce(x, group)
                sent.append(wire_bytes() - before)
            found[ranks] = sent[1] - sent[0]
        dist.barrier()
    return found


def model_and_inputs(kind):
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (2, 12))
    if kind == "gpt":
        return GPT(GPTConfig(**SMALL, qk_norm=True, bias=True)), (tokens,)
    if kind == "gpt of 2019":
        return GPT(GPTConfig(**SMALL, position="learned", norm="layer", mlp="gelu")), (tokens,)
    if kind == "vit":
        sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4)
        return VisionTransformer(num_classes=5, **sizes), (torch.randn(2, 3, 16, 16),)
    sizes = dict(d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2)
    model = Transformer(64, dim_feedforward=64, dropout=0.0, **sizes)
    return model, (tokens, tokens.flip(0)[:, :9])


def apart_from_whole(kind):
    """Largest differences of outputs, and of gradients of what a rank has whole."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for cut in (False, True):
        model, inputs = model_and_inputs(kind)
        model = tensor_parallel(model, mesh) if cut else model
        out = model(*inputs)
        out.square().mean().backward()
        grads = {
            name: p.grad for name, p in model.named_parameters() if not isinstance(p, DTensor)
        }
        found.append((out.detach(), grads))
    (out, grads), (cut_out, cut_grads) = found
    shared = [(g - grads[name]).abs().max().item() for name, g in cut_grads.items()]
    return (out - cut_out).abs().max().item(), max(shared), len(shared), len(grads)


def dropped_units(checkpointed=False):
    """In training, what is kept of 16 equal hidden units, and of 4 equal heads, and a gradient.

    The second layer is the identity, so that each unit can be seen.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    mlp, attn = Mlp(16, 16, drop=0.5), Attention(16, 4, attn_drop=0.5)
    with torch.no_grad():
        for first, last in ((mlp.fc1, mlp.fc2), (attn.qkv, attn.proj)):
            first.weight.mul_(0.01)
            first.bias.fill_(1.0)
            last.weight.copy_(torch.eye(16))
            last.bias.zero_()
    model = tensor_parallel(torch.nn.ModuleList([mlp, attn]), mesh)
    x = torch.randn(1, 200, 16, requires_grad=True)
    torch.manual_seed(1)
    run = partial(checkpoint, use_reentrant=False) if checkpointed else lambda f, x: f(x)
    hidden, heads = (run(layer, x) for layer in model)
    after = torch.rand(())  # with what all ranks go on
    (hidden.sum() + heads.square().sum()).backward()
    return [y.detach() for y in (hidden[0], heads[0], x.grad, after)]


def outputs_in_training():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = tensor_parallel(GPT(GPTConfig(**SMALL, dropout=0.5)), mesh)
    return model(torch.arange(12)[None]).detach()


def attend(qkv, causal, balanced):
    """Ring attention of this rank's tokens and its gradients, with ones for gradient."""
    cut = partial(
        shard_sequence, rank=dist.get_rank(), ranks=dist.get_world_size(), balanced=balanced
    )
    q, k, v = (cut(x).clone().requires_grad_() for x in qkv)
    out = ring_attention(q, k, v, causal=causal, balanced=balanced)
    out.sum().backward()
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def exchanges():
    """How often shapes have been exchanged after each of some calls, and whether all agree."""
    exchange, seen, found = dist.all_gather_object, [], []

    def noted(*arguments, **options):
        seen.append(1)
        exchange(*arguments, **options)

    dist.all_gather_object = noted
    try:
        other = dist.new_group(range(dist.get_world_size()))
        for tokens, group in (
            (6, None),
            (6, None),
            (8, None),
            (6, None),
            (6, other),
            (6, other),
        ):
            torch.manual_seed(dist.get_rank())
            q = torch.randn(1, tokens, 8)
            out = ring_attention(q, q, q, group=group)
            whole = [torch.empty_like(q) for _ in range(dist.get_world_size())]
            dist.all_gather(whole, q)
            keys = torch.cat(whole, 1)
            torch.testing.assert_close(out, attention(q, keys, keys))
            found.append(len(seen))
    finally:
        dist.all_gather_object = exchange
    return found


def unequal_shards():
    q = torch.randn(1, 4 + (dist.get_rank() == 1), 8)
    ring_attention(q, q, q)


def one_fails():
    if dist.get_rank() == 1:
        raise KeyError("no such weight")
    dist.barrier()


def one_dies():
    if dist.get_rank() == 1:
        os._exit(1)
    dist.barrier()


# --- sums -------------------------------------------------------------------------------------


def test_the_ring_sums_and_sends_the_least_that_is_possible(four):
    found = four.run(reduce_in_groups, 840)
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            assert found[rank][ranks] == 4 * 2 * (ranks - 1) * 840 // ranks


def test_states_are_shared_and_losses_are_those_of_one_process(four):
    config = GPTConfig(**SMALL)
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
    parameters = sum(p.numel() for p in GPT(config).parameters())
    from states_work import train_steps  # of the chapter

    (loss, whole, _), *_ = four.run(train_steps, config, tokens, "ddp")
    shares = four.run(train_steps, config, tokens, "fsdp")
    assert whole == 16 * parameters
    assert sum(states for _, states, _ in shares) == 16 * parameters
    for other, states, _ in shares:
        assert abs(other - loss) < 1e-5 and states == 4 * parameters


def test_processes_share_a_baseline(four):
    """The running means of `reinforce_loss` are those of the rewards of all ranks together."""
    found = four.run(updated_baseline, [4, 5, 3, 4])
    assert all(torch.equal(means, found[0][0]) for means, _, _ in found)
    for t in range(6):
        rewards = [x[:, t][words[:, t]] for _, x, words in found if t < x.shape[1]]
        wanted = 0.1 * torch.cat(rewards).mean() if rewards else torch.tensor(0.0)
        torch.testing.assert_close(found[0][0][t], wanted, rtol=0, atol=1e-6)


# --- matrices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "gpt of 2019", "vit", "transformer"])
def test_cut_models_give_what_whole_ones_give(four, kind):
    for output, gradient, whole, all_of_them in four.run(apart_from_whole, kind):
        assert output < 1e-5 and gradient < 1e-6 and 0 < whole < all_of_them


def test_ranks_drop_units_of_their_own(four):
    hidden, heads, gradient, after = (list(x) for x in zip(*four.run(dropped_units)))
    for found in (hidden, heads, gradient, after):
        assert all(torch.equal(x, found[0]) for x in found)  # the ranks agree on the sum
    kept = (hidden[0] != 0).float()  # of 200 tokens the 16 units, 4 of each rank
    assert kept.mean().item() == pytest.approx(1 / 4, abs=0.03)  # the second drop is common
    for i in range(4):
        for shift in (4, 8, 12):
            both = (kept[:, i] * kept[:, (i + shift) % 16]).mean().item()
            assert both == pytest.approx(1 / 16, abs=0.06)
    both = torch.stack([kept[:, :4] * kept[:, i : i + 4] for i in (4, 8, 12)])
    assert both.mean().item() == pytest.approx(1 / 16, abs=0.015)  # 1/8 with the same masks
    first, *others = heads[0].unflatten(1, (4, 4)).unbind(1)
    assert all((first - other).abs().max() > 0.05 for other in others)


def test_units_that_are_dropped_are_dropped_again_in_a_recomputation(four):
    plain, again = four.run(dropped_units), four.run(dropped_units, True)
    for a, b in zip(plain[0], again[0]):
        torch.testing.assert_close(a, b)


def test_a_cut_gpt_with_dropout_gives_all_ranks_the_same(four):
    first, *others = four.run(outputs_in_training)
    assert all(torch.equal(first, other) for other in others)


class Mesh:
    """As much of a mesh as is looked at before anything is cut."""

    def __init__(self, ranks):
        self.size = lambda: ranks


def test_what_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match=r"h\.0\.attn has \[4, 2, 2\] .* 4 ranks"):
        tensor_parallel(GPT(GPTConfig(**SMALL, n_kv_head=2)), Mesh(4))
    with pytest.raises(ValueError, match=r"model \(Linear\) has no module that can be cut"):
        tensor_parallel(torch.nn.Linear(4, 4), Mesh(2))
    relative = Transformer(64, d_model=32, nhead=4, position="relative", dim_feedforward=64)
    with pytest.raises(ValueError, match=r"position \('relative'\)"):
        tensor_parallel(relative, Mesh(2))


# --- the sequence -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("causal, balanced", [(False, False), (True, False), (True, True)])
def test_ring_attention_is_attention(four, causal, balanced, dtype, tolerance):
    """Query heads in groups, values of another width than keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 2, 3, 32, 8), (2, 2, 1, 32, 8), (2, 2, 1, 32, 5)
    qkv = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    found = four.run(attend, qkv, causal, balanced)
    ours = [unshard_sequence([x[i] for x in found], balanced=balanced) for i in range(4)]
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = attention(q, k, v, mask="causal" if causal else None)
    out.sum().backward()
    for mine, whole in zip(ours, (out.detach(), q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=tolerance)


def test_half_precision_is_as_near_as_its_rounding(four):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 2, 16, 8, generator=generator).bfloat16().unbind()
    found = four.run(attend, qkv, True, True)
    out = unshard_sequence([x[0] for x in found], balanced=True)
    assert out.dtype == torch.bfloat16
    exact = attention(*(x.double() for x in qkv), mask="causal")
    assert (out.double() - exact).abs().max() < 0.02


def test_shapes_are_compared_once_in_a_group():
    from workers import Workers

    with Workers(2) as two:
        assert two.run(exchanges) == [[1, 1, 2, 2, 3, 3]] * 2


def test_each_pair_of_chunks_meets_once():
    for ranks in (1, 2, 3, 8):
        for balanced in (False, True):
            chunks = ranks * (1 + balanced)
            met = []
            for rank in range(ranks):
                own = scaling.sequence_chunks(rank, ranks, balanced)
                for step, pairs in enumerate(ring_schedule(rank, ranks, True, balanced)):
                    theirs = scaling.sequence_chunks((rank - step) % ranks, ranks, balanced)
                    met += [(own[i], theirs[j], diagonal) for i, j, diagonal in pairs]
            wanted = [(a, b, a == b) for a in range(chunks) for b in range(a + 1)]
            assert sorted(met) == wanted


def test_sequences_that_do_not_divide_are_refused():
    x = torch.randn(2, 10, 4)
    with pytest.raises(ValueError, match="x has 10 tokens on axis -2; 4 ranks need a multiple"):
        shard_sequence(x, 0, 4)
    with pytest.raises(RuntimeError, match="ring_attention needs a group of processes"):
        ring_attention(x, x, x)
    for balanced in (False, True):
        parts = [shard_sequence(x[:, :8], r, 2, balanced=balanced) for r in range(2)]
        assert torch.equal(unshard_sequence(parts, balanced=balanced), x[:, :8])


# --- the depth --------------------------------------------------------------------------------


def test_stages_are_the_model(four):
    config = GPTConfig(**{**SMALL, "n_layer": 4})
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0))
    from stage_work import train_stages  # of the chapter

    found = four.run(train_stages, config, tokens, 4)
    torch.manual_seed(0)
    whole = GPT(config)
    loss = F.cross_entropy(whole(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert abs(found[3][0] - loss.item()) < 1e-5
    wanted = [p.grad.norm().item() for p in whole.h.parameters()]
    ours = [norm for _, norms in found for name, norm in norms.items() if name[:2] == "h."]
    assert torch.allclose(torch.tensor(ours), torch.tensor(wanted), rtol=1e-4)


def test_stages_that_are_impossible_are_refused():
    with pytest.raises(ValueError, match=r"tied \(True\)"):
        GPTStage(GPT(GPTConfig(**{**SMALL, "tied": True})), 0, 2)
    with pytest.raises(ValueError, match=r"stage \(0\) .* stages \(3\), .* n_layer \(2\)"):
        GPTStage(GPT(GPTConfig(**SMALL)), 0, 3)


# --- processes that fail ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, arguments, message",
    [
        (one_dies, (), "rank 1 of 2 died"),
        (one_fails, (), "rank 1 of 2 failed: KeyError: 'no such weight'"),
        (unequal_shards, (), r"rank \d of 2 failed: ValueError: rank 1 has q "),
        (time.sleep, (60,), "rank 0 of 2 did not finish in time"),
    ],
)
def test_a_rank_that_fails_is_named_in_time(function, arguments, message):
    from workers import Workers

    with Workers(2, timeout=3) as workers:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=message):
            workers.run(function, *arguments)
        assert time.monotonic() - start < 15
    for process in workers.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def alone():
    """On a single rank the ring has nobody to send to."""
    q, k, v = torch.randn(3, 2, 8, 4).unbind()
    q.requires_grad_()
    ring_attention(q, k, v, causal=True).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):  # products of float32 stay float32
        out = ring_attention(q.detach(), k, v)
    with pytest.raises(ValueError, match="rank .5. must be at least 0 and below"):
        shard_sequence(q, 5, 4)
    assert torch.equal(ring_all_reduce(torch.ones(5)), torch.ones(5))
    return (out - attention(q, k, v)).abs().max().item(), q.grad.abs().sum().item()


def test_one_rank_is_enough():
    from workers import Workers

    with Workers(1) as workers:
        ((apart, gradient),) = workers.run(alone)
    assert apart < 1e-6 and gradient > 0


def test_numbers_of_ranks_are_checked():
    from workers import Workers

    with pytest.raises(ValueError, match="ranks"):
        Workers(0)


# --- the planner ------------------------------------------------------------------------------


LARGE = GPTConfig(**{**vars(PUBLISHED["llama-3.1-405b"]), "block_size": 8192})


def test_parameters_and_operations_are_those_of_the_model():
    config = GPTConfig(**SMALL)
    block, ends = scaling._parameter_counts(config)
    matrices = sum(p.numel() for p in GPT(config).parameters() if p.ndim == 2)
    assert 2 * block + ends == matrices
    assert Plan(1).parameters(config) == matrices
    attention_, all_ = flops_per_token(config)
    head = config.vocab_size * config.n_embd
    assert all_ - attention_ == 6 * (2 * block + head)
    assert attention_ == 6 * 2 * config.block_size * config.n_embd


def test_states_are_zeros_table():
    config = GPTConfig(**SMALL)
    psi = sum(scaling._parameter_counts(config)) + scaling._parameter_counts(config)[0]
    for zero, wanted in ((0, 16), (1, 4 + 12 / 4)):
        states = memory_per_device(Plan(4, zero=zero), config, 8)["states"]
        assert states == pytest.approx(wanted * psi)
    shared = memory_per_device(Plan(4, zero=3), config, 8)["states"]
    # two blocks and the ends are whole, in two bytes
    block, ends = scaling._parameter_counts(config)
    assert shared == pytest.approx(4 * psi + 2 * (2 * block + ends))


def test_the_bubble_is_that_of_the_theorem():
    cluster = Cluster(16, efficiency=0.5)
    for stages, micro, pieces in ((4, 1, 1), (4, 2, 1), (4, 1, 2)):
        cut = Plan(1, 1, stages, micro=micro, interleave=pieces)
        parts = step_time(cut, GPTConfig(**{**SMALL, "n_layer": 8}), cluster, 16)
        micros = 16 / micro
        idle = parts["bubble"] / (parts["bubble"] + parts["compute"])
        assert idle == pytest.approx((stages - 1) / (pieces * micros + stages - 1))


def test_the_plan_fits_and_no_other_that_fits_is_faster():
    cluster = Cluster(64, memory=200e9)
    best = plan(LARGE, cluster, 64)
    assert sum(memory_per_device(best, LARGE, 64).values()) <= 0.9 * cluster.memory
    assert best.devices <= 64
    time_ = sum(step_time(best, LARGE, cluster, 64).values())
    for other in list(_possible_plans(LARGE, cluster, 64))[::17]:
        if sum(memory_per_device(other, LARGE, 64).values()) <= 0.9 * cluster.memory:
            assert sum(step_time(other, LARGE, cluster, 64).values()) >= time_


def test_slower_links_and_less_memory_never_help():
    times = [
        sum(step_time(plan(LARGE, cluster, 64), LARGE, cluster, 64).values())
        for cluster in (
            Cluster(512, between=100e9),
            Cluster(512),
            Cluster(512, between=5e9),
            Cluster(512, between=5e9, memory=40e9),
        )
    ]
    assert times == sorted(times)


def test_what_the_planner_refuses():
    with pytest.raises(ValueError, match=r"cluster.memory \(80 GB\)"):
        plan(LARGE, Cluster(8), 8)
    with pytest.raises(ValueError, match=r"between \(-1\)"):
        Cluster(8, between=-1)
    with pytest.raises(ValueError, match="batch"):
        plan(LARGE, Cluster(8), 0)
