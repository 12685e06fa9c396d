"""Threads, processes, repeated calls: the same numbers, no leak, no deadlock."""

import concurrent.futures
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calls import Shape, bfloat16, make_call, normal, repeat, run_python
from jaxflash import flash_attention


def test_n04_two_python_threads(implementation):
    """The same kernel from several jitted functions on several threads at once."""
    shapes = [
        Shape(T=70, S=140, H=16),
        Shape(T=65, S=257, N=1, H=24),
        Shape(T=130, S=70, N=4, K=1, H=8),
    ]
    calls = [make_call(s, is_causal=True, deterministic_gradients=True) for s in shapes]
    expected = [call.check(implementation) for call in calls]

    def work(number):
        return [calls[number].flash(implementation) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    for want, repeats in zip(expected, results, strict=True):
        for got in repeats:
            for name, value in got.items():
                np.testing.assert_array_equal(value, want[name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16()], ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(T=130, S=257, N=4, K=2), Shape(B=1, T=70, S=600, N=1)], ids=str
)
def test_repeated_calls_are_bitwise_equal(implementation, shape, dtype):
    call = make_call(
        shape,
        dtype,
        bias=lambda rng: normal(rng, (shape.B, shape.N, shape.T, shape.S)),
        deterministic_gradients=True,
    )
    first = call.flash(implementation)
    for _ in range(10):
        for name, value in call.flash(implementation).items():
            np.testing.assert_array_equal(value, first[name], err_msg=name)


FORK = """
    import multiprocessing, sys
    import numpy as np
    import jax, jax.numpy as jnp
    from jaxflash import flash_attention

    def attend(queue):
        x = jnp.ones((1, 130, 2, 16))
        run = jax.grad(lambda x: flash_attention(x, x, x, implementation=sys.argv[1]).sum())
        queue.put(np.asarray(run(x)))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=attend, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    attend(queue)
    results = [queue.get(timeout=120) for _ in range(3)]
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    assert all((r == results[0]).all() for r in results)
    print("done")
"""


def test_n07_fork_after_import(implementation):
    """Data loader workers: a fork between import and first computation deadlocks nobody."""
    assert run_python(FORK, implementation).strip() == "done"


FORKED_WORKER = """
    import multiprocessing, sys, warnings
    import numpy as np
    import jax, jax.numpy as jnp
    from jaxflash import flash_attention

    warnings.filterwarnings("ignore", message=".*fork.*")
    x = jnp.ones((1, 130, 2, 16))
    run = jax.jit(lambda x: flash_attention(x, x, x, is_causal=True, implementation=sys.argv[1]))
    before = np.asarray(run(x))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        batches = pool.map(np.arange, range(8))
        during = np.asarray(run(x))
    assert [len(b) for b in batches] == list(range(8))
    assert (np.asarray(run(x)) == before).all() and (during == before).all()
    print("done")
"""


def test_forked_workers_that_use_no_jax(implementation):
    """Workers forked while the thread pool is alive load data; the parent goes on computing."""
    assert run_python(FORKED_WORKER, implementation).strip() == "done"


def module_level_attention(q, k, v):
    return flash_attention(q, k, v, is_causal=True)


def test_n06_pickling(implementation):
    """The public function, and a function that uses it, survive pickling."""
    assert pickle.loads(pickle.dumps(flash_attention)) is flash_attention
    again = pickle.loads(pickle.dumps(module_level_attention))
    q, k, v = make_call(Shape(T=9, S=21)).arrays.values()
    if implementation == "native":
        np.testing.assert_array_equal(again(q, k, v), module_level_attention(q, k, v))


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_b146_memory_is_flat_over_many_calls(implementation):
    """After a warm-up, 10,000 gradients add less than 100 bytes each to the resident memory."""
    arrays = [jnp.asarray(x) for x in make_call(Shape(B=1, T=9, S=9, N=2, H=8)).arrays.values()]
    run = jax.jit(
        jax.grad(lambda *a: flash_attention(*a, implementation=implementation).sum(), (0, 1, 2))
    )

    repeat(run, arrays, 2000)
    before = resident_bytes()
    repeat(run, arrays, 10_000)
    assert resident_bytes() - before < 1_000_000
    assert len(jax.live_arrays()) < 10_000


THREADS = """
    import os, sys
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
    import functools, hashlib
    import numpy as np
    import jax
    from jaxflash import flash_attention

    attend = functools.partial(flash_attention, implementation=sys.argv[1])
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    for heads, kv_heads, keys in ((4, 2, 257), (1, 1, 600)):
        q = rng.standard_normal((1, 130, heads, 16), np.float32)
        k, v = rng.standard_normal((2, 1, keys, kv_heads, 16), np.float32)
        run = jax.jit(jax.value_and_grad(
            lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2)
        ))
        for leaf in jax.tree.leaves(run(q, k, v)[1]):
            digest.update(np.asarray(leaf).tobytes())
    print(digest.hexdigest())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_n09_number_of_threads_changes_nothing(implementation):
    """One CPU or all of them: bitwise the same gradients."""
    counts = sorted({1, len(os.sched_getaffinity(0))})
    assert len({run_python(THREADS, implementation, str(n)) for n in counts}) == 1
