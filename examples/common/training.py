"""Trains a language model and writes down what came of it."""

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from common.checkpoints import Checkpoints
from common.corpus import (
    START,
    Corpus,
    read_corpus,
    training_rows,
    unigram_entropy,
    validation_rows,
)
from common.curves import Metrics, plot
from common.devices import Devices
from common.generation import generate
from common.model import LanguageModel, Params
from common.settings import ModelSettings, Settings, parse_arguments

EVALUATIONS = 10
"""Validation losses, and checkpoints, in a run."""

VALIDATION_TOKENS = 2**16


class TrainState(NamedTuple):
    """What a training step changes."""

    params: Params
    optimizer_state: optax.OptState


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW with clipped gradients, warm-up and cosine decay; only matrices have weight decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=settings.steps // 20,
        decay_steps=settings.steps,
        end_value=0.1 * settings.learning_rate,
    )

    def is_matrix(params: Params) -> Params:
        return jax.tree.map(lambda param: param.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=is_matrix),
    )


@partial(jax.jit, static_argnames=("model", "settings"))
def initialize(model: LanguageModel, settings: Settings, key: jax.Array) -> TrainState:
    params = model.init(key)
    return TrainState(params, make_optimizer(settings).init(params))


def total_loss(
    model: LanguageModel, params: Params, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cross entropies' sum, in nats, and their number.

    Args:
        model: the model.
        params: its parameters.
        rows: uint8 `[B, T + 1]`: T inputs and, shifted by one, T targets.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:].astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(params, inputs), targets)
    # The end of one document doesn't predict the start of the next.
    counted = targets != START
    return jnp.sum(losses, where=counted), jnp.sum(counted)


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """The mean, in nats a byte; 0 of no losses, as where all targets are starts of documents."""
    return total / jnp.maximum(count, 1)


def mean_loss(model: LanguageModel, params: Params, rows: jax.Array) -> jax.Array:
    """The mean of the cross entropies whose `total_loss` is the sum."""
    return mean(*total_loss(model, params, rows))


def train_step(
    model: LanguageModel, settings: Settings, state: TrainState, rows: jax.Array
) -> tuple[TrainState, jax.Array]:
    """One update; returns the new state and the loss before it."""
    loss, gradients = jax.value_and_grad(partial(mean_loss, model))(state.params, rows)
    updates, optimizer_state = make_optimizer(settings).update(
        gradients, state.optimizer_state, state.params
    )
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss


@partial(jax.jit, static_argnames="model")
def evaluate(model: LanguageModel, params: Params, batches: jax.Array) -> jax.Array:
    """Mean loss of uint8 `[batches, B, T + 1]`, one batch at a time."""
    totals, counts = jax.lax.map(partial(total_loss, model, params), batches)
    return mean(totals.sum(), counts.sum())


class Progress:
    """A progress bar that also keeps the losses it shows, and the speed between validations."""

    def __init__(self, settings: Settings, metrics: Metrics):
        self._metrics = metrics
        self._tokens_per_step = settings.batch * settings.length
        self.bar = tqdm(
            total=settings.steps * self._tokens_per_step,
            initial=len(metrics.training.step) * self._tokens_per_step,
            unit="token",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 10,  # seconds; a log needs few lines
        )
        self._speeds: list[float] = []
        self.start_lap()

    def start_lap(self) -> None:
        self._lap_start, self._lap_tokens = time.perf_counter(), 0

    def end_lap(self) -> None:
        self._speeds.append(self._lap_tokens / (time.perf_counter() - self._lap_start))

    def speed(self) -> float:
        """Tokens a second in the median lap: the first one compiles. NaN where there was none."""
        return statistics.median(self._speeds) if self._speeds else math.nan

    def trained(self, step: int, loss: float) -> None:
        self._metrics.training.append(step, loss)
        self.bar.set_description(f"step {step + 1}", refresh=False)
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.bar.update(self._tokens_per_step)
        self._lap_tokens += self._tokens_per_step

    def validated(self, step: int, loss: float) -> None:
        self._metrics.validation.append(step, loss)
        self.bar.write(f"after step {step}: validation loss {loss:.3f}")


