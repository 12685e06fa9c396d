"""Who computes attention: jaxflash and what else there is for JAX.

A contender maps a problem to its attention function. One that can't do the problem raises here,
where it is traced or where it is compiled, and is reported as absent, with what it raised.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash.bench.problems import (
    GROUPED,
    Attention,
    Inputs,
    Problem,
    dense_attention,
    jaxflash_attention,
    same_document,
)

OURS = "jaxflash"
MOST_SCORES_BYTES = {"cpu": 2**30, "gpu": 10 * 2**30}
"""Those that hold all scores do the problems whose scores take no more, by platform, where the
device doesn't say how much memory it has."""
MOST_SCORES_SHARE = 0.1
"""Else this share of it: backward holds several arrays of the scores' size."""


def most_scores_bytes(platform: str) -> int:
    """Returns the most bytes of scores with which those that hold them all are tried."""
    if platform == jax.default_backend() != "cpu":
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        if limit:
            return int(limit * MOST_SCORES_SHARE)
    return MOST_SCORES_BYTES.get(platform, MOST_SCORES_BYTES["gpu"])


@dataclass(frozen=True)
class Contender:
    """Somebody's attention.

    Attributes:
      build: maps a problem to its attention function.
      supports: what it can do of `Problem.needs`.
      module: what it imports; it is a contender where that is installed.
      platforms: where it runs.
      distribution: what it is installed by, for its version. None: jax itself.
      holds_scores: whether its memory grows with the square of the length.
    """

    build: Callable[[Problem], Attention]
    supports: frozenset[str] = frozenset()
    module: str = "jax"
    platforms: tuple[str, ...] = ("gpu",)
    distribution: str | None = None
    holds_scores: bool = False

    def attention(self, problem: Problem, platform: str) -> Attention:
        """Returns its attention function for a problem.

        Raises:
          NotImplementedError: it can't, or should not, do it on this platform.
        """
        if missing := sorted(problem.needs - self.supports):
            raise NotImplementedError(f"has no {', '.join(missing)}")
        if self.holds_scores and problem.scores_bytes() > most_scores_bytes(platform):
            size = problem.scores_bytes() / 2**30
            raise NotImplementedError(f"not tried: it holds all scores, {size:.1f} GiB of them")
        return self.build(problem)


def _jax_nn(implementation: Literal["cudnn", "xla"]) -> Callable[[Problem], Attention]:
    """Attention of `jax.nn`, which takes documents as a mask."""

    def build(problem: Problem) -> Attention:
        def attention(inputs: Inputs) -> jax.Array:
            query, key, value, bias, mask, segment_ids = inputs
            if segment_ids is not None:
                mask = same_document(segment_ids, segment_ids)
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                bias,
                mask,
                is_causal=problem.is_causal,
                local_window_size=problem.window,
                implementation=implementation,
            )

        return attention

    return build


def _flash_mha(module_name: str) -> Callable[[Problem], Attention]:
    """The function that the bindings of FlashAttention for JAX have in common."""

    def build(problem: Problem) -> Attention:
        module = importlib.import_module(module_name)
        options: dict[str, Any] = {"is_causal": problem.is_causal}
        if problem.window is not None:
            # A causal mask bounds the right side; kernels differ in what else they take for it.
            right = 0 if problem.is_causal else problem.window
            options["window_size"] = (problem.window, right)

        def attention(inputs: Inputs) -> jax.Array:
            return module.flash_mha(inputs.query, inputs.key, inputs.value, **options)

        return attention

    return build


def _tokamax(problem: Problem) -> Attention:
    module = importlib.import_module("tokamax")

    def attention(inputs: Inputs) -> jax.Array:
        return module.dot_product_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            bias=inputs.bias,
            mask=inputs.mask,
            is_causal=problem.is_causal,
            logits_soft_cap=problem.soft_cap,
        )

    return attention


