"""How time and memory are measured: interleaved rounds, medians with quartiles, and ratios."""

import functools
import random
import statistics
import time

import torch

from attnlib import train
from benchmarks.basics import reason
from benchmarks.runner import free_memory

# names in every record
OURS = "attnlib"
OPTIMIZED = "attnlib, optimized"
LONG = 30  # milliseconds, see `measured`


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def attempt(left_out, name, function):
    """Call a function of one contestant; if it fails, say why in `left_out`.

    Parameters
    ----------
    left_out : dict or None
        {name: reason} of what has failed, to which a failure is added: out of memory, a package
        that is missing, a kernel that does not take the inputs. With None errors are raised.
        A wrong result (AssertionError) and the end of the time (TimeoutError) always are.
    name : str
    function : callable
        Without arguments.

    Returns
    -------
    object
        What the function returns; None after a failure.
    """
    if left_out is None:
        return function()
    try:
        return function()
    except (AssertionError, TimeoutError):
        raise
    except Exception as problem:
        left_out[name] = reason(problem)
    free_memory()  # now that the error no longer holds the tensors of the call
    return None


def attempt_all(functions, left_out):
    """{name: what its function returns}, for those that do not fail; see `attempt`."""
    found = {name: attempt(left_out, name, function) for name, function in functions.items()}
    return {name: value for name, value in found.items() if name not in (left_out or {})}


def rounds(calls, repeats, timer, seed=0, left_out=None):
    """What `timer` finds of some functions, {name: [one for each round]}.

    A round calls each of them once, in an order drawn anew: a busy machine slows all alike, and
    none always runs behind the same other, whose data are still in the cache. A function that
    fails takes part no longer; without `left_out` its error is raised, see `attempt`.
    """
    times = {name: [] for name in calls}
    names = list(calls)
    draw = random.Random(seed)
    for _ in range(repeats):
        draw.shuffle(names)
        for name in list(names):
            took = attempt(left_out, name, functools.partial(timer, calls[name]))
            if took is None:
                names.remove(name)
                del times[name]
            else:
                times[name].append(took)
    return times


def take_turns(calls, repeats, device, seed=0, clock=time.perf_counter, left_out=None):
    """Milliseconds of some functions, {name: [one for each round]}, by the clock on the wall.

    With ``clock=time.process_time`` the time in which other programs have the processor is left
    out. For `left_out` see `rounds`.
    """

    def timer(call):
        synchronize(device)
        began = clock()
        call()
        synchronize(device)
        return 1000 * (clock() - began)

    return rounds(calls, repeats, timer, seed, left_out)


def warm_turns(calls, repeats, device, left_out, clock=time.perf_counter, warm_up=1):
    """`take_turns` after some rounds that are not counted, by those that do not fail."""
    warm = take_turns(calls, warm_up, device, left_out=left_out)
    calls = {name: calls[name] for name in warm}
    return take_turns(calls, repeats, device, clock=clock, left_out=left_out)


def own_stream(device):
    """Make a stream of its own the present one: nothing can be captured on the default one."""
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def captured(call, times):
    """A CUDA graph of some calls in a row, as a function; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(times):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        new_random_state()
        return None
    return graph.replay


def new_random_state():
    """After a capture that failed: the old state waits for its end, and gives no numbers."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(device="cuda").graphsafe_get_state())


def kernel_turns(calls, repeats, graphs=(), times=3, seed=0, left_out=None):
    """Milliseconds on the GPU itself, {name: [one for each round]}, between two events.

    Between them are some calls in a row. Those named in `graphs` are captured, and replayed
    without Python and launches; what cannot be captured is left out. All have been called
    before. For `left_out` see `rounds`.
    """

    def often(call):
        def run():
            for _ in range(times):
                call()

        return run

    found = {
        name: captured(call, times) if name in graphs else often(call)
        for name, call in calls.items()
    }
    found = {name: run for name, run in found.items() if run}

    def timer(run):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times

    warm = rounds(found, 1, timer, left_out=left_out)  # a first replay uploads the graph, too
    return rounds({name: found[name] for name in warm}, repeats, timer, seed, left_out)


