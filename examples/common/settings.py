"""Presets of the training examples and their command line."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.devices import Devices


@dataclass(frozen=True)
class ModelSettings:
    """A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
        heads: of the queries, each `width // heads` wide.
        key_value_heads: divides `heads`.
        hidden: width inside the MLP.
        dtype: of the computation; parameters are float32.
        attention: "jaxflash", or the implementation of `jax.nn.dot_product_attention`.
    """

    layers: int
    width: int
    heads: int
    key_value_heads: int
    hidden: int
    dtype: str
    attention: str = "jaxflash"

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Settings:
    """All that determines a run's curve.

    Attributes:
        batch: rows a step.
        length: tokens a row.
        learning_rate: the highest, between warm-up and decay.
    """

    model: ModelSettings
    steps: int
    batch: int
    length: int
    learning_rate: float
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


PRESETS = {
    # Three minutes on two CPU cores.
    "tiny": Settings(
        ModelSettings(
            layers=4, width=128, heads=4, key_value_heads=2, hidden=352, dtype="float32"
        ),
        steps=1200, batch=4, length=512, learning_rate=4e-3,
    ),
    # For a GPU of any size, or a night on a CPU.
    "small": Settings(
        ModelSettings(
            layers=6, width=384, heads=6, key_value_heads=2, hidden=1024, dtype="float32"
        ),
        steps=2000, batch=16, length=1024, learning_rate=1e-3,
    ),
    # The blocks of the 124M GPT-2 (its token table is most of the rest), for one large GPU.
    "gpt2": Settings(
        ModelSettings(
            layers=12, width=768, heads=12, key_value_heads=4, hidden=2048, dtype="bfloat16"
        ),
        steps=2000, batch=64, length=1024, learning_rate=6e-4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """The parsed command line: what determines the curve, and the rest.

    Attributes:
        devices: what the run is dealt to.
        out: absolute folder of the run's results.
        resume: continue the run in `out`.
        prompt: the sample's beginning.
    """

    settings: Settings
    devices: Devices
    out: Path
    resume: bool
    prompt: str


def parse_arguments(name: str, description: str | None) -> Arguments:
    """Parses the command line of an example; wrong values end the program with a message.

    Args:
        name: of the example, for the default output folder.
        description: the help's first paragraph.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="default: tiny")
    parser.add_argument(
        "--attention", choices=["jaxflash", "xla", "cudnn"], default="jaxflash",
        help="xla, cudnn: jax.nn.dot_product_attention's, to compare with (default: jaxflash)",
    )  # fmt: skip
    preset_group = parser.add_argument_group("instead of the preset's")
    preset_group.add_argument(
        "--dtype", choices=["float32", "bfloat16"],
        help="of the computation; cudnn needs bfloat16",
    )  # fmt: skip
    preset_group.add_argument("--steps", type=_number(int, 1), metavar="N", help="updates")
    preset_group.add_argument("--batch", type=_number(int, 1), metavar="N", help="rows a step")
    preset_group.add_argument("--length", type=_number(int, 1), metavar="N", help="bytes a row")
    preset_group.add_argument(
        "--learning-rate", type=_number(float, 0), metavar="X", help="the highest, after warm-up"
    )
    parser.add_argument(
        "--seed", type=_number(int, 0), default=0, metavar="N",
        help="of parameters, data and sample (default: 0)",
    )  # fmt: skip
    devices_group = parser.add_argument_group("several devices, which change no curve")
    devices_group.add_argument(
        "--data", type=_number(int, 1), default=1, metavar="N",
        help="parts that rows are dealt in (default: 1)",
    )  # fmt: skip
    devices_group.add_argument(
        "--tensor", type=_number(int, 1), default=1, metavar="N",
        help="parts that heads and hidden channels are dealt in (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"folder for the results (default: runs/{name}-PRESET-ATTENTION)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--prompt", default="import ", metavar="TEXT", help="the sample's beginning"
    )
    options = parser.parse_args()

    preset = PRESETS[options.preset]
    overrides = {
        field: getattr(options, field)
        for field in ("steps", "batch", "length", "learning_rate")
        if getattr(options, field) is not None
    }
    settings = replace(
        preset,
        model=replace(
            preset.model,
            attention=options.attention,
            dtype=options.dtype or preset.model.dtype,
        ),
        seed=options.seed,
        **overrides,
    )
    if settings.batch % options.data:
        parser.error(
            f"argument --data: expected a divisor of the {settings.batch} rows a step, "
            f"got {options.data}"
        )
    devices = Devices(options.data, options.tensor)
    out = options.out or Path("runs", f"{name}-{options.preset}-{options.attention}")
    return Arguments(settings, devices, out.resolve(), options.resume, options.prompt)


def _number(kind: type[int] | type[float], minimum: int) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum}, got {text}")
        return value

    parse.__name__ = kind.__name__  # what argparse calls it where `kind` refuses the text
    return parse
