"""`python -m jaxflash`: what was built, what was found, and why something is off."""

from __future__ import annotations

import platform

import jax

from jaxflash import __version__, _modules


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


if __name__ == "__main__":
    print(report())
