"""How far a result may be from the exact one: derived from the working precision, never guessed."""

import dataclasses

import numpy as np


def wobble(scale, dtype):
    """What adding and subtracting a constant costs numbers up to `scale`: about an ulp of it."""
    x = (float(scale) * np.sin(np.arange(1000))).astype(dtype)
    step = np.asarray(0.3 * float(scale)).astype(dtype)
    return float(np.abs(np.asarray(x + step - step - x, np.float64)).max())


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What the limit of an error is made from.

    Attributes:
        exact: The right numbers.
        working: Results of the dense formula in the working precision; the worst of them counts.
        magnitude: Largest sum of absolute values of the terms that a number is added up from.
        storage: The dtype of the result.
        compute: The dtype of the arithmetic.
        spread: For numbers summed over many rows: root of the summed squares of the rows' errors
            in the working precision (one sum may be right by luck, where its rows are not).
    """

    exact: np.ndarray
    working: list[np.ndarray]
    magnitude: float
    storage: np.dtype
    compute: np.dtype
    spread: float = 0.0

    def __add__(self, other):
        """The yardstick of the sum of two results."""
        return dataclasses.replace(
            self,
            exact=self.exact + other.exact,
            working=[a + b for a, b in zip(self.working, other.working, strict=True)],
            magnitude=self.magnitude + other.magnitude,
            spread=float(np.hypot(self.spread, other.spread)),
        )

    @property
    def working_error(self):
        return max(error(w, self.exact) for w in self.working)

    @property
    def limit(self):
        """Twice the error of the working precision, plus noise of two ulps.

        The ulps are those of the largest number at the result's dtype, and those of the largest
        sum of absolute terms at the dtype of the arithmetic (the terms of a 0 may cancel).
        """
        largest = np.abs(self.exact[np.isfinite(self.exact)]).max(initial=0)
        noise = wobble(largest, self.storage) + wobble(self.magnitude, self.compute)
        return 2 * (max(self.working_error, 2 * self.spread) + noise)


def row_spread(exact, working):
    """`Yardstick.spread` from the reference's "rows" at two precisions."""
    (exact_rows, axes), (rows, _) = exact, working
    if not axes:
        return 0.0
    return float(np.sqrt(((rows - exact_rows) ** 2).sum(axes)).max(initial=0))


def error(got, exact):
    """Largest absolute difference; infinities must be equal, NaN is an infinite error."""
    wide = np.longdouble if exact.dtype == np.longdouble else np.float64
    got, exact = np.asarray(got).astype(wide), np.asarray(exact).astype(wide)
    finite = np.isfinite(exact)
    if not (np.isfinite(got) == finite).all() or not np.array_equal(got[~finite], exact[~finite]):
        return np.inf
    return float(np.abs(got[finite] - exact[finite]).max(initial=0))


def assert_close(name, got, yardstick):
    """Fails with the ratio of the error to its limit, and with where the error is largest."""
    got, exact = np.asarray(got), yardstick.exact
    assert got.shape == exact.shape, f"{name} has shape {got.shape}, expected {exact.shape}"
    found, limit = error(got, exact), yardstick.limit
    if found <= limit:
        return
    ratio = found / limit if limit else np.inf
    with np.errstate(invalid="ignore"):
        off = np.abs(got.astype(np.float64) - exact.astype(np.float64))
    flat = np.argmax(np.nan_to_num(off, nan=np.inf))
    where = tuple(int(i) for i in np.unravel_index(flat, got.shape))
    raise AssertionError(
        f"{name}: error {found:.3g} is {ratio:.3g} times the limit {limit:.3g} "
        f"(working precision: {yardstick.working_error:.3g}), largest at {where}: "
        f"got {got[where]}, expected {exact[where]}"
    )
