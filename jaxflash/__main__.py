"""`python -m jaxflash`: what was built, what was found, and why something is off.

With `--length` and other options: which CUDA kernels such a call of attention and its gradient
would run, on the GPU here or on another. Needs no GPU.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash import __version__, _modules, flash_attention
from jaxflash._choice import cuda_choice


def report() -> str:
    """Versions, devices, and of each compiled module its build facts or why it is not used."""
    major, minor = _modules.runtime_ffi_version()
    lines = [
        f"jaxflash  {__version__}",
        f"python    {platform.python_version()} on {platform.machine()}",
        f"jax       {jax.__version__}, jaxlib {_modules.jaxlib_version()}, XLA FFI {major}.{minor}",
        f"devices   {', '.join(f'{device.platform}:{device.id}' for device in jax.devices())}",
    ]
    for name, module in _modules.MODULES.items():
        lines += ["", f"{name} kernels: {'on' if module.reason is None else 'off'}"]
        if module.reason is not None:
            lines.append(f"  reason: {module.reason}")
        lines += [f"  {key}: {_text(fact)}" for key, fact in module.facts.items()]
    return "\n".join(lines)


def _text(fact: object) -> str:
    """A build fact in words."""
    if not isinstance(fact, (tuple, list)):
        return str(fact)
    numbers = all(isinstance(part, int) for part in fact)
    return ("." if numbers else ", ").join(map(str, fact))


DTYPES = ("bfloat16", "float16", "float32")
FEATURES = ("bias", "mask", "segment-ids", "lengths", "soft-cap", "sinks", "dropout")


def parse_capability(text: str) -> int:
    """A compute capability "major.minor" as a number, 10 * major + minor."""
    match = re.fullmatch(r"(\d|1\d)\.(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected major.minor, as 9.0, got {text}")
    return 10 * int(match[1]) + int(match[2])


def parse_size(text: str) -> int:
    """A size of an array's axis."""
    if re.fullmatch(r"\d{1,10}", text) is None or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2^31 - 1, got {text}")
    return int(text)


def local_capability() -> int | None:
    """The compute capability of the GPU here, if there is one."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    return parse_capability(device.compute_capability)


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        "python -m jaxflash",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=parse_size, metavar="T", help="of queries")
    parser.add_argument("--key-length", type=parse_size, metavar="S", help="default: T")
    parser.add_argument("--batch", type=parse_size, default=1, metavar="B", help="default: 1")
    parser.add_argument("--heads", type=parse_size, default=8, metavar="N", help="default: 8")
    parser.add_argument("--kv-heads", type=parse_size, metavar="K", help="default: N")
    parser.add_argument("--head-dim", type=parse_size, default=64, metavar="H", help="default: 64")
    parser.add_argument("--value-dim", type=parse_size, metavar="V", help="default: H")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default: bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, metavar="W", help="keys on each side")
    parser.add_argument(
        "--with",
        nargs="+",
        default=[],
        choices=FEATURES,
        dest="features",
        metavar="WHAT",
        help=f"{', '.join(FEATURES)}; the bias is [1, N, T, S], the mask [B, 1, T, S]",
    )
    parser.add_argument("--deterministic", action="store_true", help="deterministic_gradients")
    parser.add_argument(
        "--capability",
        type=parse_capability,
        metavar="M.N",
        help="compute capability of the GPU; default: of the one here, or else 9.0",
    )
    return parser


def choice(settings: argparse.Namespace) -> Iterator[str]:
    """Lines that say for which GPU, and which kernels a call of attention and its gradient run."""
    if settings.capability is not None:
        capability, whose = settings.capability, ""
    elif (local := local_capability()) is not None:
        capability, whose = local, ", the GPU's here"
    else:
        capability, whose = 90, ": there is no GPU here"
    batch, rows, heads, dim = settings.batch, settings.length, settings.heads, settings.head_dim
    keys = rows if settings.key_length is None else settings.key_length
    kv_heads = heads if settings.kv_heads is None else settings.kv_heads
    value_dim = dim if settings.value_dim is None else settings.value_dim

    def array(*shape: int, dtype: Any = settings.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    differentiable = {
        "query": array(batch, rows, heads, dim),
        "key": array(batch, keys, kv_heads, dim),
        "value": array(batch, keys, kv_heads, value_dim),
    }
    others: dict[str, Any] = {}
    static: dict[str, Any] = {
        "is_causal": settings.causal,
        "local_window_size": settings.window,
        "deterministic_gradients": settings.deterministic,
    }
    features = settings.features
    if "bias" in features:
        differentiable["bias"] = array(1, heads, rows, keys)
    if "sinks" in features:
        differentiable["sinks"] = array(heads)
    if "mask" in features:
        others["mask"] = array(batch, 1, rows, keys, dtype=bool)
    if "segment-ids" in features:
        others["query_segment_ids"] = array(batch, rows, dtype=jnp.int32)
        others["key_value_segment_ids"] = array(batch, keys, dtype=jnp.int32)
    if "lengths" in features:
        others["key_value_seq_lengths"] = array(batch, dtype=jnp.int32)
    if "soft-cap" in features:
        static["logits_soft_cap"] = 30.0
    if "dropout" in features:
        others["dropout_key"] = jax.eval_shape(lambda: jax.random.key(0))
        static["dropout_rate"] = 0.1

    def loss(differentiable: dict[str, Any], others: dict[str, Any]) -> jax.Array:
        return flash_attention(**differentiable, **others, **static).sum()

    lines = list(cuda_choice(jax.grad(loss), differentiable, others, capability=capability))
    yield f"for compute capability {capability // 10}.{capability % 10}{whose}"
    yield from lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what was asked for."""
    parser = make_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    settings = parser.parse_args(arguments)
    if settings.length is None:
        if arguments:
            parser.error("--length: expected with the other options, got none")
        print(report())
        return
    try:
        print("\n".join(choice(settings)))
    except (ValueError, TypeError, NotImplementedError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