def quartiles(numbers):
    ordered = sorted(numbers)
    quarter = len(numbers) // 4
    return ordered[quarter], ordered[-1 - quarter]


def ratio(times, others):
    """The median and the quartiles of time / other time over the rounds, and their number."""
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(x, 3) for x in quartiles(ratios)],
        "rounds": len(ratios),
    }


def compared(times, name, ours=OURS):
    """What a row records of a contestant: its times, and the ratios ours / its.

    `ratio` and `quartiles` are those of the plain model, where it has taken part; those of the
    optimized one, where it has, under the name "attnlib, optimized", stand under "optimized".
    """
    row = {
        "ms": round(statistics.median(times[name]), 4),
        "ms_quartiles": [round(x, 4) for x in quartiles(times[name])],
        "rounds": len(times[name]),
    }
    if ours in times:
        row |= ratio(times[ours], times[name])
    if OPTIMIZED in times:
        row["optimized"] = ratio(times[OPTIMIZED], times[name])
    return row


def measured(calls, repeats, device, ours=OURS, graphs=None, left_out=None):
    """{name: its row}: time on the wall, and on a GPU under "kernel" that of the kernels.

    The latter is that of CUDA graphs for the contestants in `graphs`, all by default, and the
    others do not have it. No graph is made of calls of more than LONG milliseconds, behind
    whose work the launches disappear, nor of any if `graphs` is empty: these are timed by
    events around the calls. For `left_out` see `rounds`.
    """
    times = take_turns(calls, repeats, device, left_out=left_out)
    rows = {name: compared(times, name, ours) for name in times}
    if device == "cuda":
        some = {name: calls[name] for name in rows if not graphs or name in graphs}
        short = {name for name in some if rows[name]["ms"] < LONG and graphs != ()}
        failed = None if left_out is None else {}
        times = kernel_turns(some, repeats, short, left_out=failed)
        for name in times:
            rows[name]["kernel"] = compared(times, name, ours) | {"graph": name in short}
        for name in failed or ():  # it has the time on the wall all the same
            left_out[f"{name}, kernel"] = failed[name]
    return rows


def memories(calls, device, left_out):
    """{name: the MiB that its call takes}, for those that do not fail; they are warm then."""
    watched = {name: functools.partial(peak_mib, call, device) for name, call in calls.items()}
    return attempt_all(watched, left_out)


def timm_like(ours, name, options):
    """timm's model of this name, whose weights ours then has."""
    import timm  # which not every machine has

    theirs = timm.create_model(name, **dict(drop_path_rate=0.0) | options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs


def median_row(times, name, rival, digits=1):
    """The median of a contestant's times, and its ratio to a rival's that has run, too."""
    row = {"ms": round(statistics.median(times[name]), digits), "rounds": len(times[name])}
    if rival in times:
        row |= ratio(times[name], times[rival])
    return row


def told(row, ours):
    """The ratio of a row and its quartiles in words, where it has them."""
    if "ratio" not in row:
        return ""
    return f"{ours} / it {row['ratio']:.3f} {row['quartiles']}"


def race(calls, label, arguments, ours, left_out):
    """{name: its row} with its memory in MiB; each row is printed behind the label."""
    memory = memories(calls, arguments.device, left_out)
    calls = {name: calls[name] for name in memory}
    repeats = 0 if arguments.tiny else 5
    take_turns(calls, repeats, arguments.device, left_out=left_out)
    calls = {name: call for name, call in calls.items() if name not in left_out}
    rows = measured(calls, arguments.repeats, arguments.device, ours, left_out=left_out)
    for name, row in rows.items():
        own = row.get("kernel", row)
        print(f"{label} {name:14} {own['ms']:8.3f} ms   {told(own, ours)}", flush=True)
    return {name: {"memory": memory[name], **row} for name, row in rows.items()}


def peak_mib(call, device):
    """MiB by which a call raises the memory in use at most.

    A first call is not counted: it makes what is made only once.
    """
    call()
    return round(train.peak_memory(call, device) / 2**20, 3)
