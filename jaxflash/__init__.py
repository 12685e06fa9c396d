"""jaxflash: flash attention for JAX."""

from jaxflash._attention import flash_attention
from jaxflash._dot_product_attention import dot_product_attention
from jaxflash._version import __version__

__all__ = ["__version__", "dot_product_attention", "flash_attention"]
