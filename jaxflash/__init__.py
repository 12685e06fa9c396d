"""jaxflash: flash attention for JAX."""

from jaxflash._attention import flash_attention
from jaxflash._version import __version__

__all__ = ["__version__", "flash_attention"]