def _kvax(problem: Problem) -> Attention:
    """Kernels in Triton. Its mask is causal over positions."""
    if not problem.is_causal:
        raise NotImplementedError("is always causal")
    operations, utilities = (importlib.import_module(f"kvax.{name}") for name in ("ops", "utils"))
    shape = (problem.batch, problem.length)
    positions = jnp.broadcast_to(jnp.arange(problem.length, dtype=jnp.int32), shape)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    layout = ("data", None, None, None)

    def attention(inputs: Inputs) -> jax.Array:
        ids = jnp.zeros(shape, jnp.int32) if inputs.segment_ids is None else inputs.segment_ids
        places = positions, ids, positions, ids
        with utilities.attention_specs(layout, layout):
            mask = operations.create_attention_mask(*places, calc_bwd_mask=True, mesh=mesh)
            return operations.flash_attention(
                inputs.query,
                inputs.key,
                inputs.value,
                *places,
                mask,
                scale=problem.head_dim**-0.5,
                mesh=mesh,
            )

    return attention


def _pallas_triton(problem: Problem) -> Attention:
    """The Triton kernel that JAX has among its examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")

    def attention(inputs: Inputs) -> jax.Array:
        return module.mha(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.segment_ids,
            sm_scale=problem.head_dim**-0.5,
            causal=problem.is_causal,
        )

    return attention


def _pallas_mosaic(problem: Problem) -> Attention:
    """The Hopper kernel that JAX has among its examples. It takes a scaled query."""
    module: Any = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = module.TuningConfig(
        block_q=64,
        block_kv=64,
        max_concurrent_steps=2,
        causal=problem.is_causal,
        compute_wgs_bwd=1,
        **backward,
    )

    def attention(inputs: Inputs) -> jax.Array:
        scale = jnp.asarray(problem.head_dim**-0.5, inputs.query.dtype)
        return module.attention(inputs.query * scale, inputs.key, inputs.value, config)

    return attention


JAX_NN = frozenset({"bias", "mask", "documents", "window", GROUPED})
EVERYTHING = JAX_NN | {"dropout", "soft cap"}

CONTENDERS: dict[str, Contender] = {
    OURS: Contender(jaxflash_attention, EVERYTHING, platforms=("cpu", "gpu", "tpu")),
    "jax.nn cudnn": Contender(_jax_nn("cudnn"), JAX_NN),
    "jax.nn xla": Contender(
        _jax_nn("xla"), JAX_NN, platforms=("cpu", "gpu", "tpu"), holds_scores=True
    ),
    "dew": Contender(
        _flash_mha("dew_flash_attn"),
        frozenset({GROUPED, "window"}),
        "dew_flash_attn",
        distribution="dew-flash-attn-cu13",
    ),
    "flash-attn3-jax": Contender(
        _flash_mha("flash_attn3_jax"),
        frozenset({GROUPED}),
        "flash_attn3_jax",
        distribution="flash-attn3-jax",
    ),
    # Needs libcudart.so.12, and libcudart.so, on the loader's path.
    "flash-attn-jax": Contender(
        _flash_mha("flash_attn_jax"),
        frozenset({GROUPED, "window"}),
        "flash_attn_jax",
        distribution="flash-attn-jax",
    ),
    "tokamax": Contender(
        _tokamax,
        frozenset({"bias", "mask", "soft cap", GROUPED}),
        "tokamax",
        ("gpu", "tpu"),
        distribution="tokamax",
    ),
    "kvax": Contender(_kvax, frozenset({"documents", GROUPED}), "kvax", distribution="kvax"),
    "pallas triton": Contender(
        _pallas_triton,
        frozenset({"documents"}),
        "jax.experimental.pallas.ops.gpu.attention",
    ),
    "pallas mosaic": Contender(
        _pallas_mosaic,
        frozenset({GROUPED}),
        "jax.experimental.pallas.ops.gpu.attention_mgpu",
    ),
    "dense": Contender(
        dense_attention, EVERYTHING, platforms=("cpu", "gpu", "tpu"), holds_scores=True
    ),
}
"""By the name in the results."""


def is_installed(contender: Contender) -> bool:
    """Whether what it imports is there; whether it can be imported turns out when it is."""
    try:
        return importlib.util.find_spec(contender.module) is not None
    except ModuleNotFoundError:
        return False


def default_contenders(platform: str) -> list[str]:
    """Returns the names of those that are installed and made for a platform."""
    return [
        name
        for name, contender in CONTENDERS.items()
        if platform in contender.platforms and is_installed(contender)
    ]
