"""Who computes attention in the GPU benchmark, jaxflash and its rivals.

A contender maps a problem to its attention function. One that isn't installed or can't do the
problem raises here or where it is traced, and is reported as absent, with what it raised.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Literal

import jax

from problems import Attention, Problem, dense_attention, jaxflash_attention, same_document


def jaxflash_native(problem: Problem) -> Attention:
    return jaxflash_attention(problem, "native")


def jaxflash_anything(problem: Problem) -> Attention:
    """For a dry run where the kernels for CUDA are not built."""
    return jaxflash_attention(problem, None)


def flash_attn_jax(problem: Problem) -> Attention:
    """FlashAttention-2. Needs libcudart.so.12, and libcudart.so, on the loader's path."""
    module = importlib.import_module("flash_attn_jax")

    def attention(query, key, value):
        return module.flash_mha(query, key, value, is_causal=problem.is_causal)

    return attention


def pallas_triton(problem: Problem) -> Attention:
    """The Triton kernel that JAX has among its examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")

    def attention(query, key, value):
        return module.mha(
            query,
            key,
            value,
            None,
            sm_scale=problem.head_dim**-0.5,
            causal=problem.is_causal,
        )

    return attention


def jax_nn(problem: Problem, implementation: Literal["cudnn", "xla"]) -> Attention:
    """Attention of `jax.nn`, which takes documents as a mask."""
    if problem.soft_cap or problem.dropout_rate:
        raise NotImplementedError(f"jax.nn has no {problem.feature}")

    def attention(query, key, value, bias=None, mask=None, segment_ids=None):
        if segment_ids is not None:
            mask = same_document(segment_ids)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=problem.is_causal,
            implementation=implementation,
        )

    return attention


def jax_nn_cudnn(problem: Problem) -> Attention:
    return jax_nn(problem, "cudnn")


def jax_nn_xla(problem: Problem) -> Attention:
    return jax_nn(problem, "xla")


CONTENDERS: dict[str, Callable[[Problem], Attention]] = {
    "jaxflash": jaxflash_native,
    "flash-attn-jax": flash_attn_jax,
    "jax Triton mha": pallas_triton,
    "jax.nn cudnn": jax_nn_cudnn,
    "jax.nn xla": jax_nn_xla,
    "dense xla": dense_attention,
}
"""By the name in the results."""

TORCH = "torch flash"
"""Runs in a process of its own: see gpu_torch.py."""