def train(
    model: LanguageModel,
    settings: Settings,
    devices: Devices,
    corpus: Corpus,
    checkpoints: Checkpoints,
    state: TrainState,
    metrics: Metrics,
) -> TrainState:
    """Takes the steps that `metrics` doesn't have yet, and adds their losses to it."""
    batch, length, steps = settings.batch, settings.length, settings.steps
    count = max(1, VALIDATION_TOKENS // (batch * length))
    validation = validation_rows(corpus.validation, count * batch, length)
    validation = devices.place_rows(validation.reshape(count, batch, length + 1), axis=1)
    evaluation_interval = max(1, steps // EVALUATIONS)

    # The new state lies where the old one does.
    where = jax.tree.map(lambda array: array.sharding, state)
    take_step = jax.jit(
        partial(train_step, model, settings), donate_argnums=0, out_shardings=(where, None)
    )
    progress = Progress(settings, metrics)
    running: deque[tuple[int, jax.Array]] = deque()  # steps that the device may still be busy with
    with progress.bar:
        for step in range(len(metrics.training.step), steps):
            rows = training_rows(corpus.training, settings.seed, step, batch, length)
            state, loss = take_step(state, devices.place_rows(rows))
            running.append((step, loss))
            done = step + 1
            is_evaluated = done % evaluation_interval == 0 or done == steps
            # To read a loss is to wait for it: done one step late, the device never waits for us.
            while len(running) > (0 if is_evaluated else 1):
                earlier_step, loss = running.popleft()
                progress.trained(earlier_step, float(loss))
            if is_evaluated:
                progress.end_lap()
                progress.validated(done, float(evaluate(model, state.params, validation)))
                checkpoints.save(done, state, metrics)
                progress.start_lap()
    print(f"trained at {progress.speed():,.0f} tokens/s")
    return state


def run(
    name: str, description: str | None, build_model: Callable[[ModelSettings], LanguageModel]
) -> None:
    """The whole example: command line, text, training, results.

    Args:
        name: of the example, for the default output folder.
        description: the text of `--help`.
        build_model: makes the model; all else is the same whichever library it is written in.
    """
    arguments = parse_arguments(name, description)
    settings, devices, out = arguments.settings, arguments.devices, arguments.out
    devices.check()
    corpus = read_corpus()
    if settings.length >= len(corpus.validation):
        sys.exit(
            f"error: argument --length: expected less than the {len(corpus.validation)} bytes of "
            f"validation text, got {settings.length}"
        )
    metrics = Metrics(settings.as_dict(), unigram_entropy(corpus.validation))
    model = build_model(settings.model)
    init_key, sample_key = jax.random.split(jax.random.key(settings.seed))
    state = devices.place_state(model, initialize(model, settings, init_key))
    checkpoints = Checkpoints(out / "checkpoints")
    if arguments.resume:
        state, metrics = resume(checkpoints, state, metrics.settings)
    elif checkpoints.newest is not None:
        sys.exit(f"error: {out} holds a run: continue it with --resume, or choose another --out")

    print(
        f"text: {len(corpus.training):,} bytes for training, {len(corpus.validation):,} bytes of "
        f"other files for validation, whose unigram entropy is {metrics.unigram_entropy:.3f} nats\n"
        f"model: {sum(param.size for param in jax.tree.leaves(state.params)):,} parameters, "
        f"{model.dtype}, attention by {settings.model.attention}, on {devices.mesh.size} x "
        f"{jax.devices()[0].device_kind}"
    )
    state = train(model, settings, devices, corpus, checkpoints, state, metrics)
    metrics.write(out / "metrics.json")
    plot({name: metrics}, out / "curves.png")
    sample = generate(model, state.params, arguments.prompt, settings.length, sample_key)
    (out / "sample.txt").write_text(sample, encoding="utf-8")
    print(
        f"sample:\n{sample}\n"
        f"validation loss {metrics.validation.loss[-1]:.3f} nats a byte, unigram entropy "
        f"{metrics.unigram_entropy:.3f}; results in {out}"
    )


def resume(
    checkpoints: Checkpoints, like: TrainState, settings: dict[str, Any]
) -> tuple[TrainState, Metrics]:
    """Reads the newest checkpoint; ends the program if it is none of a run with these settings."""
    if checkpoints.newest is None:
        sys.exit(f"error: no checkpoint to resume from in {checkpoints.folder}")
    metrics = checkpoints.restore_metrics()
    changes = [
        f"{name} was {metrics.settings[name]}, is {value}"
        for name, value in settings.items()
        if metrics.settings[name] != value
    ]
    if changes:
        sys.exit("error: cannot resume with other settings: " + "; ".join(changes))
    return checkpoints.restore_state(like), metrics
